"""Adapters as the library peft keeps them: a folder with adapter_config.json and adapter_model.safetensors, under the
names that Hugging Face's models have for their matrices.

Rows of queries and keys lie in another order where a GGUF file turns neighbours (2i, 2i + 1): there Hugging Face's
models turn i and i + half.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np

from ..core.errors import FormatError, ShapeError
from ..core.extras import need
from ..files.atomic import read_whole, write_whole
from .config import Config

CONFIG, MATRICES = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.([a-z_.]+)\.lora_([AB])\.weight")

_PLAIN = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FUSED = {
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "smollm3", "granite", "olmo2"), _PLAIN
    ),
    "phi3": _FUSED,
    "starcoder2": {**_PLAIN, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_REORDERED = {"llama", "smollm3", "granite"}  # architectures whose queries and keys lie in another order


def save(folder: str | os.PathLike[str], matrices: dict[str, np.ndarray], c: Config, settings: dict) -> None:
    """Write the two files, each whole or not at all.

    Args:
        matrices: by name, as "blk.0.attn_q.weight.lora_a".
        settings: rank, alpha, rslora and dropout, under peft's names for them.

    Raises:
        ShapeError: the architecture's names in Hugging Face's models are not known.
    """
    names = _names(c)
    stored, targets = {}, set()
    for name, value in matrices.items():
        _, layer, part, _, which = name.split(".")
        theirs = names.get(part)
        if theirs is None:
            raise ShapeError(f"{name}: no name for it in Hugging Face's models of {c.arch} is known")
        targets.add(theirs.rpartition(".")[2])
        if which == "lora_b":
            value = _rows(value, part, int(layer), c, to_theirs=True)
        key = f"base_model.model.model.layers.{layer}.{theirs}.lora_{which[-1].upper()}.weight"
        stored[key] = np.ascontiguousarray(value, np.float32)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "base_model_name_or_path": None, "target_modules": sorted(targets), **settings,
    }  # fmt: skip
    safetensors = need("safetensors.numpy", "peft's layout", "finetune")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / MATRICES, safetensors.save(stored, {"format": "pt"}))
    write_whole(target / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def load(folder: str | os.PathLike[str], c: Config) -> tuple[dict[str, np.ndarray], dict]:
    """Matrices by name, as `save` takes them, and what the config says.

    Raises:
        FormatError: the files are damaged, or hold what is no plain LoRA of such a model.
    """
    path = Path(folder)
    try:
        config = json.loads(read_whole(path / CONFIG))
    except ValueError as error:
        raise FormatError(f"{path / CONFIG} is no JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise FormatError(f"{path / CONFIG}: its peft_type must be LORA")
    for option, plain in (("use_dora", False), ("rank_pattern", {}), ("alpha_pattern", {}), ("modules_to_save", None)):
        if config.get(option, plain) not in (plain, None):
            raise FormatError(f"{path / CONFIG}: {option} is {config[option]!r}, which is not known")
    safetensors = need("safetensors.numpy", "peft's layout", "finetune")
    try:
        stored = safetensors.load(read_whole(path / MATRICES))
    except Exception as error:
        raise FormatError(f"{path / MATRICES} cannot be read: {error}") from None
    ours = {theirs: part for part, theirs in _names(c).items()}
    found = {}
    for key, value in sorted(stored.items()):
        match = _KEY.fullmatch(key)
        if not match or match[2] not in ours or int(match[1]) >= c.layers:
            raise FormatError(f"{path / MATRICES}: {key!r} is no adapter of a matrix that {c.arch} has")
        part = ours[match[2]]
        if match[3] == "B":
            value = _rows(value, part, int(match[1]), c, to_theirs=False)
        found[f"blk.{match[1]}.{part}.weight.lora_{match[3].lower()}"] = np.array(value, np.float32)
    return found, config


def _names(c: Config) -> dict[str, str]:
    if c.arch not in NAMES:
        raise ShapeError(f"peft's layout is not known for {c.arch}; it is for {', '.join(NAMES)}")
    return NAMES[c.arch]


def _rows(value: np.ndarray, part: str, layer: int, c: Config, *, to_theirs: bool) -> np.ndarray:
    """Rows of queries and keys in the other order."""
    if c.arch not in _REORDERED or part not in ("attn_q", "attn_k"):
        return value
    heads = (c.heads if part == "attn_q" else c.kv_heads)[layer]
    if value.ndim != 2 or value.shape[0] % (2 * heads):
        raise FormatError(f"{part}: {value.shape} are no rows of {heads} heads")
    half = value.shape[0] // heads // 2
    inner = (half, 2) if to_theirs else (2, half)
    return value.reshape(heads, *inner, -1).swapaxes(1, 2).reshape(value.shape)
