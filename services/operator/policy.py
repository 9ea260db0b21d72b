"""`tidegate policy`: which policies there are, which acts, and moving the champion by hand."""

from __future__ import annotations

import argparse
import time
from typing import Final, TextIO

import msgspec

from loadgen.examiner.pointers import Pointers
from schemas.config import KEY_PIN, PinOrder
from schemas.features import FEATURE_HASH
from schemas.policies import HEURISTIC, KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer, Rejection, Rejections, expired
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS
from services import qweights
from services.bus import Bus, KvEntry
from services.decision.book import admit_network
from services.errors import PolicyError, TidegateError, UserError
from services.operator.changes import by, checked, order, put, told, what
from services.operator.former import TAKEN_BACK, formers
from services.operator.session import NothingFound, expiry_ns, one_line, shown_time, table, warn, who

KINDS = ("heuristic", "static", "fixed")
REJECTIONS_LISTED: Final = 10
"""Of up to 256 that are kept."""


class Pinned(TidegateError):
    """The champion is pinned, and another one was to be put in its place."""


async def list_policies(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Every pointer that is or was, newest first; what was rejected; the pin."""
    rows = []
    ends = []
    for key in (KEY_CHAMPION, KEY_CANDIDATE):
        history = list(reversed(await bus.kv_history(BUCKET_POLICY, key)))
        for place, entry in enumerate(history):
            pointer = _read(entry)
            role = key if place == 0 else f"former {key}"
            if pointer is None:
                rows.append([role, "-", "-", str(entry.revision), "-", "-", told(key, entry.value)])
                continue
            judged = ", ".join(f"{k} {v:.4g}" for k, v in sorted(pointer.evaluation.items())) or "-"
            mover = one_line(": ".join(filter(None, [pointer.who or "the loop itself", pointer.why])))
            rows.append([role, pointer.version, pointer.kind, str(entry.revision), shown_time(entry.stored_ns),
                         judged, mover])  # fmt: skip
            if place == 0:
                ends.append(_ending(key, pointer))
    if rows:
        out.write(table(["role", "version", "kind", "revision", "since", "evaluation", "by"], rows))
    else:
        out.write("no pointers in tg_policy: the heuristic acts\n")
    out.write("".join(ends))
    out.write(_listed(await Pointers(bus).rejections()))
    pinned = await Pointers(bus).pinned()
    if pinned is not None:
        out.write(f"pin: {what(pinned)}{by(pinned)}\n")
    return 0


async def show(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """A pointer, and the network that it names."""
    pointer, revision = await _find(bus, options.version)
    fields = msgspec.structs.asdict(pointer) | {"created": shown_time(pointer.created_ns)}
    out.write(what(pointer) + (f", revision {revision}" if revision else "") + "\n")
    for name in ("parent", "transitions", "evaluation", "created", "who", "why", "sha256", "feature_hash"):
        if fields[name] and fields[name] != "-":
            out.write(f"  {name}: {one_line(str(fields[name]))}\n")
    if (rejected := (await Pointers(bus).rejections()).of(pointer)) is not None:
        out.write(f"  rejected: {_reason(rejected)}\n")
    if pointer.kind == "dqn":
        data = await bus.object_get(BUCKET_WEIGHTS, pointer.version)
        if data is None:
            out.write(f"  weights: not in {BUCKET_WEIGHTS}\n")
        else:
            try:
                admit_network(pointer, data)
                weights = qweights.load(data)
            except PolicyError as error:
                out.write(f"  weights: {len(data)} bytes, refused: {error}\n")
            else:
                sizes = "-".join(map(str, weights.hidden))
                out.write(f"  weights: {len(data)} bytes, hidden layers {sizes}, valid here\n")
    return 0


async def promote(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Make a policy the champion. UserError or PolicyError when it could not act, Pinned."""
    pointer, _ = await _find(bus, options.version)
    code = await _move(bus, pointer, options, out)
    if (rejected := (await Pointers(bus).rejections()).of(pointer)) is not None:
        warn(f"warning: {pointer.version} was rejected {_reason(rejected)}")
    return code


async def rollback(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Point back to the last champion of another version that nobody took back or rejected and that decision would
    take. The network that is left counts as rejected. NothingFound, Pinned."""
    history = [_read(entry) for entry in await bus.kv_history(BUCKET_POLICY, KEY_CHAMPION)]
    left = history[-1] if history else None
    for pointer, passed_over in formers(history, await Pointers(bus).rejections()):
        if refused := passed_over or await _refusal(bus, pointer):
            out.write(f"passed over {pointer.version}: {one_line(refused)}\n")
            continue
        why = f"{TAKEN_BACK}{left.version if left else 'an unreadable pointer'}: {options.why}"
        code = await _move(bus, pointer, argparse.Namespace(**{**vars(options), "why": why}), out)
        if left is not None and left.kind == "dqn":
            await Pointers(bus).reject(left, f"{who(options)} rolled back: {options.why}")
            out.write(f"rejected: {left.version}: no examiner promotes it again\n")
        return code
    raise NothingFound(
        f"policy rollback: found no champion before {left.version if left else 'this one'} to go back to; "
        "tidegate policy promote heuristic always works"
    )


async def pin(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Promote a version if it is not the champion, and forbid examiners to move it."""
    now_ns = time.time_ns()
    if options.clear:
        if options.version:
            raise UserError("policy pin: found a version beside --clear, expected one or the other")
        if options.ttl is not None:
            raise UserError("policy pin --clear: found --ttl, which only a pin that stands has")
        version = ""
    else:
        champion = await bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
        held = _read(champion) if champion is not None else None
        version = options.version or (held.version if held else "heuristic")
        if held is None or held.version != version:
            pointer, _ = await _find(bus, version)
            await _move(bus, pointer, argparse.Namespace(**{**vars(options), "revision": None}), out)
            version = pointer.version
    new = checked(
        PinOrder, active=not options.clear, version=version, who=who(options), when_ns=now_ns, why=options.why,
        expires_ns=expiry_ns(options.ttl, now_ns),
    )  # fmt: skip
    return await order(bus, KEY_PIN, new, options, out)


async def _move(bus: Bus, pointer: PolicyPointer, options: argparse.Namespace, out: TextIO) -> int:
    if refused := await _refusal(bus, pointer):
        raise (PolicyError if pointer.kind == "dqn" else UserError)(f"nothing was changed: {refused}")
    pinned = await Pointers(bus).pinned()
    if pinned is not None and pinned.version != pointer.version and options.what != "pin":
        raise Pinned(f"the champion is {what(pinned)}{by(pinned)}: tidegate policy pin --clear first")
    # A policy that an operator puts in force stays until somebody moves it: no examiner watches over it.
    new = msgspec.structs.replace(
        pointer.for_all(), who=who(options), why=options.why, when_ns=time.time_ns(), expires_ns=0
    )
    before, revision = await put(bus, BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(new), options.revision)
    out.write(f"champion: {what(new)}{by(new)} (revision {revision})\n")
    if before is not None and before.value is not None:
        out.write(f"before: {told(KEY_CHAMPION, before.value)} (revision {before.revision})\n")
    return 0


async def _find(bus: Bus, name: str) -> tuple[PolicyPointer, int]:
    """The pointer of a role, a version or a rule, and its revision (0: none points there). UserError."""
    for key in (KEY_CHAMPION, KEY_CANDIDATE):
        for place, entry in enumerate(reversed(await bus.kv_history(BUCKET_POLICY, key))):
            pointer = _read(entry)
            if pointer is not None and (pointer.version == name or (name == key and place == 0)):
                return pointer, entry.revision
    kind = "fixed" if name.startswith("fixed:") else name
    if kind in KINDS:
        return PolicyPointer(version=name, kind=kind), 0  # type: ignore[arg-type]  # one of KINDS
    data = await bus.object_get(BUCKET_WEIGHTS, name)
    if data is None:
        raise UserError(
            f"policy {name!r}: found neither a pointer in {BUCKET_POLICY} nor weights in {BUCKET_WEIGHTS}, expected "
            f"champion, candidate, a version of `tidegate policy list`, or one of {', '.join(KINDS)}:RHO"
        )
    return PolicyPointer(version=name, kind="dqn", sha256=qweights.digest(data), feature_hash=FEATURE_HASH), 0


async def _refusal(bus: Bus, pointer: PolicyPointer) -> str:
    """Why decision would refuse it; empty: it would not."""
    try:
        await Pointers(bus).policy(pointer)
    except PolicyError as error:
        return str(error)
    return ""


def _ending(key: str, pointer: PolicyPointer) -> str:
    """A line about a pointer that is in force for some time, or for some workers, only."""
    if expired(pointer, time.time_ns()):
        return f"{key}: {pointer.version} expired at {shown_time(pointer.expires_ns)}: the heuristic acts\n"
    if not pointer.expires_ns and not pointer.on_probation:
        return ""
    former = pointer.former.version if pointer.former is not None else HEURISTIC
    words = [f"on {pointer.share * 100:g}% of the workers, the others on {former}" if pointer.on_probation else "",
             f"until {shown_time(pointer.expires_ns)}" if pointer.expires_ns else ""]  # fmt: skip
    return f"{key}: {pointer.version} {', '.join(filter(None, words))}\n"


def _listed(rejections: Rejections) -> str:
    """Lines for the newest, newest first."""
    rejected = rejections.rejected
    lines = [f"rejected: {one.version} {_reason(one)}\n" for one in reversed(rejected[-REJECTIONS_LISTED:])]
    if len(rejected) > REJECTIONS_LISTED:
        lines.append(f"rejected: {len(rejected) - REJECTIONS_LISTED} more before these\n")
    return "".join(lines)


def _reason(one: Rejection) -> str:
    return f"at {shown_time(one.when_ns)}: {one_line(one.why)}"


def _read(entry: KvEntry) -> PolicyPointer | None:
    try:
        return None if entry.value is None else msgspec.json.decode(entry.value, type=PolicyPointer)
    except msgspec.DecodeError:
        return None
