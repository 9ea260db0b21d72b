"""Orders of operators: mode, pause, override, kill switch. Each is a compare-and-put in ``tg_config``."""

from __future__ import annotations

import argparse
import time
from typing import TextIO

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
from schemas.policies import KEY_REJECTED, PolicyPointer, Rejections
from schemas.subjects import BUCKET_CONFIG
from services.bus import Bus, KvEntry
from services.decision.modes import stands
from services.errors import Conflict, TidegateError, UserError
from services.operator.arguments import DEFAULT_TTL
from services.operator.roster import warn_of_a_stranger
from services.operator.session import expiry_ns, node_of, one_line, shown_time, warn, who


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
    if key == KEY_REJECTED:
        return _rejected(value)
    try:
        order: Order | PolicyPointer = read_order(key, value)
    except ValueError:
        try:
            order = msgspec.json.decode(value, type=PolicyPointer)
        except msgspec.DecodeError:
            return f"unreadable: {value[:80]!r}"
    return f"{what(order)}{by(order)}"


def _rejected(value: bytes) -> str:
    """What the newest rejection says; each revision of the entry adds one."""
    try:
        rejections = msgspec.json.decode(value, type=Rejections).rejected
    except msgspec.DecodeError:
        return f"unreadable: {value[:80]!r}"
    return f"{rejections[-1].version} rejected: {one_line(rejections[-1].why)}" if rejections else "nothing rejected"


def about(key: str) -> str:
    """What an order of ``tg_config`` is about: ``mode of worker n0/0/w0``."""
    place = place_of(key)
    return place.kind + (f" of {place.scope} {place.name}" if place.name else "")


def what(order: Order | PolicyPointer) -> str:
    """The order itself."""
    match order:
        case PolicyPointer():
            tried = f" on {order.share * 100:g}% of the workers" if order.on_probation else ""
            return order.version + (" (dqn)" if order.kind == "dqn" else "") + tried
        case ModeOrder():
            return order.mode + (f" for {order.share * 100:g}%" if order.mode == "canary" else "")
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
    ends = f", until {shown_time(order.expires_ns)}" if order.expires_ns else ""
    why = f": {one_line(order.why)}" if order.why else ""
    if isinstance(order, PolicyPointer) and not order.who:
        moved_ns = order.when_ns or order.created_ns
        return ", by the loop itself" + (f" at {shown_time(moved_ns)}" if moved_ns else "") + ends + why
    return f", by {one_line(order.who)} at {shown_time(order.when_ns)}{ends}{why}"


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
    out.write(f"{about(key)}: {what(new)}{by(new)} (revision {revision})\n")
    if before is not None and before.value is not None:
        out.write(f"before: {told(key, before.value)} (revision {before.revision})\n")
    now_ns = time.time_ns()
    if not stands(new, now_ns) and not _stood(key, before, now_ns):
        warn(f"warning: there was nothing to take back: no {about(key)} stood")
    place = place_of(key)
    if place.scope == "worker":
        await warn_of_a_stranger(bus, place.name)
    return 0


def _stood(key: str, entry: KvEntry | None, now_ns: int) -> bool:
    """Whether an entry said anything until now; one that cannot be read may have."""
    if entry is None or entry.value is None:
        return False
    try:
        return stands(read_order(key, entry.value), now_ns)
    except ValueError:
        return True


async def mode(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    if options.worker and options.class_:
        raise UserError("--worker and --class: found both, expected one of them")
    if options.worker:
        node_of(options.worker)
    try:
        key = mode_key(worker=options.worker or "", service_class=options.class_ or "")
    except ValueError as error:
        raise UserError(str(error)) from None
    if options.share is not None and options.mode != "canary":
        raise UserError(f"mode {options.mode}: found --share, which only canary has")
    if options.share is not None and options.worker:
        raise UserError("--worker and --share: found both, expected one: a worker alone is commanded or it is not")
    if options.mode == "inherit":
        _nothing_ends("mode inherit", options)
    share = 1.0 if options.mode == "canary" and options.worker else options.share
    now_ns = time.time_ns()
    new = checked(
        ModeOrder, mode=options.mode, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=expiry_ns(options.ttl, now_ns), **({} if share is None else {"share": share}),
    )  # fmt: skip
    return await order(bus, key, new, options, out)


async def pause(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    if options.resume:
        _nothing_ends("pause --resume", options)
    now_ns = time.time_ns()
    new = checked(
        PauseOrder, active=not options.resume, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=0 if options.resume else expiry_ns(DEFAULT_TTL if options.ttl is None else options.ttl, now_ns),
    )  # fmt: skip
    return await order(bus, KEY_PAUSE, new, options, out)


async def override(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    node_of(options.worker)
    given = [options.rho, options.max_running, options.action]
    if options.clear != all(one is None for one in given):
        raise UserError(
            "override: found --clear beside values, expected one or the other"
            if options.clear
            else "override: found neither --rho, --max-running nor --action, expected one of them, or --clear"
        )
    if options.clear:
        _nothing_ends("override --clear", options)
    now_ns = time.time_ns()
    new = checked(
        OverrideOrder, active=not options.clear, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=0 if options.clear else expiry_ns(DEFAULT_TTL if options.ttl is None else options.ttl, now_ns),
        rho=options.rho, max_running=options.max_running, action=options.action,
    )  # fmt: skip
    return await order(bus, override_key(options.worker), new, options, out)


def _nothing_ends(named: str, options: argparse.Namespace) -> None:
    """UserError for a ``--ttl`` beside what takes an order back."""
    if options.ttl is not None:
        raise UserError(f"{named}: found --ttl, which only an order that stands has")


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
        expected, _, field = str(error).removeprefix("Expected ").partition(" - at `$.")
        name = field.rstrip("`")
        found = fields.get(name)
        told = f"{len(found)} characters" if isinstance(found, str) else repr(found)
        raise UserError(f"--{name.replace('_', '-')}: found {told}, expected {expected.replace('`', '')}") from None
