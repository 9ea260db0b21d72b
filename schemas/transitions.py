"""TransitionBatch: one-step transitions of a node (featurizer -> learner, JetStream TG_TRANSITIONS)."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.codec import Codec, DecodeError, unpack
from schemas.features import FEATURE_COUNT, FEATURE_HASH

REWARD_PARTS: Final = ("article", "goodput", "tokens", "alloc", "violation", "oom")
"""Columns of ``rewards``. ``article`` and ``goodput`` are the two whole objectives; ``tokens`` (tokens/s over
the card's reference), ``alloc`` (card KV use), ``violation`` (share of judged requests) and ``oom`` (events) are
the article's parts before weighting."""


class TransitionBatch(msgspec.Struct, frozen=True, array_like=True):
    """Transition of step ``step``: state, executed action, reward, next state and next mask, per worker.

    A row is emitted when the outcome of the following step brings the next mask, or as terminal.
    """

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    feature_hash: str
    workers: tuple[str, ...]
    policies: tuple[str, ...]
    """Behaviour policy per worker."""
    states: bytes
    """float32 [workers, FEATURE_COUNT]."""
    next_states: bytes
    """float32 [workers, FEATURE_COUNT]."""
    actions: bytes
    """uint8 [workers]: executed actions."""
    masks: bytes
    """uint8 [workers]: allowed actions, bit k is action k."""
    next_masks: bytes
    """uint8 [workers]."""
    probabilities: bytes
    """float32 [workers]: of the action under the behaviour policy."""
    rewards: bytes
    """float32 [workers, len(REWARD_PARTS)]."""
    discounts: bytes
    """float32 [workers]: 0 for terminal rows."""
    dones: bytes
    """uint8 [workers]: 1 when the trajectory ended in this transition (an out-of-memory crash)."""


TRANSITION_BATCH: Final = Codec(TransitionBatch)


class Columns(msgspec.Struct, frozen=True):
    """A TransitionBatch's rows as arrays, in its order."""

    states: NDArray[np.float32]
    next_states: NDArray[np.float32]
    actions: NDArray[np.uint8]
    masks: NDArray[np.uint8]
    next_masks: NDArray[np.uint8]
    probabilities: NDArray[np.float32]
    rewards: NDArray[np.float32]
    discounts: NDArray[np.float32]
    dones: NDArray[np.uint8]


def columns_of(batch: TransitionBatch) -> Columns:
    """The batch as arrays; DecodeError (``feature_table``, ``bad_shape``) when it does not hold together."""
    if batch.feature_hash != FEATURE_HASH:
        raise DecodeError(
            "TransitionBatch",
            "feature_table",
            f"table {batch.feature_hash!r}, this program has {FEATURE_HASH!r}",
        )
    rows = len(batch.workers)
    wide = {"states": FEATURE_COUNT, "next_states": FEATURE_COUNT, "rewards": len(REWARD_PARTS)}
    kinds = {"actions": "u1", "masks": "u1", "next_masks": "u1", "dones": "u1"}
    arrays = {}
    for name in Columns.__struct_fields__:
        array = unpack(getattr(batch, name), kinds.get(name, "<f4"), rows, "TransitionBatch")
        expected = wide.get(name, 1)
        if rows and array.shape[1] != expected:
            raise DecodeError(
                "TransitionBatch", "bad_shape", f"{name} has {array.shape[1]} columns, expected {expected}"
            )
        arrays[name] = array if name in wide else array.reshape(rows)
    if len(batch.policies) != rows:
        raise DecodeError("TransitionBatch", "bad_shape", f"{rows} workers, {len(batch.policies)} policies")
    return Columns(**arrays)
