"""Orders of operators: mode, pause, override, kill switch. Each is a compare-and-put in ``tg_config``."""

from __future__ import annotations

import argparse
import time
from typing import Final, TextIO

import msgspec

from schemas.config import (
    KEY_KILL,
    KEY_PAUSE,
    KillOrder,
    ModeOrder,
    Order,
    OverrideOrder,
    PauseOrder,
    PinOrder,
    mode_key,
    override_key,
    place_of,
    read_order,
)
from schemas.identity import parse_worker_id
from schemas.policies import PolicyPointer
from schemas.subjects import BUCKET_CONFIG
from services.bus import Bus, KvEntry
from services.errors import Conflict, TidegateError, UserError
from services.operator.session import duration_s, expiry_ns, shown_time, who

DEFAULT_TTL: Final = "1h"
"""Of a pause and of an override: neither may be forgotten for ever."""


class ChangedMeanwhile(TidegateError):
    """Somebody else wrote since; says what and both revisions."""

    def __init__(self, bucket: str, key: str, expected: int, found: KvEntry | None) -> None:
        self.expected, self.found = expected, found.revision if found else 0
        theirs = told(key, found.value) if found else "nothing is there"
        super().__init__(
            f"{bucket}/{key}: nothing was changed: revision {expected} was expected, found revision {self.found}: "
            f"{theirs}"
        )


def told(key: str, value: bytes | None) -> str:
    """An entry of ``tg_config`` or ``tg_policy`` in words: what, who, when, why."""
    if value is None:
        return "deleted"
    try:
        order: Order | PolicyPointer = read_order(key, value)
    except ValueError:
        try:
            order = msgspec.json.decode(value, type=PolicyPointer)
        except msgspec.DecodeError:
            return f"unreadable: {value[:80]!r}"
    return f"{what(order)}{by(order)}"


def what(order: Order | PolicyPointer) -> str:
    """The order itself."""
    match order:
        case PolicyPointer():
            return f"{order.version} ({order.kind})"
        case ModeOrder():
            return order.mode + (f" for {order.share:.0%}" if order.mode == "canary" else "")
        case OverrideOrder() if order.active:
            parts = [f"rho {order.rho:g}" if order.rho is not None else "",
                     f"max running {order.max_running}" if order.max_running is not None else "",
                     f"action {order.action}" if order.action is not None else ""]  # fmt: skip
            return ", ".join(part for part in parts if part)
        case PinOrder() if order.active:
            return f"pinned to {order.version}"
        case KillOrder():
            return "on" if order.active else "off"
        case PauseOrder():
            return "paused" if order.active else "resumed"
    return "cleared"


def by(order: Order | PolicyPointer) -> str:
    """Who, when, until when, why."""
    if isinstance(order, PolicyPointer):
        until = 0
        if not order.who:
            return f", by the loop itself at {shown_time(order.created_ns)}"
    else:
        until = order.expires_ns
    ends = f", until {shown_time(until)}" if until else ""
    return f", by {order.who} at {shown_time(order.when_ns)}{ends}: {order.why}"


async def put(bus: Bus, bucket: str, key: str, value: bytes, expected: int | None) -> tuple[KvEntry | None, int]:
    """Write if nobody else did since it was read (or since ``expected``): what was there, and the new revision."""
    before = await bus.kv_get(bucket, key)
    revision = before.revision if before else 0
    if expected is not None and expected != revision:
        raise ChangedMeanwhile(bucket, key, expected, before)
    try:
        return before, await bus.kv_put(bucket, key, value, revision=revision)
    except Conflict:
        raise ChangedMeanwhile(bucket, key, revision, await bus.kv_get(bucket, key)) from None


async def order(bus: Bus, key: str, new: Order, options: argparse.Namespace, out: TextIO) -> int:
    """Put an order and say what it replaced; the exit code."""
    before, revision = await put(bus, BUCKET_CONFIG, key, msgspec.json.encode(new), options.revision)
    place = place_of(key)
    about = place.kind + (f" of {place.scope} {place.name}" if place.name else "")
    out.write(f"{about}: {what(new)}{by(new)} (revision {revision})\n")
    if before is not None and before.value is not None:
        out.write(f"before: {told(key, before.value)} (revision {before.revision})\n")
    return 0


async def mode(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    if options.worker and options.class_:
        raise UserError("--worker and --class: found both, expected one of them")
    try:
        if options.worker:
            parse_worker_id(options.worker)
        key = mode_key(worker=options.worker or "", service_class=options.class_ or "")
    except ValueError as error:
        raise UserError(str(error)) from None
    now_ns = time.time_ns()
    if options.share is not None and options.mode != "canary":
        raise UserError(f"mode {options.mode}: found --share, which only canary has")
    share = {} if options.share is None else {"share": options.share}
    new = checked(
        ModeOrder, mode=options.mode, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=expiry_ns(options.ttl, now_ns), **share,
    )  # fmt: skip
    return await order(bus, key, new, options, out)


async def pause(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    now_ns = time.time_ns()
    active = not options.resume
    new = checked(
        PauseOrder, active=active, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=now_ns + round(duration_s(options.ttl) * 1e9) if active else 0,
    )  # fmt: skip
    return await order(bus, KEY_PAUSE, new, options, out)


async def override(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    try:
        parse_worker_id(options.worker)
    except ValueError as error:
        raise UserError(str(error)) from None
    given = [options.rho, options.max_running, options.action]
    if options.clear != all(one is None for one in given):
        raise UserError(
            "override: found --clear beside values, expected one or the other"
            if options.clear
            else "override: found neither --rho, --max-running nor --action, expected one of them, or --clear"
        )
    now_ns = time.time_ns()
    new = checked(
        OverrideOrder, active=not options.clear, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=0 if options.clear else now_ns + round(duration_s(options.ttl) * 1e9),
        rho=options.rho, max_running=options.max_running, action=options.action,
    )  # fmt: skip
    return await order(bus, override_key(options.worker), new, options, out)


async def kill_switch(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """On stands whatever others write meanwhile: who pulls it must not be asked to try again."""
    pulled = options.state == "on"
    new = checked(KillOrder, active=pulled, who=who(options), when_ns=time.time_ns(), why=options.why)
    while True:
        try:
            return await order(bus, KEY_KILL, new, options, out)
        except ChangedMeanwhile as error:
            if not pulled or options.revision is not None:
                raise
            out.write(f"{error}; trying again\n")


def checked(kind: type[Order], **fields: object) -> Order:
    """An order whose fields are in range; UserError says which is not."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"{kind.__name__.removesuffix('Order').lower()}: {error}") from None
