"""What Tidegate's part of a vLLM process is told: environment variables, since vLLM's own flags are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from schemas.actions import RHO_MAX
from schemas.classes import DEFAULT_LIMITS, ServiceClass
from schemas.identity import worker_id
from services.actuator.engines.emulated import gpu_and_name
from services.errors import SettingsError

PREFIX: Final = "TIDEGATE_"
_WHERE: Final = "environment of vLLM"


class PluginSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's."""

    socket: Path
    """``TIDEGATE_SOCKET``: where the engine protocol is served, ``<folder>/<gpu>-<name>.sock``."""
    worker: str
    """``<node>/<gpu>/<name>``: ``TIDEGATE_NODE`` (default n0) and the parts of the socket's name."""
    service_class: ServiceClass = ServiceClass.CHAT
    """``TIDEGATE_CLASS``: class of requests that name none."""
    q0_share: float = 1.0
    """``TIDEGATE_Q0_SHARE``: share of the card's KV capacity that is this engine's baseline, above 0, at most 1."""
    card_kv_bytes: int = 0
    """``TIDEGATE_CARD_KV_BYTES``: KV capacity of the whole card, bytes; 0: this engine's pool, which has it alone."""
    hbm_bytes: int = 0
    """``TIDEGATE_HBM_BYTES``: the card's memory, bytes; 0: not told, telemetry asks the device."""
    group_blocks: int = 0
    """``TIDEGATE_GROUP_BLOCKS``: blocks of a page group; 0: as many as 2 MiB of a layer's K hold."""
    pause_ms: float = 3.0
    """``TIDEGATE_PAUSE_MS``: what one call between steps may take to relocate, ms; most are well below it."""

    @property
    def rho_max(self) -> float:
        """Of the class, at most the design's."""
        return min(RHO_MAX, DEFAULT_LIMITS[self.service_class].rho_max)


def from_environ(environ: Mapping[str, str]) -> PluginSettings | None:
    """None without ``TIDEGATE_SOCKET``: then vLLM runs as if Tidegate were not there. SettingsError names the
    variable, what was found and what is expected."""
    text = environ.get(f"{PREFIX}SOCKET", "")
    if not text:
        return None
    path = Path(text)
    told = gpu_and_name(path)
    if told is None:
        raise SettingsError(_WHERE, f"{PREFIX}SOCKET", repr(text), "a path that ends in <gpu>-<name>.sock")
    node = environ.get(f"{PREFIX}NODE", "") or "n0"
    class_name = (environ.get(f"{PREFIX}CLASS", "") or "chat").upper()
    if class_name not in ServiceClass.__members__:
        known = ", ".join(one.name.lower() for one in ServiceClass)
        raise SettingsError(_WHERE, f"{PREFIX}CLASS", repr(class_name.lower()), f"one of {known}")
    try:
        worker = worker_id(node, *told)
    except ValueError as error:
        raise SettingsError(_WHERE, f"{PREFIX}NODE", repr(node), str(error)) from error
    return PluginSettings(
        socket=path,
        worker=worker,
        service_class=ServiceClass[class_name],
        q0_share=_number(environ, "Q0_SHARE", 1.0, low=1e-6, high=1.0),
        card_kv_bytes=int(_number(environ, "CARD_KV_BYTES", 0)),
        hbm_bytes=int(_number(environ, "HBM_BYTES", 0)),
        group_blocks=int(_number(environ, "GROUP_BLOCKS", 0)),
        pause_ms=_number(environ, "PAUSE_MS", 3.0, low=0.1, high=1000.0),
    )


def _number(environ: Mapping[str, str], name: str, default: float, *, low: float = 0.0, high: float = 1e15) -> float:
    text = environ.get(PREFIX + name, "")
    if not text:
        return default
    expected = f"a number from {low:g} to {high:g}"
    try:
        value = float(text)
    except ValueError as error:
        raise SettingsError(_WHERE, PREFIX + name, repr(text), expected) from error
    if not low <= value <= high:
        raise SettingsError(_WHERE, PREFIX + name, text, expected)
    return value
