"""Modules of torch's as graphs: results, gradients and training as torch's, on the module's own weights."""

import copy

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GraphError, ShapeError

torch = pytest.importorskip("torch")
F = torch.nn.functional
nn = torch.nn

import ggrad.torch as gt  # noqa: E402


class Residual(nn.Module):
    def __init__(self, channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.down = nn.Conv2d(channels, channels, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.down(x))


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.blocks = nn.Sequential(Residual(8), Residual(8, 2))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


class Attention(nn.Module):
    """As in GPT-2: one projection, heads, causal."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(17, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block(16, 4, True) for _ in range(2))
        self.ln, self.head = nn.LayerNorm(16), nn.Linear(16, 17, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("places", torch.arange(12))

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(self.places[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)).flatten(0, 1)


class Vit(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, 16))
        self.pos = nn.Parameter(torch.randn(1, 5, 16))
        self.block, self.head = Block(16, 2, False), nn.Linear(16, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.block(x)[:, 0])


class Llama(nn.Module):
    """A block with rotary positions and keys that are repeated for their queries."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(16, eps=1e-6), nn.RMSNorm(16, eps=1e-6)
        self.q, self.k, self.v = (
            nn.Linear(16, 16, bias=False),
            nn.Linear(16, 8, bias=False),
            nn.Linear(16, 8, bias=False),
        )
        self.o = nn.Linear(16, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)
        angles = torch.outer(torch.arange(9.0), 100 ** -(torch.arange(2) / 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x):
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], dim=-1) * self.sin

    def repeated(self, x):
        B, H, T, D = x.shape
        return x[:, :, None].expand(B, H, 2, T, D).reshape(B, 2 * H, T, D) if H > 2 else torch.cat([x, x], 1)

    def forward(self, x):
        B, T, _ = x.shape
        h = self.norm1(x)
        q = self.turned(self.q(h).view(B, T, 4, 4).transpose(1, 2))
        k = self.repeated(self.turned(self.k(h).view(B, T, 2, 4).transpose(1, 2)))
        v = self.repeated(self.v(h).view(B, T, 2, 4).transpose(1, 2))
        weights = torch.softmax(q @ k.transpose(2, 3) / 2.0, dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(B, T, 16))
        return x + self.down(F.silu(self.gate(self.norm2(x))) * self.up(x))


class Experts(nn.Module):
    """Every expert, weighed by a softmax."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x):
        share = self.router(x).softmax(-1)
        return torch.stack([e(x) for e in self.experts], dim=-1).mul(share[..., None, :]).sum(-1)


def unet():
    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(2, 4, 3, 1, 1), nn.GroupNorm(2, 4), nn.SiLU())
            self.deep = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 4, 3, 1, 1), nn.LeakyReLU(0.1))
            self.up = nn.Conv2d(8, 2, 3, 1, 1)

        def forward(self, x):
            high = self.down(x)
            low = F.interpolate(self.deep(high), scale_factor=2.0, mode="nearest")
            return self.up(torch.cat([high, low], dim=1))

    return Unet()


def images(channels, size):
    return lambda rng, n: torch.tensor(rng.standard_normal((n, channels, size, size)).astype(np.float32))


def rows(*shape):
    return lambda rng, n: torch.tensor(rng.standard_normal((n, *shape)).astype(np.float32))


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), rows(6)),
    "CNN": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=4),
            nn.Hardtanh(), nn.Flatten(), nn.Linear(16, 5),
        ),
        images(3, 8),
    ),
    "residual network": (Resnet, images(3, 8)),
    "GPT-2": (Gpt, lambda rng, n: torch.tensor(rng.integers(0, 17, (n, 7)))),
    "vision transformer": (Vit, images(3, 8)),
    "Llama": (Llama, rows(9, 16)),
    "experts": (Experts, rows(6)),
    "U-Net": (unet, images(2, 8)),
    "autoencoder": (lambda: nn.Sequential(nn.Linear(9, 3), nn.Sigmoid(), nn.Linear(3, 9), nn.Softplus()), rows(9)),
    "convolution of sequences": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3, padding=2, dilation=2), nn.BatchNorm1d(4), nn.GELU()),
        rows(3, 10),
    ),
}  # fmt: skip


def made(name, training=True):
    torch.manual_seed(3)
    make, batch = MODELS[name]
    return make().train(training), lambda n, seed=0: batch(np.random.default_rng(seed), n)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_results_and_gradients_are_torchs(name, training):
    module, batch = made(name, training)
    reference, x = copy.deepcopy(module), batch(4)
    wanted = reference(x)
    d = torch.randn_like(wanted)
    wanted.backward(d)
    converted = gt.from_torch(module, (x,))
    out = converted.outputs[0]
    loss = gg.sum(out * gg.tensor(d.numpy()))
    graph = gg.Graph().build_forward_expand(out, loss, *converted.updates).build_backward_expand(loss)
    converted.inputs[0].set(x)
    graph.compute()
    scale = wanted.abs().max().item()
    np.testing.assert_allclose(out.numpy(), wanted.detach().numpy(), rtol=0, atol=1e-5 * scale)
    theirs = dict(reference.named_parameters())
    assert set(converted.params) == set(theirs)
    for path, leaf in converted.params.items():
        grad = theirs[path].grad.numpy()
        assert np.abs(graph.grad(leaf).numpy() - grad).max() <= 3e-5 * max(1.0, np.abs(grad).max()), path
    for (path, ours), other in zip(module.named_buffers(), reference.buffers(), strict=True):
        if ours.is_floating_point():
            np.testing.assert_allclose(ours.numpy(), other.numpy(), rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", MODELS)
def test_training_moves_the_modules_own_parameters_as_torch_does(name):
    module, batch = made(name)
    reference, x = copy.deepcopy(module), batch(4)
    target = torch.tensor(np.random.default_rng(1).standard_normal(reference(x).shape).astype(np.float32))
    reference.load_state_dict(module.state_dict())  # running statistics as before that call
    converted = gt.from_torch(module, (x,))
    loss = gg.mean(gg.sqr(converted.outputs[0] - gg.tensor(target.numpy())))
    graph = gg.Graph().build_forward_expand(loss, *converted.updates).build_backward_expand(loss)
    gg.SGD(list(converted.params.values()), lr=0.02).build(graph)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
    for step in range(20):
        x = batch(4, seed=step)
        converted.inputs[0].set(x)
        graph.compute()
        theirs = F.mse_loss(reference(x), target)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(theirs.item(), rel=2e-4), step
    for (path, ours), other in zip(module.named_parameters(), reference.parameters(), strict=True):
        np.testing.assert_allclose(ours.detach().numpy(), other.detach().numpy(), rtol=0, atol=2e-4, err_msg=path)


def test_other_batches_have_graphs_of_their_own_on_the_same_weights():
    module, batch = made("GPT-2", training=False)
    converted = gt.from_torch(module, (batch(2),))
    for n in (2, 3, 1, 3):
        x = batch(n, seed=n)
        np.testing.assert_allclose(converted(x)[0], module(x).detach().numpy(), rtol=0, atol=2e-5)
    with torch.no_grad():
        module.head.weight.mul_(0.5)  # and of the embedding, which is the same
    np.testing.assert_allclose(converted(x)[0], module(x).detach().numpy(), rtol=0, atol=2e-5)
    assert len(converted._others) == 2


def test_what_does_not_require_a_gradient_is_constant():
    module, batch = made("MLP")
    module[0].requires_grad_(False)
    assert list(gt.from_torch(module, (batch(2),)).params) == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_dropout_drops_while_training():
    module = nn.Sequential(nn.Dropout(0.5)).train()
    x = torch.ones(8, 64)
    out = gt.from_torch(module, (x,))(x)[0]
    assert set(np.unique(out)) == {0, 2} and 0.3 < (out == 0).mean() < 0.7
    np.testing.assert_array_equal(gt.from_torch(module.eval(), (x,))(x)[0], x)


def test_what_cannot_be_converted_is_listed_whole_with_its_line():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x) + torch.lgamma(x)

    with pytest.raises(GraphError) as caught:
        gt.from_torch(Odd(), (torch.eye(3),))
    message = str(caught.value)
    assert "2 ops have no counterpart here" in message and "lgamma" in message and "linalg_inv" in message
    assert message.count("torch.linalg.inv(x) + torch.lgamma(x)") == 2
    with pytest.raises(ShapeError, match=r"0\.weight is torch.float64, and must be float32"):
        gt.from_torch(nn.Sequential(nn.Linear(2, 2)).double(), (torch.ones(1, 2, dtype=torch.float64),))
    with pytest.raises(ShapeError, match="must be tensors of torch's, not list"):
        gt.from_torch(nn.Linear(2, 2), ([1.0, 2.0],))
    with pytest.raises(GraphError, match="ceil_mode=True has no counterpart"):
        gt.from_torch(nn.MaxPool2d(2, ceil_mode=True), (torch.ones(1, 1, 5, 5),))
