"""What lies in the ``tg_policy`` and ``tg_config`` buckets: JSON, because operators read and write it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

KEY_CHAMPION: Final = "champion"
KEY_CANDIDATE: Final = "candidate"
KEY_MODE: Final = "mode"

HEURISTIC: Final = "heuristic"


class PolicyPointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which policy is in force (``champion``) or up for examination (``candidate``).

    ``kind`` heuristic needs no weights; dqn names an object ``<version>`` in ``tg_weights`` (safetensors)
    whose bytes have ``sha256``. The object is put first, the pointer moves after: who reads the pointer
    finds the object.
    """

    version: str
    kind: Literal["heuristic", "static", "fixed", "dqn"]
    sha256: str = ""
    parent: str = ""
    feature_hash: str = ""
    transitions: int = 0
    """Transitions the policy has learned from."""
    evaluation: dict[str, float] = {}
    created_ns: int = 0


HEURISTIC_POINTER: Final = PolicyPointer(version=HEURISTIC, kind="heuristic")


class ModeDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far Tidegate may act: for all workers unless ``workers`` or ``classes`` says otherwise."""

    default: Literal["off", "shadow", "canary", "enforce"] = "enforce"
    workers: dict[str, Literal["off", "shadow", "canary", "enforce"]] = {}
    revision: int = 0
