"""What Kimi Delta Attention promises: other people's numbers, the same result in chunks, token by token, in halves and
over ranks; no bit changed by what comes later; finite gradients of saturated gates.

The files in golden/kda hold results of an independent implementation in double precision, of flash-linear-attention's
options (its commit bc3b101d).  GGRAD_GOLDEN=<folder> runs over another set.  A tolerance is a share of a tensor's
largest magnitude: 1e-5 is about 80 roundings of f32, and sums of gradients over all tokens that cancel, as those of a
gate's parameters do, have more of them.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import ggrad as gg
from ggrad.core.errors import GradientError
from ggrad.core.native import ffi
from ggrad.mimic import fla
from ggrad.testing import check_gradients, check_kernel

GOLDEN = Path(os.environ.get("GGRAD_GOLDEN", Path(__file__).parent / "golden")) / "kda"
FILES = sorted(path.stem for path in GOLDEN.glob("golden_kda_*.npz"))
RANKS = sorted(path.stem for path in GOLDEN.glob("cp_kda_*.npz"))
RTOL = {"dg": 2e-5, "ddt_bias": 3e-5, "dA_log": 1e-4}
NATIVE = pytest.param("native", marks=pytest.mark.native)
INPUTS = ("q", "k", "v", "g", "beta")


def require_close(got, wanted, what, rtol=1e-5):
    got = np.asarray(got, np.float64).reshape(wanted.shape)
    off, size = np.abs(got - wanted).max(initial=0), np.abs(wanted).max(initial=0)
    assert off <= rtol * (size or 1), f"{what}: off by {off:.2g} of {size:.2g}"


def made_inputs(B=1, T=64, H=2, K=16, V=16, *, HV=None, low=-0.5, high=0.0, seed=0):
    """Unit keys, as a layer would give; g from low to high."""
    rng, HV = np.random.default_rng(seed), HV or H
    q, k = (rng.standard_normal((B, T, H, K)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    made = (
        q,
        k,
        rng.standard_normal((B, T, HV, V)),
        rng.uniform(low, high, (B, T, HV, K)),
        rng.uniform(0, 1, (B, T, HV)),
    )
    return dict(zip(INPUTS, (x.astype(np.float32) for x in made), strict=True))


def run(inputs, do=None, dht=None, *, op=gg.kda, backend="native", **options):
    """o, the final state, and the gradients of sum(o * do) + sum(final state * dht) by all that is given."""
    leaves = {name: gg.tensor(x, name=name, param=True) for name, x in inputs.items()}
    o, ht = op(**leaves, **options, output_final_state=True)
    graph = gg.Graph().build_forward_expand(o, ht)
    terms = [gg.sum(x * gg.tensor(d)) for x, d in ((o, do), (ht, dht)) if d is not None]
    if terms:
        graph.build_backward_expand(terms[0] if len(terms) == 1 else terms[0] + terms[1])
    graph.compute(backend=backend)
    result = {"o": o.numpy(), "final_state": ht.numpy()}
    gradients = {f"d{name}": graph.grad(x) for name, x in leaves.items()} if terms else {}
    return result | {name: g.numpy() for name, g in gradients.items() if g is not None}


# -- other people's numbers -----------------------------------------------------------------------------------


def read(case):
    file = dict(np.load(GOLDEN / f"{case}.npz"))
    options = {name: value for name, value in json.loads(str(file["config"])).items() if value is not None}
    options.pop("output_final_state")
    inputs = {name: file[name] for name in (*INPUTS, "A_log", "dt_bias") if name in file}
    if "h0" in file:
        inputs["initial_state"] = file["h0"]
        file["dinitial_state"] = file.pop("dh0", None)
    if "cu_seqlens" in file:
        options["cu_seqlens"] = file["cu_seqlens"]
    return file, inputs, options


def test_there_is_golden_data():
    assert FILES and RANKS


@pytest.mark.parametrize("how", ["reference", NATIVE, pytest.param("kept", marks=pytest.mark.native)])
@pytest.mark.parametrize("case", FILES)
def test_values_and_gradients_are_those_of_the_golden_files(case, how):
    """In double precision to 1e-14; in kernels, with intermediate results computed again and with them kept."""
    file, inputs, options = read(case)
    backend = "reference" if how == "reference" else "native"
    got = run(inputs, file["do"], file.get("dht"), backend=backend, **options, disable_recompute=how == "kept")
    for name, value in got.items():
        if file.get(name) is not None:
            require_close(value, file[name], f"{case}: {name}", 1e-14 if how == "reference" else RTOL.get(name, 1e-5))


@pytest.mark.parametrize("backend", ["reference", NATIVE])
@pytest.mark.parametrize("case", FILES)
def test_the_recurrent_form_gives_the_same_values(case, backend):
    file, inputs, options = read(case)
    for name in ("chunk_size", "safe_gate"):
        options.pop(name)
    got = run(inputs, op=gg.kda_recurrent, backend=backend, **options)
    for name, value in got.items():
        if name in file:
            require_close(value, file[name], f"{case}: {name}", 1e-14 if backend == "reference" else 2e-6)


@pytest.mark.native
@pytest.mark.parametrize("case", RANKS)
def test_ranks_that_exchange_their_state_maps_give_the_whole(case):
    """As distributed runs do: every rank has a slice of the tokens, and hands on what it does to any state."""
    file, inputs, options = read(case)
    world, V = options.pop("world_size"), inputs["v"].shape[-1]
    options.pop("cu_seqlens")
    share = inputs["q"].shape[1] // world
    here = [{name: x[:, r * share : (r + 1) * share] for name, x in inputs.items()} for r in range(world)]
    do = [file["do"][:, r * share : (r + 1) * share] for r in range(world)]
    bounds = [file[f"r{r}_cu_seqlens"] for r in range(world)]
    before, after = file["pre_num_ranks"], file["post_num_ranks"]

    def value(t):
        gg.Graph().build_forward_expand(t).compute()
        return t.numpy()[0]

    zeros = np.zeros(file["r0_hm"].shape)
    forward, backward = [], []
    for r in range(world):
        last = {name: x[:, bounds[r][-2] :] for name, x in here[r].items() if name != "q"}
        forward.append(value(gg.kda_state_map(**last)) if after[r] else zeros)
        first = {name: x[:, : bounds[r][1]] for name, x in here[r].items() if name != "v"}
        backward.append(value(gg.kda_state_map_back(**first, do=do[r][:, : bounds[r][1]])) if before[r] else zeros)
        require_close(forward[r], file[f"r{r}_hm"], f"{case}: map of rank {r}")
        require_close(backward[r], file[f"r{r}_dhm"], f"{case}: reverse map of rank {r}")

    for r in range(world):
        S, D = np.zeros((*zeros.shape[:2], V)), np.zeros((*zeros.shape[:2], V))
        for j in range(r - before[r], r):
            S = forward[j][..., V:] @ S + forward[j][..., :V]
        for j in range(r + after[r], r, -1):
            D = backward[j][..., V:] @ D + backward[j][..., :V]
        require_close(S, file[f"r{r}_S0"], f"{case}: state of rank {r}")
        require_close(D, file[f"r{r}_dSend"], f"{case}: gradient of the state of rank {r}")
        states, dht = np.zeros((2, len(bounds[r]) - 1, *S.shape), np.float32)
        states[0], dht[-1] = S, D
        got = run({**here[r], "initial_state": states}, do[r], dht, cu_seqlens=bounds[r], **options)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            require_close(got[name], file[name][:, r * share : (r + 1) * share], f"{case}: {name} of rank {r}", 2e-5)


# -- one result, computed in several ways -----------------------------------------------------------------------


@pytest.mark.native
@pytest.mark.parametrize("T", [1, 63, 65, 130])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 32}, {"disable_recompute": True}])
def test_kernels_agree_with_references_at_the_edges_of_chunks(T, options):
    inputs = made_inputs(T=T, H=1, HV=2, K=20, V=24)
    state = np.random.default_rng(1).standard_normal((1, 2, 20, 24)).astype(np.float32)
    check_kernel(
        lambda q, k, v, g, beta, h0: gg.kda(q, k, v, g, beta, initial_state=h0, output_final_state=True, **options),
        *inputs.values(), state, backward=True, threads=(1, 2, 3),
    )  # fmt: skip


@pytest.mark.native
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("wild", [False, True])
def test_kernels_agree_with_references_over_many_segments(packed, wild):
    """So many heads and sequences that each chunk of them is a segment, and the states go from one to the next."""
    N, T = 4, 130
    inputs = list(made_inputs(B=1 if packed else N, T=T, H=4, HV=8, K=5, V=6).values())
    states = np.random.default_rng(1).standard_normal((N, 8, 5, 6)).astype(np.float32)
    if wild:
        inputs[3][0, [37, 70], 1] = 0.7
    cu = gg.tensor(np.array([0, 0, 70, 71, T], np.int32)) if packed else None

    def build(q, k, v, g, beta, h0):
        options = {"initial_state": h0, "output_final_state": True, "chunk_size": 32, "cu_seqlens": cu}
        return gg.kda(q, k, v, g, beta, **options)

    check_kernel(build, *inputs, states, backward=True, threads=(1, 2, 3))
    q = gg.tensor(inputs[0], param=True)
    o = gg.kda(q, *inputs[1:], initial_state=states, chunk_size=32, cu_seqlens=cu)
    session = gg.Graph().build_backward_expand(gg.sum(o * o)).compute().prepared("native")
    steps = session.steps_in_c[0 : len(session.steps)]
    assert len({s.stage for s in steps if ffi.string(s.call.kernel.name) == b"kda_back"}) > 10, "a single segment"


@pytest.mark.native
def test_a_batch_in_many_segments_gives_the_same_bits_as_its_rows_in_one():
    rng = np.random.default_rng(0)
    inputs = made_inputs(B=4, T=130, H=4, HV=8, K=8, V=8) | {"initial_state": rng.standard_normal((4, 8, 8, 8))}
    do, dht = rng.standard_normal((4, 130, 8, 8)), rng.standard_normal((4, 8, 8, 8))
    whole = run(inputs, do, dht, chunk_size=32)
    alone = run({name: x[2:3] for name, x in inputs.items()}, do[2:3], dht[2:3], chunk_size=32)
    for name, value in alone.items():
        assert value.tobytes() == np.ascontiguousarray(whole[name][2:3]).tobytes(), name


@pytest.mark.native
@pytest.mark.parametrize("T", [5, 64, 200])
def test_chunks_and_the_recurrence_agree(T):
    rng = np.random.default_rng(T)
    inputs = made_inputs(T=T, low=-3.0) | {"initial_state": rng.standard_normal((1, 2, 16, 16)).astype(np.float32)}
    do, dht = rng.standard_normal((1, T, 2, 16)), rng.standard_normal((1, 2, 16, 16))
    chunked, recurrent = run(inputs, do, dht), run(inputs, do, dht, op=gg.kda_recurrent)
    for name, value in recurrent.items():
        require_close(chunked[name], value.astype(np.float64), name)


@pytest.mark.native
@pytest.mark.parametrize("cut", [1, 63, 64, 100])
def test_two_halves_that_hand_on_their_state_are_the_whole(cut):
    """Forward the state, backward its gradient."""
    rng = np.random.default_rng(cut)
    T, shape = 130, (1, 2, 16, 16)
    inputs, h0 = made_inputs(T=T), rng.standard_normal(shape).astype(np.float32)
    do, dht = rng.standard_normal((1, T, 2, 16)), rng.standard_normal(shape)
    whole = run(inputs | {"initial_state": h0}, do, dht)
    first, second = ({name: x[:, part] for name, x in inputs.items()} for part in (slice(cut), slice(cut, None)))
    middle = run(first | {"initial_state": h0})["final_state"]
    later = run(second | {"initial_state": middle}, do[:, cut:], dht)
    earlier = run(first | {"initial_state": h0}, do[:, :cut], later["dinitial_state"])
    require_close(later["final_state"], whole["final_state"], "final_state")
    require_close(earlier["dinitial_state"], whole["dinitial_state"], "dinitial_state")
    for name in ("o", *(f"d{x}" for x in INPUTS)):
        require_close(np.concatenate([earlier[name], later[name]], axis=1), whole[name], name)


@pytest.mark.native
def test_state_maps_compose():
    """The map of a run is that of its second part after that of its first, forward and in reverse."""
    inputs, do, cut, V = (
        made_inputs(T=150, K=12, V=20),
        np.random.default_rng(0).standard_normal((1, 150, 2, 20)),
        70,
        20,
    )
    parts = [
        ({name: x[:, part] for name, x in inputs.items()}, do[:, part])
        for part in (slice(None), slice(cut), slice(cut, None))
    ]
    forward = [gg.kda_state_map(p["k"], p["v"], p["g"], p["beta"]) for p, _ in parts]
    reverse = [gg.kda_state_map_back(p["q"], p["k"], p["g"], p["beta"], d) for p, d in parts]
    gg.Graph().build_forward_expand(*forward, *reverse).compute()
    for maps, (then, before) in ((forward, (2, 1)), (reverse, (1, 2))):
        whole, M, E = maps[0].numpy(), maps[then].numpy()[..., V:], maps[then].numpy()[..., :V]
        made = M @ maps[before].numpy()
        made[..., :V] += E
        require_close(made, whole, "composition")


@pytest.mark.native
def test_a_batch_gives_the_same_bits_as_its_rows_alone():
    rng = np.random.default_rng(0)
    inputs = made_inputs(B=3, T=90, HV=4, V=40) | {"initial_state": rng.standard_normal((3, 4, 16, 40))}
    do, dht = rng.standard_normal((3, 90, 4, 40)), rng.standard_normal((3, 4, 16, 40))
    whole = run(inputs, do, dht)
    packed = {name: x if name == "initial_state" else x.reshape(1, 270, *x.shape[2:]) for name, x in inputs.items()}
    one_row = run(packed, do.reshape(1, 270, 4, 40), dht, cu_seqlens=[0, 90, 180, 270])
    for b in range(3):
        alone = run({name: x[b : b + 1] for name, x in inputs.items()}, do[b : b + 1], dht[b : b + 1])
        for name, value in alone.items():
            assert value.tobytes() == np.ascontiguousarray(whole[name][b : b + 1]).tobytes(), name
    for name, value in whole.items():
        assert value.tobytes() == one_row[name].tobytes(), name


@pytest.mark.native
def test_the_first_tokens_give_the_same_bits_whatever_follows():
    inputs = made_inputs(T=100)
    whole = run(inputs)["o"]
    for T in (1, 7, 22, 64, 65, 99):
        assert run({name: x[:, :T] for name, x in inputs.items()})["o"].tobytes() == whole[:, :T].tobytes(), T


@pytest.mark.native
@pytest.mark.parametrize("token", [1, 8, 21, 64, 75])
def test_a_gate_changes_no_bit_before_it(token):
    """Nor in the gradients of a loss on what comes before."""
    inputs = made_inputs(T=80, K=24, low=-5.0)
    do = np.random.default_rng(1).standard_normal((1, 80, 2, 16))
    do[:, token:] = 0
    before = run(inputs, do)
    for value in (0.0, -1.0, -1000.0, 0.3, 5.0, np.nan):
        changed = dict(inputs, g=inputs["g"].copy())
        changed["g"][:, token:] = value
        after = run(changed, do)
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta") if value < 5 else ("o",):
            assert after[name][:, :token].tobytes() == before[name][:, :token].tobytes(), (name, value)


@pytest.mark.native
def test_safe_gate_changes_nothing():
    inputs = made_inputs(T=80, low=-5.0)
    do = np.ones((1, 80, 2, 16))
    plain, safe = run(inputs, do), run(inputs, do, safe_gate=True)
    assert all(safe[name].tobytes() == value.tobytes() for name, value in plain.items())


@pytest.mark.native
def test_what_lies_behind_a_row_is_not_read():
    """K and V that fill no vector, and garbage between rows and behind the last."""
    inputs = made_inputs(T=70, K=60, V=36)
    do = np.random.default_rng(0).standard_normal((1, 70, 2, 36))
    wanted = run(inputs, do)

    def among_garbage(x):
        if x.ndim == 3:
            return gg.tensor(x)
        wide = np.full((*x.shape[:-1], x.shape[-1] + 7), 1e30, np.float32)
        wide[..., : x.shape[-1]] = x
        return gg.tensor(wide)[..., : x.shape[-1]]

    o = gg.kda(*map(among_garbage, inputs.values()))
    recurrent = gg.kda_recurrent(*map(among_garbage, inputs.values()))
    gg.Graph().build_forward_expand(o, recurrent).compute()
    assert o.numpy().tobytes() == wanted["o"].tobytes()
    require_close(recurrent.numpy(), wanted["o"], "recurrent")


# -- hard numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", NATIVE])
@pytest.mark.parametrize("lower_bound", [None, -5.0, -50.0])
@pytest.mark.parametrize("A_log", [-3.0, 3.0, 80.0])
def test_saturated_gates_have_finite_gradients(A_log, lower_bound, backend):
    rng = np.random.default_rng(0)
    inputs = made_inputs(T=70)
    inputs["g"] = rng.choice([-50.0, 50.0, -1.0, 0.0], inputs["g"].shape)
    gates = {"A_log": np.full(2, A_log), "dt_bias": rng.standard_normal(32)}
    options = {"use_gate_in_kernel": True} | ({} if lower_bound is None else {"lower_bound": lower_bound})
    got = run(inputs | gates, rng.standard_normal((1, 70, 2, 16)), backend=backend, **options)
    assert {"dA_log", "ddt_bias", "dg"} <= set(got)
    for name, value in got.items():
        assert np.isfinite(value).all(), name


@pytest.mark.native
@pytest.mark.parametrize("low", [-1000.0, -6.0, -1e-4])
def test_collinear_keys_and_any_decay_agree_with_the_reference(low):
    rng = np.random.default_rng(0)
    inputs = made_inputs(T=130, low=low)
    inputs["k"] = inputs["k"][:, :1] + 1e-3 * inputs["k"]
    inputs["k"] /= np.linalg.norm(inputs["k"], axis=-1, keepdims=True)
    inputs["beta"][...] = 1
    inputs["g"][rng.random(inputs["g"].shape) < 0.3] = 0
    do = rng.standard_normal((1, 130, 2, 16))
    wanted = run(inputs, do, backend="reference")
    for name, value in run(inputs, do).items():
        require_close(value, wanted[name], name, RTOL.get(name, 1e-5))


@pytest.mark.parametrize("rows", ["zero", "tiny"])
def test_rows_without_length_have_finite_gradients(rows):
    inputs = made_inputs(T=6)
    inputs["q"][:, 2] = inputs["k"][:, 3] = 0 if rows == "zero" else 1e-20
    got = run(inputs, np.ones((1, 6, 2, 16)), use_qk_l2norm_in_kernel=True, backend=None)
    assert all(np.isfinite(value).all() for value in got.values())
    assert np.abs(got["dq"][:, 2]).max() > 10  # 1000 times what comes in


@pytest.mark.native
def test_infinities_reach_what_comes_after_them_only():
    inputs = made_inputs(T=150)
    clean = run(inputs)["o"]
    inputs["v"][0, 70, 1, 3] = np.inf
    dirty = run(inputs)["o"]
    assert dirty[:, :70].tobytes() == clean[:, :70].tobytes()
    assert dirty[:, :, 0].tobytes() == clean[:, :, 0].tobytes()
    assert not np.isfinite(dirty[0, 70:, 1, 3]).any()


# -- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", NATIVE])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_intermediate_states_are_those_of_shorter_runs(state_v_first, backend):
    inputs = made_inputs(T=100, K=12)
    o, ht, states = gg.kda(
        *inputs.values(), chunk_size=32, return_intermediate_states=True, state_v_first=state_v_first
    )
    gg.Graph().build_forward_expand(o, states).compute(backend=backend)
    assert ht is None and states.shape == (4, 2, *((16, 12) if state_v_first else (12, 16)))
    for chunk in range(4):
        part = {name: x[:, : 32 * chunk] for name, x in inputs.items()}
        shorter = run(part, backend=backend, state_v_first=state_v_first)["final_state"]
        require_close(states.numpy()[chunk], shorter[0].astype(np.float64), f"chunk {chunk}")


def test_intermediate_states_have_no_gradient_and_results_beside_them_have():
    q, *others = made_inputs(T=5).values()
    q = gg.tensor(q, param=True)
    o, _, states = gg.kda(q, *others, return_intermediate_states=True)
    with pytest.raises(GradientError, match=r"intermediate states no gradient: build the loss from the result"):
        gg.Graph().build_backward_expand(gg.sum(states))
    assert gg.Graph().build_backward_expand(gg.sum(o)).grad(q) is not None


def test_short_sequences_train_and_a_beta_for_every_channel_says_that_it_does_not():
    inputs = [gg.tensor(x, param=True) for x in made_inputs(T=5).values()]
    check_gradients(gg.kda_recurrent, *(x.numpy() for x in inputs))
    beta = gg.tensor(np.ones((1, 5, 2, 16)))
    with pytest.raises(GradientError, match=r"no gradient with a beta for every value channel: give it one for every"):
        gg.Graph().build_backward_expand(gg.sum(gg.kda_recurrent(*inputs[:4], beta)))


def test_the_old_name_of_state_v_first_is_understood_where_that_library_is_mimicked():
    inputs = made_inputs(T=5, V=3)
    with pytest.warns(DeprecationWarning, match="old name of state_v_first"):
        _, ht = fla.chunk_kda(*inputs.values(), transpose_state_layout=True, output_final_state=True)
    assert ht.shape == (1, 2, 3, 16)


def test_flash_linear_attentions_names_give_the_same_nodes():
    """Its order of arguments, and always a tuple; what only speaks of a GPU changes nothing."""
    q, k, v, g, beta = made_inputs(T=5, V=3).values()
    o, none = fla.chunk_kda(q, k, v, g, beta, 0.25, cu_seqlens_cpu=[0, 5], chunk_size=32)
    assert none is None and o.src[0].op is gg.kda
    assert o.src[0].attrs["form"].scale == 0.25 and o.src[0].attrs["chunk_size"] == 32
    o, ht = fla.fused_recurrent_kda(q, k, v, g, beta, None, None, 0.25, output_final_state=True)
    assert o.src[0].op is gg.kda_recurrent and ht.shape == (1, 2, 16, 3)
    gate = fla.fused_kda_gate(g, np.zeros(2, np.float32), None, -5.0)
    assert gate.op is gg.kda_gate and gate.attrs["lower_bound"] == -5.0


@pytest.mark.native
def test_a_pool_of_states_decodes_as_one_long_sequence_does():
    """Sequences that share a pool go on token by token; drafts that were not accepted leave no trace."""
    N, T = 3, 12
    inputs = made_inputs(B=N, T=T, HV=4, V=40)
    whole = run(inputs)
    pool = gg.tensor(np.full((2 * N + 2, 4, 16, 40), 1e30, np.float32), name="pool")
    places = np.array([[1, 4], [7, 2], [5, 0]])
    pool.memory()[places[:, 0]] = 0
    untouched = np.setdiff1d(np.arange(len(pool.numpy())), places)
    leaves = {name: gg.tensor(shape=(N, 2, *x.shape[2:])) for name, x in inputs.items()}
    accepted = gg.tensor(np.ones(N, np.int32))
    o = gg.kda_recurrent(
        **leaves, initial_state=pool, ssm_state_indices=places.astype(np.int32), num_accepted_tokens=accepted
    )
    graph = gg.Graph().build_forward_expand(o)
    rng, at = np.random.default_rng(0), np.zeros(N, int)
    while (at < T - 1).any():
        steps = np.minimum(at, T - 2)
        for name, leaf in leaves.items():
            leaf.set(np.stack([inputs[name][n, t : t + 2] for n, t in enumerate(steps)]))
        before = pool.numpy().copy()
        graph.compute()
        taken = np.where(at < T - 1, rng.integers(1, 3, N), 0)  # of the two tokens, as many are right
        for n in range(N):
            if at[n] < T - 1:
                require_close(o.numpy()[n], whole["o"][n, at[n] : at[n] + 2], f"sequence {n} at {at[n]}")
            else:  # it has ended: as if nothing had happened
                pool.memory()[places[n]] = before[places[n]]
        at = np.minimum(at + taken, T)
        accepted.set(np.where(taken == 0, accepted.numpy(), taken).astype(np.int32))
    assert (pool.numpy()[untouched] == np.float32(1e30)).all()


# -- size ---------------------------------------------------------------------------------------------------------


@pytest.mark.native
def test_memory_grows_with_the_number_of_tokens_and_65536_of_them_train_in_2_gib():
    def total(T, **options):
        leaves = [gg.tensor(shape=(1, T, 4, 64), param=True) for _ in range(4)]
        o = gg.kda(*leaves, gg.tensor(shape=(1, T, 4), param=True), **options)
        graph = gg.Graph().build_backward_expand(gg.sum(o * o))
        return graph.plan().total(threads=2)

    assert total(65536) < 2 * 2**30
    short, long = total(4096), total(65536)
    assert long < 16.1 * short
    assert total(65536, disable_recompute=True) < 2 * 2**30


# -- the gates' gradients under any decay ---------------------------------------------------------------------


def plain_recurrence(inputs, do, dht, dtype, lower_bound=None):
    """dg, dA_log and ddt_bias token by token, every number of them in dtype, as one would write it down."""
    x = {name: a.astype(dtype) for name, a in inputs.items()}
    group = x["v"].shape[2] // x["q"].shape[2]
    q, k = (np.repeat(x[name], group, axis=2) for name in ("q", "k"))
    v, beta, raw, T = x["v"], x["beta"][..., None], x["g"], x["q"].shape[1]
    q, one = q * dtype(q.shape[-1] ** -0.5), dtype(1)
    if "A_log" in x:
        A, z = np.exp(x["A_log"])[:, None], raw + x["dt_bias"].reshape(raw.shape[2:])
        with np.errstate(over="ignore"):
            sigmoid = one / (one + np.exp(-(z if lower_bound is None else A * z)))
        g = -A * np.logaddexp(dtype(0), z) if lower_bound is None else dtype(lower_bound) * sigmoid
    else:
        g = raw
    a = np.exp(g)
    S = [x["initial_state"]]
    written = []
    for t in range(T):
        decayed = a[:, t, :, :, None] * S[-1]
        written.append(beta[:, t] * (v[:, t] - np.einsum("bhk,bhkv->bhv", k[:, t], decayed)))
        S.append(decayed + k[:, t, :, :, None] * written[-1][:, :, None])
    D, dg = dht.astype(dtype), np.zeros_like(g)
    for t in reversed(range(T)):
        D = D + q[:, t, :, :, None] * do[:, t, :, None].astype(dtype)
        by_v = beta[:, t] * np.einsum("bhk,bhkv->bhv", k[:, t], D)
        D = D - k[:, t, :, :, None] * by_v[:, :, None]
        dg[:, t] = (D * (a[:, t, :, :, None] * S[t])).sum(-1)
        D = D * a[:, t, :, :, None]
    if "A_log" not in x:
        return {"dg": dg}
    if lower_bound is None:
        dx, share = dg * -A * sigmoid, dg * g
    else:
        dx = dg * (sigmoid * (one - sigmoid) * A * dtype(lower_bound))
        share = dx * z
    return {"dg": dx, "dA_log": share.sum((0, 1, 3)), "ddt_bias": dx.sum((0, 1)).reshape(x["dt_bias"].shape)}


def require_ten_times_the_plain_recurrence(inputs, lower_bound=None, **options):
    rng = np.random.default_rng(1)
    do, dht = (rng.standard_normal(inputs[name].shape).astype(np.float32) for name in ("v", "initial_state"))
    if lower_bound is not None:
        options["lower_bound"] = lower_bound
    got = run(inputs, do, dht, use_gate_in_kernel="A_log" in inputs, **options)
    wanted = plain_recurrence(inputs, do, dht, np.float64, lower_bound)
    plain = plain_recurrence(inputs, do, dht, np.float32, lower_bound)
    for name, exact in wanted.items():
        size = np.abs(exact).max()
        errors = [np.abs(x[name].reshape(exact.shape) - exact).max() / size for x in (got, plain)]
        # by chance the plain one may be better than the roundings of A, A z, a sigmoid and a decay
        assert errors[0] <= 10 * max(errors[1], 2**-22), f"{name}: off by {errors[0]:.2g}, plainly by {errors[1]:.2g}"


def with_state(inputs, seed=2):
    (B, _, HV, V), K = inputs["v"].shape, inputs["k"].shape[-1]
    state = np.random.default_rng(seed).standard_normal((B, HV, K, V)).astype(np.float32)
    return inputs | {"initial_state": state}


OPTIONS = [{}, {"chunk_size": 32}, {"disable_recompute": True}, {"op": gg.kda_recurrent}]


@pytest.mark.native
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("low", [-1e-4, -0.1, -1.0, -5.0, -30.0, -1000.0, "mixed", "resets"])
def test_the_gradient_of_any_gate_is_as_good_as_a_plain_recurrences(low, options):
    rng = np.random.default_rng(0)
    inputs = with_state(made_inputs(B=2, T=150, H=1, HV=2, K=20, V=24))
    shape = inputs["g"].shape
    if low == "mixed":
        inputs["g"] = -(10 ** rng.uniform(-6, 3, shape)).astype(np.float32)
    elif low == "resets":
        inputs["g"] = np.where(rng.random(shape) < 0.3, -1000, rng.uniform(-0.01, 0, shape)).astype(np.float32)
    else:
        inputs["g"] = rng.uniform(low, low / 2, shape).astype(np.float32)
    require_ten_times_the_plain_recurrence(inputs, **options)


@pytest.mark.native
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("lower_bound", [None, -5.0, -50.0])
@pytest.mark.parametrize("A_log", [-3.0, 0.0, 1.5, 2.77, 4.5])
def test_the_gradients_of_a_gates_parameters_are_as_good_as_a_plain_recurrences(A_log, lower_bound, options):
    rng = np.random.default_rng(0)
    inputs = with_state(made_inputs(B=2, T=150, H=1, HV=2, K=20, V=24))
    inputs["g"] = rng.standard_normal(inputs["g"].shape).astype(np.float32)
    inputs["A_log"] = np.array([A_log, A_log / 2], np.float32)
    inputs["dt_bias"] = rng.standard_normal(2 * 20).astype(np.float32)
    require_ten_times_the_plain_recurrence(inputs, lower_bound, **options)


@pytest.mark.native
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("reset", [0, 2, 7, 8, 31, 32, 63, 64, 90])
def test_a_gate_that_forgets_everything_has_no_gradient(reset, options):
    inputs = with_state(made_inputs(T=100, low=-1e-3))
    inputs["g"][:, reset] = -1000
    do, dht = np.ones_like(inputs["v"]), np.ones_like(inputs["initial_state"])
    assert not run(inputs, do, dht, **options)["dg"][:, reset].any()
