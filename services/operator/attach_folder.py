"""The folder of an attachment: who is attached (``attached.json``), what was seen, the embedded server's store, logs.

One worker, one folder, one process: the folder is locked while attached, and whatever is in it outlives that, so that
``tidegate report`` can be asked later.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Final

import msgspec

from schemas.subjects import token
from services.errors import UserError

FILE: Final = "attached.json"
LOCK: Final = "lock"
SETTINGS: Final = "operator.toml"


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """What ``attached.json`` says. It holds a password: the file is its owner's alone."""

    worker: str
    kind: str
    url: str
    """Of the server."""
    mode: str
    nats_url: str
    nats_user: str = ""
    nats_password: str = ""
    nats_token: str = ""
    embedded: bool = False
    """The NATS server is attach's own: its store is in the folder, and it runs while attach does."""
    pid: int = 0


def root(environ: os._Environ[str] | dict[str, str]) -> Path:
    """Where folders are kept that nobody named: ``$XDG_STATE_HOME/tidegate/attach``."""
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local/state")
    return Path(state) / "tidegate" / "attach"


def folder_of(worker: str, environ: os._Environ[str] | dict[str, str]) -> Path:
    """The folder of a worker that nobody named another for."""
    return root(environ) / token(worker.replace("/", "-"))


def newest(environ: os._Environ[str] | dict[str, str]) -> Path | None:
    """The folder of whoever attached last; None when nobody did."""
    found = [path for path in root(environ).glob(f"*/{FILE}") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else None


def claim(folder: Path) -> IO[bytes]:
    """Make the folder and lock it; keep the file open as long as it is used. UserError when another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / LOCK).open("ab")
    except OSError as error:
        raise UserError(f"--folder {folder}: found {error.strerror}, expected a folder to write to") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"--folder {folder}: found an attachment that runs ({_who(folder)}), expected a folder of one's own "
            "(another --name or --folder)"
        ) from None
    return lock


def running(folder: Path) -> bool:
    """Whether somebody is attached with this folder now."""
    try:
        with (folder / LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def remember(folder: Path, attached: Attached) -> None:
    """Write ``attached.json``, and the settings with which operator commands reach the same bus."""
    _write(folder / FILE, msgspec.json.format(msgspec.json.encode(attached), indent=1))
    bus = {"nats_url": attached.nats_url, "nats_user": attached.nats_user, "nats_password": attached.nats_password,
           "nats_token": attached.nats_token}  # fmt: skip
    # A JSON string without control characters is a TOML one.
    lines = ["[common]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in bus.items() if value)]
    _write(folder / SETTINGS, ("\n".join(lines) + "\n").encode())


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, for its owner alone."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    part.replace(path)


def recall(folder: Path) -> Attached | None:
    """What a folder says; None where nobody was attached with it. UserError for a file that cannot be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Attached)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{folder / FILE}: found {error}, expected what attach wrote") from error


def _who(folder: Path) -> str:
    try:
        attached = recall(folder)
    except UserError:
        attached = None
    return f"{attached.worker} at {attached.url}, process {attached.pid}" if attached is not None else "of nobody known"
