"""DCGM exporter as a source: memory and utilisation of each GPU and MIG instance from its page. Pure.

What it gives: ``hbm_bytes`` of METRICS where the page has the parts, card memory, and utilisation. Traps:
memory is in MiB; ``FB_RESERVED`` and ``FB_TOTAL`` are not in every configuration, so a total is never made of used and
free alone; DCGM writes a blank as a huge number, one for each type; in Kubernetes one GPU appears once per pod;
label names differ between configurations. (DCGM field identifiers, dcgm_fields.h; blanks, dcgm_structs.h.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client.metrics_core import Metric

from services.errors import DeviceError
from services.telemetry.sources.said import Presence, provides

PROVIDES: Final[Mapping[str, Presence]] = provides({Presence.SOMETIMES: ("hbm_bytes",)})
PREFIX: Final = "DCGM_FI_"
_MIB: Final = float(1 << 20)

_BLANKS: Final[tuple[tuple[float, float], ...]] = (
    (2147483632.0, 2147483647.0),  # int32: blank, not found, not supported, no permission, ...
    (140737488355328.0, 140737488355343.0),  # fp64
    (9223372036854774784.0, math.inf),  # int64, which a float cannot tell from its neighbours
)
"""Both ends included."""

_MEMORY: Final[dict[str, str]] = {
    "DCGM_FI_DEV_FB_TOTAL": "total_bytes",
    "DCGM_FI_DEV_FB_USED": "used_bytes",
    "DCGM_FI_DEV_FB_FREE": "free_bytes",
    "DCGM_FI_DEV_FB_RESERVED": "reserved_bytes",
}
_RATIOS: Final[dict[str, tuple[str, float]]] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_active", 1.0),
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_active", 1.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("dram_active", 1.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("tensor_active", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu_util", 100.0),
}
"""Field by metric, and the largest value that it has."""
_SLACK: Final = 1.01
"""Profiling ratios are quotients of two samplings: a hair above 1 is 1."""


class DcgmGpu(NamedTuple):
    """One GPU or one MIG instance. Bytes; ratios 0 to 1; NaN = not told."""

    gpu: str
    """The exporter's number; "" when it has none."""
    uuid: str
    instance: str = ""
    """GPU_I_ID of a MIG instance."""
    profile: str = ""
    total_bytes: float = math.nan
    used_bytes: float = math.nan
    free_bytes: float = math.nan
    reserved_bytes: float = math.nan
    engine_active: float = math.nan
    sm_active: float = math.nan
    dram_active: float = math.nan
    tensor_active: float = math.nan
    gpu_util: float = math.nan
    flags: tuple[tuple[str, str], ...] = ()
    """(metric, why) of what was said and not believed."""

    @property
    def hbm_bytes(self) -> float:
        """The total told, or the sum of its three parts; NaN when one of them is missing."""
        if not math.isnan(self.total_bytes):
            return self.total_bytes
        return self.used_bytes + self.free_bytes + self.reserved_bytes


def gpus_of(families: Iterable[Metric]) -> tuple[DcgmGpu, ...]:
    """The GPUs of one page, in its order. DeviceError ``empty_page`` when it has no DCGM metric: an exporter that
    lost its driver answers 200 with nothing."""
    found: dict[tuple[str, str], DcgmGpu] = {}
    seen = False
    for family in families:
        if not family.name.startswith(PREFIX):
            continue
        seen = True
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {name.lower(): value for name, value in sample.labels.items()}
            gpu = DcgmGpu(
                labels.get("gpu", ""),
                labels.get("uuid", labels.get("gpu_uuid", "")),
                labels.get("gpu_i_id", ""),
                labels.get("gpu_i_profile", ""),
            )
            key = (gpu.uuid or gpu.gpu, gpu.instance)
            found[key] = _with(found.get(key, gpu), family.name, float(sample.value))
    if not seen:
        raise DeviceError(
            "empty_page", f"no {PREFIX}* metric in the page", "look at the log of dcgm-exporter: it lost the driver"
        )
    return tuple(_checked(gpu) for gpu in found.values())


def _with(gpu: DcgmGpu, metric: str, value: float) -> DcgmGpu:
    if metric in _MEMORY:
        field, scale, high = _MEMORY[metric], _MIB, math.inf
    elif metric in _RATIOS:
        field, largest = _RATIOS[metric]
        scale, high = 1.0 / largest, largest * _SLACK
    else:
        return gpu
    why = _rejection(value, high)
    before: float = getattr(gpu, field)
    if why is None:
        now = value * scale if metric in _MEMORY else min(value * scale, 1.0)
        if not math.isnan(before) and before != now:
            # The same GPU once per pod: not to be added up.
            why = f"told twice, {before:g} and {now:g}: the greater is kept"
            now = max(before, now)
        gpu = _put(gpu, field, now)
    return gpu if why is None else gpu._replace(flags=(*gpu.flags, (metric, why)))


def _put(gpu: DcgmGpu, field: str, value: float) -> DcgmGpu:
    changed: dict[str, Any] = {field: value}
    return gpu._replace(**changed)


def _rejection(value: float, high: float) -> str | None:
    if math.isnan(value):
        return "not a number"
    if any(low <= value <= top for low, top in _BLANKS):
        return f"DCGM's blank {value:.0f}: not told"
    if not 0.0 <= value <= high:
        return f"{value:g}, expected 0 to {high:g}"
    return None


def _checked(gpu: DcgmGpu) -> DcgmGpu:
    parts = gpu.used_bytes + gpu.free_bytes
    if parts > gpu.total_bytes * _SLACK:
        why = f"used and free are {parts:.0f} of {gpu.total_bytes:.0f} bytes"
        return gpu._replace(used_bytes=math.nan, free_bytes=math.nan, flags=(*gpu.flags, ("DCGM_FI_DEV_FB_USED", why)))
    return gpu
