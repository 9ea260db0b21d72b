"""NodeSample: what telemetry measured on a node in one step (telemetry -> featurizer)."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.codec import Codec, DecodeError, fit_columns, pack, unpack
from schemas.metrics import METRICS


class NodeSample(msgspec.Struct, frozen=True, array_like=True):
    """One row of METRICS per worker. Late is useless: the newest wins."""

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    workers: tuple[str, ...]
    cards: tuple[int, ...]
    """The card of each worker; workers with the same number share HBM and link."""
    classes: tuple[int, ...]
    """ServiceClass of each worker."""
    metrics: bytes
    """float64 [workers, columns], little-endian; NaN = missing."""
    source: str = ""
    ages_s: tuple[float, ...] = ()
    """How old each worker's numbers are at ``t_ns``, the oldest that the row is made of; empty: of that moment."""
    flags: tuple[tuple[int, str, str], ...] = ()
    """(row, metric, why) of what a source said and was not believed."""


NODE_SAMPLE: Final = Codec(NodeSample)


def pack_metrics(matrix: NDArray[np.float64]) -> bytes:
    """Bytes of a METRICS matrix [workers, len(METRICS)]; ValueError for another width."""
    if matrix.ndim != 2 or matrix.shape[1] != len(METRICS):
        raise ValueError(f"metrics of shape {matrix.shape}: expected [workers, {len(METRICS)}]")
    return pack(matrix, "<f8")


def metrics_of(sample: NodeSample) -> NDArray[np.float64]:
    """float64 [workers, len(METRICS)], columns the sender lacks as NaN.

    DecodeError (``bad_shape``) when bytes, workers, cards and classes do not agree.
    """
    rows = len(sample.workers)
    if len(sample.cards) != rows or len(sample.classes) != rows:
        raise DecodeError(
            "NodeSample",
            "bad_shape",
            f"{rows} workers, {len(sample.cards)} cards, {len(sample.classes)} classes: expected equal numbers",
        )
    return fit_columns(unpack(sample.metrics, "<f8", rows, "NodeSample"), len(METRICS))
