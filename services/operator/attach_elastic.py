"""``--kvcached`` and ``--sleep``: what an attached engine can beside its socket, looked at before anything starts."""

from __future__ import annotations

import argparse
import contextlib
import math
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from schemas.identity import parse_worker_id
from services.actuator.cold_weights import ColdWeightSettings
from services.actuator.engines.connecting import EngineSettings
from services.actuator.engines.vllm.asleep import NO_SLEEP_MODE
from services.actuator.engines.vllm.device_use import DeviceUse
from services.actuator.engines.vllm.sleeping import Sleeper
from services.actuator.service import Settings as ActuatorSettings
from services.errors import DeviceError, EngineRefused, ScrapeFailed, SegmentError, UserError
from services.kvsegment import read_usage
from services.nvml import Nvml
from services.operator import session
from services.operator.attach_endpoint import ANSWER_LIMIT_S
from services.operator.attach_plan import Plan
from services.telemetry.sources.fetch import base_url, fetch_bytes
from services.telemetry.sources.model_facts import model_folder, read_model_facts

GB: Final = 1e9


class Elastic(NamedTuple):
    """What the services are told of it."""

    settings: EngineSettings | None = None
    cold: ColdWeightSettings | None = None
    told: tuple[str, ...] = ()
    """Lines for whoever attaches."""

    @property
    def for_telemetry(self) -> dict[str, Any]:
        one = self.settings
        if one is None:
            return {}
        said: dict[str, Any] = {"kvcached": str(one.segment)} if one.kvcached else {}
        return said | ({"weights_bytes": float(one.weights_bytes)} if one.weights_bytes else {})

    @property
    def for_actuator(self) -> dict[str, str]:
        said = {} if self.settings is None else {"engines": msgspec.json.encode([self.settings]).decode()}
        return said if self.cold is None else said | {"cold_weights": msgspec.json.encode(self.cold).decode()}


async def elastic_of(options: argparse.Namespace, plan: Plan) -> Elastic:
    """What the options come to on this server. UserError where they cannot be meant or the server was not started for
    them; SegmentError for a segment that cannot be read."""
    if not options.kvcached and not options.sleep:
        if options.weights_gb is not None:
            raise UserError("--weights-gb: found without --sleep, expected both: it is what a sleep has to free")
        return Elastic()
    told = []
    try:
        settings = EngineSettings(worker=plan.worker, kvcached=options.kvcached or "")
    except ValueError as error:
        raise UserError(f"--kvcached {options.kvcached}: {error}") from None
    if options.kvcached:
        try:
            usage = read_usage(settings.segment)
        except SegmentError as error:
            raise UserError(f"--kvcached {options.kvcached}: {error}") from None
        told.append(
            f"  kvcached {settings.segment}: {usage.mapped_bytes / GB:.1f} of {usage.limit_bytes / GB:.1f} GB mapped"
            f"{'; its limit moves with the hard quota' if plan.mode == 'enforce' else ''}"
        )
    if not options.sleep:
        return Elastic(settings, None, tuple(told))
    if plan.mode != "enforce":
        raise UserError("--sleep: found --mode shadow, expected enforce: in shadow nobody is sent to sleep")
    weights_bytes = await _weights(options, plan)
    settings = msgspec.structs.replace(settings, sleep_url=base_url(plan.url), weights_bytes=weights_bytes)
    told.append(f"  sleep: {await _sleep(plan, settings)}")
    cold = session.settings_of(options, ActuatorSettings, "actuator").cold_weights
    return Elastic(settings, msgspec.structs.replace(cold, enabled=True), tuple(told))


async def _weights(options: argparse.Namespace, plan: Plan) -> int:
    if options.weights_gb is not None:
        return round(float(options.weights_gb) * GB)
    found = math.nan
    async with aiohttp.ClientSession() as http:
        with contextlib.suppress(ScrapeFailed):
            body = await fetch_bytes(http, f"{base_url(plan.url)}/v1/models", ANSWER_LIMIT_S)
            folder = model_folder(body, "")
            found = read_model_facts(folder).weights_bytes if folder is not None else math.nan
    if not found > 0:
        raise UserError("--sleep: found no model folder that says what the weights take, expected --weights-gb X")
    return round(found)


async def _sleep(plan: Plan, settings: EngineSettings) -> str:
    """Words on whether it will be done. UserError where the server has no sleep mode."""
    async with aiohttp.ClientSession() as http:
        sleeper = Sleeper(plan.worker, settings.sleep_url, http, lambda: 0, settings.weights_bytes)
        try:
            asleep = await sleeper.is_sleeping()
        except EngineRefused:
            raise UserError(f"--sleep: found a server with {NO_SLEEP_MODE}") from None
    nvml = Nvml()
    try:
        DeviceUse(nvml, parse_worker_id(plan.worker).gpu, lambda: 0).begin()
    except DeviceError as error:
        return f"no: what it frees cannot be verified: {error}"
    finally:
        with contextlib.suppress(DeviceError):
            nvml.close()
    return f"{settings.weights_bytes / GB:.1f} GB of weights{', asleep now' if asleep else ''}"
