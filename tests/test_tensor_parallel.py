"""Models cut over ranks: a transformer in tensor x data parallel equals one process."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.distributed import ColumnLinear, Comm, Embedding, RowLinear, cross_entropy, part_of, simulate

VOCAB, D, H, HK, HIDDEN, T = 12, 16, 4, 4, 20, 5


def weights():
    rng = np.random.default_rng(0)
    shapes = {
        "embed": (VOCAB, D), "q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "up": (HIDDEN, D), "down": (D, HIDDEN),
        "head": (VOCAB, D),
    }  # fmt: skip
    made = {name: rng.normal(size=s).astype(np.float32) / 3 for name, s in shapes.items()}
    return made | {"norm": np.ones(D, np.float32), "up bias": rng.normal(size=HIDDEN), "down bias": rng.normal(size=D)}


def batch(rows):
    rng = np.random.default_rng(1)
    x, y = rng.integers(0, VOCAB, (2, rows, T)).astype(np.int32)
    y[0, :2] = -100
    return x, y


class Data:
    position = 0

    def __init__(self, rows):
        self.rows = rows

    def __next__(self):
        self.position += 1
        return batch(self.rows)

    def seek(self, position):
        self.position = position


def model(comm, rows):
    """The loss, its inputs, and the parameters with the axis that each is cut along."""
    w = weights()
    embed = Embedding(w["embed"], comm, name="embed")
    q, k, v = (ColumnLinear(w[n], comm, name=n) for n in "qkv")
    o = RowLinear(w["o"], comm, name="o")
    up = ColumnLinear(w["up"], comm, bias=w["up bias"], name="up")
    down = RowLinear(w["down"], comm, bias=w["down bias"], name="down")
    head = ColumnLinear(w["head"], comm, name="head")
    norm = gg.tensor(w["norm"], name="norm", param=True)
    x, y = (gg.tensor(shape=(rows, T), dtype=gg.I32) for _ in range(2))

    def heads(t, n):
        return t.reshape(rows, T, n // comm.size, D // H).permute(0, 2, 1, 3)

    h = embed(x)
    a = gg.rms_norm(h, gg.replicated(norm, comm))
    a = gg.flash_attn_ext(heads(q(a), H), heads(k(a), HK), heads(v(a), HK), causal=True)
    h = h + o(a.reshape(rows * T, D // comm.size))
    h = h + down(gg.gelu(up(gg.rms_norm(h, gg.replicated(norm, comm)))))
    loss = gg.counted_once(cross_entropy(head(h), y.reshape(-1), comm), comm)
    params = {
        embed.weight: 0, q.weight: 0, k.weight: 0, v.weight: 0, o.weight: 1, up.weight: 0, up.bias: 0, down.weight: 1,
        down.bias: None, head.weight: 0, norm: None,
    }  # fmt: skip
    return loss, (x, y), params


def gradients(comm, rows=2):
    loss, (x, y), params = model(comm, rows)
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss)
    x.set(batch(rows)[0]), y.set(batch(rows)[1])
    graph.compute(threads=1)
    return loss.item(), {p.name: (axis, graph.grad(p).numpy().copy()) for p, axis in params.items()}


def of_plain_ops(rows=2):
    """The same model without any of the parts that are cut: what they must give."""
    w = {name: gg.tensor(a, name=name, param=True) for name, a in weights().items()}
    x, y = batch(rows)
    h = gg.get_rows(w["embed"], gg.tensor(x.reshape(-1)))
    a = gg.rms_norm(h, w["norm"])
    q, k, v = (gg.mul_mat(w[n], a).reshape(rows, T, H, D // H).permute(0, 2, 1, 3) for n in "qkv")
    h = h + gg.mul_mat(w["o"], gg.flash_attn_ext(q, k, v, causal=True).reshape(rows * T, D))
    a = gg.gelu(gg.mul_mat(w["up"], gg.rms_norm(h, w["norm"])) + w["up bias"])
    h = h + gg.mul_mat(w["down"], a) + w["down bias"]
    loss = gg.cross_entropy_loss(gg.mul_mat(w["head"], h), gg.tensor(y.reshape(-1)))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss).compute(threads=1)
    return loss.item(), {name: graph.grad(p).numpy() for name, p in w.items()}


def plain_name(name):
    return name.removesuffix(".weight").replace(".bias", " bias")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_transformer_cut_over_ranks_has_the_loss_and_gradients_of_the_whole(size):
    loss, want = of_plain_ops()
    ranks = simulate(size, gradients)
    for value, _ in ranks:
        assert value == pytest.approx(loss, rel=1e-6)
    for name, (axis, first) in ranks[0][1].items():
        got = first if axis is None else np.concatenate([made[name][1] for _, made in ranks], axis)
        whole = want[plain_name(name)]
        assert np.abs(got - whole).max() < 5e-6 * np.abs(whole).max(), name
        if axis is None:
            assert all(np.array_equal(made[name][1], first) for _, made in ranks)


def test_two_by_two_data_and_tensor_parallel_equals_one_process():
    def program(comm, rows, parts):
        tensor_group, data_group = comm.split(comm.rank // parts), comm.split(comm.rank % parts)
        begin, end = gg.data.Share.rows(rows, data_group)
        loss, inputs, params = model(tensor_group, end - begin)
        counted = lambda b: int(np.count_nonzero(b[1] != -100))  # noqa: E731
        trainer = gg.Trainer(
            loss, inputs, gg.data.Share(Data(rows), data_group), gg.SGD(list(params), lr=0.1), comm=data_group,
            count=counted, clip=None, progress=False, threads=1,
        )  # fmt: skip
        trainer.run(4)
        return trainer.last.loss, {p.name: (axis, p.numpy().copy()) for p, axis in params.items()}

    want_loss, want = program(Comm(), 3, 1)
    ranks = simulate(4, lambda c: program(c, 3, 2))
    for loss, _ in ranks:
        assert loss == pytest.approx(want_loss, rel=1e-5)
    for name, (axis, whole) in want.items():
        for pair in (ranks[:2], ranks[2:]):
            got = pair[0][1][name][1] if axis is None else np.concatenate([made[name][1] for _, made in pair], axis)
            assert np.abs(got - whole).max() < 1e-5 * np.abs(whole).max(), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cross_entropy_over_ranks_survives_large_logits_and_ignored_rows(size):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(5, 6)) * 300, np.array([0, 5, -100, 3, 2], np.int32)

    def program(comm):
        x = gg.tensor(part_of(logits, 1, comm), param=True)
        loss = gg.counted_once(cross_entropy(x, gg.tensor(targets), comm), comm)
        graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss).compute()
        return loss.item(), graph.grad(x).numpy().copy()

    x = gg.tensor(logits, param=True)
    loss = gg.cross_entropy_loss(x, gg.tensor(targets))
    graph = gg.Graph().build_forward_expand(loss).build_backward_expand(loss).compute()
    ranks = simulate(size, program)
    assert all(value == pytest.approx(loss.item(), rel=1e-6) for value, _ in ranks)
    assert np.allclose(np.concatenate([d for _, d in ranks], 1), graph.grad(x).numpy(), atol=1e-7)


def test_what_is_refused():
    with pytest.raises(gg.errors.ShapeError, match=r"axis 0 of \[3, 2\] cannot be cut into 2 equal parts"):
        simulate(2, lambda c: ColumnLinear(np.ones((3, 2)), c))
    tokens = gg.tensor(np.array([1, 4], np.int32))
    with pytest.raises(gg.errors.ShapeError, match="4 is not in a vocabulary of 4"):
        gg.Graph().build_forward_expand(Embedding(np.ones((4, 2)), Comm())(tokens)).compute()
    with pytest.raises(gg.errors.ShapeError, match="are not logits"):
        cross_entropy(gg.tensor(np.ones((2, 3))), tokens.reshape(1, 2), Comm())
