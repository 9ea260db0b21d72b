"""The report beside a running decision: what it counts is what was decided, and it says what it does not know."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.actions import Action, Hold, MaskReason, ShadowDecision, WorkerAction
from schemas.outcomes import OutcomeKind, WorkerOutcome
from schemas.telemetry import NODE_SAMPLE
from services.errors import TidegateError, UserError
from services.operator import attach_seen, report
from services.operator.attach_folder import Attached
from services.operator.report_decisions import Decisions, decisions
from services.operator.report_text import as_text
from tests.services.operator.fleet import Fleet
from tests.services.operator.test_attach_seen import sample, seen_of

W = "n0/0/w0"
QUEUE = {"l_queue_memory": 5.0, "u_reserved": 0.97, "l_queue": 5.0, "rho": 1.0, "host_use": 0.7}
"""A state in which the heuristic widens."""


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    running = Fleet(mode="shadow", policy="heuristic")
    await running.start()
    yield running
    await running.stop()


async def test_shadows_choices_are_counted_from_the_audit_stream(fleet: Fleet) -> None:
    for _ in range(3):
        await fleet.step(**QUEUE)
    await fleet.step()
    await fleet.step(**QUEUE)
    one = (await decisions(fleet.bus, 0, W, "n0"))[W]
    assert (one.steps, one.would, one.spells) == (5, {"widen": 4, "hold": 1}, {"widen": 2})
    assert (one.acted, one.orders, one.policy) == ({}, {"shadow": 5}, "heuristic")
    assert one.rho_high == 1.4, "four choices in turn from 1.0: as far as it could have got"
    assert await decisions(fleet.bus, 0, "n0/0/w9", None) == {}


async def test_what_was_seen_and_decided_stand_in_one_report(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.step(**QUEUE)
    attach_seen.append(tmp_path / attach_seen.FILE, [seen_of(sample(0), sample(1))])
    attached = Attached(worker=W, kind="vllm", url="http://h", mode="shadow", nats_url="nats://h")
    found, hints = await report.gathered(fleet.bus, tmp_path, attached, 0, W, 0.01)
    assert (len(found), hints) == (1, [])
    text = as_text(found[0])
    assert text.startswith("n0/0/w0, agent, shadow: 2026-")
    assert "1 step" in text
    assert "up to 1.1 at most" in text
    assert "preemptions          not told" in text, "what nobody told is not zero"
    assert "waiting saved by admission: at most 75.0% of all waiting" in text
    json.dumps(report.as_json(found[0]))


async def test_without_a_file_it_tells_what_is_heard_now_and_says_so(fleet: Fleet) -> None:
    async def publish() -> None:
        for step in range(3):
            await fleet.bus.publish("tg.v1.telemetry.n0", NODE_SAMPLE.encode(sample(step)))
            await asyncio.sleep(0.01)

    publishing = asyncio.create_task(publish())
    found, hints = await report.gathered(fleet.bus, None, None, 0, None, 0.1)
    await publishing
    assert found[0].seen is not None
    assert found[0].seen.seconds == 4.0
    assert len(hints) == 2, "neither a file nor decisions are there"


def test_a_folder_that_attach_never_had_is_a_mistake(tmp_path: Path) -> None:
    options = argparse.Namespace(folder=tmp_path, nats=None, worker=None, since=None, json=False, config=None, wait=0.1)
    with pytest.raises(UserError, match=r"found no attached\.json"):
        report.report(options)


def test_without_folder_and_server_both_ways_in_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TIDEGATE_COMMON_NATS_URL", "nats://127.0.0.1:9")
    monkeypatch.setenv("TIDEGATE_COMMON_CONNECT_TIMEOUT_S", "0.2")
    options = argparse.Namespace(folder=None, nats=None, worker=None, since=None, json=False, config=None, wait=0.1)
    with pytest.raises(TidegateError) as caught:
        report.report(options)
    assert str(caught.value).startswith(
        f"found no attachment's folder ({tmp_path}/tidegate/attach), expected --folder FOLDER or a NATS server at "
        "nats://127.0.0.1:9"
    )


def row(hold: Hold = Hold.NONE, wish: Action = Action.HOLD, reasons: tuple[int, ...] = (0,) * 5) -> WorkerAction:
    shadows = (ShadowDecision("heuristic", wish),) if hold == Hold.SHADOW else ()
    action = Action.HOLD if hold else wish
    return WorkerAction(W, f"{W}@1.1", action, 1.0, 256, 0, 0, 0, "heuristic", 1.0, 31, reasons, hold, (), shadows)


def outcome(executed: Action = Action.HOLD, refusal: int = 0) -> WorkerOutcome:
    return WorkerOutcome(
        W, f"{W}@1.1", OutcomeKind.RECEIPT, 0, executed, executed, refusal, 1.0, 1.0, 0, 256, "h", 1.0, 31
    )


def test_a_state_in_doubt_is_no_decision_and_ends_a_spell() -> None:
    one = Decisions(worker=W)
    for action in (row(wish=Action.EVICT), row(Hold.SAMPLE_REJECTED), row(wish=Action.EVICT)):
        one.add(action, outcome(Action(action.action)), 1)
    assert (one.would, one.spells, one.held) == ({"evict": 2}, {"evict": 2}, {"sample_rejected": 1})
    assert one.acted == {"evict": 2}, "no operator's word stood against it"


def test_rho_is_walked_within_its_range() -> None:
    one = Decisions(worker=W)
    for wish in [Action.TIGHTEN] * 3 + [Action.WIDEN] * 9:
        one.add(row(Hold.SHADOW, wish), outcome(), 1)
    assert one.rho_high == 1.6


def test_what_was_forbidden_is_counted_by_reason() -> None:
    one = Decisions(worker=W)
    one.add(row(Hold.SHADOW, reasons=(0, 0, 0, 0, MaskReason.UNKNOWN_STATE)), outcome(refusal=8), 1)
    assert one.forbidden == {"evict": {"unknown_state": 1}}
    assert one.refused == {"engine_refused": 1}
    assert not [name for name in one.told() if name.startswith("_")]


def test_remarks_that_differ_in_numbers_alone_are_one_and_an_enforced_run_is_told_as_done() -> None:
    seen = seen_of(sample(0), sample(1))
    seen.flags = {"waiting_for_memory: 3 while KV use is 43%": 2, "waiting_for_memory: 5 while KV use is 36%": 1}
    one = Decisions(worker=W)
    one.add(row(wish=Action.EVICT), outcome(Action.EVICT), 1)
    text = as_text(report.Report(worker=W, mode="enforce", seen=seen, decisions=one))
    assert text.count("remark") == 1
    assert "waiting_for_memory: 3 while KV use is 43% (3 steps)" in text
    assert "what it did" in text
    assert "would have" not in text
    idle = as_text(report.Report(worker=W, mode="enforce", seen=seen, decisions=Decisions(worker=W)))
    assert "what it did" in idle, "the attachment's mode tells it too"
    assert "carried out          nothing" in idle
