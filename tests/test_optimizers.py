"""Optimizers: after each of twenty steps parameters are where torch's, or the formula in double precision, has them."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GraphError, NotComputedError
from ggrad.train.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Group, Lion, Muon, RMSprop

STEPS = 20
pytestmark = pytest.mark.native


def task(shapes=((7, 5), (5,), (4, 9))):
    """Parameters, and a loss whose gradients differ in size from element to element."""
    rng = np.random.default_rng(0)
    given = [(rng.standard_normal(s).astype("f"), rng.standard_normal(s).astype("f")) for s in shapes]
    params = [gg.tensor(x, name=f"w{i}", param=True) for i, (x, _) in enumerate(given)]
    terms = [gg.sum(gg.sqr(gg.sqr(p - y)) + gg.sqr(p)) for p, (_, y) in zip(params, given, strict=True)]
    return params, sum(terms[1:], terms[0]), given


def steps_of(optimizer, params, loss, **options):
    graph = gg.Graph().build_backward_expand(loss)
    optimizer.build(graph, **options)
    for _ in range(STEPS):
        graph.compute()
        yield [p.numpy().copy() for p in params]


def torch_steps(made, given, before_step=lambda params: None):
    torch = pytest.importorskip("torch")
    params = [torch.tensor(x.astype(float), requires_grad=True) for x, _ in given]
    optimizer = made(torch.optim, params)
    for _ in range(STEPS):
        optimizer.zero_grad()
        sum((((p - torch.tensor(y)) ** 4) + p * p).sum() for p, (_, y) in zip(params, given, strict=True)).backward()
        before_step(params)
        optimizer.step()
        yield [p.detach().numpy().copy() for p in params]


TORCH = {
    "sgd": (lambda p: SGD(p, 1e-3, weight_decay=0.1), lambda o, p: o.SGD(p, 1e-3, weight_decay=0.1)),
    "momentum": (
        lambda p: SGD(p, 1e-3, momentum=0.9, weight_decay=0.1),
        lambda o, p: o.SGD(p, 1e-3, momentum=0.9, weight_decay=0.1),
    ),
    "dampening": (
        lambda p: SGD(p, 1e-3, momentum=0.9, dampening=0.3),
        lambda o, p: o.SGD(p, 1e-3, momentum=0.9, dampening=0.3),
    ),
    "nesterov": (
        lambda p: SGD(p, 1e-3, momentum=0.9, nesterov=True),
        lambda o, p: o.SGD(p, 1e-3, momentum=0.9, nesterov=True),
    ),
    "adam": (lambda p: Adam(p, 0.05, weight_decay=0.1), lambda o, p: o.Adam(p, 0.05, weight_decay=0.1)),
    "amsgrad": (
        lambda p: Adam(p, 0.05, betas=(0.8, 0.9), amsgrad=True),
        lambda o, p: o.Adam(p, 0.05, betas=(0.8, 0.9), amsgrad=True),
    ),
    "adamw": (lambda p: AdamW(p, 0.05, weight_decay=0.1), lambda o, p: o.AdamW(p, 0.05, weight_decay=0.1)),
    "adamw, amsgrad": (
        lambda p: Adam(p, 0.05, weight_decay=0.1, amsgrad=True, decoupled=True),
        lambda o, p: o.AdamW(p, 0.05, weight_decay=0.1, amsgrad=True),
    ),
    "rmsprop": (lambda p: RMSprop(p, 0.01, weight_decay=0.1), lambda o, p: o.RMSprop(p, 0.01, weight_decay=0.1)),
    "rmsprop, centered, momentum": (
        lambda p: RMSprop(p, 0.01, alpha=0.9, centered=True, momentum=0.5),
        lambda o, p: o.RMSprop(p, 0.01, alpha=0.9, centered=True, momentum=0.5),
    ),
    "adagrad": (
        lambda p: Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.1),
        lambda o, p: o.Adagrad(p, 0.1, lr_decay=0.1, weight_decay=0.1),
    ),
    "adafactor": (
        lambda p: Adafactor(p, 0.02, weight_decay=0.1, clip=1.5),
        lambda o, p: o.Adafactor(p, 0.02, weight_decay=0.1, d=1.5, eps=(2.0**-23, 1e-3)),
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_steps_are_torchs(name):
    ours, theirs = TORCH[name]
    params, loss, given = task()
    for mine, other in zip(steps_of(ours(params), params, loss), torch_steps(theirs, given), strict=True):
        for x, y in zip(mine, other, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)  # f32 over twenty steps


def test_gradients_cut_by_value_are_torchs():
    torch = pytest.importorskip("torch")
    params, loss, given = task()
    mine = steps_of(SGD(params, 1e-2), params, loss, clip_value=0.5)
    other = torch_steps(
        lambda o, p: o.SGD(p, 1e-2), given, lambda p: torch.nn.utils.clip_grad_value_(p, 0.5)
    )  # fmt: skip
    for xs, ys in zip(mine, other, strict=True):
        for x, y in zip(xs, ys, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def gradients(xs, given):
    return [4 * (x - y) ** 3 + 2 * x for x, (_, y) in zip(xs, given, strict=True)]


def test_lion_is_its_papers():
    params, loss, given = task()
    xs, ms = [x.astype(float) for x, _ in given], [np.zeros(x.shape) for x, _ in given]
    for mine in steps_of(Lion(params, 0.01, betas=(0.8, 0.95), weight_decay=0.3), params, loss):
        for i, g in enumerate(gradients(xs, given)):
            xs[i] = xs[i] - 0.01 * (np.sign(0.8 * ms[i] + 0.2 * g) + 0.3 * xs[i])
            ms[i] = 0.95 * ms[i] + 0.05 * g
        for x, y in zip(mine, xs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def orthogonal(u):
    a, b, c = 3.4445, -4.775, 2.0315
    x = u / np.linalg.norm(u)
    x = x.T if u.shape[0] > u.shape[1] else x
    for _ in range(5):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def test_muon_is_its_papers_and_adamw_steps_the_rest():
    params, loss, given = task()
    xs = [x.astype(float) for x, _ in given]
    ms, vs = ([np.zeros(x.shape) for x in xs] for _ in range(2))
    muon = Muon(params, 0.02, weight_decay=0.1, adamw=[params[2]], adamw_lr=0.5, betas=(0.9, 0.95))
    for t, mine in enumerate(steps_of(muon, params, loss), 1):
        for i, g in enumerate(gradients(xs, given)):
            if i == 0:
                ms[i] = 0.95 * ms[i] + 0.05 * g
                u = 0.05 * g + 0.95 * ms[i]
                xs[i] = xs[i] * (1 - 0.02 * 0.1) - 0.02 * (7 / 5) ** 0.5 * orthogonal(u)
                continue
            ms[i], vs[i] = 0.9 * ms[i] + 0.1 * g, 0.95 * vs[i] + 0.05 * g * g
            step = ms[i] / (1 - 0.9**t) / (np.sqrt(vs[i] / (1 - 0.95**t)) + 1e-8)
            xs[i] = xs[i] * (1 - 0.01 * 0.1) - 0.01 * step
        for x, y in zip(mine, xs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)  # iterations that double small errors


MADE = {
    "sgd": lambda p: SGD(p, 1e-3, momentum=0.9),
    "adam": lambda p: Adam(p, 0.05, amsgrad=True),
    "rmsprop": lambda p: RMSprop(p, 0.01, centered=True, momentum=0.5),
    "adagrad": lambda p: Adagrad(p, 0.1),
    "lion": lambda p: Lion(p, 0.01),
    "adafactor": lambda p: Adafactor(p, 0.1),
    "muon": lambda p: Muon(p, 0.02),
}


@pytest.mark.parametrize("name", MADE)
def test_a_resumed_run_goes_on_with_the_same_bits(name, tmp_path):
    params, loss, _ = task()
    graph = gg.Graph().build_backward_expand(loss)
    optimizer = MADE[name](params)
    optimizer.build(graph, average=0.9)
    for _ in range(3):
        graph.compute()
    gg.checkpoint.save(tmp_path / "state", params, optimizer=optimizer)
    for _ in range(3):
        graph.compute()
    after = [p.numpy().copy() for p in params]
    means = [m.copy() for m in optimizer.averages().values()]

    params, loss, _ = task()
    graph = gg.Graph().build_backward_expand(loss)
    optimizer = MADE[name](params)
    optimizer.build(graph, average=0.9)
    gg.checkpoint.load(tmp_path / "state", params, optimizer=optimizer)
    for _ in range(3):
        graph.compute()
    for p, x in zip(params, after, strict=True):
        np.testing.assert_array_equal(p.numpy(), x)
    for m, x in zip(optimizer.averages().values(), means, strict=True):
        np.testing.assert_array_equal(m, x)


@pytest.mark.parametrize("name", MADE)
def test_a_gradient_that_is_not_finite_changes_nothing(name):
    params, loss, _ = task()
    factor = gg.tensor(1.0)
    graph = gg.Graph().build_backward_expand(loss * factor)
    optimizer = MADE[name](params)
    optimizer.build(graph, average=0.9)
    graph.compute()
    before = [t.numpy().copy() for t in (*params, *optimizer.moments.values())]
    factor.set(np.nan)
    graph.compute()
    for t, x in zip((*params, *optimizer.moments.values()), before, strict=True):
        np.testing.assert_array_equal(t.numpy(), x)


def test_averages_are_running_means_without_the_zeros_that_they_began_with():
    params, loss, _ = task()
    optimizer = AdamW(params, 0.05)
    means = [np.zeros(p.shape) for p in params]
    for t, xs in enumerate(steps_of(optimizer, params, loss, average=0.8, clip=0.5), 1):
        means = [0.8 * m + 0.2 * x for m, x in zip(means, xs, strict=True)]
        for p, m in zip(params, means, strict=True):
            np.testing.assert_allclose(optimizer.averages()[p], m / (1 - 0.8**t), rtol=1e-5, atol=1e-6)
    before = [p.numpy().copy() for p in params]
    with optimizer.averaged():
        for p, m in zip(params, means, strict=True):
            np.testing.assert_allclose(p.numpy(), m / (1 - 0.8**STEPS), rtol=1e-5, atol=1e-6)
    for p, x in zip(params, before, strict=True):
        np.testing.assert_array_equal(p.numpy(), x)


def test_groups_have_schedules_of_their_own():
    params, loss, _ = task()
    groups = [Group(params[:1], lr=gg.schedule.linear(0.1, 10)), Group(params[1:], weight_decay=0.2)]
    found = list(steps_of(Lion(groups, gg.schedule.cosine(0.01, 20)), params, loss))
    rates = [np.abs(found[t][0] - found[t - 1][0]).max() for t in range(1, STEPS)]
    np.testing.assert_allclose(rates, [max(0, 0.1 * (1 - t / 10)) for t in range(1, STEPS)], atol=1e-6)


def test_what_is_out_of_range_is_refused_in_words():
    params, loss, _ = task()
    refused = [
        (lambda: SGD(params, 0.1, momentum=1.5), r"SGD\(\): momentum must be from 0 to 1, not 1.5"),
        (lambda: SGD(params, 0.1, nesterov=True), r"nesterov needs a momentum, not 0.0"),
        (lambda: RMSprop(params, 0.1, alpha=-1.0), r"RMSprop\(\): alpha must be from 0 to 1"),
        (lambda: Adagrad(params, 0.1, lr_decay=-1.0), r"lr_decay must be a number of at least 0"),
        (lambda: Adafactor(params, beta2_decay=0.5), r"beta2_decay=0.5 must be below 0"),
        (lambda: Lion([Group(params, eps=1.0)], 0.1), r"a group sets eps, which Lion does not have"),
        (lambda: Muon(params, momentum=2.0), r"Muon\(\): momentum must be from 0 to 1"),
    ]
    for call, message in refused:
        with pytest.raises(GraphError, match=message):
            call()
    graph = gg.Graph().build_backward_expand(loss)
    for options, message in [
        ({"clip_value": 0.0}, "clip_value must be a positive number"),
        ({"average": 1.0}, r"average must lie in \[0, 1\)"),
        ({"shard": True}, "a step of Muon looks at whole parameters"),
    ]:
        with pytest.raises(GraphError, match=message):
            Muon(params).build(graph, **options)
    with pytest.raises(NotComputedError, match="keeps running means"):
        Muon(params).averages()
