"""A pool with bytes beneath it and a plain-Python account beside it: what long random histories are checked against.

Every block has a token for content. The engine's kernels, copiers and tiers are played here at the worst moment that
their contracts allow: kernels read the tables of the last iteration boundary until the next, an aborted copier goes
on writing until it is said to have stopped, unfilled blocks are written without a word. Each call's outcome is
predicted; a call that must fail must leave the pool as it was.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import BlockState, Pool, Ticket
from services.errors import MemoryPlaneError

I8 = NDArray[np.int64]

ALLOWED = {
    "allocate": {"live"},
    "make_idle": {"live"},
    "resume": {"idle"},
    "begin_leave": {"idle"},
    "complete_leave": {"leaving"},
    "abort_leave": {"leaving"},
    "begin_return": {"away"},
    "complete_return": {"returning"},
    "abort_return": {"returning"},
    "free": {"live", "idle", "away"},
}
AFTER = {
    "make_idle": "idle",
    "resume": "live",
    "begin_leave": "leaving",
    "complete_leave": "away",
    "abort_leave": "idle",
    "begin_return": "returning",
    "complete_return": "idle",
    "abort_return": "away",
}


@dataclasses.dataclass
class Known:
    """A session as it should be."""

    state: str
    content: list[int]
    full: int = 0
    pinned: bool = False
    pins: dict[int, int] = dataclasses.field(default_factory=dict)
    """Places in the table whose blocks are pinned, and those blocks."""
    prefix: int | None = None
    version: int = 0
    """Another one whenever kernels no longer read what they were launched on."""


@dataclasses.dataclass
class Copying:
    ticket: Ticket
    copied: NDArray[np.bool_]


class History:
    """Calls on ``pool`` with everything that must be true afterwards."""

    def __init__(self, geometry: Geometry, **settings: object) -> None:
        self.pool = Pool(geometry, **settings)  # type: ignore[arg-type]
        self.memory: I8 = np.full(geometry.blocks, -1, np.int64)
        self.known: dict[int, Known] = {}
        self.open: dict[int, Copying] = {}
        self.held: dict[int, I8] = {}
        self.launched: dict[int, tuple[int, I8, list[int]]] = {}
        self.calls = 0
        self._token = itertools.count(1)
        self._versions = itertools.count(1)

    def _call(self, legal: bool, call: Callable[[], object]) -> bool:
        """Make a call whose outcome is known; whether it was legal."""
        self.calls += 1
        if legal:
            call()
            return True
        before = fingerprint(self.pool)
        try:
            call()
        except MemoryPlaneError:
            assert fingerprint(self.pool) == before, "a refused call changed the pool"
            return False
        raise AssertionError("a call was accepted that should have been refused")

    def _room(self, count: int, waiter: int | None) -> bool:
        """Whether a request for blocks can be served, counted block by block."""
        pool, geometry = self.pool, self.pool.geometry
        used = int((pool.state != BlockState.FREE).sum())
        usable = [g for g in range(geometry.groups) if pool.mapped[g] and pool.blocks.protected[g] in (-1, waiter)]
        free = sum(int((self._of_group(g) == BlockState.FREE).sum()) for g in usable)
        more = max(0, pool.quota.hard_groups - int(pool.mapped.sum())) * geometry.blocks_per_group
        return count <= min(pool.quota.hard_groups * geometry.blocks_per_group - used, free + more)

    def _of_group(self, group: int) -> NDArray[np.uint8]:
        per_group = self.pool.geometry.blocks_per_group
        return self.pool.state[group * per_group : (group + 1) * per_group]

    def _may(self, owner: int, wanted: str) -> bool:
        return owner in self.known and self.known[owner].state in ALLOWED[wanted]

    def _read(self, owner: int) -> bool:
        return any(one.prefix == owner for one in self.known.values())

    # Sessions

    def allocate(self, owner: int, count: int, pinned: bool = False, waiter: int | None = None) -> None:
        legal = (owner not in self.known or self._may(owner, "allocate")) and self._room(count, waiter)
        if not self._call(legal, lambda: self.pool.allocate(owner, count, pinned=pinned, waiter=waiter)):
            return
        known = self.known.setdefault(owner, Known("live", [], version=next(self._versions)))
        known.pinned |= pinned
        if count:
            tokens = [next(self._token) for _ in range(count)]
            added = self.pool.table(owner)[-count:]
            self.memory[added] = tokens
            if pinned:
                known.pins |= dict(zip(range(len(known.content), len(known.content) + count), added, strict=True))
            known.content += tokens
            known.full = len(known.content) - 1

    def fill(self, owner: int, full: int) -> None:
        legal = self._may(owner, "allocate") and full <= len(self.known[owner].content)
        if self._call(legal, lambda: self.pool.fill(owner, full)):
            self.known[owner].full = full

    def written(self, owner: int, first: int) -> None:
        """Full blocks are rewritten, and the pool is told."""
        if self._call(self._may(owner, "allocate"), lambda: self.pool.written(owner, first)):
            self._scribble(owner, first)

    def scribble(self, owner: int) -> None:
        """The engine writes into what it has not filled, and tells nobody."""
        if self._may(owner, "allocate"):
            self._scribble(owner, self.known[owner].full)

    def _scribble(self, owner: int, first: int) -> None:
        known = self.known[owner]
        known.content[first:] = [next(self._token) for _ in known.content[first:]]
        self.memory[self.pool.table(owner)[first:]] = known.content[first:]
        known.version = next(self._versions)

    def free(self, owner: int) -> None:
        if self._call(self._may(owner, "free") and not self._read(owner), lambda: self.pool.free(owner)):
            del self.known[owner]

    def turn(self, owner: int, wanted: str) -> None:
        """A call that needs no more than the owner; ``wanted`` is a key of AFTER."""
        legal = self._may(owner, wanted)
        if wanted == "begin_leave" and legal:
            moving = (self.pool.state[self.pool.table(owner)] == BlockState.MOVING).any()
            legal = not moving and not self._read(owner)
        if wanted == "begin_return" and legal:
            legal = self._room(len(self.known[owner].content), None)
        if self._call(legal, lambda: getattr(self.pool, wanted)(owner)):
            known = self.known[owner]
            known.state = AFTER[wanted]
            known.version = next(self._versions)
            if wanted == "begin_return" and known.pinned:
                known.pins = dict(enumerate(self.pool.table(owner)))
            if wanted == "complete_return":
                self.memory[self.pool.table(owner)] = known.content

    def adopt(self, owner: int, blocks: int) -> None:
        if self._call(owner not in self.known, lambda: self.pool.adopt(owner, blocks)):
            tokens = [next(self._token) for _ in range(blocks)]
            self.known[owner] = Known("away", tokens, full=blocks, version=next(self._versions))

    def attach(self, owner: int, prefix: int) -> None:
        one, shared = self.known.get(owner), self.known.get(prefix)
        legal = one is not None and shared is not None and owner != prefix and one.prefix is None
        legal = legal and not self._read(owner) and shared.pinned and shared.prefix is None  # type: ignore[union-attr]
        legal = legal and shared.state in ("live", "idle")  # type: ignore[union-attr]
        if self._call(legal, lambda: self.pool.attach(owner, prefix)):
            self.known[owner].prefix = prefix

    def detach(self, owner: int) -> None:
        legal = owner in self.known and self.known[owner].prefix is not None
        if self._call(legal, lambda: self.pool.detach(owner)):
            self.known[owner].prefix = None

    def turns(self) -> list[tuple[int, str]]:
        """What sessions may do now, as arguments of ``turn``."""
        return [(owner, wanted) for owner in self.known for wanted in AFTER if self._may(owner, wanted)]

    # Relocation

    def prepare(self, sources: I8, destinations: I8) -> None:
        """A plan that the pool's masks allow."""
        count = min(len(sources), len(destinations))
        moves = np.stack((sources[:count], destinations[:count]), axis=1)
        self.calls += 1
        ticket = self.pool.prepare(moves)
        self.open[ticket.number] = Copying(ticket, np.zeros(count, np.bool_))

    def prepare_badly(self, source: int, destination: int) -> None:
        """A single move, which may well be impossible."""
        pool = self.pool
        legal = bool(pool.movable()[source] and pool.holes()[destination] and source != destination)
        before = len(pool.relocations.tickets)
        if self._call(legal, lambda: pool.prepare(np.array([[source, destination]]))):
            assert len(pool.relocations.tickets) == before + 1
            ticket = next(reversed(pool.relocations.tickets.values()))
            self.open[ticket.number] = Copying(ticket, np.zeros(1, np.bool_))

    def copy(self, number: int, every: int) -> None:
        """Copy every ``every``-th block of a ticket now."""
        one = self.open[number]
        part = np.arange(len(one.copied)) % every == 0
        self._copy(one, part)

    def _copy(self, one: Copying, part: NDArray[np.bool_]) -> None:
        moves = one.ticket.moves[part]
        self.memory[moves[:, 1]] = self.memory[moves[:, 0]]
        one.copied |= part

    def commit(self, number: int) -> None:
        if number not in self.open:
            self._call(False, lambda: self.pool.commit(number))
            return
        one = self.open.pop(number)
        self._copy(one, ~one.copied)
        self.calls += 1
        done = self.pool.commit(one.ticket)
        assert done.moved + done.dropped == len(one.ticket.moves), "a move is followed or given up"

    def abort(self, number: int, stopped: bool) -> None:
        if number not in self.open:
            self._call(False, lambda: self.pool.abort(number))
            return
        one = self.open.pop(number)
        self.calls += 1
        self.pool.abort(number, copier_stopped=stopped)
        if not stopped:
            self.held[number] = one.ticket.moves[:, 1]

    def copier_stops(self, number: int) -> None:
        if self._call(number in self.held, lambda: self.pool.release_held(number)):
            del self.held[number]

    def tick(self) -> None:
        """The kernels launched at the last boundary are done; the next read the tables as they are now."""
        for owner, (version, blocks, content) in self.launched.items():
            if owner in self.known and self.known[owner].version == version:
                assert self.memory[blocks].tolist() == content, f"a running kernel read foreign bytes of {owner}"
        self.calls += 1
        self.pool.tick()
        self.launched = {
            owner: (known.version, self.pool.table(owner), list(known.content))
            for owner, known in self.known.items()
            if known.state == "live"
        }

    # Groups and quota

    def map(self, count: int) -> None:
        room = self.pool.quota.hard_groups - int(self.pool.mapped.sum())
        self._call(count <= max(0, room), lambda: self.pool.map_groups(count))

    def refill(self) -> None:
        self._call(True, self.pool.refill_reserve)

    def give_back(self, count: int, keep_reserve: bool) -> None:
        before = self.pool.mapped_groups
        given = self.pool.give_back(count, keep_reserve=keep_reserve)
        self.calls += 1
        assert len(given) <= count
        assert not len(given) or self.pool.mapped_groups >= self.pool.quota.floor_groups, "below the floor"
        assert before - len(given) == self.pool.mapped_groups
        self._gone(given)

    def give_back_named(self, group: int, waiter: int | None) -> None:
        pool = self.pool
        legal = bool(pool.mapped[group]) and bool((self._of_group(group) == BlockState.FREE).all())
        legal = legal and pool.blocks.protected[group] in (-1, waiter) and pool.mapped_groups > pool.quota.floor_groups
        if self._call(bool(legal), lambda: pool.give_back(np.array([group]), waiter=waiter)):
            self._gone(np.array([group]))

    def _gone(self, groups: I8) -> None:
        for group in groups:
            assert (self._of_group(int(group)) == BlockState.FREE).all(), "a group went back with a block in use"
            per_group = self.pool.geometry.blocks_per_group
            self.memory[group * per_group : (group + 1) * per_group] = -2

    def protect(self, waiter: int, group: int) -> None:
        legal = bool(self.pool.mapped[group]) and self.pool.blocks.protected[group] in (-1, waiter)
        self._call(legal, lambda: self.pool.protect(waiter, np.array([group])))

    def release(self, waiter: int) -> None:
        self._call(True, lambda: self.pool.release(waiter))

    def set_quota(self, hard_groups: int, soft_blocks: int | None, generation: int) -> None:
        quota = self.pool.quota
        legal = generation >= quota.generation and quota.floor_groups <= hard_groups <= self.pool.geometry.groups
        self._call(legal, lambda: self.pool.set_quota(hard_groups, soft_blocks, generation))

    def promise(self, owner: int, blocks: int) -> None:
        quota = self.pool.quota
        before = quota.promises().get(owner, 0)
        others = sum(quota.promises().values()) - before
        legal = quota.soft_blocks is None or blocks <= before or others + blocks <= quota.soft_blocks
        self._call(legal, lambda: self.pool.promise(owner, blocks))

    # What must be true

    def check(self) -> None:
        """The pool agrees with itself and with the account; every session on the card has its bytes."""
        for destinations in self.held.values():
            self.memory[destinations] = -3  # a copier nobody waits for is still writing
        self.pool.check()
        assert self.pool.sessions.keys() == self.known.keys()
        for owner, known in self.known.items():
            assert self.pool.session_state(owner).name.lower() == known.state
            table = self.pool.table(owner)
            if known.state == "away":
                assert not len(table), "a session that is away has no block"
                continue
            assert len(table) == len(known.content), "blocks were lost or came from nowhere"
            assert all(table[at] == block for at, block in known.pins.items()), f"a pinned block of {owner} moved"
            if known.state != "returning":
                assert self.memory[table].tolist() == known.content, f"session {owner} has foreign bytes"


def fingerprint(pool: Pool) -> tuple[object, ...]:
    """Everything that a refused call must leave alone."""
    blocks = pool.blocks
    arrays = (
        blocks.state, blocks.resting, blocks.owner, blocks.cell, blocks.epoch, blocks.pinned, blocks.writing,
        blocks.mapped, blocks.protected, blocks.free_in_group, blocks.pinned_in_group,
    )  # fmt: skip
    sessions = tuple(
        (
            owner,
            one.state,
            one.at,
            one.size,
            one.span,
            one.full,
            one.since,
            one.away,
            one.pinned,
            one.prefix,
            one.readers,
        )
        for owner, one in pool.sessions.items()
    )
    tables = tuple(pool.table(owner).tobytes() for owner in pool.sessions)
    moves = pool.relocations
    tickets = (tuple(moves.tickets), tuple(moves.held), len(moves.quarantined))
    quota = (pool.quota.hard_groups, pool.quota.soft_blocks, pool.generation, tuple(pool.quota.promises().items()))
    return (*(array.tobytes() for array in arrays), sessions, tables, tuple(pool._idle), tickets, quota)
