"""What a plan is made from: each worker's memory, link and pace, live one by one or offline as columns. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.metrics import COLUMN, METRICS

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

INF: Final = float("inf")


class WorkerView(msgspec.Struct):
    """A worker as the actuator knows it when it plans; bytes unless the name says otherwise."""

    q0_bytes: float
    capacity_bytes: float
    """KV capacity of the whole card."""
    group_bytes: float
    floor_bytes: float
    mapped_bytes: float
    kv_bytes: float
    """Live and idle KV."""
    idle_bytes: float
    swap_allowed: bool
    host_free_bytes: float = INF
    link_bytes_per_s: float = 0.0
    iteration_s: float = 0.0
    """Mean gap between two tokens; 0: nothing decodes, or not known."""
    prefetch_bytes: float = 0.0
    """KV of sessions that are to come back now if the budget allows; the emulated fleet prefetches by itself."""


@dataclasses.dataclass(frozen=True, eq=False)
class Views:
    """:class:`WorkerView` for n workers, each array [n]; ``cards`` int64 numbers cards 0..c-1 without gaps."""

    cards: I8
    q0_bytes: F8
    capacity_bytes: F8
    group_bytes: F8
    floor_bytes: F8
    mapped_bytes: F8
    kv_bytes: F8
    idle_bytes: F8
    swap_allowed: Bool
    host_free_bytes: F8
    link_bytes_per_s: F8
    iteration_s: F8
    prefetch_bytes: F8


def views_of(
    metrics: F8, cards: I8, classes: NDArray[np.uint8], limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS
) -> Views:
    """Views of METRICS rows: float64 [n, len(METRICS)], int64 [n] cards (any numbers), uint8 [n] classes.

    An unknown group is one byte, an unknown mapping is the KV in it, an unknown host tier bounds nothing
    (the engine itself refuses what does not fit), unknown idle KV is none: what nobody can see is not moved.
    """
    if metrics.ndim != 2 or metrics.shape[1] != len(METRICS):
        raise ValueError(f"metrics of shape {metrics.shape}: expected [workers, {len(METRICS)}]")

    def column(name: str, missing: float | F8) -> F8:
        values = metrics[:, COLUMN[name]]
        return np.where(np.isfinite(values), values, missing)

    allowed = np.array([limits[one].swap_allowed for one in ServiceClass])
    kv = column("kv_bytes", 0.0)
    host = metrics[:, COLUMN["host_capacity_bytes"]] - metrics[:, COLUMN["host_used_bytes"]]
    return Views(
        cards=np.unique(cards, return_inverse=True)[1].astype(np.int64).reshape(-1),
        q0_bytes=column("q0_bytes", 0.0),
        capacity_bytes=column("card_kv_capacity_bytes", 0.0),
        group_bytes=column("page_group_bytes", 1.0),
        floor_bytes=column("floor_bytes", 0.0),
        mapped_bytes=column("kv_mapped_bytes", kv),
        kv_bytes=kv,
        idle_bytes=column("kv_idle_bytes", 0.0),
        swap_allowed=allowed[classes],
        host_free_bytes=np.where(np.isfinite(host), np.maximum(host, 0.0), INF),
        link_bytes_per_s=column("link_bytes_per_s", 0.0),
        iteration_s=column("iteration_s", 0.0),
        prefetch_bytes=np.zeros(len(metrics)),
    )
