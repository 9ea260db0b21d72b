"""What others wrote and the report shows: learning curves, and how well return times are told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.bench.returns_scores import Question
from services.errors import UserError


class Point(msgspec.Struct, frozen=True):
    """One validation during training."""

    transitions: int
    ratio: float
    """Goodput over the heuristic's, on validation fleets."""
    worst: float | None = None


class Curve(NamedTuple):
    """One training run."""

    name: str
    points: list[Point]


class _Returns(msgspec.Struct, frozen=True):
    questions: list[Question]


def curves(paths: Sequence[Path]) -> list[Curve]:
    """Of files of JSON lines with ``transitions`` and ``ratio``, and of folders of training runs. UserError for what
    is neither."""
    return [_curve(path) for path in paths]


def reliability(path: Path | None) -> list[Question]:
    """The questions of ``tidegate bench returns --json``; UserError when it is something else."""
    if path is None:
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Returns).questions
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"--returns {path}: {error}") from error


def _curve(path: Path) -> Curve:
    if path.is_dir():
        from loadgen.train import checkpoint

        saved = checkpoint.load(path)
        if saved is None:
            raise UserError(f"--training-log: folder {path} holds no training run")
        points = [Point(one.transitions, one.ratio, one.worst) for one in saved.meta.curve]
        return Curve(f"seed {saved.meta.settings.seed}", points)
    decoder = msgspec.json.Decoder(Point)
    points = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                points.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                if b'"ratio"' in line:
                    raise UserError(f"--training-log {path}, line {number}: {error}") from error
    except OSError as error:
        raise UserError(f"--training-log {path}: {error.strerror}") from error
    if not points:
        raise UserError(f"--training-log {path}: no line of it has transitions and a ratio")
    return Curve(path.stem, points)
