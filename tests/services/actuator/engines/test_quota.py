"""The engine's own quota: what holds with no actuator, bus or network."""

from __future__ import annotations

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from schemas.engine import GrantPages, SetQuota
from schemas.identity import STEP_NS, action_id
from services.actuator.engines.quota import LEASE_LIMIT_NS, Quota, QuotaLimits

GIB = 1 << 30
LIMITS = QuotaLimits(q0_bytes=20 * GIB, capacity_bytes=40 * GIB)


def command(step: int, rho: float = 1.2, *, boot: int = 1, generation: int = 0, now_ns: int = 0, **changes: int):
    fields = {
        "soft_bytes": int(rho * LIMITS.q0_bytes) if rho == rho else GIB,
        "hard_bytes": 30 * GIB,
        "max_running": 256,
        "lease_ns": now_ns + 3 * STEP_NS,
        "deadline_ns": now_ns + STEP_NS,
    }
    return SetQuota(
        boot_id=boot, step=step, action_id=action_id("n0/0/w0", boot, step), rho=rho, generation=generation,
        **(fields | changes),
    )  # fmt: skip


def refused(quota: Quota, one: SetQuota, now_ns: int = 0) -> str:
    before = (quota.generation, quota.rho, quota.soft_bytes, quota.hard_bytes, quota.lease_until_ns)
    failure = quota.set_quota(one, now_ns, floor_bytes=GIB)
    assert failure is not None, "the engine must say no"
    assert before == (quota.generation, quota.rho, quota.soft_bytes, quota.hard_bytes, quota.lease_until_ns)
    return failure.reason


def test_a_command_takes_effect_under_a_new_generation():
    quota = Quota(LIMITS)
    assert quota.set_quota(command(1, 1.3), 0, GIB) is None
    assert (quota.rho, quota.soft_bytes, quota.generation) == (1.3, 26 * GIB, 1)


def test_a_repeat_does_nothing_not_even_renew():
    quota = Quota(LIMITS)
    quota.set_quota(command(1), 0, GIB)
    lease = quota.lease_until_ns
    assert quota.set_quota(command(1, now_ns=STEP_NS), STEP_NS, GIB) is None
    assert (quota.generation, quota.lease_until_ns) == (1, lease)


def test_the_same_quota_again_renews_the_lease_and_keeps_the_generation():
    quota = Quota(LIMITS)
    quota.set_quota(command(1), 0, GIB)
    quota.set_quota(command(2, generation=1, now_ns=STEP_NS), STEP_NS, GIB)
    assert (quota.generation, quota.lease_until_ns) == (1, 4 * STEP_NS)


@pytest.mark.parametrize(("keeps_pool", "hard_gib"), [(False, 30), (True, 40)])
def test_a_hard_quota_outlives_its_lease_only_where_a_neighbour_may_have_mapped_the_rest(keeps_pool, hard_gib):
    quota = Quota(QuotaLimits(q0_bytes=20 * GIB, capacity_bytes=40 * GIB, keeps_pool=keeps_pool))
    quota.set_quota(command(1, 1.0), 0, GIB)
    assert quota.expire(3 * STEP_NS) == keeps_pool, "a lowered hard quota alone is something to take back, or nothing"
    assert quota.hard_bytes == hard_gib * GIB


def test_a_lease_that_runs_out_takes_the_raise_back():
    quota = Quota(LIMITS)
    quota.set_quota(command(1, 1.5), 0, GIB)
    assert not quota.expire(3 * STEP_NS - 1)
    assert quota.expire(3 * STEP_NS)
    assert (quota.rho, quota.soft_bytes, quota.generation, quota.max_running) == (1.0, 20 * GIB, 2, 256)
    assert not quota.expire(9 * STEP_NS), "there is nothing more to take back"
    assert refused(quota, command(2, generation=1, now_ns=3 * STEP_NS), 3 * STEP_NS) == "stale_generation"


def test_no_lease_is_longer_than_the_engine_gives():
    quota = Quota(LIMITS)
    quota.set_quota(command(1, lease_ns=10**18), 0, GIB)
    assert quota.lease_until_ns == LEASE_LIMIT_NS


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (command(1, float("nan")), "out_of_range"),
        (command(1, 1.7), "out_of_range"),
        (command(1, 0.9), "out_of_range"),
        (command(1, max_running=3), "out_of_range"),
        (command(1, soft_bytes=40 * GIB), "out_of_range"),
        (command(1, hard_bytes=41 * GIB), "out_of_range"),
        (command(1, hard_bytes=GIB // 2), "below_floor"),
        (command(1, deadline_ns=-1), "late"),
        (command(1, lease_ns=0), "late"),
    ],
)
def test_what_cannot_be_right_is_refused_and_changes_nothing(one, reason):
    assert refused(Quota(LIMITS), one) == reason


def test_an_older_step_or_boot_is_refused():
    quota = Quota(LIMITS)
    quota.set_quota(command(5, boot=2), 0, GIB)
    assert refused(quota, command(4, boot=2, generation=1)) == "stale_generation"
    assert refused(quota, command(9, boot=1, generation=1)) == "stale_generation"
    assert quota.set_quota(command(0, boot=3, generation=1), 0, GIB) is None, "a newer boot starts its steps anew"


def test_a_class_has_its_own_highest_rho():
    quota = Quota(QuotaLimits(q0_bytes=20 * GIB, capacity_bytes=40 * GIB, rho_max=1.3))
    assert refused(quota, command(1, 1.4)) == "class_forbids"


def test_granted_pages_stay_the_engines():
    quota = Quota(LIMITS)
    assert quota.grant(GrantPages(2 * GIB, 0), mapped_bytes=5 * GIB) is None
    assert quota.granted_bytes == 5 * GIB
    failure = quota.grant(GrantPages(41 * GIB, 0), 0)
    assert failure is not None
    assert failure.reason == "out_of_range"


class QuotaMachine(RuleBasedStateMachine):
    """Any order of commands, repeats, silence and time."""

    def __init__(self) -> None:
        super().__init__()
        self.quota = Quota(LIMITS)
        self.now_ns = 0
        self.step = 0
        self.accepted_ns = -(10**18)
        self.generation = 0
        self.last: SetQuota | None = None

    @rule(rho=st.sampled_from([0.9, 1.0, 1.1, 1.6, 1.7]), behind=st.integers(0, 2), late=st.booleans())
    def command(self, rho: float, behind: int, late: bool) -> None:
        self.step += 1
        generation = max(self.quota.generation - behind, 0)
        one = command(self.step, rho, generation=generation, now_ns=self.now_ns - (2 * STEP_NS if late else 0))
        if self.quota.set_quota(one, self.now_ns, GIB) is None:
            assert not late
            assert generation == self.quota.generation or generation == self.quota.generation - 1
            assert 1.0 <= rho <= 1.6
            self.accepted_ns = self.now_ns
            self.last = one

    @rule()
    def repeat(self) -> None:
        if self.last is not None:
            before = vars(self.quota).copy()
            self.quota.set_quota(self.last, self.now_ns, GIB)
            assert vars(self.quota) == before or self.quota.order != (self.last.boot_id, self.last.step)

    @rule(steps=st.integers(1, 4))
    def wait(self, steps: int) -> None:
        self.now_ns += steps * STEP_NS
        self.quota.expire(self.now_ns)

    @invariant()
    def nothing_is_raised_that_nobody_watches(self) -> None:
        if self.now_ns - self.accepted_ns >= LEASE_LIMIT_NS:
            assert self.quota.rho == 1.0
        assert 1.0 <= self.quota.rho <= 1.6
        assert self.quota.soft_bytes <= 1.6 * LIMITS.q0_bytes

    @invariant()
    def generations_only_grow(self) -> None:
        assert self.quota.generation >= self.generation
        self.generation = self.quota.generation


TestQuotaMachine = QuotaMachine.TestCase
TestQuotaMachine.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
