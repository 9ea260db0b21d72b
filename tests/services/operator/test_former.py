"""Which champion a rollback goes back to, by the pointer's history."""

from __future__ import annotations

from schemas.policies import HEURISTIC_POINTER, PolicyPointer, Rejection, Rejections
from services.operator.former import formers


def network(version: str, why: str = "") -> PolicyPointer:
    return PolicyPointer(version=version, kind="dqn", sha256=f"digest of {version}", why=why)


def told(history: list[PolicyPointer | None], *rejected: Rejection) -> list[tuple[str, str]]:
    return [(one.pointer.version, one.passed_over) for one in formers(history, Rejections(rejected=rejected))]


def test_the_way_back_names_each_version_once_newest_first() -> None:
    history = [HEURISTIC_POINTER, network("a"), network("b"), network("a"), network("c")]
    assert told(history) == [("a", ""), ("b", ""), ("heuristic", "")]
    assert told([]) == []
    assert told([network("a"), network("a")]) == [], "a champion that was confirmed is none of before"


def test_who_was_taken_back_is_passed_over_until_promoted_anew() -> None:
    history: list[PolicyPointer | None] = [
        HEURISTIC_POINTER,
        network("a"),
        network("b"),
        network("a", "rollback from b: slow"),
    ]
    assert told(history) == [("b", "rollback from b: slow"), ("heuristic", "")]
    history += [network("b", "mended"), network("c")]
    assert told(history)[0] == ("b", "")


def test_an_examiners_rollback_counts_as_an_operators_does() -> None:
    history = [network("a"), network("b"), network("a", "rollback from b: live regression: goodput 1 against 2 of a")]
    assert told(history) == [("b", "rollback from b: live regression: goodput 1 against 2 of a")]


def test_rejected_weights_are_passed_over_under_whatever_name() -> None:
    rejection = Rejection(version="x", sha256="digest of b", why="out of memory", when_ns=1)
    assert told([network("a"), network("b"), network("c")], rejection) == [("b", "rejected: out of memory"), ("a", "")]


def test_a_pointer_that_cannot_be_read_is_left_for_the_last_one_that_can() -> None:
    assert told([network("a"), None]) == [("a", "")]
    assert told([network("a"), None, network("b")]) == [("a", "")]
