"""Who may be commanded now: what the operators' orders in ``tg_config`` come to for each worker. Pure.

The strongest word wins: kill switch, then the worker's override, then a pause, then the mode, of which the worker's
own stands over its class's and that over all's; where nobody said anything the setting ``mode`` does. An order past
its ``expires_ns`` counts for nothing, and what lies beneath it counts again.

| what | the engine is told | the policy's decision |
|---|---|---|
| ``enforce`` | what the policy decides | acts |
| ``canary`` | that, for a share of the workers; the others are in shadow | acts, or is recorded |
| ``shadow`` | hold at rho 1.0 and the starting ceiling; the actuator moves nothing but a rho above it | recorded |
| ``off`` | the same; every worker of a node shares its one message, so it cannot stay silent for one | not recorded |
| paused | hold at what is in force | recorded |
| override | the numbers given, or the action given wherever the shield allows it | recorded |
| kill switch | as ``off``, whatever else was ordered | recorded |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from zlib import crc32

from schemas.actions import Action, Hold
from schemas.classes import ServiceClass
from schemas.config import (
    KEY_KILL,
    KEY_MODE,
    KEY_PAUSE,
    Mode,
    ModeOrder,
    Order,
    OverrideOrder,
    PinOrder,
    Place,
    mode_key,
    place_of,
    read_order,
)

_CLASS_NAMES: Final = {int(kind): kind.name.lower() for kind in ServiceClass}


class Standing(NamedTuple):
    """What counts for a worker now."""

    mode: Mode
    hold: Hold = Hold.NONE
    """NONE: the policy's decision acts."""
    key: str = ""
    """The order that says so; empty: the setting."""
    canary: bool = False
    """One of the share that a canary mode commands."""
    override: OverrideOrder | None = None


class Modes:
    """The orders as they stand. ``default`` counts where nobody ordered a mode."""

    def __init__(self, default: Mode) -> None:
        self.default: Mode = default
        self._orders: dict[str, tuple[Order, int]] = {}
        self._by_worker: dict[str, str] = {}
        """Mode keys of single workers: an id is escaped once, not every step."""
        self._overrides: dict[str, str] = {}
        """The same of overrides."""

    def enter(self, key: str, value: bytes | None, revision: int) -> Order | None:
        """Take up an entry of the bucket, None when it was deleted; ValueError for one that says nothing sensible:
        then what stood before goes on standing."""
        place = place_of(key)
        order = None if value is None else read_order(key, value)
        if order is None:
            self._orders.pop(key, None)
        else:
            self._orders[key] = (order, revision)
        self._index(place, key, order)
        return order

    def order(self, key: str) -> tuple[Order, int] | None:
        """An order and its revision, expired or not."""
        return self._orders.get(key)

    def orders(self) -> dict[str, tuple[Order, int]]:
        return dict(self._orders)

    def plain(self, now_ns: int) -> bool:
        """Whether every worker is simply enforced: nothing to look up for any of them."""
        return self.default == "enforce" and not any(
            stands(order, now_ns) and not isinstance(order, PinOrder) for order, _ in self._orders.values()
        )

    def standings(self, workers: Sequence[str], classes: Sequence[int], now_ns: int) -> list[Standing]:
        """What counts for each worker at wall clock ``now_ns``."""
        kill, pause = self._live(KEY_KILL, now_ns) is not None, self._live(KEY_PAUSE, now_ns) is not None
        of_class = {}
        for kind in set(classes):
            order, key = self._class_mode(kind, now_ns)
            chosen, rest = _of_mode(order, key, self.default)
            of_class[kind] = (_above(chosen, kill, pause), _above(rest, kill, pause), order.share if order else 0.0)
        own = self._by_worker.keys() | self._overrides.keys()
        out = []
        for worker, kind in zip(workers, classes, strict=True):
            chosen, rest, share = of_class[kind]
            if worker in own:
                chosen = self._own(worker, now_ns, kill, pause, chosen if in_share(worker, share) else rest)
            elif chosen is not rest and not in_share(worker, share):
                chosen = rest
            out.append(chosen)
        return out

    def _own(self, worker: str, now_ns: int, kill: bool, pause: bool, standing: Standing) -> Standing:
        """What counts for a worker about which something was ordered; ``standing``: what its class gives it."""
        key = self._by_worker.get(worker, "")
        order = self._live(key, now_ns)
        if isinstance(order, ModeOrder):
            standing = _above(_of_mode(order, key, self.default)[0], kill, pause)
        key = self._overrides.get(worker, "")
        override = self._live(key, now_ns)
        if isinstance(override, OverrideOrder) and not kill:
            return standing._replace(hold=Hold.OVERRIDE, key=key, override=override)
        return standing

    def _index(self, place: Place, key: str, order: Order | None) -> None:
        table = {"mode": self._by_worker, "override": self._overrides}.get(place.kind)
        if table is None or place.scope != "worker":
            return
        if order is None:
            table.pop(place.name, None)
        else:
            table[place.name] = key

    def _live(self, key: str, now_ns: int) -> Order | None:
        known = self._orders.get(key)
        return known[0] if known is not None and stands(known[0], now_ns) else None

    def _class_mode(self, kind: int, now_ns: int) -> tuple[ModeOrder | None, str]:
        """The mode of a class or, where that says nothing, of all."""
        name = _CLASS_NAMES.get(kind)
        for key in ([mode_key(service_class=name)] if name else []) + [KEY_MODE]:
            order = self._live(key, now_ns)
            if isinstance(order, ModeOrder):
                return order, key
        return None, ""


def stands(order: Order, now_ns: int) -> bool:
    """Whether an order says anything at wall clock ``now_ns``: not taken back, not expired."""
    if 0 < order.expires_ns <= now_ns:
        return False
    return order.mode != "inherit" if isinstance(order, ModeOrder) else order.active


def _of_mode(order: ModeOrder | None, key: str, default: Mode) -> tuple[Standing, Standing]:
    """What a mode gives to the share that it commands, and to the others: the same but for ``canary``."""
    mode: Mode = default if order is None or order.mode == "inherit" else order.mode
    if mode == "canary":
        return Standing(mode, Hold.NONE, key, canary=True), Standing(mode, Hold.SHADOW, key)
    one = Standing(mode, {"off": Hold.MODE_OFF, "shadow": Hold.SHADOW}.get(mode, Hold.NONE), key)
    return one, one


def _above(standing: Standing, kill: bool, pause: bool) -> Standing:
    """With what stands above every mode."""
    if kill:
        return standing._replace(hold=Hold.KILLED, key=KEY_KILL)
    if pause and standing.hold == Hold.NONE:
        return standing._replace(hold=Hold.PAUSED, key=KEY_PAUSE)
    return standing


def in_share(worker: str, share: float) -> bool:
    """Whether a worker is one of a share: by a hash of its id, the same in every step and every copy."""
    return crc32(worker.encode()) < round(share * 2**32)


ACTION_OF: Final = {action.name.lower(): action for action in Action}
