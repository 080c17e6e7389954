"""ggrad's kernels in programs of JAX's: right beside JAX's own in float64, under jit, grad, vmap and from threads."""

import subprocess
import sys
import threading

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError, ShapeError

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.skipif(not gg.native.built(), reason="needs the C module")
gj = pytest.importorskip("ggrad.jax")
import jax.numpy as jnp  # noqa: E402

rng = np.random.default_rng(0)


def qkv(B=2, T=33, H=4, D=16, HK=None, dtype=np.float32):
    shapes = [(B, T, H, D), (B, T, HK or H, D), (B, T, HK or H, D)]
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def results_and_gradients(f, xs, seed=3):
    y = f(*xs)
    w = jnp.asarray(np.random.default_rng(seed).standard_normal(y.shape), y.dtype)
    return [y, *jax.jit(jax.grad(lambda *x: (f(*x) * w).sum(), tuple(range(len(xs)))))(*xs)]


def in_double(f, xs):
    with jax.enable_x64(True):
        return [np.asarray(x) for x in results_and_gradients(f, [jnp.asarray(x, jnp.float64) for x in xs])]


def assert_close(made, wanted, tolerance=1e-5):
    for a, b in zip(made, wanted, strict=True):
        assert a.shape == b.shape
        assert np.abs(np.asarray(a, np.float64) - b).max() < tolerance * np.abs(b).max()


MASK = np.random.default_rng(1).random((1, 1, 33, 33)) < 0.6
MASK[..., 0] = True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.5, "local_window_size": (4, 2)},
        {"mask": MASK},
        {"bias": np.random.default_rng(2).standard_normal((1, 4, 33, 33)), "is_causal": True},
    ],
    ids=["plain", "causal", "window", "mask", "bias"],
)
def test_attention_is_jaxs(options):
    xs = qkv()
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    made = results_and_gradients(lambda *x: gj.attention(*x, **given), xs)
    assert_close(made, in_double(lambda *x: jax.nn.dot_product_attention(*x, **options), xs))


def test_grouped_heads_and_the_gradient_of_the_bias():
    xs, bias = qkv(HK=2), jnp.asarray(rng.standard_normal((1, 1, 33, 33)), jnp.float32)
    made = results_and_gradients(lambda q, k, v, b: gj.attention(q, k, v, b), [*xs, bias])
    assert_close(made, in_double(lambda q, k, v, b: jax.nn.dot_product_attention(q, k, v, b), [*xs, bias]))


def test_halves_come_back_as_halves():
    xs = qkv(dtype=jnp.bfloat16)
    made = results_and_gradients(lambda *x: gj.attention(*x, is_causal=True), xs)
    assert all(x.dtype == jnp.bfloat16 for x in made)
    wanted = in_double(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True), xs)
    assert_close(made, wanted, 1.5 * 2**-7)  # bf16's last place


def test_windows_sinks_softcap_and_packed_sequences_are_ggrads():
    q, k, v = qkv(B=1)
    sinks, cu = jnp.asarray(rng.standard_normal(4), jnp.float32), jnp.array([0, 10, 33], jnp.int32)
    options = {"softcap": 3.0, "causal": "bottom-right"}
    made = gj.attention(q, k, v, sinks=sinks, cu_seqlens_q=cu, cu_seqlens_k=cu, local_window_size=(5, 0), **options)
    turned = [np.asarray(x).transpose(0, 2, 1, 3) for x in (q, k, v)]
    out = gg.flash_attn_ext(
        *turned, sinks=sinks, cu_seqlens_q=cu, cu_seqlens_k=cu, window=(5, 0), logit_softcap=3.0, causal=True
    )
    gg.Graph().build_forward_expand(out).compute()
    np.testing.assert_array_equal(np.asarray(made), out.numpy())


@gj.function
def swiglu(x, gate, up):
    return gg.silu(gg.mul_mat(gate, x)) * gg.mul_mat(up, x)


def plain_swiglu(x, gate, up):
    return jax.nn.silu(x @ gate.T) * (x @ up.T)


def weights():
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 4), (5, 4), (5, 4))]


def test_any_function_under_jit_and_grad():
    xs = weights()
    assert_close(results_and_gradients(swiglu, xs), in_double(plain_swiglu, xs))
    assert_close([jax.jit(swiglu)(*xs)], [np.asarray(plain_swiglu(*xs))])
    from jax.test_util import check_grads

    check_grads(swiglu, xs, order=1, modes=["rev"], eps=1e-2, atol=2e-2, rtol=2e-2)  # f32: 1e-7 / eps of rounding


def test_vmap_over_batches_of_some_arguments_and_of_batches():
    xs, gate, up = jnp.asarray(rng.standard_normal((6, 3, 4)), jnp.float32), *weights()[1:]
    made = jax.vmap(swiglu, (0, None, None))(xs, gate, up)
    wanted = jax.vmap(plain_swiglu, (0, None, None))(xs, gate, up)
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)
    twice = jax.jit(jax.vmap(jax.vmap(swiglu, (0, None, None)), (0, None, None)))(xs.reshape(2, 3, 3, 4), gate, up)
    np.testing.assert_array_equal(np.asarray(twice).reshape(made.shape), made)

    def loss(f, xs, gate, up):
        return (jax.vmap(f, (0, None, None))(xs, gate, up) ** 2).sum()

    made = jax.jit(jax.grad(lambda *a: loss(swiglu, *a), (0, 1, 2)))(xs, gate, up)
    wanted = jax.grad(lambda *a: loss(plain_swiglu, *a), (0, 1, 2))(xs, gate, up)
    for a, b in zip(made, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    of_each = jax.vmap(jax.grad(lambda x, g, u: swiglu(x, g, u).sum()), (0, None, None))(xs, gate, up)
    alone = [jax.grad(lambda x: swiglu(x, gate, up).sum())(x) for x in xs]
    np.testing.assert_array_equal(of_each, jnp.stack(alone))


def test_several_results_integers_and_what_has_no_gradient():
    f = gj.function(lambda x, i: (gg.get_rows(x, i), gg.argsort(x), x.T))
    x, ids = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32), jnp.array([2, 0], jnp.int32)
    rows, order, turned = jax.jit(f)(x, ids)
    np.testing.assert_array_equal(rows, x[ids])
    np.testing.assert_array_equal(order, jnp.argsort(x))
    np.testing.assert_array_equal(turned, x.T)
    gradient = jax.grad(lambda x: f(x, ids)[0].sum() + 2 * f(x, ids)[2].sum())(x)
    np.testing.assert_array_equal(gradient.sum(1), [12, 8, 12])
    assert jax.jit(gj.function(lambda x: x * 2.0))(jnp.zeros((0, 3))).shape == (0, 3)


def test_inside_scan_and_remat():
    w = weights()[1][:4]

    ours = gj.function(lambda x, w: gg.tanh(gg.mul_mat(w, x)))

    def loss(f, w):
        body = jax.checkpoint(lambda x: f(x, w))
        return jax.lax.scan(lambda x, _: (body(x), None), jnp.ones((2, 4)), None, 5)[0].sum()

    made = jax.jit(jax.grad(lambda w: loss(ours, w)))(w)
    np.testing.assert_allclose(
        made, jax.grad(lambda w: loss(lambda x, w: jnp.tanh(x @ w.T), w))(w), rtol=1e-4, atol=1e-5
    )


def test_results_are_the_same_from_several_threads():
    f = jax.jit(lambda *x: gj.attention(*x, is_causal=True))
    inputs = [qkv(1, 65) for _ in range(6)]
    wanted = [np.asarray(f(*xs)) for xs in inputs]
    failures = []

    def work(i):
        for _ in range(10):
            if not np.array_equal(f(*inputs[i]), wanted[i]):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_losses_and_kda():
    hidden, head = (jnp.asarray(rng.standard_normal((n, 16)), jnp.float32) for n in (50, 70))
    targets = jnp.asarray(rng.integers(0, 70, 50), jnp.int32).at[3].set(-100)

    def wanted(h, w):
        picked = jnp.take_along_axis(jax.nn.log_softmax(h @ w.T), jnp.maximum(targets, 0)[:, None], 1)[:, 0]
        return -jnp.where(targets < 0, 0, picked).sum() / 49

    for f in (
        lambda h, w: gj.linear_cross_entropy(h, w, targets),
        lambda h, w: gj.cross_entropy(h @ w.T, targets),
    ):
        assert_close(results_and_gradients(f, [hidden, head]), in_double(wanted, [hidden, head]))
    q, k, v, g, beta = (rng.standard_normal(s).astype("f4") for s in ((1, 20, 2, 8),) * 4 + ((1, 20, 2),))
    arrays = (q, k, v, -np.abs(g), 1 / (1 + np.exp(-beta)))
    o, state = gj.kda(*arrays, output_final_state=True)
    y, last = gg.kda(*arrays, output_final_state=True)
    gg.Graph().build_forward_expand(y, last).compute()
    np.testing.assert_array_equal(o, y.numpy())
    np.testing.assert_array_equal(state, last.numpy())


def test_an_index_out_of_range_ends_the_run_and_no_more():
    f = jax.jit(gj.function(lambda x, i: gg.get_rows(x, i)))
    x = jnp.ones((3, 2))
    with pytest.raises(Exception, match="an index is 7, and must be from 0 to 2"):
        jax.block_until_ready(f(x, jnp.array([7], jnp.int32)))
    assert f(x, jnp.array([1], jnp.int32)).sum() == 2


def test_bad_input_is_refused():
    q, k, v = qkv()
    with pytest.raises(ShapeError, match="argument 0 is int8"):
        swiglu(jnp.ones(2, jnp.int8), k, v)
    with pytest.raises(ShapeError, match="rows of q have 15"):
        gj.attention(q[..., :15], k, v)
    with pytest.raises(ShapeError, match="mask must be boolean"):
        gj.attention(q, k, v, mask=jnp.ones((1, 1, 33, 33)))
    with pytest.raises(ShapeError, match="both"):
        gj.attention(q, k, v, cu_seqlens_q=jnp.array([0, 33], jnp.int32))
    with pytest.raises(ShapeError, match="four axes"):
        gj.attention(q[0], k, v)

    @gg.op
    def no_rule(x):
        """x"""
        return x.spec

    with pytest.raises(GradientError, match="no_rule has no gradient rule"):
        jax.grad(lambda x: gj.function(no_rule)(x).sum())(jnp.ones(2))


def test_a_call_of_another_process_is_refused():
    code = """
import jax, jax.numpy as jnp, numpy as np, ggrad.jax as gj
gj.function(lambda x: x * 2.0)(jnp.ones(2))
like = jax.ShapeDtypeStruct((2,), jnp.float32)
for given, text in (((np.int64(5), jnp.ones(2)), "another process"),):
    try:
        jax.block_until_ready(jax.ffi.ffi_call("ggrad_call", like)(given[1], id=given[0]))
    except Exception as error:
        assert text in str(error), error
    else:
        raise SystemExit("not refused")
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_buffers_of_another_function_are_refused():
    from ggrad.jax.calls import _registered

    gj.function(lambda x: x * 2.0)(jnp.ones(7))
    number = _registered[-1][0].id
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    with pytest.raises(Exception, match="not those of the function"):
        jax.block_until_ready(jax.ffi.ffi_call("ggrad_call", like)(jnp.ones(3), id=np.int64(number)))
