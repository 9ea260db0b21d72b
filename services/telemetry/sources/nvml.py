"""NVML as a source: what a worker's card has and uses.

What it gives: ``hbm_bytes`` of METRICS, and the card facts below, from which ``card.py`` counts what nobody claims.
What it cannot: KV apart from weights, fragmentation, anything inside an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from services.devices import Device
from services.errors import DeviceError
from services.nvml import Nvml
from services.telemetry.sources.said import Presence, provides

PROVIDES: Final[Mapping[str, Presence]] = provides({Presence.MEASURED: ("hbm_bytes",)})


class NvmlProbe(NamedTuple):
    """What NVML can tell on this machine."""

    can: bool
    """At least one GPU tells its memory."""
    driver: str = ""
    cuda: int = 0
    devices: tuple[Device, ...] = ()
    trouble: str = ""
    remedy: str = ""


class CardFacts(NamedTuple):
    """Bytes of one card or MIG instance; NaN = not told."""

    hbm_bytes: float = math.nan
    used_bytes: float = math.nan
    """By allocations; on a driver without memory version 2 the reserved part is in it (``used_has_reserved``)."""
    free_bytes: float = math.nan
    reserved_bytes: float = math.nan
    used_has_reserved: bool = False
    flags: tuple[tuple[str, str], ...] = ()
    """(name, why) of what was told and not believed."""


def probe(library: Any = None) -> NvmlProbe:
    """Open, look, close. Never raises for a machine without a GPU: ``trouble`` and ``remedy`` say it."""
    nvml = Nvml(library)
    try:
        versions = nvml.open()
        try:
            devices = nvml.devices()
        finally:
            nvml.close()
    except DeviceError as error:
        return NvmlProbe(False, trouble=error.detail, remedy=error.remedy)
    told = any(device.total_bytes is not None for device in devices)
    return NvmlProbe(told, versions.driver, versions.cuda, devices)


def card_facts(device: Device) -> CardFacts:
    """The facts of one device. What contradicts itself is left out and flagged."""
    total, used, free, reserved = (
        _number(value) for value in (device.total_bytes, device.used_bytes, device.free_bytes, device.reserved_bytes)
    )
    flags: list[tuple[str, str]] = []
    parts = used + free + (0.0 if device.used_has_reserved or math.isnan(reserved) else reserved)
    if total == 0.0:
        flags.append(("hbm_bytes", "a card of 0 bytes"))
        total = math.nan
    if parts > total * 1.01:
        # Not one of the three can be told to be the wrong one.
        flags.append(("used_bytes", f"used, free and reserved are {parts:.0f} of {total:.0f} bytes"))
        used = free = math.nan
    return CardFacts(total, used, free, reserved, device.used_has_reserved, tuple(flags))


def _number(value: int | None) -> float:
    return math.nan if value is None else float(value)
