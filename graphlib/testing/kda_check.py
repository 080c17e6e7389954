"""Holds a kernel of Kimi Delta Attention, of any framework, against `kda_reference`, over options that trap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .comparison import Arguments, Comparison, Question, Refusals, Results, Rounding, options_of
from .kda_reference import KdaResult, kda_reference

__all__ = ["KdaCase", "compare_kda", "kda_cases"]

INPUTS = ("q", "k", "v", "g", "beta", "d")
FACTORS = ("q", "k", "v", "beta", "d")  # what a kernel is given in a narrow format; gates and states are f32


@dataclass(frozen=True, kw_only=True)
class KdaCase:
    """Shapes and options of one comparison; arrays are drawn when it runs."""

    name: str
    B: int = 1
    T: int = 70
    H: int = 2
    K: int = 16
    HV: int = 0  # 0: as many as H
    V: int = 0  # 0: as large as K
    decay: float = 1.0  # gates are -decay * softplus of normal numbers
    state: bool = False  # there is an initial state, and a gradient of the final one
    bias: bool = False  # with use_gate_in_kernel, dt_bias
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments, as kda_reference takes them
    backward: bool = True  # else d is None

    @property
    def results(self) -> Sequence[str]:
        """Names of what a kernel may give."""
        return KdaResult._fields

    @property
    def features(self) -> set[str]:
        """What an implementation must know for it: names of options, and of sizes that are not the usual one."""
        sizes = {name for name, usual in (("HV", self.H), ("V", self.K)) if getattr(self, name) not in (0, usual)}
        present = {name for name, there in (("initial_state", self.state), ("dt_bias", self.bias)) if there}
        return {*self.options, *sizes, *present}

    def arguments(self, seed: int, dtype: np.dtype) -> dict[str, Any]:
        """q, k of norm 1 or so, v and d of normal numbers, decays, learning rates; and the options."""
        rng = np.random.default_rng(seed)
        HV, V = self.HV or self.H, self.V or self.K
        tokens, options = (self.B, self.T), dict(self.options)

        def normal(*shape: int, size: float = 1.0) -> np.ndarray:
            return (size * rng.standard_normal(shape)).astype(np.float32)

        made: dict[str, Any] = {name: normal(*tokens, self.H, self.K, size=self.K**-0.5) for name in ("q", "k")}
        made["v"] = normal(*tokens, HV, V)
        x = normal(*tokens, HV, self.K)
        in_kernel = options.get("use_gate_in_kernel", False)
        made["g"] = x if in_kernel else (-self.decay * np.logaddexp(0, x)).astype(np.float32)
        rate = normal(*tokens, HV)
        made["beta"] = rate if options.get("use_beta_sigmoid_in_kernel") else 1 / (1 + np.exp(-rate))
        made["d"] = normal(*tokens, HV, V) if self.backward else None
        if in_kernel:
            options["A_log"] = np.log(self.decay * rng.uniform(0.5, 1.5, HV)).astype(np.float32)
            options |= {"dt_bias": normal(HV * self.K)} if self.bias else {}
        if self.state:
            N = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else self.B
            shape = (N, HV, V, self.K) if options.get("state_v_first") else (N, HV, self.K, V)
            options["initial_state"] = normal(*shape)
            options |= {"dht": normal(*shape)} if self.backward else {}
        narrow = {name: None if made[name] is None else made[name].astype(dtype) for name in FACTORS}
        return {**made, **narrow, **options}

    def answer(self, arguments: Arguments, *, dtype: DTypeLike, rounded: Rounding) -> Results:
        """Token by token."""
        return kda_reference(**arguments, dtype=dtype, rounded=rounded).present()


def compare_kda(
    fn: Callable[..., Any],
    cases: Iterable[KdaCase] | None = None,
    *,
    without: str | Iterable[str] = (),
    refuses: Refusals = (),
    dtype: str | DTypeLike = np.float32,
    factor: float = 3.0,
    floor: float = 1e-6,
    seed: int = 0,
) -> Comparison:
    """Compare a kernel of Kimi Delta Attention with the answer in double precision, on options that trap.

        result = gg.testing.compare_kda(gg.testing.adapters.fla_kda(device="cuda"), dtype="bf16")
        assert result.passed, result

    The rule is that of `compare_attention`; the plain implementation goes from token to token.

    Args:
        fn: `fn(q, k, v, g, beta, d, **options)`, of NumPy arrays shaped as in `kda_reference`, with only those
            options that a case sets: initial_state, dht, A_log, dt_bias, cu_seqlens, scale,
            use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound, use_beta_sigmoid_in_kernel,
            allow_neg_eigval, state_v_first.  `d` is the gradient of o, or None where only the forward pass is
            wanted.  It returns o; or a tuple of o, final_state, dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias, of which
            it may leave off the last and set others to None; or a dict of these.
        cases: default `kda_cases()`.
        without: what `fn` does not know: names of options, "HV" (more heads of values), "V" (other than K).
        refuses: exceptions, beside NotImplementedError, by which `fn` says that it has no kernel for a case.
        dtype: of q, k, v, beta and d, as in `compare_attention`; gates and states are f32 in every format.
        factor, floor: of the rule.  A kernel that works in chunks inverts a triangle for each, by more roundings than
            the plain implementation makes: in "tf32" and "bf16" a factor of 10 is fair.
        seed: of the arrays.

    Returns:
        As `compare_attention`.

    Raises:
        ValueError: `without` names no option, there is no case to compare, or the dtype is none.
    """
    return QUESTION.ask(
        fn, kda_cases() if cases is None else cases, without=without, refuses=refuses,
        dtype=dtype, factor=factor, floor=floor, seed=seed,
    )  # fmt: skip


QUESTION = Question(
    "compare_kda",
    INPUTS,
    options_of(kda_reference) | {"HV", "V"},
    frozenset({"final_state", "dg", "dh0", "dA_log", "ddt_bias"}),
)


def kda_cases() -> list[KdaCase]:
    """What `compare_kda` tries: each option alone and all together, lengths at the edges of chunks, extreme decays."""

    def packed(*ends: int) -> np.ndarray:
        return np.array([0, *ends], np.int32)

    def case(name: str, *, state=False, bias=False, backward=True, decay=1.0, options=None, **sizes):
        return KdaCase(
            name=name, state=state, bias=bias, backward=backward, decay=decay, options=options or {}, **sizes
        )

    gate = {"use_gate_in_kernel": True}
    norm = {"use_qk_l2norm_in_kernel": True}
    layer = {**gate, **norm, "use_beta_sigmoid_in_kernel": True}
    return [
        case("one token", T=1),
        case("a few tokens", T=5),
        case("one chunk", T=64),
        case("a chunk and one token", T=65),
        case("one token short of two chunks", T=127),
        case("several chunks, batches", B=2, T=150),
        case("32 channels", K=32),
        case("64 channels", K=64, T=100),
        case("128 channels", K=128, T=100, H=1),
        case("more channels of values", K=16, V=32),
        case("fewer channels of values", K=32, V=16),
        case("more heads of values", HV=4, T=80),
        case("scale", options={"scale": 0.7}),
        case("states", state=True),
        case("states, one token", state=True, T=1),
        case("states, values first", state=True, V=32, options={"state_v_first": True}),
        case("l2norm", options=norm),
        case("a gate", options=gate),
        case("a gate with a bias", bias=True, options=gate),
        case("a gate with a lower bound", bias=True, options={**gate, "lower_bound": -5.0}),
        case("sigmoid of beta", options={"use_beta_sigmoid_in_kernel": True}),
        case("twice sigmoid of beta", options={**layer, "allow_neg_eigval": True}),
        case("packed", T=150, options={"cu_seqlens": packed(3, 67, 67, 131, 150)}),
        case("packed, states", T=90, state=True, options={"cu_seqlens": packed(64, 65, 90)}),
        case("a layer", B=2, T=100, K=32, bias=True, options=layer),
        case("a layer, packed, states", T=140, K=32, state=True, bias=True,
             options={**layer, "cu_seqlens": packed(1, 70, 140)}),
        case("weak decays", decay=1e-3, T=130),
        case("strong decays", decay=8.0),
        case("decays that leave nothing", decay=200.0),
        case("long", T=1000, H=1, decay=0.1, options=norm),
        case("forward only", T=100, backward=False, state=True),
    ]  # fmt: skip
