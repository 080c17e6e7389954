"""Optimizers and schedules against plain NumPy."""

import math

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, GraphError, NotComputedError
from ggrad.train.optim import SGD, AdamW, Group

RTOL = 1e-5  # f32 over some ten steps


def parabola(shape=(7, 5), seed=0, name="w"):
    """A parameter, where its loss is smallest, and the loss sum((w - target)^2), whose gradient is 2 (w - target)."""
    rng = np.random.default_rng(seed)
    w = gg.tensor(rng.standard_normal(shape), name=name, param=True)
    target = gg.tensor(rng.standard_normal(shape), name="target")
    difference = w - target
    return w, target, gg.sum(difference * difference)


def with_gradients(*losses, **options) -> gg.Graph:
    loss = losses[0]
    for more in losses[1:]:
        loss = loss + more
    return gg.Graph().build_forward_expand(loss).build_backward_expand(loss, **options)


def adamw_step(x, grad, m, v, t, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    m[...] = betas[0] * m + (1 - betas[0]) * grad
    v[...] = betas[1] * v + (1 - betas[1]) * grad**2
    corrected = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return x - lr * weight_decay * x - lr * corrected


def test_adamw_is_what_numpy_makes_of_it():
    w, target, loss = parabola()
    x, y = w.numpy().astype(np.float64), target.numpy().astype(np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    graph = with_gradients(loss)
    optimizer = AdamW([w], lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    assert optimizer.build(graph) is graph
    for t in range(1, 12):
        graph.compute()
        assert optimizer.step()
        x = adamw_step(x, 2 * (x - y), m, v, t, 0.05, (0.8, 0.95), 1e-6, 0.1)
        np.testing.assert_allclose(w.numpy(), x, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(optimizer.moments["w/m"].numpy(), m, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(optimizer.moments["w/v"].numpy(), v, rtol=RTOL, atol=RTOL)
    assert optimizer.steps == 11


def test_sgd_is_what_numpy_makes_of_it():
    w, target, loss = parabola(shape=(3,))
    x, y = w.numpy().astype(np.float64), target.numpy().astype(np.float64)
    graph = with_gradients(loss)
    optimizer = SGD([w], lr=gg.schedule.linear(0.1, steps=6), weight_decay=0.5)
    optimizer.build(graph)
    for t in range(6):
        lr = 0.1 * (1 - t / 6)
        assert optimizer.lr == pytest.approx(lr)
        graph.compute()
        optimizer.step()
        x = x * (1 - lr * 0.5) - lr * 2 * (x - y)
        np.testing.assert_allclose(w.numpy(), x, rtol=RTOL, atol=RTOL)


def test_each_group_has_its_own_settings():
    parts = [parabola(seed=i, name=f"w{i}") for i in range(3)]
    (a, _, _), (b, _, _), (c, _, _) = parts
    values = {p: (p.numpy().astype(np.float64), t.numpy().astype(np.float64)) for p, t, _ in parts}
    graph = with_gradients(*(loss for _, _, loss in parts))
    optimizer = AdamW(
        [
            Group([a], lr_multiplier=0.1, weight_decay=0.0),
            Group([b], lr=lambda step: 0.3 / (step + 1), betas=(0.5, 0.6)),
            Group([c], eps=0.1),
        ],
        lr=0.02,
    )
    optimizer.build(graph)
    for _ in range(2):
        graph.compute()
        optimizer.step()
    settings = {
        a: [{"lr": 0.002, "weight_decay": 0.0}] * 2,
        b: [{"lr": 0.3, "betas": (0.5, 0.6)}, {"lr": 0.15, "betas": (0.5, 0.6)}],
        c: [{"lr": 0.02, "eps": 0.1}] * 2,
    }
    for p, steps in settings.items():
        x, y = values[p]
        m, v = np.zeros_like(x), np.zeros_like(x)
        for t, step in enumerate(steps, 1):
            x = adamw_step(x, 2 * (x - y), m, v, t, **step)
        np.testing.assert_allclose(p.numpy(), x, rtol=RTOL, atol=RTOL, err_msg=p.name)


@pytest.mark.parametrize("clip", [1e-3, 1.0, 1e6])
def test_gradients_are_scaled_down_to_the_clip_all_by_the_same_factor(clip):
    (a, ya, loss_a), (b, yb, loss_b) = parabola((4,), 1, "a"), parabola((2, 3), 2, "b")
    before = {p: p.numpy().copy() for p in (a, b)}
    grads = {p: 2 * (p.numpy().astype(np.float64) - y.numpy()) for p, y in ((a, ya), (b, yb))}
    norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
    graph = with_gradients(loss_a, loss_b)
    optimizer = SGD([a, b], lr=1.0)
    optimizer.build(graph, clip=clip)
    graph.compute()
    assert optimizer.norm == pytest.approx(norm, rel=1e-6)  # that of the gradients, not of what is left of them
    for p in (a, b):
        np.testing.assert_allclose(p.numpy(), before[p] - min(1, clip / norm) * grads[p], rtol=RTOL, atol=1e-6)


def test_zero_gradients_are_no_reason_to_skip():
    w, target, loss = parabola()
    w.set(target.numpy())
    optimizer = AdamW([w], lr=0.1, weight_decay=0.0)
    graph = optimizer.build(with_gradients(loss), clip=1.0).compute()
    assert optimizer.norm == 0 and optimizer.step()
    np.testing.assert_array_equal(w.numpy(), target.numpy())
    assert graph.loss.item() == 0


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(kind, clip, bad):
    (a, target, loss_a), (b, _, loss_b) = parabola(name="a"), parabola(name="b", seed=1)
    graph = with_gradients(loss_a, loss_b)
    optimizer = kind([a, b], lr=0.1)
    optimizer.build(graph, clip=clip)
    graph.compute()
    assert optimizer.step()

    tensors = [a, b, *optimizer.moments.values()]
    before, good = [t.numpy().copy() for t in tensors], target.numpy().copy()
    target.numpy()[3, 2] = bad
    graph.compute()
    assert not optimizer.step()
    assert optimizer.steps == 1
    for t, value in zip(tensors, before, strict=True):
        np.testing.assert_array_equal(t.numpy(), value, err_msg=t.name)

    target.set(good)
    graph.compute()
    assert optimizer.step() and optimizer.steps == 2
    assert np.isfinite(a.numpy()).all()


def test_accumulated_gradients_are_stepped_by_a_graph_of_its_own():
    w, target, loss = parabola()
    x, y = w.numpy().astype(np.float64), target.numpy().astype(np.float64)
    graph = with_gradients(loss, seed=gg.tensor(0.25), accumulate=True)
    optimizer = SGD([w], lr=0.1)
    update = optimizer.build(graph, clip=100.0)
    assert update is not graph
    for _ in range(3):
        for _ in range(4):
            graph.compute()
        np.testing.assert_allclose(w.numpy(), x, rtol=RTOL, atol=RTOL)  # so far nothing
        update.compute()
        assert optimizer.step()
        graph.reset()
        x -= 0.1 * 2 * (x - y)
        np.testing.assert_allclose(w.numpy(), x, rtol=RTOL, atol=RTOL)


def test_parameters_without_a_gradient_stay():
    w, _, loss = parabola()
    idle = gg.tensor(np.ones(3), name="idle", param=True)
    optimizer = AdamW([w, idle], lr=0.1)
    optimizer.build(with_gradients(loss)).compute()
    assert set(optimizer.moments) == {"w/m", "w/v"}
    np.testing.assert_array_equal(idle.numpy(), 1)


def test_the_plan_accounts_for_the_moments():
    w, _, loss = parabola((100, 16))
    optimizer = AdamW([w], lr=0.1)
    assert optimizer.build(with_gradients(loss)).plan().optimizer == 2 * w.nbytes


def test_schedules():
    warm = gg.schedule.constant(2.0, warmup=4)
    assert [warm(i) for i in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    line = gg.schedule.linear(1.0, steps=12, warmup=2, end=0.5)
    assert [line(i) for i in (0, 1, 2, 7, 12, 100)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    wave = gg.schedule.cosine(1.0, steps=10, warmup=2, end=0.2)
    assert [wave(i) for i in (0, 1, 2, 6, 10, 11)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert gg.schedule.cosine(1.0, steps=0)(0) == 1.0


def test_mistakes_are_named():
    w, _, loss = parabola()
    with pytest.raises(GraphError, match="without parameters"):
        AdamW([], lr=0.1)
    with pytest.raises(GraphError, match="is no parameter"):
        AdamW([gg.tensor(1.0, name="x")], lr=0.1)
    with pytest.raises(GraphError, match=r"w: f32.* was given twice"):
        AdamW([Group([w]), Group([w])], lr=0.1)
    with pytest.raises(GraphError, match="SGD does not have"):
        SGD([Group([w], betas=(0.9, 0.9))], lr=0.1)
    with pytest.raises(GraphError, match="betas must lie"):
        AdamW([w], lr=0.1, betas=(0.9, 1.0))
    with pytest.raises(GradientError, match="build_backward_expand comes first"):
        AdamW([w], lr=0.1).build(gg.Graph().build_forward_expand(loss))
    with pytest.raises(NotComputedError):
        AdamW([w], lr=0.1).step()
    optimizer = AdamW([w], lr=0.1)
    graph = with_gradients(loss)
    with pytest.raises(GraphError, match="clip must be"):
        optimizer.build(graph, clip=0)
    optimizer.build(graph)
    with pytest.raises(GraphError, match="makes its step in this graph already"):
        optimizer.build(graph)


def adamw_in_double(x, gradients, lr, b1, b2, eps, decay, first=1):
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, first):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        rest1, rest2 = (-np.expm1(t * np.log1p(b - 1)) if b else 1.0 for b in (b1, b2))
        root = np.sqrt(v / rest2) + eps
        step = np.where(root == 0, 0, m / rest1 / np.where(root == 0, 1, root))
        x = x - lr * decay * x - lr * step
    return x


@pytest.mark.parametrize("first", [1, 10**6])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-30])
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.999), (1 - 1e-6, 1 - 1e-6), (0.0, 1 - 1e-6), (1 - 1e-5, 0.5)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e15])
def test_extreme_hyperparameters_are_stepped_as_in_double(betas, eps, first, size):
    """Tolerated: 1e-5 of what the steps moved the parameter by, and the rounding of the parameter itself."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=50)
    gradients = rng.normal(size=(20, 50)) * size
    gradients[:, :5] = 0  # never a gradient
    w, given = gg.tensor(start, param=True), gg.tensor(shape=(50,))
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(w, given)))
    optimizer = gg.AdamW([w], lr=1e-2, betas=betas, eps=eps, weight_decay=0.1)
    optimizer.build(graph)
    optimizer.steps = first - 1
    rounded = [float(np.float32(b)) for b in betas]
    for g in gradients:
        given.set(g)
        graph.compute()
        assert optimizer.step()
    start, gradients = (np.float32(a).astype(float) for a in (start, gradients))
    expected = adamw_in_double(start, gradients, 1e-2, *rounded, eps, 0.1, first)
    moved = np.abs(expected - start).max()
    np.testing.assert_allclose(w.numpy(), expected, rtol=0, atol=1e-5 * moved + 20 * 2**-24 * np.abs(start).max())


def test_without_eps_what_never_had_a_gradient_stays():
    w = gg.tensor([1.0, -2.0], param=True)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(w, gg.tensor([0.0, 1.0]))))
    optimizer = gg.AdamW([w], lr=0.5, eps=0.0, weight_decay=0.0)
    optimizer.build(graph)
    graph.compute()
    np.testing.assert_allclose(w.numpy(), [1.0, -2.5], rtol=1e-6)


@pytest.mark.parametrize("make", [gg.AdamW, gg.SGD])
def test_a_decay_that_is_barely_an_ulp_is_not_rounded_away(make):
    """1 - 1e-7 is 1 - 1.19e-7 in f32: after 1000 steps that would be 19 % too much."""
    w = gg.tensor(np.linspace(1, 2, 1001), param=True)
    start = w.numpy().astype(float)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(w, gg.tensor(np.zeros(1001)))))
    optimizer = make([w], lr=1e-6, weight_decay=0.15)
    optimizer.build(graph)
    for _ in range(100):
        graph.compute()
        optimizer.step()
    lost = start - w.numpy()
    assert abs(lost.mean() / (1.5e-5 * start.mean()) - 1) < 0.05


def test_betas_that_f32_rounds_to_one_are_refused():
    with pytest.raises(gg.errors.GraphError, match="also as f32"):
        gg.AdamW([gg.tensor([1.0], param=True)], lr=0.1, betas=(0.9, 1 - 1e-9))


# -- runs with and without a step ---------------------------------------------------------------------


def fitting():
    """A small problem, and torch's parameters for it."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in [(6, 4), (3, 4), (6, 3)]]
    x, y = gg.tensor(arrays[0]), gg.tensor(arrays[2])
    w = gg.tensor(arrays[1], param=True, name="w")
    loss = gg.sum(gg.sqr(gg.mul_mat(w, x) - y))
    return w, loss, arrays


def torchs(arrays, rates):
    """The weights after a step of Adam at each of the rates."""
    torch = pytest.importorskip("torch")
    x, w, y = map(torch.tensor, arrays)
    w.requires_grad_()
    optimizer = torch.optim.AdamW([w], lr=0.1, weight_decay=0.01)
    for lr in rates:
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        ((x @ w.T - y) ** 2).sum().backward()
        optimizer.step()
    return w.detach().numpy()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_run_counts_its_step_itself(backend):
    """Without a call between runs the corrections of the moments are those of each step."""
    w, loss, arrays = fitting()
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    optimizer = gg.AdamW([w], lr=0.1)
    optimizer.build(graph)
    for _ in range(6):
        graph.compute(backend=backend)
    assert optimizer.steps == 6
    np.testing.assert_allclose(w.numpy(), torchs(arrays, [0.1] * 6), rtol=2e-5, atol=1e-6)


def test_a_skipped_step_is_not_counted():
    w, loss, arrays = fitting()
    x = gg.tensor(1.0)
    graph = gg.Graph().build_forward_expand(loss * x).build_backward_expand()
    optimizer = gg.AdamW([w], lr=0.1)
    optimizer.build(graph)
    for factor in (1.0, np.inf, 1.0):
        x.set(factor)
        graph.compute()
    assert optimizer.steps == 2
    np.testing.assert_allclose(w.numpy(), torchs(arrays, [0.1] * 2), rtol=2e-5, atol=1e-6)


def test_the_learning_rate_can_be_set_in_a_running_graph():
    w, loss, arrays = fitting()
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    optimizer = gg.AdamW([w], lr=0.1)
    optimizer.build(graph)
    graph.compute().compute()
    before, prepared = graph.version, graph.prepared()
    optimizer.lr = 1e-3
    assert optimizer.lr == 1e-3
    graph.compute()
    optimizer.lr = lambda steps: 0.01 * steps
    graph.compute()
    assert graph.version == before and graph.prepared() is prepared
    np.testing.assert_allclose(w.numpy(), torchs(arrays, [0.1, 0.1, 1e-3, 0.03]), rtol=2e-5, atol=1e-6)
    with pytest.raises(GraphError, match="learning rate of step 5 must be a number of at least 0, not -1"):
        optimizer.lr = -1
    assert optimizer.lr == pytest.approx(0.04)
    own = gg.AdamW([gg.optim.Group([w], lr=0.5)], lr=0.1)
    with pytest.raises(GraphError, match="every group has a learning rate of its own"):
        own.lr = 0.2


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_run_without_update_computes_losses_and_gradients_and_leaves_all_as_it_is(backend):
    w, loss, _ = fitting()
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    optimizer = gg.AdamW([w], lr=0.1)
    optimizer.build(graph, clip=1.0)
    graph.compute(backend=backend)
    state = [leaf.numpy().copy() for leaf in graph.leaves]
    for _ in range(2):
        graph.compute(update=False, backend=backend)
        gradient, value, norm = graph.grad(w).numpy().copy(), loss.item(), optimizer.norm
        for leaf, before in zip(graph.leaves, state, strict=True):
            np.testing.assert_array_equal(leaf.numpy(), before, err_msg=leaf.label())
    assert optimizer.steps == 1
    graph.compute(backend=backend)
    np.testing.assert_array_equal(graph.grad(w).numpy(), gradient)
    assert (loss.item(), optimizer.norm) == (value, norm)
    assert optimizer.steps == 2 and not np.array_equal(w.numpy(), state[graph.leaves.index(w)])


def test_evaluate_computes_the_results_alone():
    called = []

    def seen(value):
        called.append(value.copy())
        return value

    w, loss, _ = fitting()
    doubled = gg.custom(loss, function=seen, shape=loss.shape)
    graph = gg.Graph().build_forward_expand(loss, doubled).build_backward_expand(loss)
    gg.AdamW([w], lr=0.1).build(graph)
    before = w.numpy().copy()
    graph.evaluate(loss)
    assert not called
    expected = loss.item()
    graph.evaluate()
    assert len(called) == 1 and called[0] == expected
    np.testing.assert_array_equal(w.numpy(), before)
    with pytest.raises(NotComputedError):
        graph.grad(w).numpy()
    graph.compute()
    assert loss.item() == expected and not np.array_equal(w.numpy(), before)
    with pytest.raises(GraphError, match=r"evaluate\(\): neg: f32\[\] is no result of this graph"):
        graph.evaluate(gg.neg(loss))


def test_sums_of_gradients_stay_as_they_are_without_update():
    w, loss, _ = fitting()
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(accumulate=True)
    graph.compute()
    once = graph.grad(w).numpy().copy()
    graph.compute(update=False)
    np.testing.assert_array_equal(graph.grad(w).numpy(), once)
    graph.compute()
    np.testing.assert_array_equal(graph.grad(w).numpy(), 2 * once)


def test_what_needs_a_write_is_refused_without_update():
    state = gg.tensor(np.ones(3), name="state")
    after = gg.assign(state, state * 2) + 1
    graph = gg.Graph().build_forward_expand(after)
    with pytest.raises(GraphError, match=r"assign: f32\[3\] writes state: f32\[3\], and a result .* depends on it"):
        graph.compute(update=False)
    graph.compute()
    np.testing.assert_array_equal(after.numpy(), [3, 3, 3])
