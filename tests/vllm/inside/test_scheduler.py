"""Run by vLLM's own interpreter: Tidegate around vLLM's real scheduler, model and engine aside."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from schemas.engine import Describe, Failure, Prefetch, SetQuota, Snapshot, SnapshotReply
from services.actuator.engines.vllm import scheduler as plugin
from services.actuator.engines.vllm.commands import answer
from services.actuator.engines.vllm.scheduler import TidegateScheduler
from services.actuator.engines.vllm.steward import Steward
from services.actuator.engines.vllm.traffic import LOAD_S
from tests.vllm.inside.worlds import BLOCK_BYTES, BLOCK_TOKENS, hasher, real_scheduler, request, step, until

FLOOR = 512 // BLOCK_TOKENS + 1
"""Blocks of the longest request, and one."""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a steered scheduler of class ``agent``, whose quotas may go far."""
    monkeypatch.setenv("TIDEGATE_SOCKET", str(tmp_path / "0-w0.sock"))

    def make(**given: Any) -> TidegateScheduler:
        made: TidegateScheduler = real_scheduler(TidegateScheduler, tmp_path, **given)
        return made

    return make


def test_the_scheduler_is_of_the_kind_that_the_engine_asks_for(tmp_path: Path) -> None:
    """A plain one in an engine that schedules ahead would cost it that."""

    def ahead(**given: Any) -> Any:
        given["vllm_config"].scheduler_config.async_scheduling = True
        return TidegateScheduler(**given)

    assert isinstance(real_scheduler(ahead, tmp_path), AsyncScheduler)
    assert not isinstance(real_scheduler(TidegateScheduler, tmp_path), AsyncScheduler)


def told(scheduler: TidegateScheduler, soft_blocks: int, hard_blocks: int = 64, max_running: int = 256) -> None:
    """A quota command, as the actuator sends it."""
    now = time.monotonic_ns()
    said = answer(
        scheduler.tidegate,
        SetQuota(
            boot_id=1, step=now, action_id="q", generation=0, rho=1.0, soft_bytes=soft_blocks * BLOCK_BYTES,
            hard_bytes=hard_blocks * BLOCK_BYTES, max_running=max_running, lease_ns=now + 6 * 10**9,
            deadline_ns=now + 10**9,
        ),
    )  # fmt: skip
    assert not isinstance(said, Failure), said


def finish(scheduler: TidegateScheduler, *requests: Any) -> None:
    until(scheduler, lambda: all(one.is_finished() for one in requests))


# Soft quota.


def test_before_the_first_command_everybody_is_admitted_as_ever(made: Any) -> None:
    scheduler = made()
    for _ in range(8):
        scheduler.add_request(request(64, 400))
    step(scheduler)
    assert len(scheduler.running) == 8


def test_a_soft_quota_admits_what_prompt_and_possible_output_reserve(made: Any) -> None:
    scheduler = made()
    told(scheduler, soft_blocks=40)
    for _ in range(5):
        scheduler.add_request(request(64, 192))  # 16 blocks each
    step(scheduler)
    assert len(scheduler.running) == 2


def test_a_request_larger_than_what_is_left_of_the_quota_enters_alone(made: Any) -> None:
    scheduler = made()
    told(scheduler, soft_blocks=FLOOR)
    large = request(400, 110)
    scheduler.add_request(request(64, 64))
    scheduler.add_request(large)
    step(scheduler)
    assert large not in scheduler.running
    finish(scheduler, large)


def test_who_holds_kv_and_waits_is_not_reckoned_twice(made: Any) -> None:
    """A load that arrived while no block was free waits for blocks with its own still held: were its need asked for
    once more, more than half the quota would never be there for it."""
    scheduler = made()
    told(scheduler, soft_blocks=FLOOR)
    one = request(256, 64)
    scheduler.add_request(one)
    step(scheduler)
    scheduler.running.remove(one)  # as vLLM has it after a load: blocks held, promoted, not scheduled yet
    one.status = RequestStatus.WAITING
    scheduler.kv_holding_waiting.add_request(one)
    finish(scheduler, one)


def test_a_request_whose_grammar_was_just_compiled_passes_the_same_gate(made: Any) -> None:
    scheduler = made()
    told(scheduler, soft_blocks=FLOOR)
    scheduler.add_request(request(256, 256))
    step(scheduler)
    params = SamplingParams(max_tokens=100, structured_outputs=StructuredOutputsParams(json={"type": "object"}))
    one = request(64, params=params)
    scheduler.add_request(one)
    one.structured_output_request = SimpleNamespace(grammar=object())
    step(scheduler)
    assert one.status is RequestStatus.WAITING, "it entered beside a quota that is full"
    assert one in list(scheduler.waiting)


def test_the_running_cap_never_exceeds_vllms_own_limit(made: Any) -> None:
    scheduler = made(most=4)
    scheduler.tidegate._most_active = 3
    told(scheduler, soft_blocks=64)
    for _ in range(6):
        scheduler.add_request(request(16, 32))
    step(scheduler)
    assert len(scheduler.running) == 3


# Hard quota.


def test_a_lowered_bound_preempts_within_a_step_and_nobody_fails(made: Any) -> None:
    scheduler = made()
    everybody = [request(100, 60) for _ in range(8)]
    for one in everybody:
        scheduler.add_request(one)
    step(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.live_blocks == 8 * 7
    told(scheduler, soft_blocks=64, hard_blocks=FLOOR)
    step(scheduler)
    assert pool.live_blocks <= FLOOR
    assert scheduler.tidegate.preemptions >= 3
    finish(scheduler, *everybody)
    assert pool.live_blocks + len(pool.idle) <= FLOOR


def test_who_is_preempted_for_a_bound_stays_out_of_that_step(made: Any) -> None:
    """Preempted and resumed in one step, a request kills vLLM's model runner."""
    scheduler = made()
    for _ in range(8):
        scheduler.add_request(request(100, 60))
    step(scheduler)
    told(scheduler, soft_blocks=64, hard_blocks=FLOOR)
    output = scheduler.schedule()
    assert output.preempted_req_ids
    assert not output.preempted_req_ids & set(output.num_scheduled_tokens)


def test_the_latest_deadline_gives_way_first(made: Any) -> None:
    scheduler = made()
    late, soon = request(200, 60, priority=9), request(200, 60, priority=1)
    for one in (late, soon, request(200, 60, priority=2), request(100, 60, priority=3)):
        scheduler.add_request(one)
    step(scheduler)
    told(scheduler, soft_blocks=64, hard_blocks=FLOOR)
    step(scheduler)
    assert late.status is RequestStatus.PREEMPTED
    assert soon.status is RequestStatus.RUNNING


# Order.


def test_who_just_arrived_does_not_pass_those_whose_deadline_is_nearer(made: Any) -> None:
    scheduler = made(most=1)
    scheduler.add_request(request(16, 32))
    step(scheduler)
    now = time.time()
    older, newer = request(16, 8, arrival_time=now - 1.0), request(16, 8, arrival_time=now)
    scheduler.add_request(older)
    step(scheduler)  # orders the queue
    scheduler.add_request(newer)  # and now has a while until the next time
    assert scheduler.waiting.peek_request() is older
    assert 0 < older.priority < newer.priority


def test_a_priority_that_the_client_chose_stays(made: Any) -> None:
    scheduler = made()
    one = request(16, 8, priority=-3)
    scheduler.add_request(one)
    step(scheduler)
    assert one.priority == -3


# Conversations.


def test_a_turn_that_is_cut_while_it_waits_leaves_its_conversation_waiting(made: Any) -> None:
    """The next turn used to find a conversation between turns that waited for nothing: an error in add_request."""
    scheduler = made(most=1)
    first = request(64, 8, session_id="s")
    scheduler.add_request(first)
    finish(scheduler, first)
    cut = request(64, 8, session_id="s")
    scheduler.add_request(cut)
    scheduler.finish_requests(cut.request_id, RequestStatus.FINISHED_ABORTED)
    (idle,) = snapshot(scheduler).idle
    assert idle.bytes == 4 * BLOCK_BYTES
    scheduler.add_request(request(64, 8, session_id="s"))
    assert scheduler.tidegate is not None


def test_blocks_of_a_finished_turn_idle_for_its_conversation(made: Any) -> None:
    scheduler = made()
    one = request(100, 30)
    scheduler.add_request(one)
    finish(scheduler, one)
    (idle,) = snapshot(scheduler).idle
    assert idle.bytes == 129 // BLOCK_TOKENS * BLOCK_BYTES, "the last token was sampled, not computed"
    assert idle.tokens == 128
    assert idle.expected_return_s > 0


def snapshot(scheduler: TidegateScheduler) -> SnapshotReply:
    said = answer(scheduler.tidegate, Snapshot(100, 1e9))
    assert isinstance(said, SnapshotReply)
    return said


# Loads that nobody waits for. The host tier is a stand-in: it has every block.


@pytest.fixture
def away(made: Any) -> TidegateScheduler:
    """Conversation 1 has its blocks in host memory only."""
    scheduler = made()
    steward = scheduler.tidegate
    steward.offloaded = SimpleNamespace(has=lambda block_hash: True, capacity_bytes=0, used_bytes=0, free_bytes=0)
    steward.core = SimpleNamespace(request_block_hasher=hasher())
    one = request(100, 30)
    scheduler.add_request(one)
    finish(scheduler, one)
    steward.pool.evict_blocks(set(steward.pool.idle))
    return scheduler


def test_a_load_that_is_not_admitted_in_time_ends_and_says_so(away: TidegateScheduler) -> None:
    steward = away.tidegate
    begun = answer(steward, Prefetch((1,), "p"))
    assert not begun.done
    assert begun.prefetched_bytes == 8 * BLOCK_BYTES
    steward.traffic.drop_late(time.monotonic() + LOAD_S - 1)
    assert len(away.waiting) == 1
    steward.traffic.drop_late(time.monotonic() + LOAD_S)
    said = steward.receipts.of("p")
    assert (said.done, said.prefetched_bytes) == (True, 0)
    assert "did not arrive" in said.detail
    assert not away.requests
    assert not answer(steward, Prefetch((1,), "again")).done


def test_a_conversation_that_is_on_its_way_is_not_loaded_twice(away: TidegateScheduler) -> None:
    answer(away.tidegate, Prefetch((1,), "p"))
    assert answer(away.tidegate, Prefetch((1,), "q")).done
    assert len(away.waiting) == 1


def test_a_load_goes_behind_everybody_and_closes_the_gate_for_nobody(away: TidegateScheduler) -> None:
    told(away, soft_blocks=FLOOR)
    answer(away.tidegate, Prefetch((1,), "p"))
    client = request(300, 150)
    away.add_request(client)
    assert away.waiting.peek_request() is client
    step(away)
    small = request(16, 16)
    away.add_request(small)
    step(away)
    assert small.status is RequestStatus.RUNNING
    assert len(away.waiting) == 1


def test_nothing_is_loaded_into_an_engine_that_sleeps(away: TidegateScheduler) -> None:
    away.set_pause_state(type(away.pause_state).PAUSED_ALL)
    said = answer(away.tidegate, Prefetch((1,), "p"))
    assert isinstance(said, Failure)
    assert said.reason == "busy"
    assert not away.waiting


def test_what_its_tokens_alone_would_not_find_again_is_not_loaded(made: Any) -> None:
    scheduler = made()
    steward = scheduler.tidegate
    steward.offloaded = SimpleNamespace(has=lambda block_hash: True, capacity_bytes=0, used_bytes=0, free_bytes=0)
    steward.core = SimpleNamespace(request_block_hasher=hasher())
    salted = request(100, 30, cache_salt="tenant")
    scheduler.add_request(salted)
    finish(scheduler, salted)
    steward.pool.evict_blocks(set(steward.pool.idle))
    assert answer(steward, Prefetch((1,), "p")).prefetched_bytes == 0
    assert not scheduler.waiting


# Account.


def test_a_prompt_that_fits_one_step_counts_as_prompt(made: Any) -> None:
    scheduler = made()
    seen: list[tuple[int, int]] = []
    scheduler.tidegate.traffic.scheduled = lambda now_s, prompt, decoding, waiting: seen.append((prompt, decoding))
    scheduler.add_request(request(100, 3))
    for _ in range(3):
        step(scheduler)
    assert seen == [(100, 0), (0, 1), (0, 1)]


def test_several_tensors_of_one_allocation_are_one_block(made: Any) -> None:
    steward = made().tidegate
    assert steward.block_bytes == BLOCK_BYTES
    assert steward.floor_bytes == FLOOR * BLOCK_BYTES


# Errors of Tidegate's own.

HOOKS = ("before_step", "after_schedule", "holds_out", "may_admit", "arrived", "ended")


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_any_hook_ends_tidegate_and_no_request(
    made: Any, hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = made()
    told(scheduler, soft_blocks=FLOOR, hard_blocks=FLOOR)
    everybody = [request(100, 40) for _ in range(6)]
    scheduler.add_request(everybody[0])
    step(scheduler)

    def fails(steward: Steward, *given: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(Steward, hook, fails)
    logging.getLogger("vllm.tidegate").addHandler(caplog.handler)
    for one in everybody[1:]:
        scheduler.add_request(one)
    finish(scheduler, *everybody)
    assert scheduler.tidegate is None
    assert "vLLM goes on without it" in caplog.text
    pool = scheduler.kv_cache_manager.block_pool
    assert type(pool) is BlockPool
    assert pool.get_num_free_blocks() == 64, "all is free again, without a bound"
    assert scheduler.kv_cache_manager.watermark_blocks == 0
    assert scheduler.max_num_active_reqs == 16
    assert {one.priority for one in everybody} == {0}
    said = answered(scheduler)
    assert said.reason == "failed"
    assert "a mistake" in said.detail


def answered(scheduler: Any) -> Failure:
    frame = msgspec.msgpack.encode(Describe())
    said: Failure = msgspec.msgpack.decode(plugin.answer(SimpleNamespace(scheduler=scheduler), frame), type=Failure)
    return said


def test_without_a_socket_the_scheduler_is_vllms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDEGATE_SOCKET", raising=False)
    scheduler = real_scheduler(TidegateScheduler, tmp_path)
    one = request(100, 10)
    scheduler.add_request(one)
    finish(scheduler, one)
    assert type(scheduler.kv_cache_manager.block_pool) is BlockPool
    assert answered(scheduler).reason == "unsupported"
