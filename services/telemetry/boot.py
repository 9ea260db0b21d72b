"""boot_id: which life of a node's telemetry a message belongs to; the greater is the newer.

It is the wall clock in ns at the start, and kept increasing by a file, because a clock may be set back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from services.errors import UserError

MAX_BOOT_ID: Final = 2**62
"""A greater number in the file is damage, not a boot."""


class Boots:
    """Boot ids of one process, each greater than all before it. ``path`` None: no file, the clock alone."""

    def __init__(self, path: Path | None, wall_ns: Callable[[], int]) -> None:
        self._path = path
        self._wall_ns = wall_ns
        self._last = 0
        self.damaged = False
        """The file held something else than a boot id and was written anew."""

    def next(self) -> int:
        """A new boot id, stored before it is given out. UserError when the file cannot be written."""
        boot_id = max(self._wall_ns(), self._last + 1, self._stored() + 1)
        if self._path is not None:
            try:
                write_whole(self._path, f"{boot_id}\n")
            except OSError as error:
                raise UserError(
                    f"boot_file {self._path}: found {error.strerror}, expected a file that can be written"
                ) from error
        self._last = boot_id
        return boot_id

    def _stored(self) -> int:
        """The file's number; 0 when there is no file or it is damaged."""
        if self._path is None:
            return 0
        try:
            text = self._path.read_bytes()[:64].strip()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise UserError(f"boot_file {self._path}: found {error.strerror}, expected a readable file") from error
        if text.isdigit() and int(text) < MAX_BOOT_ID:
            return int(text)
        self.damaged = True
        return 0


def write_whole(path: Path, text: str) -> None:
    """Replace a file's content so that a kill at any moment leaves the old or the new one. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
