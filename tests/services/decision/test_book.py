"""Which policy a pointer may bring in, and which one acts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, KEY_EXAMINEE, PolicyPointer
from services import qweights
from services.decision.book import Book, admit_network, admit_rule, read_pointer
from services.decision.heuristic import HeuristicSettings
from services.decision.policy import DqnPolicy
from services.errors import PolicyError
from tests.services.decision.rows import pointer, weights

V1, V2 = weights("v1", [0, 1, 2, 3, 4]), weights("v2", [4, 3, 2, 1, 0])
HEURISTIC = HeuristicSettings()


def book(setting: str = "champion") -> Book:
    return Book(setting, HEURISTIC, np.random.default_rng(0))


def roles(of: Book) -> tuple[str, str | None]:
    return of.in_force.acting.version, of.in_force.shadow.version if of.in_force.shadow else None


def test_a_pointer_and_bytes_that_agree_are_admitted() -> None:
    policy = admit_network(pointer(V1), qweights.save(V1))
    assert policy.version == "v1"
    upper = pointer(V1, sha256=pointer(V1).sha256.upper())
    assert admit_network(upper, qweights.save(V1)).version == "v1"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sha256": "0" * 64}, "sha256"),
        ({"sha256": ""}, "sha256"),
        ({"feature_hash": "fedcba9876543210"}, "feature table"),
        ({"version": "v9"}, "say they are version 'v1'"),
    ],
)
def test_a_forged_pointer_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        admit_network(pointer(V1, **changes), qweights.save(V1))


def test_bytes_changed_after_the_pointer_was_written_are_refused() -> None:
    data = bytearray(qweights.save(V1))
    data[-1] ^= 1
    with pytest.raises(PolicyError, match="sha256"):
        admit_network(pointer(V1), bytes(data))


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b'{"version":"v1"}', b'{"version":"v1","kind":"ppo"}', b'{"version":"","kind":"dqn"}',
              b'{"version":"v1","kind":"dqn","sha":"x"}', b"\xff\xfe"]
)  # fmt: skip
def test_a_value_that_is_no_pointer_is_refused(value: bytes) -> None:
    with pytest.raises(PolicyError, match="tg_policy/champion"):
        read_pointer("champion", value)


def test_a_pointer_is_read_as_it_was_written() -> None:
    written = pointer(V1, evaluation={"goodput": 1.1})
    assert read_pointer("champion", msgspec.json.encode(written)) == written


def test_pointers_to_rules_need_no_weights() -> None:
    rng = np.random.default_rng(0)
    assert admit_rule(PolicyPointer(version="h", kind="heuristic"), HEURISTIC, rng).name == "heuristic"
    assert admit_rule(PolicyPointer(version="fixed:1.3", kind="fixed"), HEURISTIC, rng).name == "fixed:1.3"
    with pytest.raises(PolicyError):
        admit_rule(PolicyPointer(version="1.3", kind="fixed"), HEURISTIC, rng)


def test_without_pointers_the_heuristic_acts_alone() -> None:
    assert roles(book()) == ("heuristic", None)
    assert roles(book("dqn")) == ("heuristic", None)


def test_the_champion_acts_and_the_candidate_shadows_it() -> None:
    shelf = book()
    shelf.enter(KEY_CANDIDATE, DqnPolicy(V1), pointer(V1))
    assert roles(shelf) == ("heuristic", "v1")
    shelf.enter(KEY_CHAMPION, DqnPolicy(V1), pointer(V1))
    assert roles(shelf) == ("v1", None), "a policy does not shadow itself"
    shelf.enter(KEY_CANDIDATE, DqnPolicy(V2), pointer(V2))
    assert roles(shelf) == ("v1", "v2")
    shelf.enter(KEY_CHAMPION, None)
    shelf.enter(KEY_CANDIDATE, None)
    assert roles(shelf) == ("heuristic", "v2"), "the newest network goes on as a shadow"


def test_dqn_makes_the_newest_valid_network_act_wherever_it_came_from() -> None:
    shelf = book("dqn")
    shelf.enter(KEY_CANDIDATE, DqnPolicy(V2), pointer(V2, created_ns=20))
    assert roles(shelf) == ("v2", None)
    shelf.enter(KEY_CHAMPION, DqnPolicy(V1), pointer(V1, created_ns=10))
    assert roles(shelf) == ("v2", None), "the champion is older"


@pytest.mark.parametrize("setting", ["static", "fixed:1.6", "heuristic"])
def test_a_rule_in_the_setting_acts_whatever_the_pointers_say(setting: str) -> None:
    shelf = book(setting)
    shelf.enter(KEY_CHAMPION, DqnPolicy(V1), pointer(V1))
    assert roles(shelf) == (setting, "v1")


def test_an_expired_champion_makes_room_for_the_heuristic_and_says_so() -> None:
    shelf = book()
    shelf.enter(KEY_CHAMPION, DqnPolicy(V1), pointer(V1, expires_ns=100))
    assert (roles(shelf), shelf.next_end_ns, shelf.fallback) == (("v1", None), 100, "")
    assert shelf.expire(99) == []
    assert shelf.expire(100) == ["champion v1"]
    assert (roles(shelf), shelf.next_end_ns) == (("heuristic", "v1"), 0)
    assert shelf.fallback == "policy_expired"
    shelf.enter(KEY_CHAMPION, DqnPolicy(V2), pointer(V2))
    assert (roles(shelf), shelf.fallback) == (("v2", None), "")
    assert shelf.expire(10**18) == [], "0 is never"


def test_an_expired_network_does_not_act_as_the_newest_either() -> None:
    shelf = book("dqn")
    shelf.enter(KEY_CHAMPION, DqnPolicy(V1), pointer(V1, expires_ns=100))
    assert roles(shelf) == ("v1", None)
    shelf.expire(100)
    assert roles(shelf) == ("heuristic", None)


def test_whom_the_examiner_watches_shadows_before_the_newest_candidate() -> None:
    shelf = book()
    shelf.enter(KEY_EXAMINEE, DqnPolicy(V1), pointer(V1))
    shelf.enter(KEY_CANDIDATE, DqnPolicy(V2), pointer(V2))
    assert roles(shelf) == ("heuristic", "v1")
    nobody = PolicyPointer(version="heuristic", kind="heuristic")
    shelf.enter(KEY_EXAMINEE, admit_rule(nobody, HEURISTIC, np.random.default_rng(0)), nobody)
    assert roles(shelf) == ("heuristic", "v2")


def on_probation(former: PolicyPointer | None, **changes: object) -> PolicyPointer:
    return pointer(V2, share=0.5, former=former, **changes)


def test_a_champion_on_probation_leaves_the_former_on_the_other_workers() -> None:
    shelf = book()
    first = on_probation(pointer(V1))
    shelf.enter(KEY_CHAMPION, DqnPolicy(V2), first, DqnPolicy(V1))
    found = shelf.in_force
    assert (found.acting.version, found.former and found.former.version, found.split.share) == ("v2", "v1", 0.5)
    shelf.enter(KEY_CHAMPION, DqnPolicy(V2), first.for_all())
    assert (shelf.in_force.former, shelf.in_force.split.share) == (None, 1.0)
    shelf.enter(KEY_CHAMPION, DqnPolicy(V2), on_probation(None))
    assert shelf.in_force.former is not None
    assert shelf.in_force.former.version == "heuristic", "where there was none before"
    shelf.enter(KEY_CHAMPION, None)
    assert (roles(shelf), shelf.in_force.former) == (("heuristic", "v2"), None)


def test_what_an_operator_moves_acts_on_all_workers_and_a_forced_rule_too() -> None:
    shelf = book()
    shelf.enter(KEY_CHAMPION, DqnPolicy(V2), on_probation(pointer(V1), who="ada"), DqnPolicy(V1))
    assert shelf.in_force.former is None
    forced = book("static")
    forced.enter(KEY_CHAMPION, DqnPolicy(V2), on_probation(pointer(V1)), DqnPolicy(V1))
    assert forced.in_force.former is None


def test_a_former_policy_that_expires_makes_room_for_the_heuristic_and_so_does_the_champion() -> None:
    shelf = book()
    ending = on_probation(pointer(V1, expires_ns=100), expires_ns=200)
    shelf.enter(KEY_CHAMPION, DqnPolicy(V2), ending, DqnPolicy(V1))
    assert shelf.expire(100) == ["former v1"]
    assert shelf.in_force.former is not None
    assert shelf.in_force.former.version == "heuristic"
    assert shelf.fallback == ""
    assert shelf.expire(200) == ["champion v2"]
    assert (shelf.in_force.acting.version, shelf.in_force.former) == ("heuristic", None)


def test_a_pointer_on_probation_is_read_as_it_was_written_and_yesterdays_pointer_acts_on_all() -> None:
    written = on_probation(pointer(V1))
    assert read_pointer("champion", msgspec.json.encode(written)) == written
    old = read_pointer("champion", b'{"version":"v1","kind":"dqn","sha256":"","parent":"heuristic","expires_ns":5}')
    assert (old.share, old.former, old.on_probation) == (1.0, None, False)
    for bad in (b'{"version":"v1","kind":"dqn","share":0}', b'{"version":"v1","kind":"dqn","share":1.5}'):
        with pytest.raises(PolicyError):
            read_pointer("champion", bad)
