"""What an action means in bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import Action
from schemas.classes import ServiceClass
from schemas.metrics import COLUMN, METRICS
from services.actuator import budget
from services.actuator.effects import EffectSettings, plan, plan_card
from services.actuator.views import Views, WorkerView, views_of

GROUP = 128 << 20
GIB = 1 << 30
NO_RESERVE = EffectSettings(reserve_bytes=0)


def view(**changes: float | bool) -> WorkerView:
    fields: dict[str, float | bool] = {
        "q0_bytes": 20 * GIB,
        "capacity_bytes": 40 * GIB,
        "group_bytes": GROUP,
        "floor_bytes": GIB,
        "mapped_bytes": 10 * GIB,
        "kv_bytes": 8 * GIB,
        "idle_bytes": 4 * GIB,
        "swap_allowed": True,
    }
    return WorkerView(**(fields | changes))  # type: ignore[arg-type]  # all are numbers or the one flag


def arrays(views: list[WorkerView], cards: list[int]) -> Views:
    def column(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in views], np.float64)

    names = [name for name in WorkerView.__struct_fields__ if name != "swap_allowed"]
    return Views(
        cards=np.array(cards, np.int64),
        swap_allowed=np.array([one.swap_allowed for one in views]),
        **{name: column(name) for name in names},
    )


def test_soft_quota_is_rho_times_q0_and_hard_quota_what_neighbours_leave():
    mine, other = plan_card([(0, 1.5, 256), (0, 1.0, 256)], [view(), view(mapped_bytes=GIB // 2)], settings=NO_RESERVE)
    assert mine.soft_bytes == 30 * GIB
    assert mine.hard_bytes == 39 * GIB, "the neighbour has less mapped than its floor of 1 GiB, which stays its own"
    assert other.hard_bytes == 30 * GIB


def test_a_worker_alone_on_its_card_may_use_the_whole_capacity_in_whole_page_groups():
    settings = EffectSettings(reserve_bytes=GIB)
    (command,) = plan_card([(0, 1.0, 256)], [view(capacity_bytes=40 * GIB + 5)], settings=settings)
    assert command.hard_bytes == 40 * GIB


def test_a_shared_card_keeps_its_reserve():
    commands = plan_card([(0, 1.0, 256)] * 2, [view(), view()], settings=EffectSettings(reserve_bytes=GIB))
    assert [one.hard_bytes for one in commands] == [29 * GIB, 29 * GIB]


def test_rho_bounds_reservations_only():
    low, high = (plan_card([(0, rho, 256)], [view()])[0].hard_bytes for rho in (1.0, 1.6))
    assert low == high


def test_evict_moves_half_of_the_idle_bytes_within_the_link_budget():
    (command,) = plan_card([(Action.EVICT, 1.0, 256)], [view(link_bytes_per_s=25e9)])
    assert command.evict_bytes == 2 * GIB
    (slow,) = plan_card([(Action.EVICT, 1.0, 256)], [view(link_bytes_per_s=1e9)])
    assert slow.evict_bytes == pytest.approx(1e9, abs=2), "half of a 2 s step at 1 GB/s"
    (troubled,) = plan_card([(Action.EVICT, 1.0, 256)], [view(link_bytes_per_s=1e9)], scale=0.25)
    assert troubled.evict_bytes == pytest.approx(250e6, abs=2)


def test_workers_of_a_card_share_its_link_and_its_host_tier():
    both = plan_card([(Action.EVICT, 1.0, 256)] * 2, [view(link_bytes_per_s=1e9)] * 2)
    assert sum(one.evict_bytes for one in both) == pytest.approx(1e9, abs=2)
    full = plan_card([(Action.EVICT, 1.0, 256)] * 2, [view(host_free_bytes=GIB)] * 2)
    assert sum(one.evict_bytes for one in full) == pytest.approx(GIB, abs=2)


@pytest.mark.parametrize("action", list(Action))
def test_a_class_that_forbids_swap_has_swap_budget_zero(action: Action):
    forbidden = view(swap_allowed=False, idle_bytes=8 * GIB, prefetch_bytes=GIB)
    mine, neighbour = plan_card([(action, 1.0, 256), (Action.EVICT, 1.0, 256)], [forbidden, view()])
    assert mine.evict_bytes == mine.prefetch_bytes == 0
    assert neighbour.evict_bytes == 2 * GIB
    assert (mine.compact_bytes > 0) == (action == Action.COMPACT), "compaction leaves nothing off the card"
    metrics = np.full((1, len(METRICS)), np.nan)
    for name, value in {"q0_bytes": 20 * GIB, "card_kv_capacity_bytes": 40 * GIB, "kv_bytes": GIB,
                        "kv_idle_bytes": GIB, "page_group_bytes": GROUP}.items():  # fmt: skip
        metrics[0, COLUMN[name]] = value
    for one in (ServiceClass.COPILOT, ServiceClass.TRAINING):
        views = views_of(metrics, np.zeros(1, np.int64), np.array([one], np.uint8))
        assert plan(np.array([int(action)]), np.ones(1), np.array([256]), views).evict_bytes[0] == 0


def test_compaction_gets_what_swap_out_leaves():
    views = [view(link_bytes_per_s=1e9), view(link_bytes_per_s=1e9)]
    evicting, compacting = plan_card([(Action.EVICT, 1.0, 256), (Action.COMPACT, 1.0, 256)], views)
    assert evicting.evict_bytes == pytest.approx(1e9, abs=2)
    assert compacting.compact_bytes == 0, "the swap-out took the whole second that the card may move in a step"
    (alone,) = plan_card([(Action.COMPACT, 1.0, 256)], [view()])
    assert alone.compact_bytes == 2 * GIB, "as many bytes as there are holes, at most one byte moved a byte freed"


def test_prefetch_comes_before_swap_out_and_swap_out_before_compaction():
    views = [view(link_bytes_per_s=10e9, prefetch_bytes=6e9, idle_bytes=12e9, kv_bytes=12e9), view()]
    evicting, compacting = plan_card([(Action.EVICT, 1.0, 256), (Action.COMPACT, 1.0, 256)], views)
    assert evicting.prefetch_bytes == pytest.approx(6e9, abs=2), "a second a step: 10 GB over the link"
    assert evicting.evict_bytes == pytest.approx(4e9, abs=2)
    assert compacting.compact_bytes == 0
    (holding,) = plan_card([(Action.HOLD, 1.0, 256)], [view(link_bytes_per_s=1e9, prefetch_bytes=6e9)])
    assert holding.prefetch_bytes == pytest.approx(1e9, abs=2), "it needs no action to be commanded"


def test_decode_gaps_bound_compaction_and_not_the_link():
    settings = EffectSettings(movement_share=0.5, gap_ms=4.0, copy_bytes_per_s=10e9, compact_limit_bytes=100 * GIB)
    changes = {"mapped_bytes": 80 * GIB, "kv_bytes": 40 * GIB, "idle_bytes": 40e9, "link_bytes_per_s": 10e9}
    slow = view(iteration_s=0.04, **changes)
    (command,) = plan_card([(Action.COMPACT, 1.0, 256)], [slow], settings=settings)
    assert command.compact_bytes == pytest.approx(2e9, abs=2), "50 gaps of 4 ms: 0.2 s"
    (halved,) = plan_card([(Action.COMPACT, 1.0, 256)], [slow], scale=0.5, settings=settings)
    assert halved.compact_bytes == pytest.approx(1e9, abs=2)
    both = plan_card([(Action.COMPACT, 1.0, 256), (0, 1.0, 256)], [slow, view(iteration_s=0.08)], settings=settings)
    assert both[0].compact_bytes == pytest.approx(1e9, abs=2), "the neighbour has half as many gaps"
    for iteration_s in (0.0, 0.004):
        still = view(iteration_s=iteration_s, **changes)
        (whole,) = plan_card([(Action.COMPACT, 1.0, 256)], [still], settings=settings)
        assert whole.compact_bytes == pytest.approx(10e9, abs=2), "nothing decodes, or fast: only the step bounds"
    (out,) = plan_card([(Action.EVICT, 1.0, 256)], [slow], settings=settings)
    assert out.evict_bytes == pytest.approx(10e9, abs=2), "a copy engine hardly disturbs decoding"


def test_the_gap_comes_from_the_metrics_offline():
    metrics = np.full((2, len(METRICS)), np.nan)
    metrics[0, COLUMN["iteration_s"]] = 0.05
    assert views_of(metrics, np.array([0, 0]), np.zeros(2, np.uint8)).iteration_s.tolist() == [0.05, 0.0]


def test_nothing_is_compacted_when_no_page_group_can_be_gained():
    (command,) = plan_card([(Action.COMPACT, 1.0, 256)], [view(kv_bytes=10 * GIB - GROUP / 2)])
    assert command.compact_bytes == 0


def test_a_hard_quota_is_never_below_the_floor():
    commands = plan_card([(0, 1.0, 256)] * 2, [view(mapped_bytes=0), view(mapped_bytes=40 * GIB)])
    assert commands[0].hard_bytes == GIB


def test_what_a_source_does_not_report_is_neither_moved_nor_assumed():
    metrics = np.full((2, len(METRICS)), np.nan)
    metrics[:, COLUMN["q0_bytes"]] = 20 * GIB
    metrics[:, COLUMN["card_kv_capacity_bytes"]] = 40 * GIB
    metrics[:, COLUMN["kv_bytes"]] = 3 * GIB
    views = views_of(metrics, np.array([7, 7]), np.zeros(2, np.uint8))
    commands = plan(np.array([4, 3]), np.full(2, 1.2), np.full(2, 64), views, settings=NO_RESERVE)
    assert list(commands.evict_bytes) == [0, 0]
    assert list(commands.compact_bytes) == [0, 0]
    assert list(commands.hard_bytes) == [37 * GIB, 37 * GIB], "KV without a known mapping counts as mapped"


amount = st.integers(0, 40).map(lambda n: float(n * GIB // 3))
worker = st.builds(
    WorkerView,
    q0_bytes=st.integers(1, 40).map(lambda n: float(n * GIB)),
    capacity_bytes=st.just(40.0 * GIB),
    group_bytes=st.sampled_from([float(GROUP), 320.0 * 2**20]),
    floor_bytes=st.integers(0, 3).map(lambda n: float(n * GIB)),
    mapped_bytes=amount,
    kv_bytes=amount,
    idle_bytes=amount,
    swap_allowed=st.booleans(),
    host_free_bytes=st.sampled_from([0.0, 5e9, float("inf")]),
    link_bytes_per_s=st.sampled_from([0.0, 1e9, 25e9]),
    iteration_s=st.sampled_from([0.0, 0.003, 0.04, 0.3]),
    prefetch_bytes=st.sampled_from([0.0, 1e9, 20e9]),
)
target = st.tuples(st.integers(0, 4), st.sampled_from([1.0, 1.3, 1.6]), st.integers(4, 1024))


@given(
    st.lists(st.lists(st.tuples(worker, target), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from([1.0, 0.25]),
)
def test_offline_replay_and_live_actuator_give_the_same_commands(fleet, scale):
    live = [
        command for card in fleet for command in plan_card([one[1] for one in card], [one[0] for one in card], scale)
    ]
    views = arrays([one[0] for card in fleet for one in card], [i for i, card in enumerate(fleet) for _ in card])
    targets = [one[1] for card in fleet for one in card]
    whole = plan(
        np.array([t[0] for t in targets]),
        np.array([t[1] for t in targets]),
        np.array([t[2] for t in targets]),
        views,
        np.full(len(fleet), scale),
    )
    for name in ("soft_bytes", "hard_bytes", "evict_bytes", "compact_bytes", "prefetch_bytes"):
        np.testing.assert_allclose(
            getattr(whole, name), [getattr(one, name) for one in live], rtol=1e-12, atol=1.0, err_msg=name
        )


def test_the_budget_halves_beyond_the_limit_and_recovers_slowly():
    scale = 1.0
    for _ in range(20):
        scale = budget.next_scale(scale, True)
    assert scale == budget.SCALE_LOW
    steps = 0
    while scale < 1.0:
        scale, steps = budget.next_scale(scale, False), steps + 1
    assert steps == 20
    both = budget.next_scales(np.array([1.0, 0.5]), np.array([True, False]))
    np.testing.assert_allclose(both, [0.5, 0.55])
