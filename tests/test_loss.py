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
def test_the_gradient_alone_ignores_the_same_rows(backend):
    rng = np.random.default_rng(3)
    logits, classes = rng.standard_normal((5, 7)), rng.integers(0, 7, 5)
    classes[2] = -100
    _, expected = loss_and_gradient(logits, classes, backend)
    made = gg.cross_entropy_loss_back(1.0, gg.tensor(logits), classes)
    gg.Graph().build_forward_expand(made).compute(backend=backend)
    np.testing.assert_array_equal(made.numpy(), expected)


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
    with pytest.raises(gg.errors.ShapeError, match="'none' or 'sum' or 'mean', not 'max'"):
        gg.cross_entropy_loss(x, np.zeros(3, int), reduction="max")
    with pytest.raises(gg.errors.ShapeError, match=r"label_smoothing must be from 0 to 1.0, not 1.5"):
        gg.cross_entropy_loss(x, np.zeros(3, int), label_smoothing=1.5)
    with pytest.raises(gg.errors.ShapeError, match=r"class_weights must have the shape \(7,\)"):
        gg.cross_entropy_loss(x, np.zeros(3, int), class_weights=np.ones(3))
    with pytest.raises(gg.errors.ShapeError, match=r"dloss must have the shape \(3,\)"):
        gg.cross_entropy_loss_back(1.0, x, np.zeros(3, int), reduction="none")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_can_be_asked_for_directly(backend):
    rng = np.random.default_rng(3)
    logits, classes = rng.standard_normal((5, 7)), rng.integers(0, 7, 5)
    direct = gg.cross_entropy_loss_back(0.5, gg.tensor(logits), classes)
    gg.Graph().build_forward_expand(direct).compute(backend=backend)
    np.testing.assert_allclose(
        direct.numpy(), 0.5 * loss_and_gradient(logits, classes, backend)[1], rtol=1e-5, atol=1e-7
    )


def exact(logits, classes):
    """Loss and gradient of the mean in double precision, from what f32 makes of the logits."""
    x = np.asarray(logits, np.float32).astype(np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    rows = np.arange(len(x))
    others = np.where(np.arange(x.shape[1]) == np.asarray(classes)[:, None], 0, e).sum(axis=-1)
    dlogits = e / e.sum(axis=-1, keepdims=True)
    dlogits[rows, classes] = -others / e.sum(axis=-1)
    return -log_softmax(x)[rows, classes].mean(), dlogits / len(x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 1e6, 1e8, -1e30])
def test_what_all_logits_have_in_common_changes_nothing(backend, soft, offset):
    rng = np.random.default_rng(4)
    logits, classes = rng.integers(-8, 9, (5, 33)) * max(1.0, abs(offset) / 2**20) + offset, rng.integers(0, 33, 5)
    if abs(offset) > 1e7:
        logits[...] = offset
    targets = np.eye(33)[classes] if soft else classes
    loss, dlogits = loss_and_gradient(logits, targets, backend)
    expected, dexpected = exact(logits, classes)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(dlogits, dexpected, rtol=1e-6, atol=1e-7 * soft)  # labels are subtracted after rounding


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_equal_logits_of_1e8_share_the_gradient(backend):
    for targets in (np.array([1]), np.array([[0.0, 1.0]])):
        loss, dlogits = loss_and_gradient([[1e8, 1e8]], targets, backend)
        np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
        np.testing.assert_allclose(dlogits, [[0.5, -0.5]], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_at_a_target_that_has_nearly_all_keeps_its_digits(backend):
    logits = np.array([[25.0, 0.0, -3.0], [30.0, 2.0, 1.0], [3.0, -60.0, -65.0]])
    _, dlogits = loss_and_gradient(logits, np.zeros(3, int), backend)
    np.testing.assert_allclose(dlogits, exact(logits, np.zeros(3, int))[1], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_second_gradients_do_not_know_what_logits_have_in_common_either(backend, soft, offset):
    """Of the loss's gradient along a direction: p (d - sum of p d) / rows."""
    rng = np.random.default_rng(5)
    values, direction = rng.integers(-3, 4, (4, 9)) + offset, rng.integers(-4, 5, (4, 9)).astype(float)
    x, classes = gg.tensor(values, param=True), rng.integers(0, 9, 4)
    loss = gg.cross_entropy_loss(x, np.eye(9)[classes] if soft else classes)
    first = gg.Graph().build_backward_expand(loss).grad(x)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(first, gg.tensor(direction))))
    graph.compute(backend=backend)
    p = np.exp(log_softmax(values - offset))
    expected = p * (direction - (p * direction).sum(axis=-1, keepdims=True)) / 4
    np.testing.assert_allclose(graph.grad(x).numpy(), expected, rtol=0, atol=2e-7)


def test_probabilities_too_have_a_gradient_that_no_offset_spoils():
    given, p = gg.tensor([[1e6, 1e6 + 1]]), gg.tensor([[0.5, 0.5]], param=True)
    graph = gg.Graph().build_backward_expand(gg.cross_entropy_loss(given, p))
    graph.compute()
    np.testing.assert_allclose(graph.grad(p).numpy(), -log_softmax(np.array([[0.0, 1.0]])), rtol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_is_torchs(soft, smoothing, weighed, reduction):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    logits, dloss = rng.standard_normal((6, 11)).astype("f"), rng.standard_normal(6).astype("f")
    targets = rng.dirichlet(np.ones(11), 6).astype("f") if soft else np.array([1, 10, -100, 0, 4, 4])
    weights = rng.uniform(0.5, 2, 11).astype("f") if weighed else None
    dloss = dloss if reduction == "none" else np.float32(dloss[0])

    x = torch.tensor(logits, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(
        x, torch.tensor(targets), None if weights is None else torch.tensor(weights),
        label_smoothing=smoothing, reduction=reduction,
    )  # fmt: skip
    theirs.backward(torch.tensor(dloss))

    given = {"class_weights": weights, "label_smoothing": smoothing, "reduction": reduction}
    y = gg.tensor(logits, param=True)
    ours = gg.cross_entropy_loss(y, targets, **given)
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(gg.set_output(ours), dloss)))
    back = gg.cross_entropy_loss_back(dloss, y, targets, **given)
    graph.build_forward_expand(back).compute()
    np.testing.assert_allclose(ours.numpy(), theirs.detach().numpy(), rtol=2e-6)
    for dlogits in (graph.grad(y), back):
        np.testing.assert_allclose(dlogits.numpy(), x.grad.numpy(), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_z_loss_adds_squares_of_the_log_of_the_sum_in_rows_that_count(reduction):
    rng = np.random.default_rng(7)
    logits, classes = rng.standard_normal((5, 7)), np.array([1, -100, 6, 0, 2])
    plain = loss_of(logits, classes, reduction=reduction)
    more = loss_of(logits, classes, reduction=reduction, z_loss=0.01)
    squares = np.where(classes >= 0, np.log(np.exp(logits).sum(axis=-1)) ** 2, 0)
    expected = {"none": squares, "sum": squares.sum(), "mean": squares.sum() / 4}[reduction]
    np.testing.assert_allclose(more - plain, 0.01 * expected, rtol=1e-4, atol=1e-6)


def loss_of(logits, targets, **options):
    loss = gg.cross_entropy_loss(gg.tensor(logits), targets, **options)
    gg.Graph().build_forward_expand(loss).compute()
    return loss.numpy().copy()
