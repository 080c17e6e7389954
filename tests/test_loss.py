"""Cross entropy as users call it."""

import numpy as np
import pytest

import ggrad as gg

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.native)]


def loss_and_gradient(logits, targets, backend, **options):
    x = gg.tensor(logits, param=True)
    loss = gg.cross_entropy_loss(x, targets, **options)
    graph = gg.Graph().build_backward_expand(loss)
    graph.compute(backend=backend)
    return float(loss.numpy()), graph.grad(x).numpy()


def log_softmax(x):
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_and_their_one_hot_probabilities_give_the_same(backend):
    rng = np.random.default_rng(0)
    logits, classes = rng.standard_normal((2, 5, 7)), rng.integers(0, 7, (2, 5))
    for reduction in ("mean", "sum"):
        hard = loss_and_gradient(logits, classes, backend, reduction=reduction)
        soft = loss_and_gradient(logits, np.eye(7)[classes], backend, reduction=reduction)
        np.testing.assert_allclose(hard[0], soft[0], rtol=1e-6)
        np.testing.assert_allclose(hard[1], soft[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_rows_count_for_nothing(backend):
    rng = np.random.default_rng(1)
    logits, classes = rng.standard_normal((5, 7)), rng.integers(0, 7, 5)
    classes[[1, 4]] = -100
    logits[1] = np.nan
    kept = [0, 2, 3]
    loss, dlogits = loss_and_gradient(logits, classes, backend)
    np.testing.assert_allclose(loss, -log_softmax(logits)[kept, classes[kept]].mean(), rtol=1e-6)
    assert not dlogits[[1, 4]].any() and dlogits[kept].all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_row_that_counts_gives_a_loss_of_zero(backend, reduction):
    loss, dlogits = loss_and_gradient(np.ones((3, 4)), np.full(3, 9), backend, ignore_index=9, reduction=reduction)
    assert loss == 0 and not dlogits.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_labels_that_do_not_sum_to_one_have_their_own_gradient(backend):
    """ggml's assumes that they do; rows of zeros, which say that nothing counts, show it."""
    _, dlogits = loss_and_gradient(np.random.default_rng(2).standard_normal((2, 4)), np.zeros((2, 4)), backend)
    assert not dlogits.any()


@pytest.mark.native
@pytest.mark.parametrize("wrong", [7, -1, 2**31 - 1, -(2**31)])
def test_a_class_out_of_range_is_named(wrong):
    x = gg.tensor(np.ones((3, 7)), param=True)
    graph = gg.Graph().build_backward_expand(gg.cross_entropy_loss(x, np.array([0, wrong, 6])))
    with pytest.raises(gg.errors.IndexRangeError, match=f"targets holds {wrong}, and must be from 0 to 6"):
        graph.compute()


def test_what_does_not_fit_is_refused_in_words():
    x = gg.tensor(np.ones((3, 7)))
    with pytest.raises(gg.errors.ShapeError, match="a class for each row"):
        gg.cross_entropy_loss(x, np.zeros((3, 7), int))
    with pytest.raises(gg.errors.ShapeError, match="classes themselves are i32 targets"):
        gg.cross_entropy_loss(x, np.zeros(3))
    with pytest.raises(gg.errors.ShapeError, match="'mean' or 'sum', not 'none'"):
        gg.cross_entropy_loss(x, np.zeros(3, int), reduction="none")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_can_be_asked_for_directly(backend):
    rng = np.random.default_rng(3)
    logits, classes = rng.standard_normal((5, 7)), rng.integers(0, 7, 5)
    direct = gg.cross_entropy_loss_back(0.5, gg.tensor(logits), classes)
    gg.Graph().build_forward_expand(direct).compute(backend=backend)
    np.testing.assert_allclose(
        direct.numpy(), 0.5 * loss_and_gradient(logits, classes, backend)[1], rtol=1e-5, atol=1e-7
    )
