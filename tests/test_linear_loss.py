"""Cross entropy fused with the product that makes its logits: the same values, in less memory."""

import numpy as np
import pytest

import ggrad as gg

ROWS, WIDTH, CLASSES = 300, 64, 2000


def given(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    x, w, b = (rng.standard_normal(shape).astype("f") for shape in ((rows, WIDTH), (CLASSES, WIDTH), CLASSES))
    y = rng.integers(0, CLASSES, rows).astype("i4")
    y[::7] = -100
    return x, w / 8, b, y


def both(x, w, b, y, dloss=None, **options):
    """What the fused loss and the one of whole logits give: losses and gradients."""
    found = []
    for fused in (True, False):
        leaves = [gg.tensor(v, param=True) for v in (x, w, b)]
        X, W, B = leaves
        if fused:
            loss = gg.linear_cross_entropy(X, W, y, B, chunk_rows=70, **options)
        else:
            loss = gg.cross_entropy_loss(gg.add(gg.mul_mat(W, X), B), y, **options)
        gg.set_output(loss)
        scalar = loss if dloss is None else gg.sum(gg.mul(loss, dloss))
        graph = gg.Graph().build_backward_expand(scalar)
        graph.compute()
        found.append([loss.numpy().copy(), *(graph.grad(leaf).numpy().copy() for leaf in leaves)])
    return found


@pytest.mark.native
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}, {"class_weights": True}])
def test_it_is_the_loss_of_the_whole_logits(reduction, options):
    x, w, b, y = given()
    if "class_weights" in options:
        options = {"class_weights": np.linspace(0.5, 2, CLASSES)}
    dloss = np.linspace(-1, 2, ROWS).astype("f") if reduction == "none" else np.float32(0.75)
    fused, apart = both(x, w, b, y, dloss, reduction=reduction, **options)
    for ours, theirs in zip(fused, apart, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6 * np.abs(theirs).max())


@pytest.mark.native
def test_no_row_that_counts_gives_zero():
    x, w, b, y = given()
    fused, _ = both(x, w, b, np.full_like(y, -100))
    assert not any(np.any(value) for value in fused)


def products(graph):
    return sum(t.op.name in ("mul_mat", "mul_mat_onto", "mul_mat_quantized_back") for t in graph.nodes)


def test_each_chunk_has_one_product_without_gradients_two_with_a_frozen_weight_and_three_with_all():
    x, w, _, y = given()
    chunks = 5
    for params, wanted in (((0, 0), 1), ((1, 0), 2), ((1, 1), 3)):
        X, W = (gg.tensor(v, param=bool(p)) for v, p in zip((x, w), params, strict=True))
        loss = gg.linear_cross_entropy(X, W, y, chunk_rows=60)
        graph = gg.Graph().build_backward_expand(loss) if any(params) else gg.Graph().build_forward_expand(loss)
        assert products(graph) == chunks * wanted


@pytest.mark.native
def test_the_logits_are_never_whole():
    x, w, _, y = given(rows=2000)
    for training in (False, True):
        X, W = gg.tensor(x, param=True), gg.tensor(w, param=True)
        loss = gg.linear_cross_entropy(X, W, y, chunk_rows=100)
        graph = gg.Graph().build_forward_expand(loss)
        if training:
            graph.build_backward_expand()
        chunks = (graph.plan().arena - 2 * (x.nbytes + w.nbytes) * training) / (100 * CLASSES * 4)
        assert chunks < (4 if training else 1.5)


@pytest.mark.native
def test_a_quantized_weight_has_the_gradient_by_what_comes_before_it():
    x, w, _, y = given()
    q = gg.tensor(w, dtype=gg.Q8_0)
    exact = gg.cast(q, dtype=gg.F32)
    X = gg.tensor(x, param=True)
    losses = [gg.linear_cross_entropy(X, q, y, chunk_rows=70), gg.cross_entropy_loss(gg.mul_mat(exact, X), y)]
    gradients = []
    for loss in losses:
        graph = gg.Graph().build_backward_expand(loss)
        graph.compute()
        gradients.append(graph.grad(X).numpy().copy())
    np.testing.assert_allclose(losses[0].item(), losses[1].item(), rtol=1e-5)
    np.testing.assert_allclose(*gradients, rtol=0, atol=1e-7)


@pytest.mark.native
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_gradients_are_those_of_the_whole_logits(reduction):
    x, w, _, y = given(rows=40)
    found = []
    for fused in (True, False):
        X, W = gg.tensor(x, param=True), gg.tensor(w, param=True)
        loss = (
            gg.linear_cross_entropy(X, W, y, chunk_rows=15, reduction=reduction)
            if fused
            else gg.cross_entropy_loss(gg.mul_mat(W, X), y, reduction=reduction)
        )
        first = gg.Graph().build_backward_expand(gg.sum(gg.sqr(loss)))
        graph = gg.Graph().build_backward_expand(gg.sum(gg.sqr(first.grad(X))) + gg.sum(gg.sqr(first.grad(W))))
        graph.compute()
        found.append([graph.grad(X).numpy().copy(), graph.grad(W).numpy().copy()])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def test_what_does_not_fit_is_refused_in_words():
    x, w, y = gg.tensor(np.ones((3, 4))), gg.tensor(np.ones((7, 4))), np.zeros(3, "i4")
    refused = [
        (lambda: gg.linear_cross_entropy(x, gg.tensor(np.ones((7, 5))), y), r"x must be \[..., K\] and weight"),
        (lambda: gg.linear_cross_entropy(x, w, np.zeros(2, "i4")), r"targets must have the shape \(3,\)"),
        (lambda: gg.linear_cross_entropy(x, w, y, gg.tensor(np.ones(3))), r"bias must have the shape \(7,\)"),
        (lambda: gg.linear_cross_entropy(x, w, np.zeros((3, 7), "i4")), r"targets must have the shape \(3,\)"),
        (lambda: gg.linear_cross_entropy(x, w, np.zeros(3)), r"targets is f32"),
        (lambda: gg.linear_cross_entropy(x, w, y, chunk_rows=0), r"chunk_rows must be a positive number, not 0"),
        (lambda: gg.linear_cross_entropy(x, w, y, z_loss=-1.0), r"z_loss must be from 0"),
        (lambda: gg.linear_cross_entropy(x, w, y, reduction="all"), r"reduction must be 'none' or"),
    ]
    for call, message in refused:
        with pytest.raises(gg.errors.ShapeError, match=message):
            call()
