"""What lies in the ``tg_policy`` bucket: JSON, because operators read and write it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

KEY_CHAMPION: Final = "champion"
KEY_CANDIDATE: Final = "candidate"
KEY_EXAMINEE: Final = "examinee"
"""Which candidate the examiner watches in shadow; the heuristic: none. The learner may name others meanwhile."""
KEY_REJECTED: Final = "rejected"
"""A :class:`Rejections`."""
MAX_REJECTIONS: Final = 256

HEURISTIC: Final = "heuristic"


class PolicyPointer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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
    expires_ns: int = 0
    """Wall clock from which it is no longer in force and the heuristic acts; 0: never."""
    share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """Of the cards: those on whose workers it acts while an examiner has it on probation; 1: all."""
    former: PolicyPointer | None = None
    """What the others stay on meanwhile; None: the heuristic."""
    part_cards: bool = False
    """Whether ``share`` is of the workers, each by itself: the fleet has but one card."""

    @property
    def on_probation(self) -> bool:
        """Whether it acts on a share of the workers alone. What an operator moved acts on all of them."""
        return self.share < 1.0 and not self.who

    def for_all(self) -> PolicyPointer:
        """The same policy, off probation."""
        return msgspec.structs.replace(self, share=1.0, former=None, part_cards=False)


class Rejection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights that no examiner promotes again, under whatever name they come."""

    version: str
    sha256: str
    why: str
    when_ns: int


class Rejections(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest :data:`MAX_REJECTIONS` of them, oldest first."""

    rejected: tuple[Rejection, ...] = ()

    def of(self, pointer: PolicyPointer) -> Rejection | None:
        """The rejection that concerns a pointer's version or weights."""
        for one in self.rejected:
            if one.version == pointer.version or (one.sha256 and one.sha256 == pointer.sha256):
                return one
        return None

    def plus(self, new: Rejection) -> Rejections:
        return Rejections(rejected=(*self.rejected, new)[-MAX_REJECTIONS:])


HEURISTIC_POINTER: Final = PolicyPointer(version=HEURISTIC, kind="heuristic")


def behaviour_name(pointer: PolicyPointer) -> str:
    """The name under which its actions travel in outcomes and transitions."""
    return f"dqn:{pointer.version}" if pointer.kind == "dqn" else pointer.version


def expired(pointer: PolicyPointer, now_ns: int) -> bool:
    """Whether it is out of force at wall clock ``now_ns``."""
    return 0 < pointer.expires_ns <= now_ns
