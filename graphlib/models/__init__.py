"""Language models from GGUF files: their graphs, tokenizers, tuning with LoRA, and text.

from ggrad import models

model = models.load("model.gguf")
logits = model.logits([1, 2, 3])  # [3, vocabulary]
"""

from . import chat, data, generate, peft_layout, tokenizer, tuning
from .architecture import ARCHITECTURES, Architecture
from .generate import Sampling
from .model import Model, load
from .tuning import Tuning

__all__ = [
    "ARCHITECTURES", "Architecture", "Model", "Sampling", "Tuning", "chat", "data", "generate", "load", "peft_layout",
    "tokenizer", "tuning",
]  # fmt: skip
