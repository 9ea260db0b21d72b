"""Which policies there are and which of them acts: what the pointers in ``tg_policy`` come to. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np

from schemas.features import FEATURE_HASH
from schemas.policies import HEURISTIC, KEY_CANDIDATE, KEY_CHAMPION, KEY_EXAMINEE, PolicyPointer
from services import qweights
from services.decision.heuristic import HeuristicSettings
from services.decision.policy import DqnPolicy, Policy, rule
from services.decision.probation import Split
from services.errors import PolicyError, SettingsError

KEYS: Final[tuple[str, ...]] = (KEY_CHAMPION, KEY_CANDIDATE, KEY_EXAMINEE)
POLICY_EXPIRED: Final = "policy_expired"
KEY_FORMER: Final = "former"
"""What the book calls the policy inside the champion's pointer; the bucket has no such key."""


def read_pointer(key: str, value: bytes) -> PolicyPointer:
    """The pointer in a KV value; PolicyError says what is wrong with it."""
    try:
        pointer = msgspec.json.decode(value, type=PolicyPointer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"tg_policy/{key}: no policy pointer: {error}") from error
    if not pointer.version:
        raise PolicyError(f"tg_policy/{key}: the version is empty")
    return pointer


def admit_network(pointer: PolicyPointer, data: bytes) -> DqnPolicy:
    """The network that ``pointer`` names, from the object ``data``.

    PolicyError unless the bytes have the pointer's digest, were trained on this feature table, carry the
    pointer's version, and hold finite weights of the right shapes.
    """
    found = qweights.digest(data)
    if found != pointer.sha256.lower():
        raise PolicyError(f"policy {pointer.version!r}: sha256 {found}, the pointer says {pointer.sha256!r}")
    if pointer.feature_hash and pointer.feature_hash != FEATURE_HASH:
        raise PolicyError(
            f"policy {pointer.version!r}: the pointer names feature table {pointer.feature_hash!r}, "
            f"this program has {FEATURE_HASH!r}"
        )
    weights = qweights.load(data)
    if weights.version != pointer.version:
        raise PolicyError(f"policy {pointer.version!r}: the weights say they are version {weights.version!r}")
    return DqnPolicy(weights)


def admit_rule(pointer: PolicyPointer, settings: HeuristicSettings, rng: np.random.Generator) -> Policy:
    """The rule that a pointer of another kind than ``dqn`` names; PolicyError for an unknown one."""
    name = pointer.version if pointer.kind == "fixed" else pointer.kind
    try:
        return rule(name, settings, rng)
    except SettingsError as error:
        raise PolicyError(f"policy {pointer.version!r}: {error}") from error


class InForce(NamedTuple):
    """The policy that acts and the one that only says what it would have done."""

    acting: Policy
    shadow: Policy | None
    former: Policy | None = None
    """Acts on the workers on which ``acting``, on probation, is not tried; None: there are no such."""
    split: Split = Split(1.0)
    """Which workers ``acting`` is tried on, see :func:`services.decision.probation.tried_on`."""


class Book:
    """Valid policies by pointer, and who acts under the setting ``policy``.

    A refused pointer is never entered, so what was in force stays; a deleted or expired one makes room for the
    heuristic. ``rules`` name themselves in the setting and act whatever the pointers say.
    """

    def __init__(self, setting: str, settings: HeuristicSettings, rng: np.random.Generator) -> None:
        self._setting = setting
        self._heuristic = rule(HEURISTIC, settings, rng)
        self._forced = None if setting in ("champion", "dqn") else rule(setting, settings, rng)
        self._held: dict[str, Policy] = {}
        self._split = Split(1.0)
        """Of the champion."""
        self._newest: tuple[tuple[int, int], DqnPolicy] | None = None
        self._ends: dict[str, tuple[int, str]] = {}
        """When the policy of a key expires, and its version."""
        self._expired: dict[str, str] = {}
        """Version that expired under a key and was not replaced yet."""
        self.in_force = self._decide()

    def enter(
        self, key: str, policy: Policy | None, pointer: PolicyPointer | None = None, former: Policy | None = None
    ) -> InForce:
        """Note what ``key`` now names, None when it was deleted. ``former``: what a champion's pointer on probation
        names for the other workers, None where that is the heuristic."""
        self._hold(key, policy, pointer)
        if key == KEY_CHAMPION:
            tried = pointer is not None and pointer.on_probation
            self._split = Split(pointer.share, pointer.part_cards) if pointer is not None and tried else Split(1.0)
            self._hold(KEY_FORMER, former, pointer.former if pointer is not None else None)
        if isinstance(policy, DqnPolicy):
            age = (pointer.created_ns, pointer.transitions) if pointer else (0, 0)
            if self._newest is None or age >= self._newest[0]:
                self._newest = (age, policy)
        self.in_force = self._decide()
        return self.in_force

    def _hold(self, key: str, policy: Policy | None, pointer: PolicyPointer | None) -> None:
        self._ends.pop(key, None)
        self._expired.pop(key, None)
        if policy is None or (key == KEY_EXAMINEE and policy.version == HEURISTIC):
            self._held.pop(key, None)
        else:
            self._held[key] = policy
        if pointer is not None and pointer.expires_ns > 0 and (policy is not None or key != KEY_FORMER):
            self._ends[key] = pointer.expires_ns, pointer.version

    def expire(self, now_ns: int) -> list[str]:
        """Take out what has expired at wall clock ``now_ns``: ``<key> <version>`` of each."""
        ended = [key for key, (at_ns, _) in self._ends.items() if at_ns <= now_ns]
        for key in ended:
            self._expired[key] = self._ends.pop(key)[1]
            self._held.pop(key, None)
        if ended:
            self.in_force = self._decide()
        return [f"{key} {self._expired[key]}" for key in ended]

    @property
    def next_end_ns(self) -> int:
        """Wall clock of the next expiry, 0 when nothing expires."""
        return min((at_ns for at_ns, _ in self._ends.values()), default=0)

    @property
    def fallback(self) -> str:
        """Why the heuristic acts in the champion's place: :data:`POLICY_EXPIRED`, or empty when it does not or is
        itself the champion."""
        return POLICY_EXPIRED if self._forced is None and KEY_CHAMPION in self._expired else ""

    def _decide(self) -> InForce:
        newest = self._newest[1] if self._newest else None
        champion = self._held.get(KEY_CHAMPION, self._heuristic)
        candidate = self._held.get(KEY_EXAMINEE) or self._held.get(KEY_CANDIDATE)
        if self._setting == "dqn":
            valid = newest if newest and newest.version not in self._expired.values() else None
            acting: Policy = valid or self._heuristic
            shadow = candidate
        else:
            acting = self._forced or champion
            shadow = candidate or newest
        former = None
        if acting is self._held.get(KEY_CHAMPION) and self._split.share < 1.0:
            former = self._held.get(KEY_FORMER, self._heuristic)
            if former.version == acting.version:
                former = None
        if shadow is not None and shadow.version in (acting.version, former and former.version):
            shadow = None
        return InForce(acting, shadow, former, self._split if former else Split(1.0))
