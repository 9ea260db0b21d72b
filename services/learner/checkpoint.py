"""The learner's checkpoints: what was learned, and up to which message of the stream.

A checkpoint is two files: ``checkpoint-<n>.safetensors`` with the arrays and ``checkpoint-<n>.json`` with
everything else, the arrays' sha256 among it. Each is written under another name, synced and renamed; the JSON
comes last, so a checkpoint is there as a whole or not at all. The two newest are kept. One that cannot be read
or does not match its sha256 is refused, and the one before it used. Nothing is ever unpickled.

**What a kill costs.** Messages are acknowledged once their rows are in the replay, which a kill empties. This
loses nothing, because TG_TRANSITIONS keeps acknowledged messages and the consumer is bound anew from the
checkpoint, whatever the server remembers: rows up to ``sequence`` are read again from ``replay_from`` into the
replay without learning from them twice, and those after it are learned from. What is done again is the work
since the last checkpoint. Only limits of the stream that dropped a message before this make a loss.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from services.learner.trajectories import Last
from services.qweights import Origin

KEEP: Final = 2
FORMAT: Final = "tidegate-learner-1"
_NAME = re.compile(r"checkpoint-(\d{8,12})\.json")


class Meta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a checkpoint that is not arrays."""

    format: str = FORMAT
    feature_hash: str
    objective: str
    hidden: tuple[int, ...]
    lineage: str
    """Which life of the stream ``sequence`` counts in: a new store begins at 1 again."""
    sequence: int
    """Stream sequence learned from."""
    replay_from: int
    """Stream sequence of the oldest row in the replay: from here it can be filled again."""
    transitions: int
    """Learned from, since the first start."""
    updates: int
    owed: float
    """Gradient steps owed for rows up to ``sequence`` and not made yet."""
    candidate_at: int
    """Updates at the last candidate."""
    parent: str
    """Version of the last candidate, which the next one names as its parent."""
    rng: str
    """State of the NumPy bit generator, JSON (its integers have 128 bits)."""
    capacity: int
    written: int
    max_priority: float
    trajectories: Last | None = None
    """Only where the replay's rows are kept."""
    origin: Origin = Origin()
    """How the weights were begun, which their candidates go on saying: the veto they were trained with is in it."""


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    meta: Meta
    arrays_sha256: str
    arrays_bytes: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Meta data and arrays by name (``online.*``, ``target.*``, ``adam.*``, perhaps ``replay.*``)."""

    meta: Meta
    arrays: dict[str, NDArray[np.generic]]


class Found(msgspec.Struct, frozen=True):
    """The checkpoints of a folder that can be read, newest first, and why others cannot."""

    usable: list[Checkpoint]
    refused: list[str]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write ``checkpoint`` as the newest of ``folder`` (made when missing), drop all but two; the JSON's path.

    OSError when the disk refuses; then the older ones are still there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = _numbers(folder)
    number = known[0] + 1 if known else 1
    contiguous: dict[str, NDArray[Any]] = {name: np.ascontiguousarray(a) for name, a in checkpoint.arrays.items()}
    data = save_tensors(contiguous)
    manifest = _Manifest(meta=checkpoint.meta, arrays_sha256=hashlib.sha256(data).hexdigest(), arrays_bytes=len(data))
    path = _path(folder, number)
    write(path.with_suffix(".safetensors"), data)
    write(path, msgspec.json.format(msgspec.json.encode(manifest)))
    for old in known[KEEP - 1 :]:
        _path(folder, old).unlink(missing_ok=True)
    _sweep(folder, {number, *known[: KEEP - 1]})
    return path


def load(folder: Path) -> Found:
    """Read what is in ``folder``; an absent folder holds nothing. Never raises for what a file contains."""
    usable: list[Checkpoint] = []
    refused: list[str] = []
    for number in _numbers(folder):
        path = _path(folder, number)
        try:
            usable.append(_read(path))
        except (OSError, ValueError, SafetensorError) as error:
            refused.append(f"{path}: {error}")
    return Found(usable, refused)


def _read(path: Path) -> Checkpoint:
    manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
    if manifest.meta.format != FORMAT:
        raise ValueError(f"format {manifest.meta.format!r}, expected {FORMAT!r}")
    data = path.with_suffix(".safetensors").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest != manifest.arrays_sha256:
        raise ValueError(
            f"arrays of {len(data)} bytes with sha256 {digest[:12]}, expected {manifest.arrays_bytes} bytes with "
            f"{manifest.arrays_sha256[:12]}"
        )
    return Checkpoint(manifest.meta, dict(load_tensors(data)))


def write(path: Path, data: bytes) -> None:
    """``data`` under ``path``, whole or not at all, even when the machine loses power."""
    passing = path.with_name(f".{path.name}.part")
    with passing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    passing.replace(path)
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _sweep(folder: Path, kept: set[int]) -> None:
    """Drop arrays and half-written files that belong to no kept checkpoint."""
    names = {_path(folder, number).with_suffix(".safetensors").name for number in kept}
    for path in folder.iterdir():
        orphan = path.name.startswith("checkpoint-") and path.suffix == ".safetensors" and path.name not in names
        if orphan or (path.name.startswith(".checkpoint-") and path.suffix == ".part"):
            path.unlink(missing_ok=True)


def _numbers(folder: Path) -> list[int]:
    """Numbers of the checkpoints in ``folder``, newest first."""
    names = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in names if match), reverse=True)


def _path(folder: Path, number: int) -> Path:
    return folder / f"checkpoint-{number:08d}.json"
