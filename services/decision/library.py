"""The library of policies: follows the pointers in ``tg_policy`` and fetches what they name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from schemas.policies import PolicyPointer
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS
from services.bus import Bus, KvEntry
from services.decision.book import Book, InForce, admit_network, admit_rule, read_pointer
from services.decision.policy import Policy
from services.decision.settings import Settings
from services.errors import BusUnavailable, PolicyError

log = logging.getLogger(__name__)


class Library:
    """Keeps a :class:`Book` up to date. A pointer that cannot be honoured is refused: what was in force stays.

    ``on_refused`` and ``on_change`` are told of a refusal (the pointer's key) and of what is in force now.
    """

    def __init__(
        self,
        bus: Bus,
        book: Book,
        settings: Settings,
        rng: np.random.Generator,
        on_refused: Callable[[str], None],
        on_change: Callable[[InForce], None],
    ) -> None:
        self._bus = bus
        self._book = book
        self._settings = settings
        self._rng = rng
        self._on_refused = on_refused
        self._on_change = on_change

    async def follow(self, key: str) -> None:
        """Take up every change of the pointer ``key``; runs until cancelled."""
        async for entry in self._bus.kv_watch(BUCKET_POLICY, key):
            try:
                await self._take_up(key, entry)
            except PolicyError as error:
                self._on_refused(key)
                log.warning("policy refused", extra={"fields": {"pointer": key, "why": str(error)}})

    async def _take_up(self, key: str, entry: KvEntry) -> None:
        if entry.value is None:
            self._on_change(self._book.enter(key, None))
            return
        pointer = read_pointer(key, entry.value)
        policy: Policy
        if pointer.kind == "dqn":
            policy = admit_network(pointer, await self._fetch(pointer))
        else:
            policy = admit_rule(pointer, self._settings.heuristic, self._rng)
        in_force = self._book.enter(key, policy, pointer)
        log.info("policy taken up", extra={"fields": {"pointer": key, "version": policy.version}})
        self._on_change(in_force)

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
