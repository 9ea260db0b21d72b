"""What lies in the ``tg_policy`` bucket: JSON, because operators read and write it."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

KEY_CHAMPION: Final = "champion"
KEY_CANDIDATE: Final = "candidate"

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
    who: str = ""
    """Who moved the pointer here; empty: a learner or an examiner, by its own rules."""
    why: str = ""
    when_ns: int = 0
    """Wall clock of the move."""


HEURISTIC_POINTER: Final = PolicyPointer(version=HEURISTIC, kind="heuristic")
