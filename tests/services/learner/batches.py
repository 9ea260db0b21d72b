"""Transitions as a featurizer would send them, with every value open to being spoilt."""

from __future__ import annotations

from typing import Any

import numpy as np

from schemas.codec import pack
from schemas.features import FEATURE, FEATURE_COUNT, FEATURE_HASH
from schemas.identity import SCHEMA_VERSION
from schemas.subjects import subject
from schemas.transitions import REWARD_PARTS, TRANSITION_BATCH, TransitionBatch
from services.bus import Delivery

BOOT = 1_700_000_000_000_000_000


def state(value: float) -> np.ndarray:
    """float32 [FEATURE_COUNT]: an ordinary state that ``value`` tells apart by its u_alloc."""
    row = np.zeros(FEATURE_COUNT, np.float32)
    row[FEATURE["u_alloc"]] = value
    row[FEATURE["rho"]] = 1.0
    row[FEATURE["du_alloc"]] = np.nan
    return row


def batch(step: int, /, *, node: str = "n0", rows: int = 1, boot: int = BOOT, **spoilt: Any) -> TransitionBatch:
    """A good message of ``rows`` rows; ``spoilt`` replaces fields: arrays are packed, the rest taken as is."""
    rewards = np.full((rows, len(REWARD_PARTS)), np.nan, np.float32)
    rewards[:, :2] = 0.5
    fields: dict[str, Any] = {
        "node": node,
        "boot_id": boot,
        "step": step,
        "schema_version": SCHEMA_VERSION,
        "t_ns": step * 2_000_000_000,
        "feature_hash": FEATURE_HASH,
        "workers": tuple(f"{node}/0/w{i}" for i in range(rows)),
        "policies": ("heuristic",) * rows,
        "states": np.stack([state(step % 100 / 100)] * rows),
        "next_states": np.stack([state((step + 1) % 100 / 100)] * rows),
        "actions": np.zeros(rows),
        "masks": np.full(rows, 31),
        "next_masks": np.full(rows, 31),
        "probabilities": np.ones(rows),
        "rewards": rewards,
        "discounts": np.ones(rows),
        "dones": np.zeros(rows),
    } | spoilt
    kinds = {"actions": "u1", "masks": "u1", "next_masks": "u1", "dones": "u1"}
    for name, value in fields.items():
        if isinstance(value, (np.ndarray, list)):
            fields[name] = pack(np.asarray(value), kinds.get(name, "<f4"))
    return TransitionBatch(**fields)


def deliver(*batches: TransitionBatch, first: int = 1) -> list[Delivery]:
    """The messages as a pull consumer gives them, from stream sequence ``first`` on."""
    return [
        Delivery(subject("transition", b.node), TRANSITION_BATCH.encode(b), None, first + i, 1)
        for i, b in enumerate(batches)
    ]
