"""Dropout's random numbers: the published generator, and masks that look random."""

import numpy as np
import pytest

import ggrad as gg
from ggrad.ops.dropout import philox4x32


def run(t, **options):
    gg.Graph().build_forward_expand(t).compute(**options)
    return t.numpy()


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_words_its_authors_published(counter, key, words):
    def numbers(text):
        return [int(word, 16) for word in text.split()]

    assert [int(w) for w in philox4x32(numbers(counter), numbers(key))] == numbers(words)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_expected_number_of_elements_is_kept_and_neighbours_are_independent(p):
    n = 1 << 18
    kept = run(gg.dropout(np.ones((512, n // 512)), 1234, p=p)) != 0
    error = np.sqrt(p * (1 - p) / n)  # of the mean of n independent decisions
    assert abs(kept.mean() - (1 - p)) < 4 * error
    centred = (kept - (1 - p)).ravel() / np.sqrt(p * (1 - p))
    for distance in (1, 2, 16, 64, 512):
        assert abs(np.mean(centred[distance:] * centred[:-distance])) < 5 / np.sqrt(n)


def test_kept_elements_are_scaled_so_that_the_mean_stays():
    out = run(gg.dropout(np.ones(1000), 5, p=0.2))
    assert set(np.unique(out)) == {0, np.float32(1 / (1 - np.float64(np.float32(0.2))))}


def test_other_seeds_and_keys_give_other_masks():
    seeds = gg.tensor(1)
    masks = [run(gg.dropout(np.ones(4096), seeds, p=0.5, key=key)) != 0 for key in (0, 1, 2)]
    seeds.set(2)
    masks += [run(gg.dropout(np.ones(4096), seeds, p=0.5, key=key)) != 0 for key in (0, 1, 2)]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(np.mean(a == b) - 0.5) < 0.05


def test_a_new_seed_needs_no_new_graph_and_the_gradient_has_the_same_mask():
    x, seed = gg.tensor(np.ones((9, 33)), param=True), gg.tensor(3)
    out = gg.dropout(x, seed, p=0.5)
    graph = gg.Graph().build_forward_expand(out).build_backward_expand(gg.sum(out))
    masks = []
    for value in (3, 4):
        seed.set(value)
        graph.compute()
        assert np.array_equal(graph.grad(x).numpy(), out.numpy())
        masks.append(out.numpy().copy())
    assert not np.array_equal(*masks)


def test_the_mask_follows_the_place_not_the_layout_or_the_shape():
    x = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    plain = run(gg.dropout(x, 7, p=0.3, key=0))
    transposed = run(gg.dropout(gg.tensor(x.T.copy()).T, 7, p=0.3, key=0))
    assert np.array_equal(plain, transposed)
    assert np.array_equal(plain.ravel(), run(gg.dropout(x.ravel(), 7, p=0.3, key=0)))


def test_p_of_0_changes_no_bit_and_p_of_1_lets_nothing_through():
    x = np.array([np.nan, np.inf, -0.0, 1e-45, 3.0], np.float32)
    x.view(np.uint32)[0] = 0x7FC12345
    assert np.array_equal(run(gg.dropout(x, 7, p=0.0)).view(np.uint32), x.view(np.uint32))
    assert np.array_equal(run(gg.dropout(x, 7, p=1.0)), np.zeros(5))


def test_what_is_dropped_is_zero_even_if_it_was_nan():
    out = run(gg.dropout(np.full(1000, np.nan), 7, p=0.5))
    assert 0 < np.isnan(out).sum() < 1000 and set(out[~np.isnan(out)]) == {0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.5}, "p=1.5 must be from 0 to 1"),
        ({"p": float("nan")}, "p=nan"),
        ({"p": 0.5, "key": -1}, "key=-1"),
        ({"seed": [1, 2], "p": 0.5}, "seed must be a scalar"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(gg.errors.ShapeError, match=message):
        gg.dropout(np.ones(3), **({"seed": 1} | arguments))


# -- keys and generators ------------------------------------------------------------------------------


def masks(*dropped) -> list[np.ndarray]:
    gg.Graph().build_forward_expand(*dropped).compute()
    return [t.numpy() != 0 for t in dropped]


def independent(a, b) -> bool:
    return abs(np.mean(a == b) - 0.5) < 0.05


@pytest.mark.parametrize("make", [lambda: 11, lambda: gg.tensor(11), lambda: gg.Rng(11)], ids=["int", "leaf", "Rng"])
def test_two_dropouts_of_one_seed_have_masks_of_their_own(make):
    seed, x = make(), np.ones(4096)
    a, b, same, again = masks(*(gg.dropout(x, seed, p=0.5) for _ in range(2)), *(
        gg.dropout(x, seed, p=0.5, key=5) for _ in range(2)
    ))  # fmt: skip
    assert independent(a, b) and independent(a, same)
    np.testing.assert_array_equal(same, again)


def test_two_attentions_of_one_seed_drop_other_weights():
    rng, x = gg.Rng(3), gg.tensor(np.random.default_rng(0).standard_normal((1, 2, 32, 8)))
    a, b, c, d = (
        gg.flash_attn_ext(x, x, x, dropout_p=0.5, seed=rng, **options)
        for options in ({}, {}, {"dropout_key": 9}, {"dropout_key": 9})
    )
    gg.Graph().build_forward_expand(a, b, c, d).compute()
    assert not np.allclose(a.numpy(), b.numpy())
    np.testing.assert_array_equal(c.numpy(), d.numpy())


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_generator_draws_anew_in_each_run_until_it_is_held(backend):
    rng, w = gg.Rng(0), gg.tensor(np.ones(4096), param=True)
    out = gg.dropout(w, rng, p=0.5)
    graph = gg.Graph().build_forward_expand(out).build_backward_expand(gg.sum(out))

    def drawn(**options):
        graph.compute(backend=backend, **options)
        np.testing.assert_array_equal(graph.grad(w).numpy(), out.numpy())  # one mask, forward and backward
        return out.numpy() != 0

    first, second = drawn(), drawn()
    assert independent(first, second)
    np.testing.assert_array_equal(drawn(update=False), second)
    graph.evaluate(out, backend=backend)
    np.testing.assert_array_equal(out.numpy() != 0, second)
    rng.held = True
    np.testing.assert_array_equal(drawn(), second)
    rng.held = False
    third = drawn()
    assert independent(third, second) and independent(third, first)


def test_generators_of_one_seed_are_alike_and_of_others_are_not():
    def runs(seed):
        out = gg.dropout(np.ones(4096), gg.Rng(seed), p=0.5)
        graph = gg.Graph().build_forward_expand(out)
        return [graph.compute() and out.numpy() != 0 for _ in range(3)]

    assert all(map(np.array_equal, runs(1), runs(1)))
    assert all(independent(a, b) for a in runs(1) for b in runs(2))
    with pytest.raises(ValueError, match="negative"):
        gg.Rng(-1)


def test_a_model_that_is_built_again_draws_the_same():
    x = gg.tensor(np.ones(4096))

    def model():
        return gg.dropout(gg.dropout(x, 4, p=0.2), 4, p=0.3)

    first, again = model(), model()
    np.testing.assert_array_equal(*(masks(t)[0] for t in (first, again)))
    both = gg.Graph().build_forward_expand(model(), model())
    assert [t.attrs["key"] for t in both.nodes] == [0, 1, 2, 3]


def test_keys_that_are_given_are_passed_over():
    x = gg.tensor(np.ones(9))
    drops = [gg.dropout(x, 4, p=0.5, key=key) for key in (None, 1, None, None, 0)]
    graph = gg.Graph().build_forward_expand(*drops[:3])
    assert [t.attrs["key"] for t in graph.nodes] == [0, 1, 2]
    graph.build_forward_expand(*drops[3:])
    assert [t.attrs["key"] for t in graph.nodes] == [0, 1, 2, 3, 0]
    gg.Graph().build_forward_expand(drops[3])
    assert drops[3].attrs["key"] == 3  # it is what it was in the graph before


def test_gradients_that_are_made_before_the_graph_have_the_mask_of_what_they_are_of():
    w = gg.tensor(np.ones(4096), param=True)
    out = gg.dropout(gg.dropout(w, 4, p=0.2), 4, p=0.3)
    (dw,) = gg.grad(gg.sum(out), [w])
    gg.Graph().build_forward_expand(out, dw).compute()
    np.testing.assert_array_equal(out.numpy(), dw.numpy())


def test_a_generator_goes_on_from_a_checkpoint(tmp_path):
    pytest.importorskip("safetensors")

    def made():
        rng, w = gg.Rng(0), gg.tensor(np.ones(64), param=True, name="w")
        loss = gg.sum(gg.sqr(gg.dropout(w, rng, p=0.5)))
        data = gg.data.Windows(np.arange(50, dtype=np.int32), batch=2, context=4, seed=1)
        x, y = (gg.tensor(shape=(2, 4), dtype=gg.I32) for _ in range(2))
        loss = loss + gg.sum(gg.cast(x, gg.F32)) * 0.0 + gg.sum(gg.cast(y, gg.F32)) * 0.0
        optimizer = gg.SGD([w], lr=0.1)
        return w, gg.Trainer(loss, [x, y], data, optimizer, checkpoint=tmp_path / "c", progress=False)

    w, trainer = made()
    trainer.run(3)
    trainer.save()
    trainer.run(6)
    expected = w.numpy().copy()
    w, trainer = made()
    trainer.resume()
    trainer.run(6)
    np.testing.assert_array_equal(w.numpy(), expected)
