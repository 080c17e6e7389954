"""Functions of arrays: a graph for each shape, one optimizer, one arena."""

import threading

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.arena import Arena
from ggrad.errors import GraphError, ShapeError


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(w):
    def loss(x, y):
        return gg.sum(gg.sqr(gg.matmul(x, w) - y)) / float(x.shape[0])

    return loss


def test_batches_of_several_sizes_train_as_torchs():
    """Moments, counts and learning rates go on from one graph to another."""
    torch = pytest.importorskip("torch")
    data = [(random(n, 6, seed=i), random(n, 2, seed=100 + i)) for i, n in enumerate([64, 33, 64, 7, 33, 64])]
    start = random(6, 2, seed=9)
    w = gg.tensor(start, param=True, name="w")
    step = gg.function(linear(w), optimizer=gg.AdamW([w], lr=lambda n: 0.1 / (1 + n)), clip=1.0)
    losses = [step(x, y) for x, y in data]

    theirs = torch.tensor(start, requires_grad=True)
    peer = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.01)
    expected = []
    for n, (x, y) in enumerate(data):
        peer.param_groups[0]["lr"] = 0.1 / (1 + n)
        peer.zero_grad()
        loss = ((torch.tensor(x) @ theirs - torch.tensor(y)) ** 2).sum() / len(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([theirs], 1.0)
        peer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    np.testing.assert_allclose(w.numpy(), theirs.detach().numpy(), rtol=1e-4, atol=1e-5)
    assert step.optimizer.steps == 6 and len(step.graphs) == 3


def test_without_an_optimizer_it_evaluates():
    w = gg.tensor(random(6, 2), param=True)
    evaluate = gg.function(lambda x: {"product": gg.matmul(x, w), "all": [gg.sum(x), "a word"]})
    x = random(5, 6, seed=1)
    got = evaluate(x)
    first = got["product"].copy()
    np.testing.assert_allclose(got["product"], x @ w.numpy(), rtol=1e-5, atol=1e-6)
    assert got["all"][1] == "a word" and isinstance(got["all"][0], float)
    evaluate(x * 2)
    np.testing.assert_array_equal(got["product"], first)  # the caller's own


def test_a_graph_is_built_once_for_each_combination_and_the_latest_are_kept():
    calls = []

    @gg.function(keep=2)
    def f(x, *, double=False):
        calls.append((x.shape, x.dtype, double))
        return x + x if double else x

    for n in (3, 4, 3, 4, 3):
        f(random(n))
    assert [shape for shape, *_ in calls] == [(3,), (4,)]
    f(random(5))  # drops that of 4, whose last call is longest ago
    f(random(3))
    assert len(calls) == 3 and len(f.graphs) == 2
    f(random(4))
    assert len(calls) == 4
    f(np.arange(4))
    np.testing.assert_array_equal(f(random(4), double=True), random(4) * 2)
    assert calls[4:] == [((4,), gg.I32, False), ((4,), gg.F32, True)]


def test_all_graphs_share_one_arena_as_large_as_the_largest_needs():
    w = gg.tensor(random(64, 64), param=True)
    step = gg.function(lambda x: gg.sum(gg.sqr(gg.matmul(gg.tanh(gg.matmul(x, w)), w))), optimizer=gg.SGD([w], lr=1e-6))
    for n in (10, 300, 20, 200, 10):
        step(random(n, 64))
    largest = max(graph.plan().arena for graph in step.graphs)
    memories = {id(graph.prepared().values.arena.base) for graph in step.graphs if graph.prepared().values.arena.size}
    assert len(memories) == 1
    assert step._arena.results(0).size == largest


def test_a_value_of_another_graph_in_the_arena_is_not_shown():
    arena, x = Arena(), gg.tensor(random(4))
    a, b = x * 2, x * 3
    first, second = gg.Graph(arena).build_forward_expand(a), gg.Graph(arena).build_forward_expand(b)
    first.compute()
    second.compute()
    np.testing.assert_array_equal(b.numpy(), random(4) * 3)
    with pytest.raises(gg.errors.NotComputedError):
        a.numpy()
    first.compute()
    np.testing.assert_array_equal(a.numpy(), random(4) * 2)


def test_a_lent_value_keeps_its_bytes_whatever_graph_runs_next():
    f = gg.function(lambda x: x * 2)
    f(random(8))
    y = next(t for t in f.graphs[0].nodes)
    lent = np.from_dlpack(y)
    before = lent.copy()
    f(random(8, seed=1))
    f(random(4, seed=2))
    np.testing.assert_array_equal(lent, before)


def test_two_steps_that_share_parameters_as_a_gan_does():
    torch = pytest.importorskip("torch")
    arrays = [random(3, 4), random(4, 1, seed=1)]
    g, d = (gg.tensor(a, param=True, name=n) for a, n in zip(arrays, "gd", strict=True))
    made = lambda z: gg.tanh(gg.matmul(z, g))  # noqa: E731
    critic = lambda x: gg.matmul(x, d)  # noqa: E731
    step_d = gg.function(lambda x, z: gg.sum(critic(made(z))) - gg.sum(critic(x)), optimizer=gg.SGD([d], lr=0.01))
    step_g = gg.function(lambda z: gg.sum(gg.sqr(critic(made(z)) - 1.0)), optimizer=gg.SGD([g], lr=0.01))
    tg, td = (torch.tensor(a, requires_grad=True) for a in arrays)
    for i in range(5):
        x, z = random(6, 4, seed=10 + i), random(6, 3, seed=20 + i)
        ours = step_d(x, z), step_g(z)
        tz, tx = torch.tensor(z), torch.tensor(x)
        loss_d = (torch.tanh(tz @ tg) @ td).sum() - (tx @ td).sum()
        (dd,) = torch.autograd.grad(loss_d, td)
        with torch.no_grad():
            td -= 0.01 * dd
        loss_g = ((torch.tanh(tz @ tg) @ td - 1) ** 2).sum()
        (dg,) = torch.autograd.grad(loss_g, tg)
        with torch.no_grad():
            tg -= 0.01 * dg
        np.testing.assert_allclose(ours, [loss_d.item(), loss_g.item()], rtol=1e-4, atol=1e-5)


def test_one_optimizer_in_two_functions():
    w = gg.tensor(random(4, 1), param=True, name="w")
    optimizer = gg.AdamW([w], lr=0.1)
    near = gg.function(lambda x: gg.sum(gg.sqr(gg.matmul(x, w))), optimizer=optimizer)
    far = gg.function(lambda x: gg.sum(gg.abs(gg.matmul(x, w))), optimizer=optimizer)
    near(random(3, 4)), far(random(3, 4)), near(random(2, 4))
    assert optimizer.steps == 3 and set(optimizer.moments) == {"w/m", "w/v"}
    optimizer.lr = 0.0
    before = w.numpy().copy()
    far(random(3, 4))
    np.testing.assert_array_equal(w.numpy(), before)


def test_what_it_assigns_is_part_of_the_graph_and_dropouts_have_their_keys():
    total, rng = gg.tensor(np.zeros(())), gg.Rng(0)

    @gg.function
    def f(x):
        gg.assign(total, total + gg.sum(x))
        return gg.dropout(x, rng, p=0.5), gg.dropout(x, rng, p=0.5)

    a, b = f(np.ones(4096))
    c, _ = f(np.ones(4096))
    assert total.item() == 2 * 4096
    assert 0.4 < np.mean((a != 0) == (b != 0)) < 0.6 and 0.4 < np.mean((a != 0) == (c != 0)) < 0.6
    f(np.ones(5))
    keys = [[t.attrs["key"] for t in graph.nodes if t.op.name == "dropout"] for graph in f.graphs]
    assert keys == [[0, 1], [0, 1]]


def test_threads_may_share_a_function():
    w = gg.tensor(random(6, 2), param=True)
    f = gg.function(lambda x: gg.matmul(x, w), keep=3, threads=1)
    wrong = []

    def work(i):
        for k in range(30):
            x = random(1 + (i + k) % 5, 6, seed=i)
            if not np.allclose(f(x), x @ w.numpy(), rtol=1e-4, atol=1e-5):
                wrong.append((i, k))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in workers], [t.join() for t in workers]
    assert not wrong


def test_an_error_of_the_function_leaves_no_graph_behind():
    f = gg.function(lambda x: gg.reshape(x, (7,)))
    with pytest.raises(ShapeError):
        f(random(4))
    assert not f.graphs
    np.testing.assert_array_equal(f(random(7)), random(7))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: gg.function(3), "3 cannot be called"),
        (lambda: gg.function(lambda x: x, keep=0), "keep must be at least 1, not 0"),
        (lambda: gg.function(lambda x: x, clip=1.0), "clip is of gradients"),
        (lambda: gg.function(lambda x: 3)(1.0), "gave no tensor, but 3"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(GraphError, match=message):
        make()


def test_a_loss_that_is_no_scalar_is_refused():
    w = gg.tensor(random(4), param=True)
    step = gg.function(lambda x: x * w, optimizer=gg.SGD([w], lr=0.1))
    with pytest.raises(GraphError, match=r"the loss, the first result, must be a scalar, not mul: f32\[4\]"):
        step(random(4))
