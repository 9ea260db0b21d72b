"""Rows that were run before, so that an interrupted examination goes on.

One file of JSON lines for each state of the program: rows of another engine, heuristic or feature table are never
mixed in. Only one process writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

import loadgen
import schemas
import services
from loadgen.evaluate.rows import Row

_SOURCES: Final = (
    (
        Path(loadgen.__file__).parent,
        ("*.py", "engine/*.py", "workload/*.py", "fleets_*.json", "evaluate/rows.py", "evaluate/runs.py",
         "evaluate/entrants.py"),
    ),
    (
        Path(services.__file__).parent,
        ("qweights.py", "actuator/fast/*.py", "actuator/budget.py", "actuator/effects.py", "actuator/views.py",
         "decision/heuristic.py", "decision/shield.py", "decision/targets.py", "featurizer/*.py"),
    ),
    (Path(schemas.__file__).parent, ("*.py",)),
)  # fmt: skip
"""What a row depends on beside its key."""


def fingerprint() -> str:
    """Sixteen hexadecimal digits that change with what rows depend on."""
    digest = hashlib.sha256()
    for folder, patterns in _SOURCES:
        for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


class Cache:
    """Rows by block key; ``folder`` None: kept for this process only."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / f"rows-{fingerprint()}.jsonl"
        self._rows: dict[str, dict[int, Row]] = {}

    def load(self) -> int:
        """Read the file; how many rows were there. A last line that an interruption cut is dropped."""
        if self.path is None or not self.path.exists():
            return 0
        whole = self.path.read_bytes()
        lines, _, torn = whole.rpartition(b"\n")
        if torn:
            with self.path.open("r+b") as file:
                file.truncate(len(whole) - len(torn))
        decoder = msgspec.json.Decoder(Row)
        for line in lines.splitlines():
            self._keep(decoder.decode(line))
        return sum(len(rows) for rows in self._rows.values())

    def rows(self, key: str, cards: int) -> list[Row] | None:
        """All ``cards`` rows of a block, None when some are missing."""
        found = self._rows.get(key, {})
        return [found[card] for card in range(cards)] if all(card in found for card in range(cards)) else None

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows, in the file as well."""
        rows = list(rows)
        for row in rows:
            self._keep(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def _keep(self, row: Row) -> None:
        self._rows.setdefault(row.key, {})[row.card] = row
