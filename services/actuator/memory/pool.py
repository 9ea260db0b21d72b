"""The pool of one worker's arena: sessions and their block tables, over blocks in mapped page groups.

Pure and deterministic. The engine calls it in its allocation path, the planner reads it, the mover never sees it.
Every method checks before it changes: an error leaves the pool as it was. DESIGN sections 1, 4.1 and 5.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory import orders
from services.actuator.memory.blocks import Blocks
from services.actuator.memory.errors import BadGeometry, IllegalTransition, OutOfBlocks
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.groups import Groups
from services.actuator.memory.occupancy import Occupancy
from services.actuator.memory.orders import FreeList, Order
from services.actuator.memory.pool_view import PoolView
from services.actuator.memory.quota import Quota
from services.actuator.memory.relocations import Committed, Relocations, Ticket
from services.actuator.memory.states import BlockState, SessionState, session_after
from services.actuator.memory.tables import Session, Tables

__all__ = ["BlockState", "Committed", "Occupancy", "Pool", "SessionState", "Ticket"]

I8 = NDArray[np.int64]

NO_GROUPS: Final = np.zeros(0, np.int64)


class Pool(PoolView):
    """Blocks of one arena. ``order``: ``fullest``, ``lowest`` or ``lifo`` (:class:`orders.Order`).

    ``floor_groups`` are never given back, ``hard_groups`` (default: all) bound what is mapped and used,
    ``soft_blocks`` (default: no bound) what is promised, ``reserve_groups`` empty groups are kept mapped ahead.
    Owners and waiters are ints of 0 or more that the caller chooses. BadGeometry for figures that do not fit.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        order: str = "fullest",
        floor_groups: int = 0,
        hard_groups: int | None = None,
        soft_blocks: int | None = None,
        reserve_groups: int = 0,
    ) -> None:
        self.geometry = geometry
        self.order = Order(order)
        self.blocks = Blocks(geometry)
        self.quota = Quota(geometry.groups, hard_groups, soft_blocks, floor_groups)
        self.groups = Groups(self.blocks, self.quota, reserve_groups)
        self.tables = Tables(self.blocks)
        self.relocations = Relocations(self.blocks, self.tables)
        self.sessions: dict[int, Session] = {}
        self._idle = {}
        self._free_list = FreeList(self.blocks) if self.order is Order.LIFO else None
        if self._free_list is not None:
            self.blocks.on_freed = self._free_list.push

    # Sessions

    def allocate(self, owner: int, count: int, *, pinned: bool = False, waiter: int | None = None) -> I8:
        """Append ``count`` blocks to a new or live ``owner``'s table and give them, int64 [count].

        Maps groups where holes do not suffice. All blocks but the last count as full, see ``fill``. ``pinned``
        blocks are never relocated and keep to groups of their own; ``waiter`` may use what it protected.
        OutOfBlocks beyond hard quota or arena, IllegalTransition if the owner is not live.
        """
        session = self.sessions.get(owner)
        if session is not None:
            session_after(owner, session.state, "grow")
        self._check_owner(owner, count)
        chosen, new_groups = self._find(count, pinned, waiter)
        if session is None:
            session = self.sessions[owner] = Session(SessionState.LIVE)
        self._place(owner, session, chosen, new_groups, BlockState.LIVE, pinned)
        if count:
            self._set_full(session, session.size - 1, session.full)
        return chosen

    def fill(self, owner: int, full_blocks: int) -> None:
        """The first ``full_blocks`` of a live owner's table are complete, the rest may be written: those are not
        moved, and a move of one that is under way will be dropped."""
        session = self._session(owner)
        session_after(owner, session.state, "grow")
        if not 0 <= full_blocks <= session.size:
            raise IllegalTransition("session", owner, f"{session.size} blocks long", f"have {full_blocks} full")
        self._set_full(session, full_blocks, session.full)

    def written(self, owner: int, first: int = 0) -> None:
        """The content of a live owner's blocks from place ``first`` on has changed: moves of them are dropped."""
        session = self._session(owner)
        session_after(owner, session.state, "grow")
        self.blocks.epoch[self.tables.table(session)[first:]] += np.uint32(1)

    def free(self, owner: int) -> None:
        """Forget a live, idle or away owner; its blocks are free, those under relocation once that ends."""
        session = self._session(owner)
        session_after(owner, session.state, "be freed")
        self._check_unread(owner, session, "be freed")
        self._drop_blocks(session, BlockState.FREE)
        if session.prefix is not None:
            self.sessions[session.prefix].readers -= 1
        self._idle.pop(owner, None)
        self.quota.promise(owner, 0)
        del self.sessions[owner]

    def make_idle(self, owner: int, since: float = 0.0) -> None:
        """A live owner's turn is over; ``since`` is the caller's clock, given back by ``idle_owners``."""
        session = self._enter(owner, "become idle")
        session.since = since
        self.blocks.writing[self.tables.table(session)[session.full :]] = False
        self._idle[owner] = None

    def resume(self, owner: int) -> None:
        """An idle owner's next turn begins; its unfilled blocks may be written from now on."""
        session = self._enter(owner, "resume")
        del self._idle[owner]
        self._set_full(session, session.full, session.size)

    def attach(self, owner: int, prefix: int) -> None:
        """``owner`` reads the pinned blocks of ``prefix``, which stays on the card until it is detached."""
        session, shared = self._session(owner), self._session(prefix)
        if owner == prefix or session.prefix is not None or session.readers:
            raise IllegalTransition("session", owner, "part of a shared prefix already", f"read prefix {prefix}")
        if not shared.pinned or shared.prefix is not None or shared.state not in (SessionState.LIVE, SessionState.IDLE):
            found = f"{'pinned and ' if shared.pinned else ''}{shared.state.name.lower()}"
            raise IllegalTransition("session", prefix, found, f"be the prefix of session {owner}")
        session.prefix = prefix
        shared.readers += 1

    def detach(self, owner: int) -> None:
        """End what ``attach`` began."""
        session = self._session(owner)
        if session.prefix is None:
            raise IllegalTransition("session", owner, "without a prefix", "be detached")
        self.sessions[session.prefix].readers -= 1
        session.prefix = None

    # Lower tiers

    def begin_leave(self, owner: int) -> I8:
        """An idle owner's blocks are about to be copied out; gives them, int64 [n]. Not while one of them is under
        relocation, nor while somebody reads it as a prefix."""
        session = self._session(owner)
        session_after(owner, session.state, "begin to leave")
        self._check_unread(owner, session, "begin to leave")
        moving = int((self.blocks.state[self.tables.table(session)] == BlockState.MOVING).sum())
        if moving:
            raise IllegalTransition("session", owner, f"under relocation with {moving} blocks", "begin to leave")
        self._enter(owner, "begin to leave")
        del self._idle[owner]
        return self.table(owner)

    def complete_leave(self, owner: int) -> None:
        """The copy is safe in a lower tier: the blocks are free, the session is away."""
        session = self._session(owner)
        session_after(owner, session.state, "complete leaving")
        session.away = session.size
        self._drop_blocks(session, BlockState.FREE)
        session.state = SessionState.AWAY

    def abort_leave(self, owner: int) -> None:
        """The session stays, idle since when it was, but now the last that LRU takes."""
        self._enter(owner, "abort leaving")
        self._idle[owner] = None

    def adopt(self, owner: int, blocks: int, *, pinned: bool = False) -> None:
        """A session of ``blocks`` blocks found in a lower tier, as after a restart: it is away."""
        self._check_owner(owner, blocks)
        if owner in self.sessions:
            raise IllegalTransition("session", owner, self.sessions[owner].state.name.lower(), "be adopted")
        session = self.sessions[owner] = Session(SessionState.AWAY)
        session.away, session.full, session.pinned = blocks, blocks, pinned

    def begin_return(self, owner: int, count: int | None = None, *, waiter: int | None = None) -> I8:
        """Blocks to load an away owner into, as many as it left with unless told otherwise; int64 [count]."""
        session = self._session(owner)
        session_after(owner, session.state, "begin to return")
        wanted = session.away if count is None else count
        self._check_owner(owner, wanted)
        chosen, new_groups = self._find(wanted, session.pinned, waiter)
        self._place(owner, session, chosen, new_groups, BlockState.RETURNING, session.pinned)
        session.state = SessionState.RETURNING
        session.full = min(session.full, wanted)
        return chosen

    def complete_return(self, owner: int, since: float | None = None) -> None:
        """All bytes are there: the session is idle, since when it was unless told otherwise."""
        session = self._enter(owner, "complete returning")
        if since is not None:
            session.since = since
        self._idle[owner] = None

    def abort_return(self, owner: int) -> None:
        """Away again; the blocks go through the grace period. Stop the copy first."""
        session = self._session(owner)
        session_after(owner, session.state, "abort returning")
        self.relocations.quarantined.append(self.table(owner))
        self._drop_blocks(session, BlockState.QUARANTINED)
        session.state = SessionState.AWAY

    # Relocation

    def prepare(self, moves: I8) -> Ticket:
        """See :meth:`Relocations.prepare`."""
        return self.relocations.prepare(moves)

    def commit(self, ticket: Ticket | int) -> Committed:
        """See :meth:`Relocations.commit`."""
        return self.relocations.commit(ticket)

    def abort(self, ticket: Ticket | int, *, copier_stopped: bool = True) -> None:
        """See :meth:`Relocations.abort`."""
        self.relocations.abort(ticket, copier_stopped)

    def release_held(self, number: int) -> None:
        """See :meth:`Relocations.release_held`."""
        self.relocations.release_held(number)

    def tick(self) -> int:
        """One iteration boundary; gives how many quarantined blocks became free."""
        return self.relocations.tick()

    # Groups and quota

    def map_groups(self, count: int) -> I8:
        """See :meth:`Groups.map`."""
        return self.groups.map(count)

    def refill_reserve(self) -> I8:
        """See :meth:`Groups.refill_reserve`."""
        return self.groups.refill_reserve()

    def give_back(self, groups: int | I8, *, waiter: int | None = None, keep_reserve: bool = True) -> I8:
        """See :meth:`Groups.give_back`."""
        return self.groups.give_back(groups, waiter, keep_reserve)

    def empty_groups(self) -> I8:
        """Mapped groups without a used block, ascending; protected ones included."""
        return self.blocks.empty_groups()

    def protect(self, waiter: int, groups: I8) -> None:
        """See :meth:`Groups.protect`."""
        self.groups.protect(waiter, groups)

    def release(self, waiter: int) -> I8:
        """See :meth:`Groups.release`."""
        return self.groups.release(waiter)

    def set_quota(self, hard_groups: int, soft_blocks: int | None, generation: int) -> int:
        """See :meth:`Quota.set`."""
        return self.quota.set(hard_groups, soft_blocks, generation)

    def promise(self, owner: int, blocks: int) -> None:
        """See :meth:`Quota.promise`; a freed owner's promise ends by itself."""
        self.quota.promise(owner, blocks)

    # Inside

    def _check_owner(self, owner: int, count: int) -> None:
        if owner < 0:
            raise BadGeometry("owner", owner, "0 or more")
        if count < 0:
            raise BadGeometry("count", count, "0 or more")

    def _check_unread(self, owner: int, session: Session, wanted: str) -> None:
        if session.readers:
            raise IllegalTransition("session", owner, f"read as a prefix by {session.readers} sessions", wanted)

    def _find(self, count: int, pinned: bool, waiter: int | None) -> tuple[I8, I8]:
        """Blocks for a request, int64 [count], and the groups to map for them; changes nothing."""
        blocks = self.blocks
        headroom = self.quota.hard_groups * self.geometry.blocks_per_group - blocks.used
        if count > headroom:
            raise OutOfBlocks(count, max(0, headroom), "hard quota")
        usable = orders.open_groups(blocks, waiter)
        page_aware = self._free_list is None
        if self._free_list is not None:
            found = self._free_list.take(count, usable)
        else:
            found = orders.fill(blocks, orders.rank(blocks, usable, self.order, pinned, count), count)
        missing = count - len(found)
        if not missing:
            return found, NO_GROUPS
        new = self.groups.next_unmapped(min(self.groups.mappable(), self.geometry.groups_for(missing)))
        found = np.concatenate((found, orders.fill(blocks, new, missing)))
        missing = count - len(found)
        if missing and page_aware:
            rest = orders.rank(blocks, usable, self.order, pinned, missing, mixed=True)
            found = np.concatenate((found, orders.fill(blocks, rest, missing)))
        if len(found) < count:
            raise OutOfBlocks(count, len(found), "mapped and mappable groups")
        return found, new

    def _place(self, owner: int, session: Session, chosen: I8, new_groups: I8, state: BlockState, pinned: bool) -> None:
        if len(new_groups):
            self.groups.map_on_demand(new_groups)
        self.blocks.take(chosen, owner, state, pinned)
        self.tables.append(session, chosen)
        session.pinned = session.pinned or pinned

    def _enter(self, owner: int, wanted: str) -> Session:
        """Session and blocks take the state that ``wanted`` leads to; blocks under relocation will rest in it."""
        session = self._session(owner)
        session.state = session_after(owner, session.state, wanted)
        table = self.tables.table(session)
        self.blocks.resting[table] = session.state
        if self.relocations.tickets:
            table = table[self.blocks.state[table] != BlockState.MOVING]
        self.blocks.state[table] = session.state
        return session

    def _set_full(self, session: Session, full: int, before: int) -> None:
        """Blocks before place ``full`` are complete, those after it are written; ``before`` is where that changed
        last, so that a long table costs only what changes."""
        blocks, table = self.blocks, self.tables.table(session)
        session.full = full
        if before < full:
            blocks.writing[table[before:full]] = False
        begun = table[full:]
        if len(begun):
            blocks.writing[begun] = True
            if self.relocations.tickets:
                blocks.epoch[begun[blocks.state[begun] == BlockState.MOVING]] += np.uint32(1)

    def _drop_blocks(self, session: Session, state: BlockState) -> None:
        table = self.tables.table(session)
        if self.relocations.tickets:
            moving = self.blocks.state[table] == BlockState.MOVING
            self.blocks.drop(table[moving], BlockState.MOVING)
            table = table[~moving]
        self.blocks.drop(table, state)
        self.tables.clear(session)
