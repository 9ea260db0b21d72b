"""ScaleOutRequest: memory actions cannot save the SLO, more replicas can (JetStream TG_AUDIT)."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.codec import Codec


class ScaleOutRequest(msgspec.Struct, frozen=True, array_like=True):
    """Absolute, so that a repeat does nothing: ``replicas_wanted``, never "one more"."""

    node: str
    boot_id: int
    step: int
    schema_version: int
    t_ns: int
    deployment: str
    service_class: int
    replicas_wanted: int
    reason: str
    evidence: dict[str, float]
    withdrawn: bool = False


SCALE_OUT_REQUEST: Final = Codec(ScaleOutRequest)
