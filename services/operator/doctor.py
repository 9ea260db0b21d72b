"""`tidegate doctor`: one line for each thing that Tidegate needs here: whether it is there, else how to mend it.

OK: as it should be. WARN: something goes without it, and the line says what. FAIL: what was asked for cannot work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Final

from services.actuator.engines import emulated
from services.actuator.engines.vllm.flags import SOCKET_VARIABLE, START_FLAGS
from services.actuator.engines.vllm.versions import KNOWN
from services.actuator.service import Settings as ActuatorSettings
from services.errors import EngineRefused, EngineUnreachable, SettingsError, UserError
from services.operator import doctor_bus, doctor_machine, session
from services.operator.arguments_attach import KINDS
from services.operator.attach_endpoint import SLOW_S, EndpointProblem, Kind, look
from services.operator.doctor_check import Check, fail, ok, warn
from services.settings import CommonSettings, check_environment
from services.telemetry.settings import Settings as TelemetrySettings


def doctor(options: argparse.Namespace) -> int:
    """Look at everything and tell; 1 when something FAILs."""
    asked = [_asked(text) for text in options.url]
    with session.quiet_bus_log():
        checks = asyncio.run(examine(options, asked))
    if options.json:
        sys.stdout.write(json.dumps([check._asdict() for check in checks]) + "\n")
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            mend = f": {check.mend}" if check.mend else ""
            sys.stdout.write(
                session.one_line(f"{check.state:4}  {check.name.ljust(width)}  {check.found}{mend}") + "\n"
            )
    return 1 if any(check.state == "FAIL" for check in checks) else 0


async def examine(options: argparse.Namespace, asked: list[tuple[Kind, str]]) -> list[Check]:
    """All checks, those of the network side by side."""
    checks, common, telemetry, actuator = _settings(options)
    named = options.nats is not None or "TIDEGATE_COMMON_NATS_URL" in os.environ or common.nats_url != _DEFAULT_URL
    servers = list(dict.fromkeys([*asked, *((engine.kind, engine.url) for engine in telemetry.engines)]))
    bus, engines, sockets, machine = await asyncio.gather(
        doctor_bus.bus_checks(common, named),
        asyncio.gather(*(_engine(kind, url) for kind, url in servers)),
        _sockets(actuator.sockets),
        asyncio.to_thread(doctor_machine.machine_checks, [actuator.sockets, telemetry.boot_file]),
    )
    if not servers:
        engines = [[warn("engine", "none was named", "tidegate doctor --url http://127.0.0.1:8000 asks one")]]
    return [*checks, *machine, *bus, *(check for some in engines for check in some), *sockets]


_DEFAULT_URL = CommonSettings().nats_url
STEERABLE: Final = "known: it can be steered if started with Tidegate inside"


def _asked(text: str) -> tuple[Kind, str]:
    """``[KIND=]URL``: vLLM's where no kind is named."""
    for kind in KINDS:
        if text.startswith(f"{kind}="):
            return kind, text.removeprefix(f"{kind}=")  # type: ignore[return-value]  # one of the literals
    return "vllm", text


def _settings(
    options: argparse.Namespace,
) -> tuple[list[Check], CommonSettings, TelemetrySettings, ActuatorSettings]:
    """The settings as services read them, and a line for those that they would refuse."""
    checks: list[Check] = []
    common, telemetry, actuator = CommonSettings(), TelemetrySettings(), ActuatorSettings()
    overrides: dict[str, object] = {"nats_url": options.nats} if options.nats is not None else {}
    try:
        check_environment(os.environ)
        common = session.settings_of(options, CommonSettings, "common", **overrides)
        telemetry = session.settings_of(options, TelemetrySettings, "telemetry")
        actuator = session.settings_of(options, ActuatorSettings, "actuator")
    except SettingsError as error:
        checks.append(fail("settings", f"{error.where}: {error.key}: found {error.found}", f"put {error.expected}"))
        if options.nats is not None:
            common = CommonSettings(nats_url=options.nats)
    else:
        checks.append(
            ok("settings", str(options.config or os.environ.get("TIDEGATE_CONFIG") or "defaults, environment"))
        )
    return checks, common, telemetry, actuator


async def _engine(kind: Kind, url: str) -> list[Check]:
    name = f"engine {url}"
    try:
        endpoint = await look(url, kind)
    except UserError as error:
        return [fail(name, str(error), "")]
    except EndpointProblem as error:
        return [fail(name, error.why, "until then its worker is stale and held")]
    found = f"{kind} {endpoint.version or 'of unknown version'}, {len(endpoint.probe.engines)} engine(s), "
    found += f"/metrics in {endpoint.took_s * 1e3:.0f} ms"
    slow = endpoint.took_s > SLOW_S
    checks = [
        warn(name, found, f"telemetry waits {SLOW_S:g} s: give the server a core more") if slow else ok(name, found)
    ]
    known = ", ".join(f"{one}.x" for one in KNOWN)
    if kind != "vllm":
        checks.append(warn(f"version {url}", f"{kind} is watched only", "expected vLLM to enforce"))
    elif endpoint.steerable:
        checks.append(ok(f"version {url}", f"vLLM {endpoint.version}: {STEERABLE}"))
    else:
        found = f"vLLM {endpoint.version or 'of unknown version'}"
        checks.append(warn(f"version {url}", found, f"it can be watched; to enforce, run vLLM {known}"))
    return checks


async def _sockets(pattern: str) -> list[Check]:
    """Every engine socket that is there answers."""
    found = await asyncio.to_thread(doctor_machine.sockets_in, pattern)
    if not found:
        flags = " ".join(START_FLAGS)
        mend = f"to steer vLLM start it with {SOCKET_VARIABLE}={pattern}/<gpu>-<name>.sock and {flags}"
        return [warn("engine sockets", f"none in {pattern}: engines can be watched, not steered", mend)]
    return list(await asyncio.gather(*(_socket(node, worker, folder) for node, worker, folder in found)))


async def _socket(node: str, worker: str, folder: str) -> Check:
    engine = emulated.connect(Path(folder), worker, 2.0)
    name = f"engine {worker}"
    try:
        said = await engine.describe()
    except (EngineUnreachable, EngineRefused) as error:
        return fail(name, str(error), "is its process alive, and may this user open the socket?")
    finally:
        await engine.close()
    if said.worker != worker:
        mend = f"start it with TIDEGATE_NODE={node}"
        return fail(name, f"it says that it is {said.worker}", mend)
    return ok(name, f"{said.engine}, can: {', '.join(('quota', *said.capabilities))}")
