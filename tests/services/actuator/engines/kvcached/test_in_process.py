"""kvcached's own control call: its six answers, and one owner's revisions."""

from __future__ import annotations

from typing import Any

import pytest

from services.actuator.engines.kvcached.in_process import Revisions, set_limit
from services.errors import DeviceError


class Control:
    """Answers as ``kvcached.control.set_instance_memory_limit`` with one pool of pages of 10 bytes."""

    def __init__(self, mapped: int = 0, revision: int = -1) -> None:
        self.mapped, self.revision, self.limit = mapped, revision, -1

    def __call__(self, limit: int, *, revision: int) -> dict[str, Any]:
        if revision < self.revision:
            status = "stale"
        elif revision == self.revision and limit != self.limit:
            status = "conflict"
        else:
            self.revision, self.limit = revision, limit
            status = "deferred" if self.mapped > limit else "applied"
        effective = self.limit // 10 * 10
        pools = [{"revision": self.revision}]
        return {"status": status, "reason": "", "effective_limit_bytes": effective, "mapped_bytes": self.mapped,
                "revision": revision, "pools": pools}  # fmt: skip


def test_a_limit_is_applied_and_told_in_whole_pages() -> None:
    answer = set_limit(Control(), Revisions(), 95)
    assert (answer.status, answer.effective_bytes, answer.excess_bytes) == ("applied", 90, 0)


def test_a_repeat_keeps_its_revision_and_a_change_takes_the_next() -> None:
    revisions = Revisions()
    assert [revisions.of(limit) for limit in (5, 5, 7, 5)] == [1, 1, 2, 3]


def test_a_deferred_limit_is_in_force_and_says_what_is_above_it() -> None:
    answer = set_limit(Control(mapped=100), Revisions(), 60)
    assert answer.status == "deferred"
    assert answer.in_force
    assert answer.excess_bytes == 40


def test_another_owners_revision_is_told_and_only_passed_on_purpose() -> None:
    control, revisions = Control(revision=41), Revisions()
    assert set_limit(control, revisions, 50).status == "stale"
    assert not set_limit(control, revisions, 50).in_force
    taken = set_limit(control, revisions, 50, takeover=True)
    assert (taken.status, control.revision) == ("applied", 42)


def test_an_instance_without_pools_and_an_answer_in_other_words_are_not_taken_for_success() -> None:
    nothing = {"status": "unavailable", "effective_limit_bytes": 0, "mapped_bytes": 0, "revision": 1, "reason": "no"}
    assert not set_limit(lambda *_, **__: nothing, Revisions(), 50).in_force
    for answer in ({"status": "fine"}, {"status": "applied"}):
        with pytest.raises(DeviceError, match="kvcached_answer"):
            set_limit(lambda *_, answer=answer, **__: answer, Revisions(), 50)
