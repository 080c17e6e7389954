"""The reference of attention itself: its gradients are those of its results, and its options mean what they say."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.testing import attention_reference, dropout_factors, visible_pairs

INF, NAN = np.inf, np.nan
B, H, HK, N, M, DK, DV = 2, 4, 2, 5, 7, 3, 4
rng = np.random.default_rng(0)
normal = rng.standard_normal


def hole(*shape):
    return np.where(rng.random(shape) < 0.3, -INF, normal(shape))


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "top-left": {"causal": "top-left"},
    "bottom-right": {"causal": True},
    "mask": {"mask": hole(N, M)},
    "mask of each head, with rows to spare": {"mask": hole(H, N + 2, M)},
    "mask that tiles": {"mask": hole(1, 2, N, M), "causal": "top-left"},
    "boolean mask": {"mask": rng.random((N, M)) < 0.6},
    "window": {"window": (2, 1)},
    "window, causal, prefix": {"window": (1, 0), "causal": "bottom-right", "prefix": 2},
    "sinks": {"sinks": normal(H), "causal": "top-left"},
    "a sink of -inf": {"sinks": np.array([0.5, -INF, 1, -1])},
    "softcap": {"logit_softcap": 0.7, "mask": hole(N, M)},
    "dropout": {"dropout_p": 0.4, "seed": 7},
    "all together": {
        "mask": hole(2, 1, N, M),
        "sinks": normal(H),
        "causal": True,
        "window": (3, 0),
        "prefix": 1,
        "logit_softcap": 1.5,
        "dropout_p": 0.2,
        "seed": 3,
        "scale": 0.8,
    },
}


def inputs(batch=B, queries=N, keys=M):
    return {
        "q": normal((batch, H, queries, DK)),
        "k": normal((batch, HK, keys, DK)),
        "v": normal((batch, HK, keys, DV)),
    }


def require_gradients_of_results(arguments):
    """Slopes along random directions against central differences of sum(out * d) + sum(lse * d_lse)."""
    forward = attention_reference(**arguments)
    d, d_lse = normal(forward.out.shape), normal(forward.lse.shape)
    got = attention_reference(**arguments, d=d, d_lse=d_lse)
    step = 1e-5

    def loss(name, direction, at):
        moved = attention_reference(**arguments | {name: arguments[name] + at * direction})
        seen = np.isfinite(moved.lse)
        return (moved.out * d).sum() + (moved.lse * d_lse)[seen].sum()

    for name in ("q", "k", "v", "mask", "sinks"):
        gradient = getattr(got, f"d{name}")
        if name not in arguments or arguments[name].dtype == bool:
            assert gradient is None
            continue
        assert gradient.shape == arguments[name].shape
        for _ in range(2):
            direction = np.where(np.isfinite(arguments[name]), normal(gradient.shape), 0)
            quotient = (loss(name, direction, step) - loss(name, direction, -step)) / (2 * step)
            slope = (gradient * direction).sum()
            assert slope == pytest.approx(quotient, rel=1e-6, abs=1e-8), name  # the step squared, and noise / step


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_the_results(name):
    require_gradients_of_results(inputs() | OPTIONS[name])


def test_gradients_of_packed_sequences_are_those_of_the_results():
    packed = {"cu_seqlens_q": [0, 3, 3, 9, 10], "cu_seqlens_k": [0, 4, 6, 6, 11]}
    require_gradients_of_results(inputs(1, 10, 11) | packed | {"causal": "top-left", "sinks": normal(H)})
    require_gradients_of_results(inputs(1, 10, 11) | packed | {"mask": hole(H, 10, 11), "dropout_p": 0.3})
    packed = {"cu_seqlens_q": [0, 3, 8], "cu_seqlens_k": [0, 4, 9]}  # two queries and two keys are of no sequence
    require_gradients_of_results(inputs(1, 10, 11) | packed | {"sinks": normal(H)})


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": "top-left", "mask": hole(N, M), "logit_softcap": 2.0}]
)
def test_it_agrees_with_the_op(options):
    x = inputs()
    x = {name: value.astype(np.float32) for name, value in x.items()}
    d = normal((B, N, H, DV)).astype(np.float32)
    mask = options.get("mask")
    rest = {name: value for name, value in options.items() if name != "mask"}
    out, lse = gg.flash_attn_ext(**x, mask=mask, return_lse=True, **rest)
    packed = gg.flash_attn_back(**x, mask=mask, d=d, **rest)
    results = [gg.set_output(t) for t in (out, lse, *packed.parts)]
    gg.Graph().build_forward_expand(*results).compute(backend="reference")
    if mask is not None:
        mask = mask.astype(np.float32)  # as the op holds it
    expected = attention_reference(**x, d=d, **options | {"mask": mask})
    for t, name in zip(results, ("out", "lse", "dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(t.numpy(), getattr(expected, name), rtol=2e-5, atol=2e-6)  # results are f32


def test_alibi_is_ggmls_and_has_no_gradient():
    x = inputs() | {"mask": hole(N, M), "max_bias": 8.0}
    slopes = 2.0 ** -np.array([2, 4, 6, 8])  # of four heads
    by_hand = attention_reference(**x | {"max_bias": 0, "mask": slopes[:, None, None] * x["mask"]})
    np.testing.assert_allclose(attention_reference(**x).out, by_hand.out, rtol=1e-12)
    with pytest.raises(gg.errors.GradientError, match="no gradient with max_bias"):
        attention_reference(**x, d=np.ones((B, N, H, DV)))


def show(visible):
    return ["".join(".x"[int(seen)] for seen in row) for row in visible]


def test_visible_pairs():
    assert show(visible_pairs(2, 4, causal="top-left")) == ["x...", "xx.."]
    assert (
        show(visible_pairs(2, 4, causal=True)) == show(visible_pairs(2, 4, causal="bottom-right")) == ["xxx.", "xxxx"]
    )
    assert show(visible_pairs(4, 2, causal=True)) == ["..", "..", "x.", "xx"]
    assert show(visible_pairs(4, 4, window=(1, 0))) == ["x...", "xx..", ".xx.", "..xx"]
    assert show(visible_pairs(3, 5, window=(0, 1), causal="top-left")) == ["x....", ".x...", "..x.."]
    assert show(visible_pairs(3, 5, window=(0, 1))) == ["..xx.", "...xx", "....x"]
    assert show(visible_pairs(4, 4, window=(0, 0), prefix=2, causal=True)) == ["x...", "xx..", "xxx.", "xx.x"]
    assert show(visible_pairs(2, 3, window=(0, -1), prefix=1)) == ["xxx", "x.x"]


def test_a_query_that_sees_no_key_is_zero_and_takes_part_in_nothing():
    x = inputs(queries=9)
    x["q"][:, :, :2] = NAN  # of nine queries on seven keys, bottom-right, the first two see none
    d, d_lse = normal((B, 9, H, DV)), normal((B, H, 9))
    d[:, :2] = INF
    got = attention_reference(**x, d=d, d_lse=d_lse, causal=True)
    assert not got.out[:, :2].any() and (got.lse[:, :, :2] == -INF).all() and not got.dq[:, :, :2].any()
    assert all(np.isfinite(g).all() for g in (got.dq, got.dk, got.dv))

    sinks = normal(H)
    got = attention_reference(**x, d=d, d_lse=d_lse, causal=True, sinks=sinks)
    assert (got.lse[:, :, :2] == sinks[:, None]).all() and np.isfinite(got.dsinks).all()


def test_nan_counts_where_it_is_seen_and_nowhere_else():
    x, d = inputs(1), normal((1, N, H, DV))
    clean = attention_reference(**x, d=d, causal="top-left")
    x["k"][:, 1, 6], x["v"][:, 0, 3, 1] = NAN, INF  # top-left, five queries: key 6 is never seen
    got = attention_reference(**x, d=d, causal="top-left")
    np.testing.assert_allclose(got.out[:, :3], clean.out[:, :3], rtol=1e-12)
    assert not np.isfinite(got.out[:, 3:, :2, 1]).any()
    for name in ("dq", "dk", "dv"):  # the second kv head and its two query heads see no garbage
        heads = slice(2, 4) if name == "dq" else slice(1, 2)
        np.testing.assert_allclose(getattr(got, name)[:, heads], getattr(clean, name)[:, heads], rtol=1e-12, atol=1e-12)


def test_one_key_gives_exact_zeros_and_large_scores_stay_finite():
    x = inputs(keys=1)
    d = normal((B, N, H, DV))
    one = attention_reference(**x, d=d)
    assert not one.dq.any() and not one.dk.any()
    assert (one.out == x["v"].repeat(2, axis=1).swapaxes(1, 2)).all()
    large = attention_reference(**inputs(), d=d, scale=1e30)
    assert all(np.isfinite(value).all() for value in large.present().values())


def test_equal_scores_give_equal_weights_however_large_they_are():
    x = inputs() | {"k": np.full((B, HK, M, DK), 1e15)}
    got = attention_reference(**x, scale=1e15)
    np.testing.assert_allclose(got.out, np.broadcast_to(x["v"].mean(2).repeat(2, 1)[:, None], got.out.shape))


def test_a_row_of_large_finite_negatives_is_not_empty():
    x = inputs()
    got = attention_reference(**x, mask=np.full((N, M), -3.4e38, np.float32))
    np.testing.assert_allclose(got.out, np.broadcast_to(x["v"].mean(2).repeat(2, 1)[:, None], got.out.shape))


def test_a_packed_sequence_is_the_sequence_alone():
    x = inputs(1, 10, 11)
    d = normal((1, 10, H, DV))
    options = {"window": (2, 0), "causal": True, "sinks": normal(H)}
    together = attention_reference(**x, d=d, cu_seqlens_q=[0, 3, 9], cu_seqlens_k=[0, 4, 11], **options)
    assert not together.out[:, 9:].any()  # of no sequence
    for queries, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 9), slice(4, 11))):
        alone = attention_reference(
            x["q"][:, :, queries], x["k"][:, :, keys], x["v"][:, :, keys], d[:, queries], **options
        )
        np.testing.assert_array_equal(together.out[:, queries], alone.out)
        np.testing.assert_array_equal(together.dk[:, :, keys], alone.dk)


def test_dropout_depends_on_the_place_alone_and_keeps_the_right_share():
    factors = dropout_factors(60, 70, 0.3, 5, head=2, sequence=1)
    np.testing.assert_array_equal(factors[:7, :9], dropout_factors(7, 9, 0.3, 5, head=2, sequence=1))
    assert set(np.unique(factors)) == {0.0, factors.max()} and factors.max() == pytest.approx(1 / 0.7)
    assert (factors > 0).mean() == pytest.approx(0.7, abs=4 * np.sqrt(0.21 / factors.size))
    others = [dropout_factors(60, 70, 0.3, *at) for at in ((6,),)] + [
        dropout_factors(60, 70, 0.3, 5, head=h, sequence=b) for h, b in ((3, 1), (2, 0), (1, 2))
    ]
    assert all((factors != other).any() for other in others)
    assert (factors != dropout_factors(60, 70, 0.3, 5, key=1, head=2, sequence=1)).any()
    assert (dropout_factors(3, 4, 0.0, 5) == 1).all() and not dropout_factors(3, 4, 1.0, 5).any()


def test_float32_shows_what_rounding_costs():
    x, d = inputs(), normal((B, N, H, DV))
    exact = attention_reference(**x, d=d)
    plain = attention_reference(**x, d=d, dtype=np.float32)
    for name, value in plain.present().items():
        assert value.dtype == np.float32
        error = np.linalg.norm(value - getattr(exact, name)) / np.linalg.norm(getattr(exact, name))
        assert 1e-9 < error < 1e-6


def test_arguments_that_do_not_fit_are_named():
    x = inputs()
    for wrong, message in (
        ({"mask": np.zeros((N, M + 1))}, r"the mask must be \[.., .., 5 or more, 7\]"),
        ({"d": np.zeros((B, H, N, DV))}, r"d must be \[2, 5, 4, 4\]"),
        ({"sinks": np.zeros(3)}, r"sinks must be \[4\]"),
        ({"causal": "left"}, "causal='left'"),
        ({"cu_seqlens_q": [0, 5]}, "one batch"),
        ({"k": x["k"][:, :, :, :2]}, r"k=\[2, 2, 7, 2\] must be"),
        ({"k": x["k"][:, [0, 0, 0]], "v": x["v"][:, [0, 0, 0]]}, "the 3 heads of k must divide the 4"),
    ):
        with pytest.raises(gg.errors.ShapeError, match=message):
            attention_reference(**x | wrong)
    with pytest.raises(gg.errors.ShapeError, match="must be 2 numbers that rise from 0 to at most 5"):
        attention_reference(**inputs(1), cu_seqlens_q=[0, 6], cu_seqlens_k=[0, 7])
