"""Kernels of torch, JAX and flash-linear-attention as the comparisons of `ggrad.testing` call them.

    from ggrad.testing import adapters, compare_attention
    print(compare_attention(adapters.torch_sdpa("cuda", backend="flash"), dtype="bf16"))

Each makes a function of NumPy arrays.  What the kernel cannot be told (an option that it has no argument for), or
says that it has no kernel for, raises NotImplementedError, which a comparison counts as refused.  A mask, a window or
causality is handed over in the form that the library has for it; nothing is worked around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

__all__ = ["fla_kda", "flex_attention", "jax_dot_product_attention", "torch_sdpa"]

NO_KERNEL = (
    "no available kernel", "not support", "doesn't support", "unsupported", "must be divisible", "nyi:",
    "value shape should be",
)  # fmt: skip


def torch_sdpa(device: str = "cpu", *, backend: str | None = None) -> Callable[..., Any]:
    """`torch.nn.functional.scaled_dot_product_attention`, for `compare_attention`.

    Args:
        device: where it runs.
        backend: "math", "flash", "efficient" or "cudnn": only that; None lets torch choose.

    Raises:
        ModuleNotFoundError: torch is not installed.
        ValueError: there is no such backend.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    named = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
    if backend is not None and backend not in named:
        raise ValueError(f"torch_sdpa(): backend={backend!r} must be one of {', '.join(named)}, or None")
    only = list(SDPBackend.__members__.values()) if backend is None else [getattr(SDPBackend, named[backend])]
    usable = [b for b in only if b.name not in ("ERROR", "OVERRIDEABLE")]

    def attention(q, k, v, d, *, mask=None, causal=None, scale=None, **others):
        _refuse(others, "scaled_dot_product_attention")
        Q, K, V, D = _tensors(device, q, k, v, d, gradients=d is not None)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        if causal in (True, "bottom-right"):
            _refuse({"mask": mask} if mask is not None else {}, "a causal bias of torch")
            options["attn_mask"] = causal_lower_right(q.shape[2], k.shape[2])
        else:
            options |= {"is_causal": causal == "top-left", "attn_mask": None}
            if mask is not None:
                whole = torch.tensor(_whole(mask, q, k), device=device)
                options["attn_mask"] = whole if whole.dtype == torch.bool else whole.to(Q.dtype)
        with _refusals(), sdpa_kernel(usable):
            out = torch.nn.functional.scaled_dot_product_attention(Q, K, V, **options)
            return _results(out.transpose(1, 2), None, (Q, K, V), D)

    return attention


def flex_attention(device: str = "cpu", *, compiled: bool = False, gradients: bool = True) -> Callable[..., Any]:
    """`torch.nn.attention.flex_attention`, for `compare_attention`: causality, windows, masks, softcap and packed
    sequences as its masks and scores.

    Args:
        device: where it runs.
        compiled: by torch.compile, which makes the kernel; else in torch's own ops, for the meaning alone.
        gradients: False gives results alone: on a CPU there is no more.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    import torch
    from torch.nn.attention import flex_attention as flex

    call = torch.compile(flex.flex_attention, dynamic=False) if compiled else flex.flex_attention
    make = torch.compile(flex.create_block_mask) if compiled else flex.create_block_mask

    def attention(
        q, k, v, d, *, mask=None, causal=None, window=None, prefix=0, scale=None, logit_softcap=0.0, cu_seqlens_q=None,
        cu_seqlens_k=None, **others,
    ):  # fmt: skip
        _refuse(others, "flex_attention")
        d = d if gradients else None
        Q, K, V, D = _tensors(device, q, k, v, d, gradients=d is not None)
        (B, H, N, _), M = q.shape, k.shape[2]
        query_of, place, lengths = _places(N, cu_seqlens_q)
        key_of, key_place, key_lengths = _places(M, cu_seqlens_k)
        key_of = np.where(key_of == len(key_lengths) - 1, -1, key_of) if cu_seqlens_k is not None else key_of
        shift = 0 if causal == "top-left" else (key_lengths - lengths)[query_of]
        query_of, key_of, position, place = (
            torch.tensor(x, device=device) for x in (query_of, key_of, place + shift, key_place)
        )
        left, right = (-1, -1) if window is None else window
        bias = None if mask is None else torch.tensor(_whole(mask, q, k), device=device)

        def visible(b, h, i, j):
            key = place[j]
            seen = query_of[i] == key_of[j]
            inside = (key >= position[i] - left) | (left < 0)
            inside = inside & ((key <= position[i] + right) | (right < 0))
            seen = seen & (inside | (key < prefix))
            if causal:
                seen = seen & (key <= position[i])
            if bias is not None:
                here = bias[b, h, i, j]
                seen = seen & (here if bias.dtype == torch.bool else here != -torch.inf)
            return seen

        def scored(s, b, h, i, j):
            if logit_softcap > 0:
                s = logit_softcap * torch.tanh(s / logit_softcap)
            if bias is not None and bias.dtype != torch.bool:
                s = s + bias[b, h, i, j]
            return s

        plain = logit_softcap == 0 and (bias is None or bias.dtype == torch.bool)
        with _refusals():
            blocks = make(visible, B, H, N, M, device=device)
            out, lse = call(
                Q, K, V, score_mod=None if plain else scored, block_mask=blocks, scale=scale,
                enable_gqa=q.shape[1] != k.shape[1], return_lse=True,
            )  # fmt: skip
            return _results(out.transpose(1, 2), lse, (Q, K, V), D)

    return attention


def fla_kda(device: str = "cuda", *, recurrent: bool = False) -> Callable[..., Any]:
    """flash-linear-attention's `chunk_kda`, or `fused_recurrent_kda`, which has no gradient, for `compare_kda`.

    Raises:
        ModuleNotFoundError: flash-linear-attention or torch is not installed.
    """
    import torch
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    def kda(q, k, v, g, beta, d, *, dht=None, **options):
        if recurrent and d is not None:
            raise NotImplementedError("fused_recurrent_kda has no gradient")
        leaves = dict(zip(("q", "k", "v", "g", "beta"), _tensors(device, q, k, v, g, beta), strict=True))
        for name in ("initial_state", "A_log", "dt_bias"):
            if name in options:
                leaves[name] = _tensors(device, options.pop(name))[0]
        if "cu_seqlens" in options:
            options["cu_seqlens"] = torch.tensor(options["cu_seqlens"], device=device, dtype=torch.long)
        D, DHT = _tensors(device, d, dht)
        with _refusals():
            o, state = (fused_recurrent_kda if recurrent else chunk_kda)(**leaves, **options, output_final_state=True)
            made = {"o": _array(o), "final_state": _array(state)}
            if D is None and DHT is None:
                return made
            incoming = [(t, x) for t, x in ((o, D), (state, DHT)) if x is not None]
            wanted = [t for t in leaves.values() if t.requires_grad]
            grads = torch.autograd.grad([t for t, _ in incoming], wanted, [x.to(t.dtype) for t, x in incoming])
            found = dict(zip((n for n, t in leaves.items() if t.requires_grad), grads, strict=True))
        names = {"initial_state": "dh0"}
        return made | {names.get(name, f"d{name}"): _array(x) for name, x in found.items()}

    return kda


def jax_dot_product_attention(implementation: str = "xla") -> Callable[..., Any]:
    """`jax.nn.dot_product_attention`, for `compare_attention`.

    Args:
        implementation: "xla" or "cudnn".

    Raises:
        ModuleNotFoundError: JAX is not installed.
    """
    import jax
    import jax.numpy as jnp

    def attention(q, k, v, d, *, mask=None, causal=None, window=None, scale=None, **others):
        _refuse(others, "dot_product_attention")
        if causal in (True, "bottom-right") and q.shape[2] != k.shape[2]:
            raise NotImplementedError("dot_product_attention counts causality from the first key")
        if window is not None and (min(window) < 0 or q.shape[2] != k.shape[2]):
            raise NotImplementedError("dot_product_attention has windows of two bounds, for as many keys as queries")
        options: dict[str, Any] = {"scale": scale, "is_causal": bool(causal), "implementation": implementation}
        if mask is not None:
            whole = jnp.asarray(_whole(mask, q, k))
            options |= {"mask": whole} if mask.dtype == bool else {"bias": whole.astype(q.dtype)}
        if window is not None:
            options["local_window_size"] = window

        def forward(*args):
            return jax.nn.dot_product_attention(*args, **options)

        arrays = [jnp.asarray(x).transpose(0, 2, 1, 3) for x in (q, k, v)]
        with _refusals():
            if d is None:
                return np.asarray(forward(*arrays))
            out, back = jax.vjp(forward, *arrays)
            grads = back(jnp.asarray(d))
            return {"out": np.asarray(out)} | {
                f"d{name}": np.asarray(g.transpose(0, 2, 1, 3)) for name, g in zip("qkv", grads, strict=True)
            }

    return attention


# -- what they share ----------------------------------------------------------------------------------------


def _refuse(others: dict[str, Any], what: str) -> None:
    if others:
        raise NotImplementedError(f"{what} has no {', '.join(sorted(others))}")


@contextmanager
def _refusals() -> Iterator[None]:
    """What a library says where it has no kernel, as NotImplementedError."""
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        if any(words in str(error).lower() for words in NO_KERNEL):
            raise NotImplementedError(str(error)) from error
        raise


def _tensors(device: str, *arrays: np.ndarray | None, gradients: bool = True) -> list[Any]:
    """As torch's, floats with gradients; None stays."""
    import torch

    def made(x: np.ndarray) -> Any:
        narrow = x.dtype.name == "bfloat16"  # which torch does not take from NumPy
        t = torch.tensor(x.view(np.uint16).astype(np.int32) if narrow else x)
        t = (t << 16).view(torch.float32).to(torch.bfloat16) if narrow else t
        return t.to(device).requires_grad_(gradients and t.is_floating_point())

    return [None if x is None else made(x) for x in arrays]


def _array(t: Any) -> np.ndarray:
    """Of a torch tensor; halves as f32."""
    return t.detach().float().cpu().numpy()


def _results(out: Any, lse: Any, inputs: tuple[Any, ...], d: Any) -> dict[str, np.ndarray]:
    """`out`, and the gradients of q, k and v where one comes in."""
    import torch

    made = {"out": _array(out)} | ({} if lse is None else {"lse": _array(lse)})
    if d is None:
        return made
    grads = torch.autograd.grad(out, inputs, d.detach().to(out.dtype))
    return made | {f"d{name}": _array(g) for name, g in zip("qkv", grads, strict=True)}


def _whole(mask: np.ndarray, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """A mask of every pair, [B, H, N, M], of one whose batches and heads tile and that may have rows to spare."""
    (B, H, N, _), M = q.shape, k.shape[2]
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    batches, heads = np.arange(B) % mask.shape[0], np.arange(H) % mask.shape[1]
    return np.ascontiguousarray(mask[np.ix_(batches, heads, np.arange(N), np.arange(M))])


def _places(count: int, cu: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each token its sequence and its place there, and the sequences' lengths; the last is of tokens of none."""
    if cu is None:
        return np.zeros(count, np.int64), np.arange(count), np.array([count, 0])
    sequence = np.searchsorted(cu, np.arange(count), side="right") - 1
    return sequence, np.arange(count) - cu[sequence], np.append(np.diff(cu), 0)
