"""What a worker moves in a step, by name and ahead of time, and what is told of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.actions import ALL_ACTIONS, Action, MaskReason, WorkerAction, action_batch, columns_of
from schemas.classes import ServiceClass
from schemas.engine import (
    AwaySession,
    Description,
    Evict,
    IdleSession,
    Prefetch,
    Prepare,
    Receipt,
    SetQuota,
    Snapshot,
    SnapshotReply,
    Ticket,
)
from schemas.identity import action_id
from schemas.movement import Moved
from schemas.outcomes import OutcomeKind, Refusal, Status, WorkerOutcome, outcomes_of
from services.actuator.effects import EffectSettings
from services.actuator.engines.loopback import LoopbackEngine
from services.actuator.engines.protocol import PLAIN
from services.actuator.measures import MovementMetrics
from services.actuator.memory.receipts import Ledger
from services.actuator.steps import NodeSteps
from services.errors import EngineRefused
from services.observe import Observe
from services.settings import CommonSettings
from services.spans import NULL_SPAN, Span

from .spans import spans_in

BOOT = 7
WORKER = "n0/0/w0"
GB = 10**9


class TwoTierEngine(LoopbackEngine):
    """An engine that names its sessions; movements are done when the test says so."""

    waits = True

    def __init__(self, service_class: ServiceClass = ServiceClass.CHAT) -> None:
        super().__init__(WORKER)
        self.asked: list[Snapshot] = []
        self.told: list[Evict | Prefetch | Prepare | SetQuota] = []
        self.described: dict[str, Any] = {
            "capabilities": ("sessions", "prefetch"), "link_bytes_per_s": 10e9, "prefill_tokens_per_s": 10_000.0,
            "service_class": service_class, "q0_bytes": 20 * GB, "card_kv_capacity_bytes": 20 * GB,
        }  # fmt: skip
        self.shown: dict[str, Any] = {
            "live_bytes": 4 * GB, "idle_bytes": 4 * GB, "mapped_bytes": 12 * GB, "free_block_bytes": 4 * GB,
            "host_free_bytes": 50 * GB,
        }  # fmt: skip
        self.idle: tuple[IdleSession, ...] = ()
        self.away: tuple[AwaySession, ...] = ()
        self.done: dict[str, Receipt] = {}
        """By action id: what is over."""
        self.refusing: type | None = None

    async def describe(self) -> Description:
        return msgspec.structs.replace(await super().describe(), **self.described)

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        self.asked.append(ask)
        return msgspec.structs.replace(
            await super().snapshot(),
            idle=self.idle[: ask.idle_listed],
            away=self.away if ask.due_within_s else (),
            **self.shown,
        )

    async def set_quota(self, command: SetQuota) -> Receipt:
        self.told.append(command)
        return await super().set_quota(command)

    async def prepare(self, command: Prepare) -> Ticket:
        self.told.append(command)
        return Ticket(5, 3, 6 << 20, lower_bound_bytes=4 << 20)

    async def commit(self, ticket: int) -> Receipt:
        return self.receipt_of("", compacted_bytes=6 << 20, pages_freed=1, pause_us=30.0, dropped_moves=1)

    async def evict(self, command: Evict) -> Receipt:
        return self._begin(command)

    async def prefetch(self, command: Prefetch) -> Receipt:
        return self._begin(command)

    async def receipt(self, action_id: str) -> Receipt:
        return self.done.get(action_id) or self.receipt_of(action_id, done=False)

    def receipt_of(self, action: str, **changes: Any) -> Receipt:
        return msgspec.structs.replace(self._receipt(action), **changes)

    def verbs(self) -> list[str]:
        return [type(one).__name__ for one in self.told]

    def _begin(self, command: Evict | Prefetch) -> Receipt:
        if self.refusing is type(command):
            raise EngineRefused(self.worker, "busy")
        self.told.append(command)
        return self.receipt_of(command.action_id, done=False)


class Node:
    def __init__(self, engine: TwoTierEngine) -> None:
        self.engine = engine
        self.ledger = Ledger()
        self.steps = NodeSteps("n0", {WORKER: engine}.get, EffectSettings(), ledger=self.ledger)
        self.number = 0

    async def act(self, action: Action = Action.HOLD, span: Span = NULL_SPAN, **changes: Any) -> list[WorkerOutcome]:
        """One step; the receipt and what completed."""
        self.number += 1
        self.engine.told.clear()
        row = WorkerAction(
            WORKER, self.action, action, 1.0, 256, self.engine._generation, 10**12, 2 * 10**12, "heuristic", 1.0,
            ALL_ACTIONS, (0,) * 5,
        )._replace(**changes)  # fmt: skip
        batch = action_batch("n0", BOOT, self.number, 0, [row])
        outcomes = outcomes_of(await self.steps.execute(batch, columns_of(batch), span))
        assert self.engine.verbs()[-1] == "SetQuota", "the last frame of a step renews the lease"
        return outcomes

    @property
    def action(self) -> str:
        return action_id(WORKER, BOOT, self.number)


def idle(session: int, back_s: float = 100.0, size: int = GB) -> IdleSession:
    return IdleSession(session, size, 60.0, back_s, False, size // (1 << 17))


def away(session: int, size: int = GB) -> AwaySession:
    return AwaySession(session, size, 1.0, size // (1 << 17))


@pytest.fixture
def node() -> Node:
    return Node(TwoTierEngine())


async def test_an_eviction_names_the_sessions_and_only_then_asks_for_them(node: Node) -> None:
    node.engine.idle = (idle(1, 20.0), idle(2, 400.0), idle(3, 300.0))
    await node.act()
    assert node.engine.asked[-1].idle_listed == 0
    (outcome,) = await node.act(Action.EVICT)
    assert node.engine.asked[-1].idle_listed == 1024
    assert node.engine.told[0] == Evict((2, 3), 0, node.action), "half of 4 GB idle"
    assert (outcome.status, outcome.executed_action) == (Status.ACCEPTED, Action.EVICT)


async def test_an_engine_without_a_prefill_rate_chooses_by_bytes(node: Node) -> None:
    node.engine.described["prefill_tokens_per_s"] = 0.0
    await node.act(Action.EVICT)
    assert node.engine.told[0] == Evict((), 2 * GB, node.action)


async def test_where_nobody_is_worth_moving_the_eviction_waits_and_says_so(node: Node) -> None:
    node.engine.idle = (idle(1, back_s=0.5),)
    (outcome,) = await node.act(Action.EVICT)
    assert node.engine.verbs() == ["SetQuota"]
    assert (outcome.status, outcome.refusal) == (Status.DEFERRED, Refusal.BUDGET_EXHAUSTED)
    assert (outcome.executed_action, outcome.detail) == (Action.HOLD, "no session worth moving")


async def test_sessions_come_back_ahead_of_time_in_any_step_and_complete_later(node: Node) -> None:
    node.engine.away = (away(8), away(9))
    (outcome,) = await node.act()
    first = node.action
    prefetch = node.engine.told[0]
    assert isinstance(prefetch, Prefetch)
    assert (sorted(prefetch.sessions), prefetch.action_id) == ([8, 9], f"{first}/prefetch")
    assert (outcome.status, outcome.executed_action, outcome.prefetched_bytes) == (Status.ACCEPTED, Action.HOLD, 2 * GB)
    assert not node.ledger.transfers, "counted when it is done"
    node.engine.away = ()
    moved = Moved("back", "batch", 1000, 2, 0.5, 0.1, f"{first}/prefetch", 512)
    node.engine.done[f"{first}/prefetch"] = node.engine.receipt_of("", prefetched_bytes=GB, moved=(moved,))
    _, completion = await node.act()
    assert (completion.kind, completion.action_id) == (OutcomeKind.COMPLETION, first)
    assert (completion.prefetched_bytes, completion.moved) == (GB, (moved,)), "one of them did not come"
    assert node.ledger.transfers["back", "batch"].bytes == 1000


async def test_prefetch_comes_before_swap_out_and_both_keep_to_one_budget(node: Node) -> None:
    node.engine.idle = tuple(idle(session, size=GB // 4) for session in range(1, 30))
    node.engine.away = (away(40), away(41), away(42))
    node.engine.shown |= {"idle_bytes": 7 * GB}
    node.engine.described["link_bytes_per_s"] = 4e9  # half of a step: 4 GB
    (outcome,) = await node.act(Action.EVICT)
    prefetch, evict, _ = node.engine.told
    assert isinstance(prefetch, Prefetch)
    assert isinstance(evict, Evict)
    assert outcome.prefetched_bytes == len(prefetch.sessions) * GB == 3 * GB
    assert len(evict.sessions) * GB // 4 == 1 * GB
    troubled = (0, int(MaskReason.LATENCY_AT_LIMIT), 0, 0, 0)
    for _ in range(3):
        await node.act(Action.EVICT, mask_reasons=troubled)
    assert node.engine.verbs() == ["Evict", "SetQuota"], "an eighth of the budget: not one of them fits any more"


@pytest.mark.parametrize("forbidding", [ServiceClass.COPILOT, ServiceClass.TRAINING])
@pytest.mark.parametrize("action", [Action.EVICT, Action.HOLD, Action.COMPACT])
async def test_a_class_that_forbids_swapping_gets_neither_swap_nor_prefetch(
    forbidding: ServiceClass, action: Action
) -> None:
    node = Node(TwoTierEngine(forbidding))
    node.engine.idle, node.engine.away = (idle(1), idle(2)), (away(8),)
    for _ in range(3):
        await node.act(action)
        assert not {"Evict", "Prefetch"} & set(node.engine.verbs())
    assert set(node.engine.asked) == {Snapshot()}, "it is not even asked for sessions"


async def test_a_prefetch_that_is_refused_does_not_refuse_the_command(node: Node) -> None:
    node.engine.away, node.engine.refusing = (away(8),), Prefetch
    (outcome,) = await node.act()
    assert (outcome.status, outcome.prefetched_bytes) == (Status.ACCEPTED, 0)
    assert outcome.detail.startswith("prefetch: ")


async def test_a_command_that_is_refused_moves_nothing_ahead_of_time_either(node: Node) -> None:
    await node.act()
    node.engine.away = (away(8),)
    (outcome,) = await node.act(target_rho=9.0)
    assert (outcome.refusal, node.engine.verbs()) == (Refusal.OUT_OF_RANGE, ["SetQuota"])
    node.engine.away = ()
    await node.act()
    assert node.engine.verbs() == ["SetQuota"], "what was due then is not due now"


async def test_an_engine_without_an_arena_copies_itself_under_the_commands_lease(node: Node) -> None:
    (outcome,) = await node.act(Action.COMPACT)
    prepare = node.engine.told[0]
    assert isinstance(prepare, Prepare)
    assert (prepare.lease_ns, prepare.action_id) == (2 * 10**12, node.action)
    assert (outcome.compacted_bytes, outcome.lower_bound_bytes, outcome.dropped_moves) == (6 << 20, 4 << 20, 1)
    assert outcome.moved == (), "nobody said how"
    assert (node.ledger.compactions, node.ledger.lower_bound_bytes) == (1, 4 << 20)


async def test_spans_and_metrics_tell_what_really_moved(node: Node, tmp_path: Path) -> None:
    observe = Observe("actuator")
    page = MovementMetrics(observe)
    common = CommonSettings(trace_file=str(tmp_path / "spans.jsonl"), trace_ratio=1.0)
    observe.start(common, {}, instance="t", rng=random.Random(1))
    node.engine.idle, node.engine.away = (idle(1),), (away(8),)
    with observe.span("actuate") as span:
        await node.act(Action.EVICT, span)
    evict = node.action
    node.engine.away = ()
    moved = (
        Moved("out", "batch", 3000, 3, 0.5, 0.25, evict, 512),
        Moved("out", "streamed", 1000, 1, 0.5, 0.0, evict, 512),
    )
    node.engine.done[evict] = node.engine.receipt_of("", evicted_bytes=GB, moved=moved)
    with observe.span("actuate") as span:
        await node.act(Action.COMPACT, span)
    page.show(node.ledger)
    page.show(node.ledger)
    observe.stop(5.0)
    (out,) = spans_in(tmp_path / "spans.jsonl", "swap-out")
    assert (out["tidegate.worker"], out["tidegate.sessions"], out["tidegate.model_bytes"]) == (WORKER, 1, 0)
    assert "tidegate.bytes" not in out, "nothing moved yet"
    (back,) = spans_in(tmp_path / "spans.jsonl", "prefetch")
    assert (back["tidegate.sessions"], back["tidegate.asked_bytes"]) == (1, GB)
    (done,) = spans_in(tmp_path / "spans.jsonl", "completion")
    assert done == {
        "tidegate.action": evict, "tidegate.model_bytes": GB, "tidegate.bytes": 4000,
        "tidegate.path": "batch+streamed", "tidegate.pieces": 4,
        "tidegate.scale": 512,
    }  # fmt: skip
    (compact,) = spans_in(tmp_path / "spans.jsonl", "compact")
    assert (compact["tidegate.pages_freed"], compact["tidegate.lower_bound_bytes"]) == (1, 4 << 20)
    assert compact["tidegate.pause_us"] == 30.0
    text = observe.render().decode()
    for line in (
        'transferred_bytes_total{kind="out",path="batch"} 3000.0',
        'transferred_pieces_total{kind="out",path="streamed"} 1.0',
        'transfer_seconds_total{kind="out",path="batch"} 0.5',
        'transfer_queue_seconds_total{kind="out",path="batch"} 0.25',
        "compactions_total 1.0",
        "compaction_moved_bytes_total 6.291456e+06",
        "compaction_lower_bound_bytes_total 4.194304e+06",
        "compaction_dropped_moves_total 1.0",
        "compaction_groups_freed_total 1.0",
        "compaction_longest_pause_seconds 2.9999999999999997e-05",
    ):
        assert f"tidegate_actuator_{line}" in text, text
