"""`gg.grad`, gradients as nodes of a graph; and gradients of what was chosen with `params`."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.tensor import Pack
from ggrad.errors import GradientError


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def values(*tensors):
    gg.Graph().build_forward_expand(*tensors).compute()
    return [t.numpy().copy() for t in tensors]


def test_gradients_of_anything_by_anything_are_nodes():
    x, w = gg.tensor(random(3, 4)), gg.tensor(random(5, 4, seed=1))
    h = gg.tanh(gg.mul_mat(w, x))
    dx, dw, dh = gg.grad(gg.sum(gg.sqr(h)), [x, w, h])
    dx, dw, dh, h = values(dx, dw, dh, h)
    inner = 2 * h * (1 - h**2)
    np.testing.assert_allclose(dh, 2 * h, rtol=1e-6)
    np.testing.assert_allclose(dx, inner @ w.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dw, inner.T @ x.numpy(), rtol=1e-5, atol=1e-6)


def test_a_seed_weighs_the_elements():
    x, weights = gg.tensor(random(6)), random(6, seed=1)
    dx = gg.grad(gg.exp(x), x, seed=gg.tensor(weights))
    np.testing.assert_allclose(values(dx)[0], weights * np.exp(x.numpy()), rtol=1e-5)


def test_gradients_by_a_part_of_a_packed_result():
    q, k, v = (gg.tensor(random(1, 2, 4, 8, seed=i)) for i in range(3))
    out = gg.flash_attn_ext(q, k, v)
    assert out.op is Pack.op_of_parts
    d, dq, value = values(*gg.grad(gg.sum(gg.sqr(out)), [out, q]), out)
    np.testing.assert_allclose(d, 2 * value, rtol=1e-6)
    assert dq.shape == q.shape and np.abs(dq).max() > 0


def test_what_is_upstream_of_x_is_not_differentiated():
    """The op above has no gradient rule, and is not asked for one."""

    @gg.op
    def opaque(x):
        return x.spec

    opaque.reference(lambda x: x)
    x = gg.tensor(random(4), param=True)
    h = opaque(x)
    assert gg.grad(gg.sum(gg.sqr(h)), h).shape == (4,)
    with pytest.raises(GradientError, match="opaque has no gradient rule"):
        gg.grad(gg.sum(gg.sqr(h)), x)


def test_what_y_does_not_depend_on_is_an_error_or_zeros():
    x, z = gg.tensor(random(4), name="x"), gg.tensor(random(2, 3), name="z")
    with pytest.raises(GradientError, match=r"does not depend on z: f32\[2,3\].*allow_unused=True"):
        gg.grad(gg.sum(gg.sqr(x)), [x, z])
    dx, dz = values(*gg.grad(gg.sum(gg.sqr(x)), [x, z], allow_unused=True))
    np.testing.assert_array_equal(dx, 2 * x.numpy())
    np.testing.assert_array_equal(dz, np.zeros((2, 3)))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: gg.grad(x * 2, x), "y must be a scalar of a float dtype, not scale"),
        (lambda x: gg.grad(3.0, x), "y must be a scalar of a float dtype, not 3.0"),
        (lambda x: gg.grad(x * 2, x, seed=gg.tensor([1.0])), r"the seed must have y's shape \(4,\), not \(1,\)"),
        (lambda x: gg.grad(gg.sum(x), gg.tensor([1, 2])), r"there is no gradient by leaf: i32\[2\]"),
        (lambda x: gg.grad(gg.sum(x), "x"), "there is no gradient by 'x'"),
    ],
)
def test_what_is_no_gradient_is_refused(make, message):
    with pytest.raises(GradientError, match=message):
        make(gg.tensor(random(4)))


def critic(x, w1, w2, of):
    return of.matmul(of.tanh(of.matmul(x, w1)), w2)


def test_a_gradient_penalty_is_torchs():
    """Gulrajani et al. 2017: how far the norm of a critic's gradient by each input is from 1."""
    torch = pytest.importorskip("torch")
    arrays = random(8, 5), random(5, 16, seed=1), random(16, 1, seed=2)
    x, w1, w2 = (gg.tensor(a, param=True) for a in arrays)
    dx = gg.grad(gg.sum(critic(x, w1, w2, gg)), x)
    loss = gg.sum(gg.sqr(gg.sqrt(gg.sum(gg.sqr(dx), 1)) - 1.0))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(params=[w1, w2])
    graph.compute()

    tx, t1, t2 = (torch.tensor(a, requires_grad=True) for a in arrays)
    (tdx,) = torch.autograd.grad(critic(tx, t1, t2, torch).sum(), tx, create_graph=True)
    expected = ((tdx.norm(dim=1) - 1) ** 2).sum()
    expected.backward()
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5)
    np.testing.assert_allclose(graph.grad(w1).numpy(), t1.grad.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(graph.grad(w2).numpy(), t2.grad.numpy(), rtol=1e-4, atol=1e-5)
    assert graph.grad(x) is None


def test_a_physics_informed_net_trains_as_torchs():
    """u'' = -sin(x) for 20 steps of gradient descent: derivatives of second and third order."""
    torch = pytest.importorskip("torch")
    points = np.linspace(0, 3, 32, dtype=np.float32)[:, None]
    arrays = random(1, 24), random(24, seed=1), random(24, 1, seed=2) * np.float32(0.3)
    lr = 1e-3

    x = gg.tensor(points)
    w1, b1, w2 = params = [gg.tensor(a, param=True) for a in arrays]
    u = gg.matmul(gg.tanh(gg.matmul(x, w1) + b1), w2)
    u_x = gg.grad(gg.sum(u), x)
    u_xx = gg.grad(gg.sum(u_x), x)
    loss = gg.sum(gg.sqr(u_xx + gg.sin(x)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand()
    optimizer = gg.SGD(params, lr=lr)
    optimizer.build(graph)
    losses = []
    for _ in range(20):
        graph.compute()
        optimizer.step()
        losses.append(loss.item())

    tx = torch.tensor(points, requires_grad=True)
    t1, c1, t2 = theirs = [torch.tensor(a, requires_grad=True) for a in arrays]
    peer, expected = torch.optim.SGD(theirs, lr=lr), []
    for _ in range(20):
        peer.zero_grad()
        tu = torch.tanh(tx @ t1 + c1) @ t2
        (tu_x,) = torch.autograd.grad(tu.sum(), tx, create_graph=True)
        (tu_xx,) = torch.autograd.grad(tu_x.sum(), tx, create_graph=True)
        error = ((tu_xx + torch.sin(tx)) ** 2).sum()
        error.backward()
        peer.step()
        expected.append(error.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-4)
    assert losses[-1] < losses[0] / 2


# -- params -----------------------------------------------------------------------------------------


def test_only_what_is_named_is_differentiated():
    frozen, w = gg.tensor(random(8, 8), param=True, name="frozen"), gg.tensor(random(8, 8, seed=1), param=True)
    x = gg.tensor(random(4, 8))
    loss = gg.sum(gg.sqr(gg.mul_mat(w, gg.relu(gg.mul_mat(frozen, x)))))
    whole = gg.Graph().build_forward_expand(loss).build_backward_expand()
    part = gg.Graph().build_forward_expand(loss).build_backward_expand(params=[w])
    assert len(part.nodes) < len(whole.nodes) - 2
    assert part.grad(frozen) is None
    whole.compute()
    expected = whole.grad(w).numpy().copy()
    part.compute()
    np.testing.assert_array_equal(part.grad(w).numpy(), expected)
    optimizer = gg.SGD([frozen, w], lr=0.1)
    before = frozen.numpy().copy()
    optimizer.build(part)
    part.compute()
    np.testing.assert_array_equal(frozen.numpy(), before)


def test_the_gradient_of_a_result_can_be_read_if_it_was_named():
    w, c = gg.tensor(random(5), param=True), gg.tensor(random(5, seed=1))
    h = w * c
    loss = gg.sum(gg.sqr(h))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(params=[w, h, c])
    graph.compute()
    value = w.numpy() * c.numpy()
    np.testing.assert_allclose(graph.grad(h).numpy(), 2 * value, rtol=1e-6)
    np.testing.assert_allclose(graph.grad(w).numpy(), 2 * value * c.numpy(), rtol=1e-6)
    np.testing.assert_allclose(graph.grad(c).numpy(), 2 * value * w.numpy(), rtol=1e-6)


def test_asking_for_the_gradient_of_another_result_says_how():
    w = gg.tensor(random(5), param=True)
    h = w * 2
    graph = gg.Graph().build_forward_expand(gg.sum(gg.sqr(h))).build_backward_expand()
    with pytest.raises(GradientError, match=r"build_backward_expand\(params=\[\*graph.params, t\]\)"):
        graph.grad(h)


def test_params_must_be_float_tensors():
    w, ids = gg.tensor(random(5), param=True), gg.tensor([1, 2])
    graph = gg.Graph().build_forward_expand(gg.sum(w))
    with pytest.raises(GradientError, match=r"no gradient by leaf: i32\[2\]"):
        graph.build_backward_expand(params=[ids])
    assert graph.loss is None
