"""The emulated node's engines: one socket per worker, ``<folder>/<gpu>-<name>.sock``."""

from __future__ import annotations

from pathlib import Path

from schemas.identity import parse_worker_id, worker_id
from services.actuator.engines.protocol import EngineClient, SocketEngine


def socket_path(folder: Path, worker: str) -> Path:
    """Where a worker's engine listens; ValueError for a text that is no worker id."""
    name = parse_worker_id(worker)
    return folder / f"{name.gpu}-{name.name}.sock"


def workers_in(folder: Path, node: str) -> list[str]:
    """Worker ids of the engine sockets in a node's folder, sorted; none when it does not exist yet."""
    found = []
    for path in folder.glob("*-*.sock"):
        gpu, _, name = path.stem.partition("-")
        if gpu.isdigit() and name:
            found.append(worker_id(node, int(gpu), name))
    return sorted(found)


def connect(folder: Path, worker: str, timeout_s: float) -> SocketEngine:
    """An adapter for a worker; nothing is opened before its first request."""
    return SocketEngine(EngineClient(worker, socket_path(folder, worker), timeout_s))
