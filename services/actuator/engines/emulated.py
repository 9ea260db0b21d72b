"""The emulated node's engines: one socket per worker, ``<folder>/<gpu>-<name>.sock``."""

from __future__ import annotations

from pathlib import Path

from schemas.identity import parse_worker_id, worker_id
from services.actuator.engines.protocol import EngineClient, SocketEngine


def socket_path(folder: Path, worker: str) -> Path:
    """Where a worker's engine listens; ValueError for a text that is no worker id."""
    name = parse_worker_id(worker)
    return folder / f"{name.gpu}-{name.name}.sock"


def gpu_and_name(path: Path) -> tuple[int, str] | None:
    """Card and name of the worker that a socket's file name tells; None where it tells none."""
    gpu, _, name = path.stem.partition("-")
    return (int(gpu), name) if path.suffix == ".sock" and gpu.isdecimal() and name else None


def workers_in(folder: Path, node: str) -> list[str]:
    """Worker ids of the engine sockets in a node's folder, sorted; none when it does not exist yet."""
    named = map(gpu_and_name, folder.glob("*-*.sock"))
    return sorted(worker_id(node, *one) for one in named if one is not None)


def connect(folder: Path, worker: str, timeout_s: float) -> SocketEngine:
    """An adapter for a worker; nothing is opened before its first request."""
    return SocketEngine(EngineClient(worker, socket_path(folder, worker), timeout_s))
