"""Models of Hugging Face's, which look up their attention by a name."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import ShapeError
from ..core.extras import need
from .named import attention

NAME = "ggrad"


def replace_attention(model: Any) -> Any:
    """Let a model of transformers use `ggrad.torch.attention`, forward and backward.  Returns the model.

    It is registered there as the implementation "ggrad": after `register()`, `from_pretrained` takes that name too.

    Args:
        model: a `PreTrainedModel` whose attention is looked up in transformers' interface: text models of the last
            years all do.

    Raises:
        MissingExtraError: transformers is not installed.
        ShapeError: the model chooses its attention in another way.
    """
    register()
    choose = getattr(model, "set_attn_implementation", None)
    if choose is None:
        raise ShapeError(f"replace_attention(): {type(model).__name__} has no set_attn_implementation")
    choose(NAME)
    return model


def register() -> None:
    """Make "ggrad" known to transformers as an implementation of attention, with masks as torch's own has them."""
    need("transformers", "ggrad.torch.replace_attention", "torch")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """In transformers' form: [batch, heads, tokens, d] in, [batch, tokens, heads, d] out."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # one query after those of a cache sees them all, and a mask says everything itself
    causal = causal and attention_mask is None and query.shape[2] > 1
    out = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal,
        scaling,
        enable_gqa=True,
        sinks=s_aux,
        softcap=softcap or 0.0,
    )
    return out.transpose(1, 2).contiguous(), None
