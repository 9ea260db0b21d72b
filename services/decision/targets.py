"""What an action means as an absolute command: target rho and target ceiling (DESIGN section 3)."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.actions import RHO_MIN, RHO_STEP, TIGHTEN_RUNNING, WIDEN_RUNNING, Action
from schemas.features import FEATURE, FEATURE_COUNT
from services.decision.shield import ShieldSettings, rho_caps

_EXACT: Final = 1e-9
"""Keeps x 1.25 and x 0.8 of whole numbers whole before rounding."""


def targets(
    actions: NDArray[np.integer],
    features: NDArray[np.float32],
    classes: NDArray[np.integer],
    settings: ShieldSettings,
    goal_rho: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Target rho float64 [n] and target ceiling int64 [n] of ``actions`` [n] in states ``features`` [n, F].

    widen: the next grid point of rho, the ceiling x 1.25 rounded up; tighten: the previous grid point, the
    ceiling x 0.8 rounded down; every other action keeps what is in force. rho lies within [1.0, the class's
    and the setting's maximum], the ceiling within its range. Where rho or ceiling are absent, the safe ones
    stand in: rho 1.0, the starting ceiling. With ``goal_rho`` (the fixed policies), widen and tighten go to
    that rho at once and leave the ceiling alone.
    """
    if features.ndim != 2 or features.shape[1] != FEATURE_COUNT or len(actions) != len(features):
        raise ValueError(f"actions {actions.shape}, features {features.shape}: expected [n], [n, {FEATURE_COUNT}]")
    rho_now = features[:, FEATURE["rho"]].astype(np.float64)
    ceiling_now = features[:, FEATURE["max_running"]].astype(np.float64)
    rho_now = np.where(np.isfinite(rho_now), rho_now, RHO_MIN)
    ceiling_now = np.where(np.isfinite(ceiling_now), ceiling_now, settings.max_running_start)
    widen, tighten = actions == Action.WIDEN, actions == Action.TIGHTEN
    if goal_rho is not None:
        rho = np.where(widen | tighten, goal_rho, rho_now)
        ceiling = ceiling_now
    else:
        # Steps are counted in whole tenths: adding 0.1 again and again would drift off the grid.
        tenths = np.rint(rho_now / RHO_STEP) + widen.astype(np.int64) - tighten
        rho = np.where(widen | tighten, tenths * RHO_STEP, rho_now)
        ceiling = np.where(widen, np.ceil(ceiling_now * WIDEN_RUNNING - _EXACT), ceiling_now)
        ceiling = np.where(tighten, np.floor(ceiling_now * TIGHTEN_RUNNING + _EXACT), ceiling)
    # float32 features carry seven digits: what they say beyond the fourth is noise.
    rho = np.round(np.clip(rho, RHO_MIN, rho_caps(classes, settings)), 4)
    ceiling = np.clip(ceiling, settings.max_running_low, settings.max_running_high)
    return rho, ceiling.astype(np.int64)
