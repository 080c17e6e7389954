"""Modules: names, values, modes, and layers beside torch's."""

import numpy as np
import pytest

import ggrad as gg
from ggrad import nn
from ggrad.core.errors import GraphError, ShapeError


class Net(nn.Module):
    def __init__(self):
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.TransformerBlock(8, 4, 12, kv_heads=2) for _ in range(2))
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.width = 8  # no part

    def forward(self, ids, pos=None, caches=(None, None)):
        x = self.embedding(ids)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, pos, cache)
        return self.head(self.norm(x))


def values(t):
    gg.Graph().build_forward_expand(t).compute()
    return t.numpy().copy()


def test_parameters_have_the_names_of_their_places_and_shared_ones_the_first():
    net = Net()
    names = list(net.named_parameters())
    assert names[:2] == ["embedding.weight", "blocks.0.input_layernorm.weight"] and "head.weight" not in names
    assert "blocks.1.self_attn.k_proj.weight" in names and len(names) == 1 + 2 * 9 + 1
    assert net.embedding.weight.name == "embedding.weight"
    assert list(net.state_dict())[-1] == "head.weight"
    assert len(net.parameters("mlp")) == 6 and len(net.parameters(r"norm\.weight$|layernorm")) == 5


def test_a_seed_makes_the_same_module_again():
    nets = []
    for number in (3, 3, 4):
        nn.seed(number)
        nets.append(nn.Linear(5, 4).weight.numpy().copy())
    np.testing.assert_array_equal(nets[0], nets[1])
    assert np.abs(nets[0] - nets[2]).max() > 0.01 and np.abs(nets[0]).max() <= 5**-0.5


def test_a_module_trains():
    nn.seed(0)
    net = Net()
    ids, targets = gg.tensor(shape=(2, 5), dtype=gg.I32), gg.tensor(shape=10, dtype=gg.I32)
    loss = gg.cross_entropy_loss(net(ids).reshape(10, 11), targets)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
    assert set(graph.params) == set(net.parameters())
    gg.AdamW(net.parameters(), lr=1e-2).build(graph)
    rng = np.random.default_rng(0)
    batch = rng.integers(0, 11, (2, 6))
    ids.set(batch[:, :-1])
    targets.set(batch[:, 1:].reshape(-1))
    losses = []
    for _ in range(40):
        graph.compute()
        losses.append(loss.item())
    assert losses[0] > 2 and losses[-1] < 0.3 * losses[0]


def test_tokens_one_by_one_with_a_cache_are_as_all_at_once():
    nn.seed(1)
    net = Net()
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7)).astype(np.int32)
    whole = values(net(gg.tensor(tokens)))
    caches = [nn.KVCache(2, 2, 9, 2) for _ in net.blocks]
    graphs = {}
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 7)):
        n = end - start
        if n not in graphs:
            ids, pos = gg.tensor(shape=(2, n), dtype=gg.I32), gg.tensor(shape=n, dtype=gg.I32)
            out = net(ids, pos, caches)
            graphs[n] = ids, pos, out, gg.Graph().build_forward_expand(out)
        ids, pos, out, graph = graphs[n]
        ids.set(tokens[:, start:end])
        pos.set(np.arange(start, end))
        graph.compute()
        np.testing.assert_allclose(out.numpy(), whole[:, start:end], rtol=2e-5, atol=2e-6)


def test_values_go_out_and_in(tmp_path):
    pytest.importorskip("safetensors")
    one, other = Net(), Net()
    one.save_safetensors(tmp_path / "net.safetensors")
    assert other.load_safetensors(tmp_path / "net.safetensors") is other
    for name, array in one.state_dict().items():
        np.testing.assert_array_equal(other.state_dict()[name], array)
    one.norm.weight.set(np.zeros(8))
    assert other.norm.weight.numpy().all()


def test_what_does_not_fit_is_refused_whole():
    net = nn.Sequential(nn.Linear(3, 4), gg.relu, nn.Linear(4, 2))
    before = net.state_dict()
    state = {name: array + 1 for name, array in before.items()}
    with pytest.raises(GraphError, match=r"Sequential: missing 2\.bias; unknown 3\.bias\. strict=False"):
        net.load_state_dict({("3.bias" if name == "2.bias" else name): x for name, x in state.items()})
    with pytest.raises(ShapeError, match=r"0\.weight is \[4, 3\], and \[3, 4\] was given"):
        net.load_state_dict(state | {"0.weight": np.zeros((3, 4))})
    for name, array in net.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    net.load_state_dict({"2.bias": [5.0, 6.0]}, strict=False)
    assert net.state_dict()["2.bias"].tolist() == [5, 6]
    with pytest.raises(ShapeError, match="kv_heads=3 must divide heads=4"):
        nn.Attention(8, 4, kv_heads=3)
    with pytest.raises(NotImplementedError, match="Module has no forward"):
        nn.Module()(1)


def test_what_is_frozen_has_no_gradient_and_is_not_trained():
    net = nn.Sequential(nn.Linear(3, 4), gg.relu, nn.Linear(4, 2)).freeze("^0")
    assert list(net.named_parameters()) == ["2.weight", "2.bias"]
    loss = gg.sum(net(gg.tensor(np.ones((2, 3)))))
    assert len(gg.Graph().build_forward_expand(loss).build_backward_expand(loss).params) == 2
    assert len(net.unfreeze().parameters()) == 4
    summary = net.freeze("weight").summary()
    assert "0.weight  [4, 3]" in summary and "total" in summary and summary.endswith("6 numbers are trained")


def test_dropout_drops_while_training_alone():
    layer = nn.Dropout(0.5, seed=3)
    x = gg.tensor(np.ones((8, 64)))
    dropped = values(layer(x))
    assert set(np.unique(dropped)) == {0, 2} and 0.3 < (dropped == 0).mean() < 0.7
    model = nn.Sequential(layer).eval()
    assert model(x) is x and model.train()(x) is not x


LAYERS = {
    "Linear": (lambda m: m.Linear(5, 4), (3, 5)),
    "Linear, no bias": (lambda m: m.Linear(5, 4, bias=False), (2, 3, 5)),
    "LayerNorm": (lambda m: m.LayerNorm(6), (2, 3, 6)),
    "RMSNorm": (lambda m: m.RMSNorm(6, eps=1e-6), (2, 3, 6)),
    "GroupNorm": (lambda m: m.GroupNorm(2, 6), (2, 6, 3, 4)),
    "Conv2d": (lambda m: m.Conv2d(3, 4, (2, 3), stride=2, padding=1), (2, 3, 7, 8)),
    "Conv1d": (lambda m: m.Conv1d(3, 4, 3, padding=1, dilation=2), (2, 3, 9)),
    "Sequential": (lambda m: m.Sequential(m.Linear(5, 7), m.LayerNorm(7), m.Linear(7, 2)), (3, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_as_torchs(name):
    torch = pytest.importorskip("torch")
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    theirs, ours = make(torch.nn), make(nn)
    state = theirs.state_dict()
    with torch.no_grad():
        for t in state.values():
            t.add_(0.1 * torch.randn_like(t))
    ours.load_state_dict(state)
    assert list(ours.state_dict()) == list(state)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    leaf = gg.tensor(x, param=True)
    out = ours(leaf)
    d = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    loss = gg.sum(out * gg.tensor(d))
    graph = gg.Graph().build_forward_expand(out, loss).build_backward_expand(loss).compute()
    given = torch.tensor(x, requires_grad=True)
    wanted = theirs(given)
    wanted.backward(torch.tensor(d))
    np.testing.assert_allclose(out.numpy(), wanted.detach().numpy(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(graph.grad(leaf).numpy(), given.grad.numpy(), rtol=2e-4, atol=5e-6)
    for (ours_name, ours_leaf), (_, p) in zip(ours.named_parameters().items(), theirs.named_parameters(), strict=True):
        np.testing.assert_allclose(
            graph.grad(ours_leaf).numpy(), p.grad.numpy(), rtol=2e-4, atol=2e-5, err_msg=ours_name
        )
