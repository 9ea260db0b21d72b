"""StateBatch: a node's states in one step (featurizer -> decision)."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.codec import Codec, DecodeError, unpack
from schemas.features import FEATURE_COUNT, FEATURE_HASH


class StateBatch(msgspec.Struct, frozen=True, array_like=True):
    """Raw features per worker, and what decision needs beside them to make an absolute command."""

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    feature_hash: str
    workers: tuple[str, ...]
    classes: tuple[int, ...]
    holds: tuple[int, ...]
    """Hold reason per worker, 0 = none."""
    generations: tuple[int, ...]
    """Quota generation per worker: the base of its next command."""
    features: bytes
    """float32 [workers, FEATURE_COUNT], little-endian; NaN = absent."""


STATE_BATCH: Final = Codec(StateBatch)


def features_of(batch: StateBatch) -> NDArray[np.float32]:
    """float32 [workers, FEATURE_COUNT].

    DecodeError: ``feature_table`` for another feature table, ``bad_shape`` when the parts do not agree.
    """
    if batch.feature_hash != FEATURE_HASH:
        raise DecodeError(
            "StateBatch", "feature_table", f"table {batch.feature_hash!r}, this program has {FEATURE_HASH!r}"
        )
    rows = len(batch.workers)
    matrix = unpack(batch.features, "<f4", rows, "StateBatch")
    lengths = {rows, len(batch.classes), len(batch.holds), len(batch.generations)}
    if len(lengths) != 1 or (rows and matrix.shape[1] != FEATURE_COUNT):
        raise DecodeError(
            "StateBatch",
            "bad_shape",
            f"{rows} workers, {len(batch.classes)} classes, {len(batch.holds)} holds, "
            f"{len(batch.generations)} generations, features of shape {matrix.shape}",
        )
    return matrix
