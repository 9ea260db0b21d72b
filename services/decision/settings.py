"""Settings of the decision service: table ``[decision]``, variables ``TIDEGATE_DECISION_<KEY>``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.config import Mode
from schemas.identity import STEP_S
from services.decision.heuristic import HeuristicSettings
from services.decision.shield import ShieldSettings
from services.errors import SettingsError

_Steps = Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides, how long its commands hold, and what the shield forbids."""

    policy: str = "champion"
    """Which policy acts: ``champion`` (the one that tg_policy names, the heuristic while there is none),
    ``dqn`` (the newest valid network, whatever the examiner says; the heuristic while there is none), or a
    rule: ``heuristic``, ``static``, ``fixed:RHO``, ``one_line``, ``random``."""
    mode: Mode = "enforce"
    """How far workers may be commanded about which ``tg_config`` says nothing: ``off``, ``shadow``, ``canary`` (none
    of them, until an order names a share) or ``enforce``. Emulated fleets enforce; with real engines begin in
    ``shadow``."""
    queue: str = "decision"
    """Queue group: copies of the service with the same name share the nodes between them; empty: each copy
    decides for all."""
    step_s: Annotated[float, msgspec.Meta(gt=0.0)] = STEP_S
    """Control period, seconds."""
    deadline_steps: _Steps = 1.0
    """Steps after the sample until a command is too late: a later one was decided on yesterday's state."""
    lease_steps: _Steps = 3.0
    """Steps after the sample until an engine that heard nothing more returns to rho 1.0."""
    epsilon: Annotated[float, msgspec.Meta(ge=0.0, le=0.2)] = 0.0
    """Chance that a canary worker gets a random allowed action, 0 to 0.2; 0: no exploration."""
    canary_share: _Share = 0.0
    """Share of workers that are canaries, chosen by a hash of the worker id, so always the same ones."""
    seed: int = 0
    """Seed of exploration and of the ``random`` policy."""
    fetch_tries: Annotated[int, msgspec.Meta(ge=1, le=100)] = 5
    """How often the weights of a pointer are asked for: after a server's restart the object may lag."""
    fetch_pause_s: Annotated[float, msgspec.Meta(ge=0.0, le=60.0)] = 0.2
    """Pause between these tries, seconds."""
    shield: ShieldSettings = msgspec.field(default_factory=ShieldSettings)
    """When an action is out of the question."""
    heuristic: HeuristicSettings = msgspec.field(default_factory=HeuristicSettings)
    """Thresholds of the heuristic."""
    classes: dict[str, ClassLimits] = {}
    """Limits that replace a class's defaults, by its name (``[decision.classes.chat]``)."""


def shield_settings(settings: Settings) -> ShieldSettings:
    """The shield's settings with the classes' limits filled in; SettingsError for an unknown class."""
    limits = {**DEFAULT_LIMITS, **settings.shield.limits}
    for name, own in settings.classes.items():
        try:
            limits[ServiceClass[name.upper()]] = own
        except KeyError:
            known = ", ".join(kind.name.lower() for kind in ServiceClass)
            raise SettingsError("settings [decision]", "classes", repr(name), f"one of {known}") from None
    return msgspec.structs.replace(settings.shield, limits=limits)
