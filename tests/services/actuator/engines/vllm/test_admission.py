"""Who enters next and what they are reckoned with, on requests of vLLM's shape."""

from __future__ import annotations

import math

import msgspec
import pytest

from schemas.classes import DEFAULT_LIMITS, ServiceClass
from services.actuator.engines.vllm.admission import (
    FIRST,
    LAST,
    LOOK_S,
    RANK_QUEUE,
    RANK_S,
    Admission,
    deadline_s,
)

CHAT, AGENT, BATCH = ServiceClass.CHAT, ServiceClass.AGENT, ServiceClass.BATCH
NOW = 1_800_000_000.0
CONTEXT, BLOCK = 1024, 16


class Ask(msgspec.Struct):
    """A request of vLLM's, as far as admission looks at it."""

    request_id: str
    arrival_time: float = NOW
    num_prompt_tokens: int = 100
    num_output_tokens: int = 0
    max_tokens: int = 200
    priority: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class Queue(list[Ask]):
    """vLLM's priority queue."""

    def remove_requests(self, requests: list[Ask]) -> None:
        self[:] = [one for one in self if one not in requests]

    def add_request(self, request: Ask) -> None:
        self.append(request)
        self.sort(key=lambda one: (one.priority, one.arrival_time))

    @property
    def names(self) -> str:
        return "".join(one.request_id for one in self)


@pytest.fixture
def admission() -> Admission:
    return Admission(CONTEXT, BLOCK)


def ordered(admission: Admission, *requests: Ask, now_s: float = NOW, **kinds: ServiceClass) -> Queue:
    queue = Queue(requests)
    admission.order(queue, dict.fromkeys((one.request_id for one in requests), CHAT) | kinds, now_s)
    return queue


# Order.


def test_the_nearest_deadline_is_first_whoever_came_first(admission: Admission) -> None:
    early_agent, late_chat = Ask("a", arrival_time=NOW - 1.0), Ask("c", arrival_time=NOW - 0.5)
    assert ordered(admission, early_agent, late_chat, a=AGENT).names == "ca", "an agent may wait 5 s, a chat 2"


def test_a_long_prompt_has_longer(admission: Admission) -> None:
    assert ordered(admission, Ask("l", num_prompt_tokens=8000), Ask("s", arrival_time=NOW + 1.0)).names == "sl"


def test_who_is_late_is_behind_all_who_can_still_be_in_time(admission: Admission) -> None:
    late = Ask("l", arrival_time=NOW - 60.0)
    assert ordered(admission, late, Ask("t"), Ask("b", arrival_time=NOW - 1.0), b=BATCH).names == "tbl"


def test_what_the_queue_before_it_takes_counts(admission: Admission) -> None:
    admission.prefill_tokens_per_s = 100.0
    first, second = Ask("1", arrival_time=NOW - 1.0, num_prompt_tokens=50), Ask("2", num_prompt_tokens=180)
    third = Ask("3", arrival_time=NOW + 0.1, num_prompt_tokens=100)
    assert ordered(admission, first, second, third).names == "123"
    assert second.priority > 10**14, "its first token would come after its limit"


def test_whose_client_already_reads_goes_first(admission: Admission) -> None:
    reading = Ask("r", num_output_tokens=30, arrival_time=NOW + 0.5)
    assert ordered(admission, Ask("a"), reading).names == "ra"
    assert reading.priority == FIRST


def test_a_priority_that_the_client_chose_is_kept(admission: Admission) -> None:
    own, ours = Ask("o", priority=5), Ask("u")
    queue = Queue([own, ours])
    admission.order(queue, {"u": CHAT}, NOW)
    assert own.priority == 5
    assert queue.names == "ou"


def test_who_arrives_between_two_orderings_has_its_place(admission: Admission) -> None:
    older, newer = Ask("o", arrival_time=NOW - 1.0), Ask("n")
    queue = ordered(admission, older)
    newer.priority = admission.first_priority(newer, CHAT)
    queue.add_request(newer)
    assert queue.names == "on"
    admission.order(queue, {"o": CHAT, "n": CHAT}, NOW + 2 * RANK_S)
    assert queue.names == "on"


def test_the_queue_is_ordered_again_after_a_while_and_a_long_one_less_often(admission: Admission) -> None:
    queue = ordered(admission, Ask("a"))
    waited = Ask("w", arrival_time=NOW - 1.0)
    queue.append(waited)
    admission.order(queue, {"a": CHAT, "w": CHAT}, NOW + RANK_S / 2)
    assert waited.priority == 0
    queue.extend(Ask("x") for _ in range(RANK_QUEUE))
    admission.order(queue, {"w": CHAT}, NOW + 1.5 * RANK_S)
    assert waited.priority == 0
    admission.order(queue, {"w": CHAT}, NOW + 2.1 * RANK_S)
    assert waited.priority > 0


def test_a_wall_clock_that_was_set_back_does_not_stop_the_ordering(admission: Admission) -> None:
    ordered(admission, Ask("a"))
    waited = Ask("w", arrival_time=NOW - 3600.0)
    ordered(admission, waited, now_s=NOW - 3600.0)
    assert waited.priority > 0


@pytest.mark.parametrize("kind", list(ServiceClass))
def test_every_priority_fits_vllms_integers_and_is_before_what_nobody_waits_for(
    admission: Admission, kind: ServiceClass
) -> None:
    on_time, late = Ask("t"), Ask("l", arrival_time=NOW - 1e6)
    ordered(admission, on_time, late, t=kind, l=kind)
    assert -(2**63) < FIRST < on_time.priority <= late.priority < LAST < 2**63


def test_a_batchs_deadline_is_that_of_its_answer() -> None:
    assert deadline_s(Ask("b"), BATCH) == NOW + DEFAULT_LIMITS[BATCH].completion_s


# Reservation.


def test_before_eight_have_finished_all_that_may_be_produced_is_reserved(admission: Admission) -> None:
    for _ in range(7):
        admission.finished[CHAT].add(20)
    assert admission.reserved_blocks(Ask("a"), CHAT) == math.ceil((100 + 200) / BLOCK)


def test_then_what_its_class_produces(admission: Admission) -> None:
    for _ in range(8):
        admission.finished[CHAT].add(20)
    assert admission.reserved_blocks(Ask("a"), CHAT) == math.ceil((100 + 20) / BLOCK)
    assert admission.reserved_blocks(Ask("a"), AGENT) == math.ceil((100 + 200) / BLOCK), "of agents nothing is known"


def test_one_that_outgrows_the_expectation_is_expected_to_go_on_but_not_beyond_its_limit(admission: Admission) -> None:
    for _ in range(8):
        admission.finished[CHAT].add(20)
    assert admission.reserved_blocks(Ask("a", num_output_tokens=60), CHAT) == math.ceil((100 + 60 + 20) / BLOCK)
    assert admission.reserved_blocks(Ask("a", num_output_tokens=195), CHAT) == math.ceil((100 + 200) / BLOCK)


def test_never_less_than_it_holds_and_never_more_than_the_model_takes(admission: Admission) -> None:
    holds = Ask("a", num_output_tokens=250, max_tokens=200)  # a session that streams starts its limit anew
    assert admission.reserved_blocks(holds, CHAT) == math.ceil(350 / BLOCK)
    assert admission.reserved_blocks(Ask("a", max_tokens=10**6), CHAT) == CONTEXT // BLOCK


def test_what_differs_much_is_reserved_with_its_deviation(admission: Admission) -> None:
    for tokens in (0, 100) * 4:
        admission.finished[CHAT].add(tokens)
    assert admission.finished[CHAT].mean == pytest.approx(50)
    assert admission.reserved_blocks(Ask("a"), CHAT) == math.ceil((100 + 100) / BLOCK)


# Running cap and what it is driven by.


def test_the_cap_falls_when_tokens_come_late_and_rises_in_calm(admission: Admission) -> None:
    assert admission.running_cap(0.0, 64, 60, tpot_s=0.05) == 64
    admission.stepped(0.5, prompt_tokens=0, decoding=60, waiting=False)
    fallen = admission.running_cap(LOOK_S, 64, 60, tpot_s=0.05)
    assert fallen == 54
    admission.gap_s = 0.01
    assert admission.running_cap(LOOK_S * 1.5, 64, 54, tpot_s=0.05) == fallen, "one look a second"
    assert admission.running_cap(LOOK_S * 2, 64, 54, tpot_s=0.05) == fallen + 2
    assert admission.running_cap(LOOK_S * 2.1, 0, 54, tpot_s=0.05) == 1


def test_a_step_without_decoding_says_nothing_of_the_gap(admission: Admission) -> None:
    admission.stepped(3.0, prompt_tokens=500, decoding=0, waiting=False)
    assert admission.gap_s == 0.0
    assert admission.prefill_tokens_per_s == 0.0, "nobody waited: more might have gone"
    admission.stepped(2.0, prompt_tokens=500, decoding=0, waiting=True)
    assert admission.prefill_tokens_per_s == 250.0
