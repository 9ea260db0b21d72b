"""The Q network's weights as a file, and its forward pass without torch.

The network (dueling, Wang et al. 2016): x = normalise(raw); ReLU layers of the ``hidden`` sizes; a value head
V and an advantage head A; Q(s, a) = V(s) + A(s, a) - mean over all actions of A(s, .).
Beside it, where ``risk_size`` is above 0, a risk head: one ReLU layer of that size over the same x and five
logits; risk(s, a) = 1 / (1 + exp(-logit)) is the probability that memory is exhausted soon after a.
``services.qnet`` trains it with torch; decision only multiplies matrices, and so starts without loading
it. A file is safetensors, never pickle; its metadata names the feature table it was trained on.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from schemas.actions import ACTION_COUNT
from schemas.features import FEATURE_COUNT, FEATURE_HASH, INPUT_COUNT, normalise
from services.errors import PolicyError

MAX_FILE_BYTES: Final = 1024 * 1024
MAX_WEIGHT: Final = 1e3
"""No trained weight comes near it; one beyond is a broken run, and Q values from it mean nothing."""
MAX_HIDDEN: Final = 4096
_FORMAT: Final = "tidegate-q-1"
_ABOUT_KEY: Final = "tidegate"
_BLOCK_ROWS: Final = 512


class Origin(msgspec.Struct, frozen=True):
    """How weights were made, enough to make them again."""

    seed: int | None = None
    command: str = ""
    config: dict[str, Any] = {}
    """Settings of the training run."""


class Weights(msgspec.Struct, frozen=True):
    """A network's tensors by name and where they come from."""

    tensors: Mapping[str, NDArray[np.float32]]
    """``hidden.<k>.weight`` [out, in], ``hidden.<k>.bias`` [out], and the heads ``value`` (1 row) and
    ``advantage`` (5 rows) alike; with a risk head ``risk_hidden`` and ``risk`` (5 rows)."""
    hidden: tuple[int, ...]
    version: str = ""
    transitions: int = 0
    """Transitions it has learned from."""
    risk_size: int = 0
    """Hidden size of the risk head, 0: there is none, as in files of earlier versions."""
    origin: Origin = Origin()


class Values(NamedTuple):
    """What a network says of n states."""

    q: NDArray[np.float32]
    """[n, 5]."""
    risk: NDArray[np.float32] | None = None
    """[n, 5], 0 to 1; None where the network has no risk head."""


def veto_of(weights: Weights) -> float:
    """The risk above which the network was trained not to act, as its file says: 0 to 1; 1: it knows no such limit.
    PolicyError when the file says anything else."""
    said = weights.origin.config.get("veto", 1.0)
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not 0.0 <= said <= 1.0:
        raise PolicyError(f"weights {weights.version!r}: veto {said!r}, expected 0 to 1")
    return float(said)


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says of itself."""

    format: str
    feature_hash: str
    version: str
    hidden: tuple[int, ...]
    transitions: int = 0
    risk_size: int = 0
    origin: Origin = Origin()


class _Header(msgspec.Struct, frozen=True, rename={"metadata": "__metadata__"}):
    metadata: dict[str, str] = {}


def shapes(hidden: tuple[int, ...], risk_size: int = 0) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a network with these hidden sizes and, above 0, a risk head of that size."""
    sizes = (INPUT_COUNT, *hidden)
    out: dict[str, tuple[int, ...]] = {}
    for k, (wide, narrow) in enumerate(itertools.pairwise(sizes)):
        out[f"hidden.{k}.weight"], out[f"hidden.{k}.bias"] = (narrow, wide), (narrow,)
    for head, rows in (("value", 1), ("advantage", ACTION_COUNT)):
        out[f"{head}.weight"], out[f"{head}.bias"] = (rows, sizes[-1]), (rows,)
    if risk_size:
        out["risk_hidden.weight"], out["risk_hidden.bias"] = (risk_size, INPUT_COUNT), (risk_size,)
        out["risk.weight"], out["risk.bias"] = (ACTION_COUNT, risk_size), (ACTION_COUNT,)
    return out


def digest(data: bytes) -> str:
    """The sha256 that a policy pointer must name, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def check(weights: Weights) -> None:
    """PolicyError when a tensor is missing, of another shape, not finite or beyond MAX_WEIGHT."""
    expected = shapes(weights.hidden, weights.risk_size)
    if set(weights.tensors) != set(expected):
        odd = sorted(set(weights.tensors) ^ set(expected))
        raise PolicyError(f"weights {weights.version!r}: tensors {odd} are missing or unknown")
    for name, shape in expected.items():
        tensor = weights.tensors[name]
        if tensor.shape != shape or tensor.dtype != np.float32:
            raise PolicyError(
                f"weights {weights.version!r}: {name} is {tensor.dtype} {tensor.shape}, expected float32 {shape}"
            )
        if not np.isfinite(tensor).all():
            raise PolicyError(f"weights {weights.version!r}: {name} has values that are not finite")
        largest = float(np.abs(tensor).max(initial=0.0))
        if largest > MAX_WEIGHT:
            raise PolicyError(f"weights {weights.version!r}: {name} reaches {largest:g}, at most {MAX_WEIGHT:g}")


def save(weights: Weights) -> bytes:
    """safetensors bytes; PolicyError for weights that nobody could load again."""
    check(weights)
    about = _About(
        format=_FORMAT,
        feature_hash=FEATURE_HASH,
        version=weights.version,
        hidden=weights.hidden,
        transitions=weights.transitions,
        risk_size=weights.risk_size,
        origin=weights.origin,
    )
    # One entry: safetensors writes several in an order that changes from run to run, and with it the digest.
    metadata = {_ABOUT_KEY: msgspec.json.encode(about).decode()}
    data = save_tensors({name: np.ascontiguousarray(t) for name, t in weights.tensors.items()}, metadata)
    if len(data) > MAX_FILE_BYTES:
        raise PolicyError(f"weights {weights.version!r}: {len(data)} bytes, at most {MAX_FILE_BYTES}")
    return data


def load(data: bytes) -> Weights:
    """The weights in ``data``, checked; PolicyError says what is wrong with them, whatever the bytes are."""
    if len(data) > MAX_FILE_BYTES:
        raise PolicyError(f"weights: {len(data)} bytes, at most {MAX_FILE_BYTES}")
    about = _about(data)
    if about.format != _FORMAT:
        raise PolicyError(f"weights {about.version!r}: format {about.format!r}, expected {_FORMAT!r}")
    if about.feature_hash != FEATURE_HASH:
        raise PolicyError(
            f"weights {about.version!r}: trained on feature table {about.feature_hash!r}, "
            f"this program has {FEATURE_HASH!r}"
        )
    if not about.hidden or not all(0 < size <= MAX_HIDDEN for size in about.hidden):
        raise PolicyError(f"weights {about.version!r}: hidden sizes {about.hidden}: expected 1 to {MAX_HIDDEN} each")
    if not 0 <= about.risk_size <= MAX_HIDDEN:
        raise PolicyError(f"weights {about.version!r}: risk head of {about.risk_size}, expected 0 to {MAX_HIDDEN}")
    try:
        tensors = load_tensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"weights: not readable: {error}") from error
    weights = Weights(tensors, about.hidden, about.version, about.transitions, about.risk_size, about.origin)
    check(weights)
    return weights


def _about(data: bytes) -> _About:
    """What stands in a safetensors header (8 bytes of length, then JSON) about the network."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise PolicyError(f"weights: {len(data)} bytes are no safetensors file")
    try:
        metadata = msgspec.json.decode(data[8 : 8 + size], type=_Header).metadata
        return msgspec.json.decode(metadata.get(_ABOUT_KEY, "{}"), type=_About)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise PolicyError(f"weights: unreadable header: {error}") from error


def q_values(weights: Weights, raw: NDArray[np.float32]) -> NDArray[np.float32]:
    """Q float32 [n, 5] of raw states float32 [n, FEATURE_COUNT]."""
    return _in_blocks(weights, raw, _forward)


def values(weights: Weights, raw: NDArray[np.float32]) -> Values:
    """Q and risk of raw states float32 [n, FEATURE_COUNT]."""
    if not weights.risk_size:
        return Values(q_values(weights, raw))
    both = _in_blocks(weights, raw, lambda w, x: np.concatenate([_forward(w, x), _risk(w, x)], axis=1))
    return Values(both[:, :ACTION_COUNT], both[:, ACTION_COUNT:])


def best(found: Values, allowed: NDArray[np.bool_], veto: float = 1.0) -> NDArray[np.int8]:
    """int8 [n]: the action of the highest Q (the lowest number among equals) of those ``allowed`` bool [n, 5]
    whose risk is at most ``veto``; where every allowed one is riskier, the least risky. Each row must allow an
    action. Without a risk head ``veto`` has no effect."""
    if found.risk is None or veto >= 1.0:
        candidates, score = allowed, found.q
    else:
        safe = allowed & (found.risk <= veto)
        any_safe = safe.any(axis=1, keepdims=True)
        candidates = np.where(any_safe, safe, allowed)
        score = np.where(any_safe, found.q, -found.risk)
    chosen: NDArray[np.intp] = np.where(candidates, score, -np.inf).argmax(axis=1)
    return chosen.astype(np.int8)


@np.errstate(invalid="ignore", over="ignore")
def _in_blocks(
    weights: Weights,
    raw: NDArray[np.float32],
    function: Callable[[Weights, NDArray[np.float32]], NDArray[np.float32]],
) -> NDArray[np.float32]:
    if raw.ndim != 2 or raw.shape[1] != FEATURE_COUNT:
        raise ValueError(f"states of shape {raw.shape}: expected [n, {FEATURE_COUNT}]")
    # In blocks whose layers stay in the cache: a third faster than one matrix of 10,000 rows.
    blocks = [function(weights, normalise(raw[i : i + _BLOCK_ROWS])) for i in range(0, max(1, len(raw)), _BLOCK_ROWS)]
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def _forward(weights: Weights, x: NDArray[np.float32]) -> NDArray[np.float32]:
    tensors = weights.tensors
    for k in range(len(weights.hidden)):
        x = x @ tensors[f"hidden.{k}.weight"].T
        x += tensors[f"hidden.{k}.bias"]
        np.maximum(x, 0.0, out=x)
    value = x @ tensors["value.weight"].T + tensors["value.bias"]
    advantage = x @ tensors["advantage.weight"].T + tensors["advantage.bias"]
    q: NDArray[np.float32] = value + advantage - advantage.mean(axis=1, keepdims=True)
    return q


def _risk(weights: Weights, x: NDArray[np.float32]) -> NDArray[np.float32]:
    tensors = weights.tensors
    x = np.maximum(x @ tensors["risk_hidden.weight"].T + tensors["risk_hidden.bias"], 0.0)
    logits = x @ tensors["risk.weight"].T + tensors["risk.bias"]
    risk: NDArray[np.float32] = 1.0 / (1.0 + np.exp(-logits))
    return risk
