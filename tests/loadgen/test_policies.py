"""Policies and admissions by name."""

from __future__ import annotations

import pytest

from loadgen.policies import ADMISSIONS, admission_named, policy_named, with_admission


def test_every_admission_is_an_order_with_or_without_cap_and_shedding() -> None:
    assert len(set(ADMISSIONS)) == 8
    assert admission_named("fcfs") == {"order": "fcfs", "running_cap": False, "shed": False}
    assert admission_named("deadline_cap_shed") == {"order": "deadline", "running_cap": True, "shed": True}
    assert admission_named("fcfs_shed") == {"order": "fcfs", "running_cap": False, "shed": True}
    with pytest.raises(ValueError, match="deadline_cap_shed"):
        admission_named("lifo")


def test_an_admission_changes_nothing_else_of_a_policy() -> None:
    plain = policy_named("vllm_offload")
    found = with_admission(plain, "deadline_cap")
    assert found.name == plain.name
    assert (found.mode.order, found.mode.running_cap, found.mode.shed) == ("deadline", True, False)
    assert (found.mode.admission, found.mode.offload) == ("physical", True)
    assert with_admission(found, "fcfs") == plain
