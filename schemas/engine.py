"""The engine protocol: MessagePack frames on a node's Unix socket, one socket per worker (DESIGN section 5).

A frame is a 4-byte big-endian length and one :class:`Request` or :class:`Reply`. Requests are answered in
order; a reply repeats the request's ``seq``. Every reply carries the engine's clock, which is the node clock
that deadlines and leases are measured in. Commands are absolute and idempotent: after a lost connection the
caller repeats them.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from schemas.movement import Moved

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
_HEADER: Final = struct.Struct(">I")
HEADER_BYTES: Final = _HEADER.size


class Describe(msgspec.Struct, frozen=True, array_like=True, tag="describe"):
    """Ask for geometry, handle, floor and what the engine can do."""


class Description(msgspec.Struct, frozen=True, array_like=True, tag="description"):
    """``handle`` names the arena (a shared-memory segment) where the caller may copy itself; empty: it may not."""

    worker: str
    service_class: int
    engine: str
    block_bytes: int
    page_group_bytes: int
    kv_bytes_per_token: int
    q0_bytes: int
    card_kv_capacity_bytes: int
    mapped_bytes: int
    floor_bytes: int
    generation: int
    capabilities: tuple[str, ...]
    handle: str = ""
    granted_bytes: int = 0
    link_bytes_per_s: float = 0.0
    """Measured bandwidth of the card's host link; 0 when the engine does not know."""
    arena_scale: int = 1
    """The model's bytes per byte of the arena that ``handle`` names: its blocks have block_bytes / arena_scale."""
    prefill_tokens_per_s: float = 0.0
    """What the engine computes of a prompt alone; 0 when it does not know."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Ask for bytes by block state, and for sessions where the caller is about to choose among them."""

    idle_listed: int = 0
    """Idle sessions to list at most, least recently used first."""
    due_within_s: float = 0.0
    """List the sessions off the card that are expected back within so many seconds; 0: none."""


class IdleSession(msgspec.Struct, frozen=True, array_like=True):
    """A conversation between turns whose KV is on the card."""

    session: int
    bytes: int
    idle_s: float
    expected_return_s: float
    """Seconds until it is expected back; inf when nothing is known."""
    copied: bool = False
    """A lower tier has all of it: it leaves without a transfer."""
    tokens: int = 0
    """What computing it again would prefill."""


class AwaySession(msgspec.Struct, frozen=True, array_like=True):
    """A conversation whose KV is in a lower tier only."""

    session: int
    bytes: int
    expected_return_s: float
    """Seconds until it is expected back; below 0: overdue."""
    tokens: int = 0


class SnapshotReply(msgspec.Struct, frozen=True, array_like=True, tag="snapshot_reply"):
    """Bytes by block state, idle sessions, and the quota in force."""

    generation: int
    rho: float
    quota_soft_bytes: int
    quota_hard_bytes: int
    max_running: int
    live_bytes: int
    idle_bytes: int
    leaving_bytes: int
    away_bytes: int
    returning_bytes: int
    relocating_bytes: int
    mapped_bytes: int
    free_block_bytes: int
    """Free blocks inside mapped page groups."""
    floor_bytes: int
    lease_until_ns: int
    host_free_bytes: int = 0
    idle: tuple[IdleSession, ...] = ()
    away: tuple[AwaySession, ...] = ()
    link_backlog_bytes: int = 0
    """Queued on the card's host link."""
    waiting: int = 0
    """Requests in the queue."""
    iteration_s: float = 0.0
    """Mean time of an iteration in the last step: the gap between two tokens; 0: none ran, or not known."""
    weights_bytes: int = 0
    """The worker's weights, on the card or off it; 0: not known."""
    weights_on_card: bool = True
    """False: asleep, its weights are in host memory; requests wait until they are back."""
    quiet_s: float = 0.0
    """Since when it has neither running nor waiting requests; 0: it has some, or not known."""
    prefill_tokens_per_s: float = 0.0
    """What the engine has been measured to compute of a prompt alone; 0: not known yet."""


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag="set_quota"):
    """Put a quota in force, or renew it: the last frame a worker gets in a step.

    ``generation`` is the one the command was made on. The engine refuses it when its own is newer, applies it
    under a new generation when it changes anything, and only renews the lease when it does not.
    """

    boot_id: int
    step: int
    action_id: str
    rho: float
    soft_bytes: int
    hard_bytes: int
    max_running: int
    generation: int
    lease_ns: int
    deadline_ns: int


class GrantPages(msgspec.Struct, frozen=True, array_like=True, tag="grant_pages"):
    """Let the worker map page groups up to ``bytes`` in all. Granted pages stay the engine's."""

    bytes: int
    generation: int


class ReturnPages(msgspec.Struct, frozen=True, array_like=True, tag="return_pages"):
    """Give back up to ``bytes`` of entirely free page groups now."""

    bytes: int


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One block to another place, both as block numbers of the worker's arena."""

    source: int
    destination: int


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag="prepare"):
    """Reserve destinations and pin sources. Without ``moves`` the engine plans within ``budget_bytes``."""

    moves: tuple[Move, ...]
    budget_bytes: int
    lease_ns: int
    action_id: str = ""


class Copy(msgspec.Struct, frozen=True, array_like=True, tag="copy"):
    """Have the engine copy a prepared ticket's blocks (where the caller has no arena)."""

    ticket: int


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """Re-point the tables of moves whose source is still what it was; the others are dropped."""

    ticket: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Give up a ticket; its destinations are free again."""

    ticket: int


class Evict(msgspec.Struct, frozen=True, array_like=True, tag="evict"):
    """Start moving idle sessions' KV to the host tier: these ``sessions``, or up to ``bytes`` by the engine's
    own order when there are none."""

    sessions: tuple[int, ...]
    bytes: int
    action_id: str


class Prefetch(msgspec.Struct, frozen=True, array_like=True, tag="prefetch"):
    """Start bringing sessions back."""

    sessions: tuple[int, ...]
    action_id: str


class SetWeights(msgspec.Struct, frozen=True, array_like=True, tag="set_weights"):
    """Have the weights on the card, or in host memory while nobody asks the model. Absolute: a repeat does nothing.

    Room for weights that come back is the caller's to keep free; where there is none the engine refuses (``busy``)
    and stays asleep. The receipt is done when the memory of the device shows it.
    """

    on_card: bool
    action_id: str


class AskReceipt(msgspec.Struct, frozen=True, array_like=True, tag="receipt"):
    """Ask what became of an action's effects."""

    action_id: str


class Sample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """Node socket only: wait for the sample of a step after ``after_step`` (-1: the newest now).

    ``boot_id`` tells the node whose steps count from here on.
    """

    after_step: int
    boot_id: int
    timeout_s: float


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag="ticket"):
    """Answer to ``prepare``: an empty one (``moves`` 0) has nothing to do and needs no commit."""

    ticket: int
    moves: int
    bytes: int
    plan: tuple[Move, ...] = ()
    lower_bound_bytes: int = 0
    """No plan frees as many page groups with fewer; 0 where the engine did not plan."""


class Receipt(msgspec.Struct, frozen=True, array_like=True, tag="receipt_reply"):
    """Effects so far. ``done`` is False while copies are under way."""

    action_id: str
    done: bool
    generation: int
    rho: float
    quota_soft_bytes: int
    quota_hard_bytes: int
    max_running: int
    mapped_bytes: int
    compacted_bytes: int = 0
    evicted_bytes: int = 0
    prefetched_bytes: int = 0
    pages_freed: int = 0
    pause_us: float = 0.0
    detail: str = ""
    lower_bound_bytes: int = 0
    """Of a compaction: no plan frees as many page groups with fewer."""
    dropped_moves: int = 0
    """Moves whose source changed under the copy."""
    moved: tuple[Moved, ...] = ()
    """The transfers, where bytes are really moved."""


class SampleReply(msgspec.Struct, frozen=True, array_like=True, tag="sample_reply"):
    """METRICS rows of a node's workers at ``step``; ``step`` is the asked one when the wait timed out."""

    step: int
    workers: tuple[str, ...]
    cards: tuple[int, ...]
    classes: tuple[int, ...]
    metrics: bytes
    finished: bool = False
    """The replay is over: no step will follow."""


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The request changed nothing. ``reason``: ``stale_generation``, ``late``, ``out_of_range``,
    ``below_floor``, ``class_forbids``, ``unknown_ticket``, ``unknown_session``, ``tier_full``, ``busy``,
    ``malformed``, ``unsupported`` or ``failed`` (it tried, and the engine raised an error)."""

    reason: str
    detail: str = ""
    numbers: dict[str, float] = {}


RequestBody = (
    Describe | Snapshot | SetQuota | GrantPages | ReturnPages | Prepare | Copy | Commit | Abort
    | Evict | Prefetch | SetWeights | AskReceipt | Sample
)  # fmt: skip
ReplyBody = Description | SnapshotReply | Ticket | Receipt | SampleReply | Failure


class Request(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    body: RequestBody


class Reply(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    t_ns: int
    body: ReplyBody


REQUEST: Final = msgspec.msgpack.Decoder(Request)
REPLY: Final = msgspec.msgpack.Decoder(Reply)
_ENCODER: Final = msgspec.msgpack.Encoder()


def frame(message: Request | Reply) -> bytes:
    """The message with its length in front."""
    body = _ENCODER.encode(message)
    return _HEADER.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes that follow a header; ValueError beyond MAX_FRAME_BYTES."""
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {length} bytes: at most {MAX_FRAME_BYTES} expected")
    return int(length)
