"""One example of every message, as the first release wrote it.

``golden/<name>.msgpack`` holds the bytes. They are never written again: a message that grows keeps reading
them. ``python -m tests.schemas.samples`` adds the file of a new message and refuses to touch an old one.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from schemas import engine
from schemas.actions import ACTION_BATCH, ActionBatch, ShadowDecisions
from schemas.codec import Codec, pack, pack_row
from schemas.features import FEATURE_COUNT
from schemas.identity import SCHEMA_VERSION
from schemas.metrics import METRICS
from schemas.outcomes import AUDIT_RECORD, OUTCOME_BATCH, AuditRecord, Completion, Effect, OutcomeBatch
from schemas.scaleout import SCALE_OUT_REQUEST, ScaleOutRequest
from schemas.states import STATE_BATCH, StateBatch
from schemas.telemetry import NODE_SAMPLE, NodeSample, pack_metrics
from schemas.transitions import REWARD_PARTS, TRANSITION_BATCH, TransitionBatch

GOLDEN = Path(__file__).with_name("golden")
FIRST_FEATURE_HASH = "d4fa565393864642"
"""Of the first release: a frozen sample keeps it even when the table moves on."""

_HEAD = ("gpu-01.example", 1_700_000_000_000_000_000, 7, SCHEMA_VERSION, 14_000_000_000)
_WORKERS = ("gpu-01.example/0/w0", "gpu-01.example/0/w1")


def _matrix(rows: int, columns: int) -> np.ndarray:
    matrix = np.arange(rows * columns, dtype=np.float64).reshape(rows, columns) / 8
    matrix[0, 3] = np.nan
    return matrix


SAMPLE = NodeSample(*_HEAD, _WORKERS, (0, 0), (0, 1), pack_metrics(_matrix(2, len(METRICS))), "emulated")
STATE = StateBatch(*_HEAD, FIRST_FEATURE_HASH, _WORKERS, (0, 1), (0, 1), (5, 6), pack(_matrix(2, FEATURE_COUNT), "<f4"))
ACTION = ActionBatch(
    *_HEAD, _WORKERS, "heuristic", 16_000_000_000, 20_000_000_000, ("heuristic", "dqn:v1"), bytes([0, 1]),
    actions=bytes([1, 0]),
    target_rho=pack_row([1.2, 1.0], "d"),
    target_max_running=pack_row([320, 256], "q"),
    base_generations=pack_row([5, 6], "q"),
    probabilities=pack_row([1.0, 0.5], "f"),
    masks=bytes([0b10111, 1]),
    mask_reasons=bytes([0, 0, 0, 9, 0, 0, 1, 1, 1, 1]),
    holds=bytes([0, 1]),
    q_values=pack_row([0.5, 1.5, 2.5, 3.5, 4.5] * 2, "f"),
    shadows=(ShadowDecisions("dqn:v2", bytes([4, 0]), pack_row([0.25] * 10, "f")),),
)  # fmt: skip
OUTCOME = OutcomeBatch(
    *_HEAD, _WORKERS, ("heuristic", "dqn:v1"), bytes([0, 1]),
    statuses=bytes([1, 0]),
    requested_actions=bytes([1, 4]),
    executed_actions=bytes([1, 4]),
    refusals=bytes([4, 0]),
    requested_rho=pack_row([1.7, 1.0], "d"),
    effective_rho=pack_row([1.6, 1.0], "d"),
    effective_generations=pack_row([6, 7], "q"),
    effective_max_running=pack_row([320, 256], "q"),
    quota_soft_bytes=pack_row([10_000, 11_000], "q"),
    quota_hard_bytes=pack_row([12_000, 13_000], "q"),
    probabilities=pack_row([1.0, 0.5], "f"),
    masks=bytes([0b10111, 0b10001]),
    holds=bytes([0, 0]),
    effects=(Effect(1, 1, 2, 3, 4, 5.5),),
    completions=(Completion(1, _HEAD[1], 5),),
    details={0: "clipped to 1.6"},
)  # fmt: skip
# A record keeps the bytes that came and went: those of that release, not what they would be today.
_ACTED, _BECAME = [(GOLDEN / f"{name}_batch.msgpack").read_bytes() for name in ("action", "outcome")]
AUDIT = AuditRecord(*_HEAD, _ACTED, _BECAME, 3)
TRANSITION = TransitionBatch(
    *_HEAD, FIRST_FEATURE_HASH, _WORKERS, ("heuristic", "heuristic"),
    states=pack(_matrix(2, FEATURE_COUNT), "<f4"),
    next_states=pack(_matrix(2, FEATURE_COUNT) + 1, "<f4"),
    actions=bytes([1, 0]), masks=bytes([31, 1]), next_masks=bytes([31, 31]),
    probabilities=pack(np.array([1.0, 0.5]), "<f4"),
    rewards=pack(_matrix(2, len(REWARD_PARTS)), "<f4"),
    discounts=pack(np.array([0.97, 0.0]), "<f4"), dones=bytes([0, 1]),
)  # fmt: skip
SCALE_OUT = ScaleOutRequest(*_HEAD, "chat-8b", 0, 3, "tpot_over_limit", {"tpot_p99_ms": 61.5}, False)

MESSAGES: dict[str, tuple[Codec[object], object]] = {
    "node_sample": (NODE_SAMPLE, SAMPLE),  # type: ignore[dict-item]
    "state_batch": (STATE_BATCH, STATE),  # type: ignore[dict-item]
    "action_batch": (ACTION_BATCH, ACTION),  # type: ignore[dict-item]
    "outcome_batch": (OUTCOME_BATCH, OUTCOME),  # type: ignore[dict-item]
    "audit_record": (AUDIT_RECORD, AUDIT),  # type: ignore[dict-item]
    "transition_batch": (TRANSITION_BATCH, TRANSITION),  # type: ignore[dict-item]
    "scale_out_request": (SCALE_OUT_REQUEST, SCALE_OUT),  # type: ignore[dict-item]
}

_QUOTA = engine.SetQuota(9, 7, "a@9.7", 1.2, 2**31, 2**32, 320, 5, 20_000_000_000, 16_000_000_000)
FRAMES: dict[str, engine.Request | engine.Reply] = {
    "describe": engine.Request(1, engine.Describe()),
    "description": engine.Reply(
        1, 5, engine.Description("n/0/w", 0, "emulated", 2**21, 2**27, 2**17, 10**10, 10**11, 2**30, 2**28, 4,
                                 ("a",))
    ),
    "snapshot": engine.Request(2, engine.Snapshot()),
    "snapshot_reply": engine.Reply(
        2, 5, engine.SnapshotReply(4, 1.1, 1, 2, 256, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,
                                   (engine.IdleSession(8, 2**20, 3.5, 11.0),))
    ),
    "set_quota": engine.Request(3, _QUOTA),
    "grant_pages": engine.Request(4, engine.GrantPages(2**30, 5)),
    "return_pages": engine.Request(5, engine.ReturnPages(2**30)),
    "prepare": engine.Request(6, engine.Prepare((engine.Move(3, 4),), 2**30, 99, "a@9.7")),
    "ticket": engine.Reply(6, 5, engine.Ticket(17, 1, 2**21, (engine.Move(3, 4),))),
    "copy": engine.Request(7, engine.Copy(17)),
    "commit": engine.Request(8, engine.Commit(17)),
    "abort": engine.Request(9, engine.Abort(17)),
    "evict": engine.Request(10, engine.Evict((8, 9), 2**30, "a@9.7")),
    "prefetch": engine.Request(11, engine.Prefetch((8,), "a@9.7")),
    "set_weights": engine.Request(15, engine.SetWeights(False, "a@9.7")),
    "ask_receipt": engine.Request(12, engine.AskReceipt("a@9.7")),
    "receipt": engine.Reply(12, 5, engine.Receipt("a@9.7", True, 5, 1.2, 1, 2, 320, 3, 4, 5, 6, 7, 8.5, "x")),
    "sample": engine.Request(13, engine.Sample(6, 9, 2.0)),
    "sample_reply": engine.Reply(13, 5, engine.SampleReply(7, _WORKERS, (0, 0), (0, 1), b"\x00" * 16)),
    "failure": engine.Reply(14, 5, engine.Failure("stale_generation", "newer", {"generation": 6.0})),
}  # fmt: skip


def encoded(name: str) -> bytes:
    """Today's bytes of a sample."""
    if name in MESSAGES:
        codec, message = MESSAGES[name]
        return codec.encode(message)
    return msgspec.msgpack.encode(FRAMES[name])


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for sample in (*MESSAGES, *FRAMES):
        path = GOLDEN / f"{sample}.msgpack"
        if not path.exists():
            path.write_bytes(encoded(sample))
