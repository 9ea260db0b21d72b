"""A training run's checkpoint: one safetensors file with every array, and everything else as JSON in its header.

One file is there as a whole or not at all: it is written beside the former one, synced and moved over it. Nothing
is ever unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as save_tensors

from loadgen.train.settings import TrainSettings
from schemas.features import FEATURE_HASH
from services.errors import UserError
from services.learner.checkpoint import write

NAME: Final = "train.safetensors"
_FORMAT: Final = "tidegate-train-1"
_KEY: Final = "tidegate"


class Point(msgspec.Struct, frozen=True):
    """One point of the learning curve."""

    updates: int
    transitions: int
    seconds: float
    """Of training so far, all processes together."""
    ratio: float
    worst: float
    ratios: list[float]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is not arrays."""

    format: str = _FORMAT
    feature_hash: str = FEATURE_HASH
    settings: TrainSettings
    transitions: int
    updates: int
    owed: float
    acting: int | None
    """Transitions when the network began to act; None: it has not yet."""
    seconds: float
    episodes: int
    """Next episode's number; those under way are not kept, a resumed run begins new ones."""
    sampling: str
    exploring: str
    """States of the two generators, JSON (their integers have 128 bits)."""
    written: int
    max_priority: float
    factors: dict[str, float]
    reference: list[float] | None
    """The heuristic's goodput on the validation scenarios."""
    best: float
    """Best validation return so far: that network is the policy file."""
    curve: list[Point]


class Checkpoint(msgspec.Struct, frozen=True):
    """Meta data and arrays by name (``online.*``, ``target.*``, ``adam.*``, ``replay.*``)."""

    meta: Meta
    arrays: dict[str, NDArray[np.generic]]

    def part(self, prefix: str) -> dict[str, NDArray[Any]]:
        """The arrays below ``prefix.``, without it."""
        return {n.removeprefix(f"{prefix}."): a for n, a in self.arrays.items() if n.startswith(f"{prefix}.")}


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoint`` over the former one of ``folder``, which is made when missing."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(a) for name, a in checkpoint.arrays.items()}
    write(folder / NAME, save_tensors(arrays, {_KEY: msgspec.json.encode(checkpoint.meta).decode()}))


def load(folder: Path) -> Checkpoint | None:
    """The checkpoint of ``folder``, None when there is none. UserError when it cannot be read or is of another
    version of this program."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            meta = msgspec.json.decode((file.metadata() or {}).get(_KEY, "{}"), type=Meta)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise UserError(f"train: {path} is not readable: {error}") from error
    if (meta.format, meta.feature_hash) != (_FORMAT, FEATURE_HASH):
        raise UserError(
            f"train: {path} is {meta.format} on feature table {meta.feature_hash}, this program writes {_FORMAT} on "
            f"{FEATURE_HASH}"
        )
    return Checkpoint(meta, arrays)
