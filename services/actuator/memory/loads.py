"""Loads under way and who waits for them: each prefix is loaded once, however many requests need it. Pure.

A request waits for all the prefixes it needs and for nothing else: a slow one holds up only those that need it.
Every waiter has a deadline of its own; when that passes, or a load fails, the request recomputes, while the load
goes on for those who can still wait. A request that gives up waiting lets go of what it had got; it may ask again
for what is resident. State only: the caller starts and stops transfers as the answers say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from services.actuator.memory.errors import IllegalTransition

FOREVER: Final = float("inf")


class Asked(msgspec.Struct, frozen=True):
    """``start``: keys whose transfer the caller must begin now. ``ready``: nothing is left to wait for."""

    start: tuple[int, ...]
    ready: bool


class Ended(msgspec.Struct, frozen=True):
    """``ready``: waiters that have all they need. ``recompute``: waiters that must do without. ``cancel``: keys
    nobody waits for any more; their transfers may stop."""

    ready: tuple[int, ...] = ()
    recompute: tuple[int, ...] = ()
    cancel: tuple[int, ...] = ()


class _Waiter:
    """``missing``: keys still under way; ``got``: those it uses already."""

    __slots__ = ("deadline_s", "got", "missing")

    def __init__(self, missing: set[int], got: set[int], deadline_s: float) -> None:
        self.missing = missing
        self.got = got
        self.deadline_s = deadline_s


class Loads:
    """Keys being loaded, keys resident, requests waiting."""

    def __init__(self) -> None:
        self._resident: dict[int, int] = {}  # key -> requests that use it
        self._loading: dict[int, list[int]] = {}  # key -> waiters in the order they came
        self._waiters: dict[int, _Waiter] = {}

    @property
    def loading(self) -> tuple[int, ...]:
        """Keys under way, those with the nearest deadline among their waiters first: the link's order."""
        return tuple(sorted(self._loading, key=self._nearest))

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def resident(self, key: int) -> bool:
        """Whether a key is on the card."""
        return key in self._resident

    def users(self, key: int) -> int:
        """Requests that use a resident key; it must not leave while there are any."""
        return self._resident.get(key, 0)

    def appeared(self, key: int) -> None:
        """A key came to the card otherwise (it was computed there). Its load, if any, goes on until it ends."""
        self._resident.setdefault(key, 0)

    def ask(self, waiter: int, keys: Sequence[int], deadline_s: float = FOREVER) -> Asked:
        """A request needs these prefixes by an instant of the caller's clock.

        It uses each of them from the moment it is there until :meth:`done_with`. IllegalTransition when it waits
        already.
        """
        if waiter in self._waiters:
            raise IllegalTransition("request", waiter, "waiting", "ask again")
        missing: set[int] = set()
        got: set[int] = set()
        start = []
        for key in dict.fromkeys(keys):
            if key in self._resident:
                self._resident[key] += 1
                got.add(key)
                continue
            if key not in self._loading:
                self._loading[key] = []
                start.append(key)
            self._loading[key].append(waiter)
            missing.add(key)
        if missing:
            self._waiters[waiter] = _Waiter(missing, got, deadline_s)
        return Asked(tuple(start), not missing)

    def prefetch(self, key: int) -> bool:
        """Load a key for nobody yet; False when it is here or under way."""
        if key in self._resident or key in self._loading:
            return False
        self._loading[key] = []
        return True

    def loaded(self, key: int) -> Ended:
        """A transfer is complete. IllegalTransition when none of that key is under way."""
        waiters = self._end(key)
        self._resident[key] = self._resident.get(key, 0) + len(waiters)
        ready = []
        for number in waiters:
            waiter = self._waiters[number]
            waiter.missing.discard(key)
            waiter.got.add(key)
            if not waiter.missing:
                del self._waiters[number]
                ready.append(number)
        return Ended(ready=tuple(ready))

    def failed(self, key: int) -> Ended:
        """A transfer failed (a torn slot, a dead disk): those who wait for it recompute, once."""
        waiters = self._end(key)
        cancel: list[int] = []
        for waiter in waiters:
            cancel += self._leave(waiter, key)
        return Ended(recompute=tuple(waiters), cancel=tuple(cancel))

    def expire(self, now_s: float) -> Ended:
        """Who can wait no longer at ``now_s`` recomputes."""
        late = sorted(number for number, waiter in self._waiters.items() if waiter.deadline_s <= now_s)
        cancel: list[int] = []
        for waiter in late:
            cancel += self._leave(waiter, None)
        return Ended(recompute=tuple(late), cancel=tuple(cancel))

    def cancelled(self, key: int) -> None:
        """The caller stopped a transfer that ``Ended.cancel`` named and nobody has joined since."""
        if self._loading.get(key):
            raise IllegalTransition("load", key, "waited for", "be cancelled")
        self._end(key)

    def give_up(self, waiter: int) -> Ended:
        """A waiting request was called off by its client."""
        if waiter not in self._waiters:
            raise IllegalTransition("request", waiter, "not waiting", "give up")
        return Ended(cancel=tuple(self._leave(waiter, None)))

    def done_with(self, keys: Sequence[int]) -> None:
        """A request that was ready uses these no longer."""
        for key in dict.fromkeys(keys):
            if self.users(key) < 1:
                raise IllegalTransition("prefix", key, "unused", "be let go")
            self._resident[key] -= 1

    def left(self, key: int) -> None:
        """A key left the card. IllegalTransition while somebody uses it."""
        if self.users(key):
            raise IllegalTransition("prefix", key, f"used by {self.users(key)}", "leave")
        self._resident.pop(key, None)

    def _end(self, key: int) -> list[int]:
        waiters = self._loading.pop(key, None)
        if waiters is None:
            raise IllegalTransition("load", key, "not under way", "end")
        return waiters

    def _leave(self, number: int, ended: int | None) -> list[int]:
        """Take a waiter out of every queue; keys that nobody waits for now. It lets go of what it had got."""
        waiter = self._waiters.pop(number)
        empty = []
        for key in waiter.got:
            self._resident[key] -= 1
        for key in sorted(waiter.missing):
            if key == ended or key not in self._loading:
                continue
            self._loading[key].remove(number)
            if not self._loading[key]:
                empty.append(key)
        return empty

    def _nearest(self, key: int) -> tuple[float, int]:
        deadlines = [self._waiters[waiter].deadline_s for waiter in self._loading[key]]
        return min(deadlines, default=FOREVER), key
