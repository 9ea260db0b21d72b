"""What a node process reads and writes: its configuration (JSON), request tables and results (NumPy's npz)."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.engine.specs import FleetConfig
from loadgen.node.memory import BUDGET_BYTES
from loadgen.requests import RequestTable
from schemas.classes import ServiceClass
from schemas.identity import worker_id
from services.errors import UserError

_COLUMNS = tuple(field.name for field in dataclasses.fields(RequestTable))


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One emulated node."""

    node: str
    sockets: str
    """Folder of the node's sockets; it is made if it is not there."""
    tables: str
    """File of :func:`save_tables`, one table per worker."""
    results: str
    """File that receives the requests' outcomes when the replay is over."""
    duration_s: Annotated[float, msgspec.Meta(gt=0.0)]
    """Length of the replay, simulated seconds."""
    fleet: FleetConfig = FleetConfig()
    classes: tuple[int, ...] = ()
    """ServiceClass of each worker; none: the class of most of its requests."""
    step_timeout_s: Annotated[float, msgspec.Meta(gt=0.0)] = 2.0
    """How long a step waits for its commands, wall seconds; then it goes on without and counts as missed."""
    speed: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Simulated seconds per wall second at most; 0: no bound."""
    arena_bytes: Annotated[int, msgspec.Meta(ge=1 << 20)] = BUDGET_BYTES
    """Shared memory for the blocks of all workers, bytes: sets the scale at which they are kept."""
    linger_s: Annotated[float, msgspec.Meta(ge=0.0)] = 10.0
    """How long the node stays after the last step so that telemetry sees the end, wall seconds."""
    log_level: str = "info"
    parent_pid: int = 0
    """Die with this process; 0: do not."""

    def workers(self) -> tuple[str, ...]:
        """Worker ids ``<node>/<gpu>/w<k>``, in the order of the tables."""
        fleet = self.fleet
        return tuple(
            worker_id(self.node, c, f"w{k}") for c in range(fleet.cards) for k in range(fleet.workers_per_card)
        )


def read_config(path: Path) -> NodeConfig:
    """The configuration; UserError names the file, what was found and what was expected."""
    try:
        raw = msgspec.json.decode(path.read_bytes())
        for limits in _limits_in(raw):  # JSON has no infinity: what has no limit is written as null
            limits.update({name: float("inf") for name, value in limits.items() if value is None})
        config = msgspec.convert(raw, NodeConfig, str_keys=True)
        config.workers()
    except OSError as error:
        raise UserError(f"{path}: found {error.strerror}, expected a readable file") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    return config


def _limits_in(raw: Any) -> list[dict[str, Any]]:
    fleet = raw.get("fleet") if isinstance(raw, dict) else None
    limits = fleet.get("limits") if isinstance(fleet, dict) else None
    return [one for one in limits.values() if isinstance(one, dict)] if isinstance(limits, dict) else []


def write_config(path: Path, config: NodeConfig) -> None:
    """The file that :func:`read_config` reads."""
    path.write_bytes(msgspec.json.encode(config))


def save_tables(path: Path, tables: Sequence[RequestTable]) -> None:
    """Write request tables, all or nothing."""
    arrays = {f"{i}.{name}": getattr(table, name) for i, table in enumerate(tables) for name in _COLUMNS}
    told = {name: array for name, array in arrays.items() if array is not None}
    save_arrays(path, {"tables": np.array(len(tables)), **told})


def load_tables(path: Path, count: int) -> list[RequestTable]:
    """Read ``count`` tables; UserError when the file does not hold exactly these."""
    try:
        with np.load(path, allow_pickle=False) as held:
            if int(held["tables"]) != count:
                raise UserError(f"{path}: {int(held['tables'])} request tables, expected {count}: one per worker")
            return [_table(held, i).check() for i in range(count)]
    except OSError as error:
        raise UserError(f"{path}: found {error.strerror or error}, expected a readable file") from error
    except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: found {error}, expected request tables as a parent process writes them") from error


def _table(held: Mapping[str, NDArray[Any]], i: int) -> RequestTable:
    return RequestTable(**{name: held[f"{i}.{name}"] for name in _COLUMNS if f"{i}.{name}" in held})


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """An npz file that appears whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        try:
            np.savez(part, allow_pickle=False, **arrays)
            part.flush()
            os.replace(part.name, path)
        except BaseException:
            os.unlink(part.name)
            raise


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of :func:`save_arrays`; UserError when the file cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as held:
            return {name: held[name] for name in held.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: found {error}, expected a node's results") from error


def arrays_of(results: object) -> dict[str, NDArray[Any]]:
    """The fields of a results dataclass or Struct that are numbers or arrays, by name."""
    names = (
        [field.name for field in dataclasses.fields(results)]
        if dataclasses.is_dataclass(results)
        else list(getattr(results, "__struct_fields__", ()))
    )
    return {n: np.asarray(v) for n in names if isinstance(v := getattr(results, n), np.ndarray | int | float | bool)}


def classes_of(config: NodeConfig, tables: Sequence[RequestTable]) -> tuple[int, ...]:
    """ServiceClass of each worker; UserError when the configuration's do not fit."""
    if config.classes:
        if len(config.classes) != len(tables) or not all(0 <= one < len(ServiceClass) for one in config.classes):
            raise UserError(f"classes {config.classes}: expected {len(tables)} numbers below {len(ServiceClass)}")
        return config.classes
    return tuple(
        int(np.bincount(table.service_class).argmax()) if len(table) else int(ServiceClass.CHAT) for table in tables
    )
