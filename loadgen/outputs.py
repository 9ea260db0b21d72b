"""Files that a command writes for its user: checked before the work begins, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from services.errors import UserError


def check_file(option: str, path: Path | None) -> None:
    """UserError when ``path``, given as ``option``, cannot become a file; None: nothing was asked for."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{option}: folder {folder} does not exist")
    if path.is_dir():
        raise UserError(f"{option}: found the folder {path.absolute()}, expected the name of a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{option}: folder {folder} cannot be written to")


def check_new_folder(option: str, path: Path | None) -> None:
    """UserError unless ``path`` is an empty folder or can become one."""
    if path is None:
        return
    if path.is_dir():
        if any(path.iterdir()):
            raise UserError(f"{option}: folder {path.absolute()} is not empty: what lies there would mix with the run")
    elif path.exists():
        raise UserError(f"{option}: found the file {path.absolute()}, expected a folder")


def write_json(path: Path, value: object) -> None:
    """Indented JSON of structs and what they hold, as :func:`write_atomically`."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def write_atomically(path: Path, text: str) -> None:
    """The whole text or nothing under ``path``: written beside it, synced, then moved over it."""
    part = path.absolute().with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
