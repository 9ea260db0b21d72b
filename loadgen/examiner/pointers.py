"""Champion, rejections and pin: read, compared and moved, never over what somebody else wrote meanwhile.

For the examiner, and for the operators' commands, which admit and reject by the same rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from schemas.config import KEY_PIN, PinOrder, read_order
from schemas.policies import (
    HEURISTIC_POINTER,
    KEY_CHAMPION,
    KEY_EXAMINEE,
    KEY_REJECTED,
    PolicyPointer,
    Rejection,
    Rejections,
    expired,
)
from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY, BUCKET_WEIGHTS
from services.bus import Bus, KvEntry
from services.decision.book import admit_network, admit_rule, read_pointer
from services.decision.heuristic import HeuristicSettings
from services.decision.modes import stands
from services.decision.policy import Policy
from services.errors import Conflict, PolicyError


class Held(NamedTuple):
    """The champion as it stands; revision 0: there is no entry."""

    pointer: PolicyPointer
    revision: int


class Pointers:
    """``wall_ns``: the clock of expiries and of what is written."""

    def __init__(self, bus: Bus, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._bus = bus
        self.wall_ns = wall_ns

    async def champion(self) -> Held:
        """What acts by the pointer: the heuristic where there is none, none that can be read, or one that expired."""
        entry = await self._bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
        if entry is None or entry.value is None:
            return Held(HEURISTIC_POINTER, entry.revision if entry else 0)
        try:
            pointer = read_pointer(KEY_CHAMPION, entry.value)
        except PolicyError:
            return Held(HEURISTIC_POINTER, entry.revision)
        return Held(HEURISTIC_POINTER if expired(pointer, self.wall_ns()) else pointer, entry.revision)

    async def probation(self) -> str:
        """Version of the champion that an examiner has on probation, empty: nobody is. BusError."""
        pointer = (await self.champion()).pointer
        return pointer.version if pointer.on_probation else ""

    async def former(self, champion: PolicyPointer) -> PolicyPointer:
        """Where the way back from a champion leads: the one before it, as its pointer or the bucket remembers it; the
        heuristic when nobody does."""
        if champion.former is not None:
            return champion.former
        version = champion.parent
        for entry in reversed(await self._bus.kv_history(BUCKET_POLICY, KEY_CHAMPION)):
            try:
                pointer = read_pointer(KEY_CHAMPION, entry.value or b"")
            except PolicyError:
                continue
            if pointer.version == version:
                return pointer.for_all()
        return HEURISTIC_POINTER

    async def policy(self, pointer: PolicyPointer) -> Policy:
        """The policy as decision would admit it. PolicyError for what it would refuse, BusError."""
        if pointer.kind != "dqn":
            return admit_rule(pointer, HeuristicSettings(), np.random.default_rng(0))
        data = await self._bus.object_get(BUCKET_WEIGHTS, pointer.version)
        if data is None:
            raise PolicyError(f"policy {pointer.version!r}: no such object in {BUCKET_WEIGHTS}")
        return admit_network(pointer, data)

    async def move(self, pointer: PolicyPointer, revision: int, why: str) -> str:
        """Make it the champion if the entry still has ``revision`` and no operator pinned another one. Empty, or why it
        was not moved. BusError."""
        pin = await self.pinned()
        if pin is not None and pin.version != pointer.version:
            return f"{pin.who} pinned {pin.version}"
        moved = msgspec.structs.replace(pointer, who="", why=why, when_ns=self.wall_ns())
        try:
            await self._bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(moved), revision=revision)
        except Conflict:
            return "somebody else moved the champion meanwhile"
        return ""

    async def show(self, pointer: PolicyPointer | None) -> None:
        """Have decision run this candidate in shadow, or none."""
        value = msgspec.json.encode(pointer or HEURISTIC_POINTER)
        await self._bus.kv_put(BUCKET_POLICY, KEY_EXAMINEE, value)

    async def rejections(self) -> Rejections:
        """What examiners and rollbacks rejected; an entry that cannot be read rejects nothing."""
        return _rejections(await self._bus.kv_get(BUCKET_POLICY, KEY_REJECTED))

    async def reject(self, pointer: PolicyPointer, why: str) -> None:
        """No examiner promotes these weights again."""
        while True:
            entry = await self._bus.kv_get(BUCKET_POLICY, KEY_REJECTED)
            known = _rejections(entry)
            if known.of(pointer) is not None:
                return
            new = Rejection(version=pointer.version, sha256=pointer.sha256, why=why, when_ns=self.wall_ns())
            value = msgspec.json.encode(known.plus(new))
            try:
                await self._bus.kv_put(BUCKET_POLICY, KEY_REJECTED, value, revision=entry.revision if entry else 0)
            except Conflict:
                continue
            return

    async def pinned(self) -> PinOrder | None:
        """The operator's pin that stands now."""
        entry = await self._bus.kv_get(BUCKET_CONFIG, KEY_PIN)
        if entry is None or entry.value is None:
            return None
        try:
            order = read_order(KEY_PIN, entry.value)
        except ValueError:
            return None
        return order if isinstance(order, PinOrder) and stands(order, self.wall_ns()) else None


def _rejections(entry: KvEntry | None) -> Rejections:
    try:
        return Rejections() if not entry or not entry.value else msgspec.json.decode(entry.value, type=Rejections)
    except msgspec.DecodeError:
        return Rejections()
