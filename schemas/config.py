"""What lies in the ``tg_config`` bucket: the operators' words, JSON, one key a subject. Pure.

Every value says who wrote it, when and why; its revision is the bucket's. Nothing is deleted: who takes an order
back writes that (``inherit``, ``active = false``), so the bucket's history is the record of changes.

| key | struct |
|---|---|
| ``mode``, ``mode.class.<class>``, ``mode.worker.<token>`` | :class:`ModeOrder` |
| ``pause`` | :class:`PauseOrder` |
| ``override.worker.<token>`` | :class:`OverrideOrder` |
| ``kill`` | :class:`KillOrder` |
| ``pin`` | :class:`PinOrder` |

``<token>`` is the worker id as :func:`schemas.subjects.token` escapes it. ``expires_ns`` is an instant of the wall
clock, 0: never; past it the order counts for nothing.

A field that says nothing new is not written (``omit_defaults``): a decision of yesterday, which refuses fields that it
does not know, still heeds today's kill switch. So a default here never changes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from schemas.actions import MAX_RUNNING_HIGH, MAX_RUNNING_LOW, RHO_MAX, RHO_MIN
from schemas.classes import ServiceClass
from schemas.subjects import name_of, token

Mode = Literal["off", "shadow", "canary", "enforce"]
ActionName = Literal["hold", "widen", "tighten", "compact", "evict"]

KEY_MODE: Final = "mode"
KEY_PAUSE: Final = "pause"
KEY_KILL: Final = "kill"
KEY_PIN: Final = "pin"
CANARY_SHARE: Final = 0.1

_Word = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
_Instant = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62))]


class ModeOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How far Tidegate may go with the workers of a key; ``inherit`` takes the key's word back."""

    mode: Mode | Literal["inherit"]
    who: _Word
    when_ns: _Instant
    why: _Word
    expires_ns: _Instant = 0
    share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = CANARY_SHARE
    """Of ``canary`` for a class or for all: share of the workers that is commanded, always the same ones."""


class PauseOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All workers keep what is in force, recommendations go on."""

    active: bool
    who: _Word
    when_ns: _Instant
    why: _Word
    expires_ns: _Instant = 0


class OverrideOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A worker gets these numbers, or this action wherever the shield allows it, instead of the policy's."""

    active: bool
    who: _Word
    when_ns: _Instant
    why: _Word
    expires_ns: _Instant = 0
    rho: Annotated[float, msgspec.Meta(ge=RHO_MIN, le=RHO_MAX)] | None = None
    max_running: Annotated[int, msgspec.Meta(ge=MAX_RUNNING_LOW, le=MAX_RUNNING_HIGH)] | None = None
    action: ActionName | None = None


class KillOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every worker to rho 1.0 and the starting ceiling, at once and until it is taken back."""

    active: bool
    who: _Word
    when_ns: _Instant
    why: _Word
    expires_ns: _Instant = 0


class PinOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """No examiner moves the champion away from ``version`` while this stands."""

    active: bool
    version: str
    who: _Word
    when_ns: _Instant
    why: _Word
    expires_ns: _Instant = 0


Order = ModeOrder | PauseOrder | OverrideOrder | KillOrder | PinOrder


class Place(NamedTuple):
    """What a key is about: ``scope`` is ``all``, ``class`` or ``worker``, ``name`` the class or worker."""

    kind: Literal["mode", "pause", "override", "kill", "pin"]
    scope: Literal["all", "class", "worker"]
    name: str = ""


_TYPES: Final[dict[str, type[Order]]] = {
    "mode": ModeOrder, "pause": PauseOrder, "override": OverrideOrder, "kill": KillOrder, "pin": PinOrder,
}  # fmt: skip


def mode_key(*, worker: str = "", service_class: str = "") -> str:
    """The mode's key of a worker, of a class, or of all. ValueError for an unknown class."""
    if worker:
        return f"{KEY_MODE}.worker.{token(worker)}"
    if service_class:
        if service_class.upper() not in ServiceClass.__members__:
            known = ", ".join(kind.name.lower() for kind in ServiceClass)
            raise ValueError(f"class {service_class!r}: expected one of {known}")
        return f"{KEY_MODE}.class.{service_class.lower()}"
    return KEY_MODE


def override_key(worker: str) -> str:
    return f"override.worker.{token(worker)}"


def place_of(key: str) -> Place:
    """What a key is about; ValueError for one that nobody reads."""
    head, _, rest = key.partition(".")
    scope, _, name = rest.partition(".")
    if not rest and head in (KEY_MODE, KEY_PAUSE, KEY_KILL, KEY_PIN):
        return Place(head, "all")  # type: ignore[arg-type]  # one of the literals, tested above
    if head == "mode" and scope == "class" and name.upper() in ServiceClass.__members__:
        return Place("mode", "class", name)
    if head in ("mode", "override") and scope == "worker" and name:
        return Place("mode" if head == "mode" else "override", "worker", name_of(name))
    raise ValueError(f"key {key!r}: expected mode[.class.<class>|.worker.<worker>], pause, override.worker.<worker>, "
                     "kill or pin")  # fmt: skip


def read_order(key: str, value: bytes) -> Order:
    """The order in a KV value; ValueError says what is wrong with it."""
    place = place_of(key)
    try:
        return msgspec.json.decode(value, type=_TYPES[place.kind])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"no {place.kind} order: {error}") from error
