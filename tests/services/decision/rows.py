"""States to test with: a healthy worker in which every action is allowed, changed where a test says so."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.codec import pack
from schemas.features import FEATURE, FEATURE_COUNT, FEATURE_HASH
from schemas.identity import SCHEMA_VERSION
from schemas.policies import PolicyPointer
from schemas.states import STATE_BATCH, StateBatch
from schemas.subjects import subject
from services.bus import Message
from services.qweights import Weights, digest, save, shapes

HEALTHY = {
    "u_alloc": 0.5, "du_alloc": 0.0, "f_frag": 0.4, "l_queue": 0.0, "p_prefill": 0.1, "s_swap": 0.0,
    "l_queue_memory": 0.0, "card_free": 0.5, "neighbour_queue": 0.0, "neighbour_use": 0.0, "rho": 1.2,
    "quota_hard": 1.0, "u_reserved": 0.5, "tpot_p95": 0.5, "ttft_p95": 0.1, "preemption_rate": 0.0,
    "host_use": 0.1, "host_free": 1.0, "link": 20.0, "link_use": 0.0, "kv_per_token": 128.0, "idle_share": 0.3,
    "idle_return": 30.0, "running": 20.0, "max_running": 256.0, "q0_share": 1.0, "hbm": 80.0,
    "since_hold": 1.0, "since_widen": 300.0, "since_tighten": 300.0, "since_compact": 300.0, "since_evict": 300.0,
}  # fmt: skip


def state(**changes: float) -> NDArray[np.float32]:
    """One raw state float32 [1, FEATURE_COUNT]."""
    row = np.zeros((1, FEATURE_COUNT), np.float32)
    for name, value in {**HEALTHY, **changes}.items():
        row[0, FEATURE[name]] = value
    return row


def state_batch(
    features: NDArray[np.float32],
    *,
    node: str = "n0",
    boot_id: int = 7,
    step: int = 1,
    t_ns: int = 1_000_000_000,
    holds: Sequence[int] | None = None,
    classes: Sequence[int] | None = None,
    feature_hash: str = FEATURE_HASH,
) -> StateBatch:
    """A StateBatch with a worker ``<node>/0/w<k>`` per row, all of class chat and generation 3."""
    rows = len(features)
    return StateBatch(
        node, boot_id, step, SCHEMA_VERSION, t_ns, feature_hash,
        tuple(f"{node}/0/w{k}" for k in range(rows)), tuple(classes or (0,) * rows), tuple(holds or (0,) * rows),
        (3,) * rows, pack(features, "<f4"),
    )  # fmt: skip


def message(batch: StateBatch, headers: dict[str, str] | None = None) -> Message:
    return Message(subject("state", batch.node), STATE_BATCH.encode(batch), headers)


def weights(version: str, advantage: Sequence[float], hidden: tuple[int, ...] = (4,)) -> Weights:
    """A network that answers every state with V = 1 and these advantages: all else is zero."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes(hidden).items()}
    tensors["value.bias"][:] = 1.0
    tensors["advantage.bias"][:] = advantage
    return Weights(tensors, hidden, version, transitions=100)


def pointer(network: Weights, **changes: object) -> PolicyPointer:
    """A pointer that fits ``network``, changed where a test says so."""
    right = PolicyPointer(version=network.version, kind="dqn", sha256=digest(save(network)), feature_hash=FEATURE_HASH)
    return msgspec.structs.replace(right, **changes)
