"""A card's columns, from its workers' rows and what the device says.

HBM is the device's. The card's KV capacity is the sum of its engines' pools: stock engines commit theirs at start, so
weights, activation and reserve are already outside. Memory in use on the device that no engine of ours claims (another
process, a leak, an engine that nobody configured) is counted against what is free: it may be ours to lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.metrics import COLUMN

ASSUMED_POOL_SHARE: Final = 0.9
"""KV and weights over HBM where nobody says the HBM: vLLM's default share of a card."""
_SUMMED: Final = ("link_used_bytes_per_s",)


class CardMemory(NamedTuple):
    """What a device says of itself; NaN = not said."""

    total_bytes: float = math.nan
    used_bytes: float = math.nan


class Tenant(NamedTuple):
    """A worker of the card. NaN = unknown; ``pool_bytes`` as last known, also while the worker is away."""

    row: int
    pool_bytes: float
    weights_bytes: float
    claimed_share: float
    q0_share: float
    """Of the card's KV capacity; 0: an equal share of what the others leave."""
    hbm_bytes: float
    """From the settings; 0: not said."""
    alive: bool


def shares(tenants: Sequence[Tenant]) -> list[float]:
    """Each worker's share of the card's KV capacity; those without one divide what the others leave."""
    left = max(0.0, 1.0 - sum(tenant.q0_share for tenant in tenants))
    without = sum(tenant.q0_share <= 0 for tenant in tenants)
    return [tenant.q0_share if tenant.q0_share > 0 else left / without for tenant in tenants]


def fill(values: NDArray[np.float64], tenants: Sequence[Tenant], device: CardMemory) -> list[tuple[int, str, str]]:
    """Write one card's columns into its workers' rows; what an engine said itself stays.

    values: float64 [workers, len(METRICS)], written to. Rows of workers that are away stay all NaN. Returns flags
    (row, metric, why).
    """
    flags: list[tuple[int, str, str]] = []
    pools = [tenant.pool_bytes for tenant in tenants if tenant.pool_bytes == tenant.pool_bytes]
    claims = [_claim(tenant, device) for tenant in tenants]
    claimed = math.fsum(claim for claim in claims if claim == claim)
    hbm = device.total_bytes
    told = _told(values, tenants, "card_kv_capacity_bytes")
    if not hbm > 0:
        hbm = max((tenant.hbm_bytes for tenant in tenants), default=0.0) or math.nan
        if not hbm > 0 and claimed > 0:
            hbm = max(claimed, told if told == told else 0.0) / ASSUMED_POOL_SHARE
            flags += [(t.row, "hbm_bytes", "assumed: no device and no setting says it") for t in tenants if t.alive]
    capacity = min(math.fsum(pools), hbm) if pools and hbm > 0 else math.nan
    unclaimed = max(0.0, device.used_bytes - claimed) if device.used_bytes == device.used_bytes else 0.0
    free = _free(values, tenants, told) - unclaimed
    if unclaimed > 0.02 * hbm:
        flags += [
            (t.row, "card_free_bytes", f"{unclaimed:.0f} bytes in use that no engine claims")
            for t in tenants
            if t.alive
        ]
    for tenant, share in zip(tenants, shares(tenants), strict=True):
        if not tenant.alive:
            continue
        _put(values, tenant.row, "hbm_bytes", hbm)
        _put(values, tenant.row, "card_kv_capacity_bytes", told if told == told else capacity)
        _put(values, tenant.row, "q0_bytes", share * values[tenant.row, COLUMN["card_kv_capacity_bytes"]])
        _put(values, tenant.row, "card_free_bytes", max(0.0, free))
    for name in _SUMMED:
        rows = [tenant.row for tenant in tenants if tenant.alive]
        said = values[rows, COLUMN[name]]
        if np.isfinite(said).any():
            values[rows, COLUMN[name]] = np.nansum(said)
    return flags


def _claim(tenant: Tenant, device: CardMemory) -> float:
    """Bytes of the card that the worker is known to take; NaN where nothing is known."""
    told = tenant.claimed_share * device.total_bytes
    known = math.fsum(part for part in (tenant.pool_bytes, tenant.weights_bytes) if part == part)
    return max(known, told if told == told else 0.0) or math.nan


def _free(values: NDArray[np.float64], tenants: Sequence[Tenant], told: float) -> float:
    """Pools, or the capacity that their engines ``told``, less what is used of them; a worker that is away is taken to
    use its own pool whole."""
    used = values[:, COLUMN["kv_bytes"]]
    known = [tenant for tenant in tenants if tenant.pool_bytes == tenant.pool_bytes]
    taken = math.fsum(
        used[tenant.row] if tenant.alive and used[tenant.row] == used[tenant.row] else tenant.pool_bytes
        for tenant in known
    )
    return (told if told == told else math.fsum(tenant.pool_bytes for tenant in known)) - taken


def _told(values: NDArray[np.float64], tenants: Sequence[Tenant], name: str) -> float:
    said = [float(values[tenant.row, COLUMN[name]]) for tenant in tenants if tenant.alive]
    return max((value for value in said if value == value), default=math.nan)


def _put(values: NDArray[np.float64], row: int, name: str, value: float) -> None:
    if math.isnan(values[row, COLUMN[name]]):
        values[row, COLUMN[name]] = value
