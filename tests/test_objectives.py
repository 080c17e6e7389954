"""Losses: values and gradients are torch's."""

import numpy as np
import pytest

import ggrad as gg

RNG = np.random.default_rng(0)


def rows(*shape, low=-2.0, high=2.0):
    return RNG.uniform(low, high, shape).astype("f")


SIGNS = np.array([1, -1, -1, 1, -1, 1], "i4")
WEIGHTS = np.arange(1, 8, dtype="f")
CLASSES = np.array([1, 6, -100, 0, 2, 2], "i4")
TARGETS, LENGTHS, LABELS = np.array([[1, 1, 2], [3, 4, 5], [2, 3, 1]], "i4"), np.array([9, 8, 9]), np.array([3, 2, 0])


def log_softmax(x):
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


# Name: what ours makes of float inputs, what torch.nn.functional makes of them, the inputs.
CASES = {
    "mse": (lambda x, y, **o: gg.mse_loss(x, y, **o), lambda F, x, y, **o: F.mse_loss(x, y, **o), 2),
    "l1": (lambda x, y, **o: gg.l1_loss(x, y, **o), lambda F, x, y, **o: F.l1_loss(x, y, **o), 2),
    "huber": (
        lambda x, y, **o: gg.huber_loss(x, y, delta=0.7, **o),
        lambda F, x, y, **o: F.huber_loss(x, y, delta=0.7, **o),
        2,
    ),
    "smooth l1": (
        lambda x, y, **o: gg.smooth_l1_loss(x, y, beta=0.7, **o),
        lambda F, x, y, **o: F.smooth_l1_loss(x, y, beta=0.7, **o),
        2,
    ),
    "bce": (
        lambda x, y, **o: gg.bce_with_logits_loss(x, gg.sigmoid(y), **o),
        lambda F, x, y, **o: F.binary_cross_entropy_with_logits(x, y.sigmoid(), **o),
        2,
    ),
    "bce, weights": (
        lambda x, y, **o: gg.bce_with_logits_loss(x, gg.sigmoid(y), weight=WEIGHTS, pos_weight=2 * WEIGHTS, **o),
        lambda F, x, y, **o: F.binary_cross_entropy_with_logits(
            x, y.sigmoid(), weight=F.torch.tensor(WEIGHTS), pos_weight=F.torch.tensor(2 * WEIGHTS), **o
        ),
        2,
    ),
    "nll": (
        lambda x, **o: gg.nll_loss(x, CLASSES, **o),
        lambda F, x, **o: F.nll_loss(x, F.torch.tensor(CLASSES).long(), **o),
        1,
    ),
    "nll, weights": (
        lambda x, **o: gg.nll_loss(x, CLASSES, class_weights=WEIGHTS, **o),
        lambda F, x, **o: F.nll_loss(x, F.torch.tensor(CLASSES).long(), F.torch.tensor(WEIGHTS), **o),
        1,
    ),
    "kl": (
        lambda x, y, **o: gg.kl_div_loss(x, gg.softmax(y), **o),
        lambda F, x, y, **o: F.kl_div(x, y.softmax(-1), **o),
        2,
    ),
    "kl, logarithms": (
        lambda x, y, **o: gg.kl_div_loss(x, gg.log_softmax(y), log_target=True, **o),
        lambda F, x, y, **o: F.kl_div(x, y.log_softmax(-1), log_target=True, **o),
        2,
    ),
    "cosine": (
        lambda x, y, **o: gg.cosine_embedding_loss(x, y, SIGNS, margin=-0.5, **o),
        lambda F, x, y, **o: F.cosine_embedding_loss(x, y, F.torch.tensor(SIGNS), margin=-0.5, **o),
        2,
    ),
    "triplet": (
        lambda a, p, n, **o: gg.triplet_margin_loss(a, p, n, **o),
        lambda F, a, p, n, **o: F.triplet_margin_loss(a, p, n, **o),
        3,
    ),
    "triplet, swap": (
        lambda a, p, n, **o: gg.triplet_margin_loss(a, p, n, swap=True, margin=2.0, **o),
        lambda F, a, p, n, **o: F.triplet_margin_loss(a, p, n, swap=True, margin=2.0, **o),
        3,
    ),
}


def compare(ours, theirs, inputs):
    """Values and gradients, for a gradient of the losses that differs from one to the next."""
    torch = pytest.importorskip("torch")
    torch.nn.functional.torch = torch
    xs = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = theirs(torch.nn.functional, *xs)
    dout = RNG.standard_normal(expected.shape).astype("f")
    expected.backward(torch.tensor(dout))
    leaves = [gg.tensor(x, param=True) for x in inputs]
    losses = gg.set_output(ours(*leaves))
    graph = gg.Graph().build_backward_expand(gg.sum(gg.mul(losses, dout)))
    graph.compute()
    np.testing.assert_allclose(losses.numpy(), expected.detach().numpy(), rtol=2e-5, atol=1e-6)
    for leaf, x in zip(leaves, xs, strict=True):
        largest = x.grad.abs().max().item()
        np.testing.assert_allclose(graph.grad(leaf).numpy(), x.grad.numpy(), rtol=2e-5, atol=1e-5 * largest)


@pytest.mark.native
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_is_torchs(name, reduction):
    ours, theirs, n = CASES[name]
    compare(
        lambda *xs: ours(*xs, reduction=reduction),
        lambda F, *xs: theirs(F, *xs, reduction=reduction),
        [rows(6, 7) for _ in range(n)],
    )


@pytest.mark.native
def test_batchmean_is_torchs():
    compare(
        lambda x, y: gg.kl_div_loss(x, gg.softmax(y)),
        lambda F, x, y: F.kl_div(x, y.softmax(-1), reduction="batchmean"),
        [rows(6, 7), rows(6, 7)],
    )


@pytest.mark.native
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("time", [9, 300])
def test_ctc_is_torchs(reduction, time):
    lengths = np.array([time, time - 1, time])

    def theirs(F, x):
        seen = x.double().log_softmax(-1).transpose(0, 1)  # of f32 it is 3e-5 off at 300 steps
        given = [F.torch.tensor(v).long() for v in (TARGETS, lengths, LABELS)]
        return F.ctc_loss(seen, *given, reduction=reduction).float()

    compare(
        lambda x: gg.ctc_loss(gg.log_softmax(x), TARGETS, lengths, LABELS, reduction=reduction),
        theirs,
        [rows(3, time, 6)],
    )


@pytest.mark.native
def test_ctc_of_targets_too_long_is_infinite_or_zero_and_has_no_gradient():
    for zero in (False, True):
        x = gg.tensor(log_softmax(rows(1, 2, 5)), param=True)
        loss = gg.ctc_loss(x, [[1, 2, 3]], [2], [3], zero_infinity=zero)
        graph = gg.Graph().build_backward_expand(loss)
        graph.compute()
        assert loss.item() == (0 if zero else np.inf) and not graph.grad(x).numpy().any()


@pytest.mark.native
@pytest.mark.parametrize(
    "targets, lengths, labels, message",
    [
        ([[1, 5]], [4], [2], "targets holds 5, and must be from 0 to 4"),
        ([[1, 2]], [9], [2], "input_lengths holds 9, and must be from 0 to 4"),
        ([[1, 2]], [4], [3], "target_lengths holds 3, and must be from 0 to 2"),
    ],
)
def test_ctc_names_what_is_out_of_range(targets, lengths, labels, message):
    loss = gg.ctc_loss(gg.tensor(rows(1, 4, 5)), targets, lengths, labels)
    for backend in ("native", "reference"):
        with pytest.raises(gg.errors.IndexRangeError, match=message):
            gg.Graph().build_forward_expand(loss).compute(backend=backend)


@pytest.mark.native
def test_contrastive_loss_is_the_cross_entropy_of_all_pairs():
    def theirs(F, a, b):
        logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.2
        own = F.torch.arange(len(a))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    compare(lambda a, b: gg.contrastive_loss(a, b, temperature=0.2), theirs, [rows(6, 7), rows(6, 7)])


@pytest.mark.native
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo_loss_is_that_of_its_paper(smoothing):
    def theirs(F, a, b, c, d):
        margin = 0.3 * ((a - b) - (c - d))
        return (-F.logsigmoid(margin) * (1 - smoothing) - F.logsigmoid(-margin) * smoothing).mean()

    compare(lambda *xs: gg.dpo_loss(*xs, beta=0.3, label_smoothing=smoothing), theirs, [4 * rows(6) for _ in range(4)])


def test_what_does_not_fit_is_refused_in_words():
    x, y = gg.tensor(rows(3, 4)), gg.tensor(rows(4))
    refused = [
        (lambda: gg.mse_loss(x, y), r"mse_loss\(\): shapes \(3, 4\) and \(4,\) differ; gg.broadcast_to"),
        (lambda: gg.l1_loss(x, x, reduction="avg"), r"l1_loss\(\): reduction must be 'none' or 'sum' or 'mean'"),
        (lambda: gg.huber_loss(x, x, delta=0.0), r"huber_loss\(\): delta must be above 0, not 0.0"),
        (lambda: gg.smooth_l1_loss(x, x, beta=0.0), r"smooth_l1_loss\(\): beta must be above 0"),
        (lambda: gg.bce_with_logits_loss(x, x, pos_weight=rows(2, 3, 4)), r"pos_weight has more axes"),
        (lambda: gg.nll_loss(x, np.zeros(4, "i4")), r"targets must have the shape \(3,\)"),
        (lambda: gg.cosine_embedding_loss(x, x, np.zeros(4)), r"same must be of shape \(3,\)"),
        (lambda: gg.contrastive_loss(y, y), r"a and b must be \[rows, K\]"),
        (lambda: gg.contrastive_loss(x, x, temperature=0.0), r"temperature must be above 0"),
        (lambda: gg.dpo_loss(y, y, y, y, beta=0.0), r"beta must be above 0"),
        (lambda: gg.dpo_loss(y, y, y, y, label_smoothing=0.7), r"label_smoothing must be from 0 to 0.5"),
    ]
    for call, message in refused:
        with pytest.raises(gg.errors.ShapeError, match=message):
            call()
