"""The library of policies: follows the pointers in ``tg_policy`` and fetches what they name."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from schemas.policies import KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS
from services.bus import Bus, KvEntry
from services.decision.book import (
    KEY_FORMER,
    POLICY_EXPIRED,
    Book,
    InForce,
    admit_network,
    admit_rule,
    read_pointer,
)
from services.decision.policy import Policy
from services.decision.settings import Settings
from services.errors import BusUnavailable, PolicyError

log = logging.getLogger(__name__)

EXPIRY_LOOK_S: Final = 5.0
"""Expiries are waited for in parts of this at most: a wall clock may be set."""


class Library:
    """Keeps a :class:`Book` up to date. A pointer that cannot be honoured is refused: what was in force stays. One that
    expires is refused too, from then on: the heuristic takes the champion's place.

    ``on_refused`` and ``on_change`` are told of a refusal (the pointer's key) and of what is in force now.
    ``wall_ns``: the clock that policies expire by.
    """

    def __init__(
        self,
        bus: Bus,
        book: Book,
        settings: Settings,
        rng: np.random.Generator,
        on_refused: Callable[[str], None],
        on_change: Callable[[InForce], None],
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._bus = bus
        self._book = book
        self._settings = settings
        self._rng = rng
        self._on_refused = on_refused
        self._on_change = on_change
        self._wall_ns = wall_ns
        self._timer: asyncio.TimerHandle | None = None

    async def follow(self, key: str) -> None:
        """Take up every change of the pointer ``key``; runs until cancelled."""
        try:
            async for entry in self._bus.kv_watch(BUCKET_POLICY, key):
                try:
                    await self._take_up(key, entry)
                except PolicyError as error:
                    self._refuse(key, str(error))
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _refuse(self, key: str, why: str) -> None:
        self._on_refused(key)
        log.warning("policy refused", extra={"fields": {"pointer": key, "why": why}})

    def _expire(self) -> None:
        """Take out what has expired, and look again when the next does."""
        for ended in self._book.expire(self._wall_ns()):
            key, _, version = ended.partition(" ")
            self._refuse(key, f"{POLICY_EXPIRED}: {version}")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_ns := self._book.next_end_ns:
            wait_s = min(max(0.0, (next_ns - self._wall_ns()) / 1e9), EXPIRY_LOOK_S)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._expire_and_tell)

    def _expire_and_tell(self) -> None:
        before = self._book.in_force
        self._expire()
        if self._book.in_force is not before:
            self._on_change(self._book.in_force)

    async def _take_up(self, key: str, entry: KvEntry) -> None:
        if entry.value is None:
            self._book.enter(key, None)
            self._on_change(self._book.in_force)
            return
        pointer = read_pointer(key, entry.value)
        policy = await self._admit(pointer)
        self._book.enter(key, policy, pointer, await self._former(pointer) if key == KEY_CHAMPION else None)
        log.info("policy taken up", extra={"fields": {"pointer": key, "version": policy.version}})
        self._expire()
        self._on_change(self._book.in_force)

    async def _admit(self, pointer: PolicyPointer) -> Policy:
        if pointer.kind == "dqn":
            return admit_network(pointer, await self._fetch(pointer))
        return admit_rule(pointer, self._settings.heuristic, self._rng)

    async def _former(self, pointer: PolicyPointer) -> Policy | None:
        """What a champion on probation leaves its other workers on; None: the heuristic, also for one that cannot be
        honoured."""
        if not pointer.on_probation or pointer.former is None:
            return None
        try:
            return await self._admit(pointer.former)
        except PolicyError as error:
            self._refuse(KEY_FORMER, str(error))
            return None

    async def _fetch(self, pointer: PolicyPointer) -> bytes:
        """The weights' bytes; PolicyError when the object is not there after the tries that settings allow.

        While the bus is away there is no telling: it is asked until it is back.
        """
        tries = self._settings.fetch_tries
        while True:
            try:
                data = await self._bus.object_get(BUCKET_WEIGHTS, pointer.version)
            except BusUnavailable:
                data = None
            else:
                tries -= 1
            if data is not None:
                return data
            if tries <= 0:
                raise PolicyError(f"policy {pointer.version!r}: no such object in {BUCKET_WEIGHTS}")
            await asyncio.sleep(self._settings.fetch_pause_s)
