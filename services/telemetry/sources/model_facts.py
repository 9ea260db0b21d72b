"""Bytes of a token's KV and of the weights, from a model's folder where it can be read.

Engines publish how many blocks they have, seldom what a block takes. ``/v1/models`` names the model's folder in
``root``; where that is a folder on this host, its ``config.json`` says the shape. Sources: the keys of Hugging Face
configurations (``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``; ``kv_lora_rank`` and
``qk_rope_head_dim`` for latent attention, where K and V share one vector). Under tensor parallelism the bytes are
those of all cards together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

ASSUMED_KV_BYTES_PER_TOKEN: Final = 131072.0
"""A model of 8 billion parameters with grouped queries in 16 bit: 32 layers x 8 heads x 128 x 2 x 2 bytes."""
MAX_CONFIG_BYTES: Final = 1 << 20
_DTYPE_BYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


class ModelFacts(NamedTuple):
    """``config`` is empty and ``weights_bytes`` NaN where the folder cannot be read."""

    config: Mapping[str, Any] = {}
    weights_bytes: float = math.nan


def read_model_facts(folder: Path) -> ModelFacts:
    """Of a local folder; nothing known for whatever is not one. Reads files."""
    try:
        path = folder / "config.json"
        if not folder.is_absolute() or path.stat().st_size > MAX_CONFIG_BYTES:
            return ModelFacts()
        config = msgspec.json.decode(path.read_bytes())
        weights_bytes = float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    except (OSError, ValueError, RecursionError):
        return ModelFacts()
    if not isinstance(config, dict):
        return ModelFacts()
    return ModelFacts(config, weights_bytes or math.nan)


def model_folder(body: bytes, model: str) -> Path | None:
    """The folder of ``model`` (the first one listed where none has the name) in an answer of ``/v1/models``; None
    where the answer names none."""
    try:
        listed = msgspec.json.decode(body)["data"]
        named = [entry for entry in listed if entry.get("id") == model] or list(listed)
        root = named[0].get("root")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    return Path(root) if isinstance(root, str) and root.startswith("/") and "\0" not in root else None


def kv_bytes_per_token(config: Mapping[str, Any], cache_dtype: str = "auto") -> float:
    """Bytes of one token's K and V over all layers; NaN where the configuration does not tell.

    ``cache_dtype``: of the engine; ``auto`` is the model's own, anything with ``fp8`` or ``int8`` one byte.
    """
    inner = config.get("text_config")
    shape = {**config, **inner} if isinstance(inner, dict) else config
    if "fp8" in cache_dtype or "int8" in cache_dtype:
        item = 1
    else:
        named = cache_dtype if cache_dtype != "auto" else str(shape.get("torch_dtype") or shape.get("dtype") or "")
        item = _DTYPE_BYTES.get(named.removeprefix("torch."), 2)
    layers = _count(shape, "num_hidden_layers")
    latent = _count(shape, "kv_lora_rank")
    if latent == latent:
        return layers * (latent + _count(shape, "qk_rope_head_dim")) * item
    heads = _count(shape, "num_attention_heads")
    groups = _count(shape, "num_key_value_heads")
    head_dim = _count(shape, "head_dim")
    if head_dim != head_dim:
        head_dim = _count(shape, "hidden_size") / heads
    return layers * 2 * (groups if groups == groups else heads) * head_dim * item


def _count(shape: Mapping[str, Any], key: str) -> float:
    value = shape.get(key)
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1e9 else math.nan
