"""What a fleet tells of one worker: its blocks by state, and its sessions on the card and off it.

Copies, so that they stay what they were while time goes on.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
import numpy.typing as npt

from loadgen.engine.gauges import idle_sessions, link_backlog
from loadgen.engine.records import FINISHED, I8, State, Weights
from loadgen.engine.weights import lacking_bytes

AWAY_LISTED: Final = 256
"""Sessions off the card that are listed at most."""


@dataclasses.dataclass(frozen=True)
class IdleSession:
    """A conversation between turns whose KV is on the card."""

    sequence: int
    blocks: int
    idle_since_s: float
    expected_return_s: float
    """From now."""
    copied: bool
    """Its KV is in the host tier too."""
    pinned: bool
    """In a transfer, or its next turn waits in the queue."""
    tokens: int
    """What its blocks hold."""


@dataclasses.dataclass(frozen=True)
class AwaySession:
    """A conversation between turns whose KV is in the host tier only."""

    sequence: int
    host_tokens: int
    host_blocks: int
    expected_return_s: float
    """From now; below 0: overdue."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sessions:
    """All sequences of a worker, ended and future ones too; every array ``(n,)``."""

    sequence: I8
    """Numbers in the fleet, consecutive."""
    blocks: I8
    """On the card."""
    host_blocks: I8
    copies: I8
    """Transfers to the host tier completed so far; a swap-out that needed none does not count."""
    loads: I8
    """Transfers back completed so far, prefetches included."""
    lane: I8
    """``records.Lane`` of the transfer it is in, -1 for none."""
    idle: npt.NDArray[np.bool_]
    """Between turns and on the card."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What the engine protocol's ``snapshot`` tells of one worker: blocks by state and idle sessions, LRU first."""

    blocks_live: int
    blocks_idle: int
    blocks_free: int
    blocks_reserved: int
    """Kept as destinations of moves."""
    blocks_in_transfer: int
    """Of the idle ones, those that a transfer pins."""
    groups_mapped: int
    groups_empty: int
    idle: tuple[IdleSession, ...]
    link_backlog_bytes: int
    """Queued on the card's link by all its workers."""
    waiting: int
    """Requests in the queue."""


def snapshot(s: State, w: int, t_s: float) -> Snapshot:
    """Worker ``w`` at ``t_s``."""
    row = s.worker[w]
    rows = np.zeros((int(row["n_idle"]), 7))
    idle_sessions(s, w, t_s, rows)
    idle = tuple(
        IdleSession(int(q), int(blocks), since, back, bool(copied), bool(pinned), int(tokens))
        for q, blocks, since, back, copied, pinned, tokens in rows.tolist()
    )
    moving = s.sequence["lane"][rows[:, 0].astype(np.int64)] >= 0
    bpg, at = int(row["bpg"]), int(row["group_at"])
    groups = s.group[at : at + int(row["groups"])]
    used = int(row["mapped"]) * bpg - int(row["free"]) - int(row["aside"])
    return Snapshot(
        blocks_live=used - int(row["idle_blocks"]),
        blocks_idle=int(row["idle_blocks"]),
        blocks_free=int(row["free"]),
        blocks_reserved=int(row["aside"]),
        blocks_in_transfer=int(rows[moving, 1].sum()),
        groups_mapped=int(row["mapped"]),
        groups_empty=int(((groups["free"] == np.uint64(2**bpg - 1)) & (groups["mapped"] == 1)).sum()),
        idle=idle,
        link_backlog_bytes=int(link_backlog(s, int(row["card"]))),
        waiting=int(row["q_len"]),
    )


@dataclasses.dataclass(frozen=True)
class WorkerWeights:
    """Where a worker's weights are."""

    state: Weights
    bytes: int
    left_bytes: int
    """Of them, those still to be copied; 0 when none move."""
    quiet_s: float
    """Since when it has no request, running or waiting; 0: it has some."""
    lacking_bytes: int
    """What neighbours have to unmap before they could come back; 0 unless asleep."""


def weights(s: State, w: int, t_s: float) -> WorkerWeights:
    """The weights of worker ``w`` at ``t_s``."""
    row = s.worker[w]
    return WorkerWeights(
        Weights(int(row["asleep"])),
        int(row["weights"]),
        int(np.ceil(row["w_left"])),
        max(0.0, t_s - float(row["quiet_since"])),
        int(np.ceil(lacking_bytes(s, w))),
    )


def sessions(s: State, w: int) -> Sessions:
    """Every sequence of worker ``w``."""
    at, end = int(s.worker[w]["seq_at"]), int(s.worker[w]["seq_end"])
    rows = s.sequence[at:end]
    return Sessions(
        sequence=np.arange(at, end),
        blocks=rows["blocks"].copy(),
        host_blocks=rows["host_blocks"].copy(),
        copies=rows["copies"].copy(),
        loads=rows["loads"].copy(),
        lane=rows["lane"].copy(),
        idle=rows["idle"] == 1,
    )


def away(s: State, w: int, t_s: float, within_s: float) -> tuple[AwaySession, ...]:
    """Sessions of worker ``w`` that are in the host tier only, in no transfer, between turns and expected within
    ``within_s``, overdue ones among them; at most ``AWAY_LISTED``, most urgent first.

    An overdue one is expected to be as late again, as everywhere in the engine: urgent is what is near its time on
    either side, so that those long overdue do not crowd out those that come next.
    """
    at, end = int(s.worker[w]["seq_at"]), int(s.worker[w]["seq_end"])
    rows = s.sequence[at:end]
    found = np.flatnonzero((rows["host_tokens"] > 0) & (rows["blocks"] == 0) & (rows["lane"] < 0))
    found = found[s.request["phase"][rows["request"][found]] >= FINISHED]
    back_s = rows["due"][found] - t_s
    near = back_s <= within_s
    found, back_s = found[near], back_s[near]
    order = np.argsort(np.abs(back_s), kind="stable")[:AWAY_LISTED]
    return tuple(
        AwaySession(at + int(i), int(rows["host_tokens"][i]), int(rows["host_blocks"][i]), float(back))
        for i, back in zip(found[order], back_s[order], strict=True)
    )
