"""What comes in: state messages decoded, checked, and only the newest of each node let through. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.actions import Hold
from schemas.codec import DecodeError
from schemas.features import FEATURE_COUNT
from schemas.states import STATE_BATCH, StateBatch, features_of
from schemas.subjects import parse

_MAX_INT: Final = 2**62
"""Beyond it, adding a lease would leave the 64 bits that the wire has."""


class Admitted(NamedTuple):
    """A state message that gets an answer."""

    batch: StateBatch
    features: NDArray[np.float32]
    """[workers, FEATURE_COUNT]."""
    classes: bytes
    """A byte a worker."""
    holds: bytes
    """A byte a worker: the message's, or FEATURE_TABLE_MISMATCH for all."""


class Intake:
    """Decodes and keeps the newest (boot_id, step) of every node.

    ``reject`` is called with a short label for each message that is dropped: ``too_large``, ``malformed``,
    ``unknown_version``, ``bad_shape``, ``out_of_range``, ``wrong_node``, ``stale``.
    """

    def __init__(self, reject: Callable[[str], None]) -> None:
        self._reject = reject
        self._newest: dict[str, tuple[int, int]] = {}
        self._nodes: dict[str, str] = {}

    def take(self, subject: str, data: bytes) -> Admitted | None:
        """The message, when it is to be answered."""
        try:
            batch = STATE_BATCH.decode(data)
            node = self._nodes.get(subject) or parse(subject)[1]
        except DecodeError as error:
            return self._drop(error.reason)
        except ValueError:
            return self._drop("wrong_node")
        if node != batch.node:
            return self._drop("wrong_node")
        order = (batch.boot_id, batch.step)
        if order <= self._newest.get(node, (-1, -1)):
            return self._drop("stale")
        try:
            classes, holds = bytes(batch.classes), bytes(batch.holds)
            features = features_of(batch)
        except DecodeError as error:
            if error.reason != "feature_table" or not self._lengths_agree(batch):
                return self._drop("bad_shape")
            # Another table's numbers mean nothing here, but the workers are known: hold them, safely.
            features = np.full((len(batch.workers), FEATURE_COUNT), np.nan, np.float32)
            holds = bytes([Hold.FEATURE_TABLE_MISMATCH]) * len(batch.workers)
        except ValueError:  # a class or hold beyond a byte
            return self._drop("out_of_range")
        if not (max(*order, batch.t_ns) < _MAX_INT and batch.t_ns >= 0) or not self._generations_fit(batch):
            return self._drop("out_of_range")
        self._nodes[subject] = node
        self._newest[node] = order
        return Admitted(batch, features, classes, holds)

    def _drop(self, reason: str) -> Admitted | None:
        """Count, and nothing to answer."""
        self._reject(reason)
        return None

    @staticmethod
    def _lengths_agree(batch: StateBatch) -> bool:
        return len(batch.workers) == len(batch.classes) == len(batch.holds) == len(batch.generations)

    @staticmethod
    def _generations_fit(batch: StateBatch) -> bool:
        return not batch.generations or (min(batch.generations) >= 0 and max(batch.generations) < _MAX_INT)
