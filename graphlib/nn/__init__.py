"""Modules: layers that hold their parameters under names, for models of a few lines.

    class Net(gg.nn.Module):
        def __init__(self):
            self.fc1 = gg.nn.Linear(784, 64)
            self.fc2 = gg.nn.Linear(64, 10)

        def forward(self, x):
            return self.fc2(gg.relu(self.fc1(x)))

    gg.nn.seed(0)
    net = Net()
    loss = gg.cross_entropy_loss(net(x), y)

A module only makes nodes, and nothing else depends on it: a graph is built, planned and run as always.  Names and
layouts of parameters are torch's, so that `load_state_dict` takes what `state_dict` of torch's modules gives.
"""

from .layers import (
    MLP,
    Attention,
    Conv1d,
    Conv2d,
    Dropout,
    Embedding,
    GroupNorm,
    KVCache,
    LayerNorm,
    Linear,
    RMSNorm,
    TransformerBlock,
)
from .module import Module, ModuleList, Sequential, seed

__all__ = [
    "MLP",
    "Attention",
    "Conv1d",
    "Conv2d",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "KVCache",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "RMSNorm",
    "Sequential",
    "TransformerBlock",
    "seed",
]
