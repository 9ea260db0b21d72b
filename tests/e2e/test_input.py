"""What cannot be used is counted and dropped, wherever it arrives; nobody dies and the loop goes on."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from schemas.actions import ACTION_BATCH
from schemas.codec import Codec
from schemas.outcomes import OUTCOME_BATCH
from schemas.policies import KEY_CHAMPION
from schemas.states import STATE_BATCH
from schemas.subjects import BUCKET_POLICY, Family, subject
from schemas.telemetry import NODE_SAMPLE
from schemas.transitions import TRANSITION_BATCH
from tests.e2e.loop import NODE, SERVICES, RunningLoop

pytestmark = pytest.mark.asyncio(loop_scope="package")

LARGEST = bytes(8 * 1024 * 1024 - 1024)
"""What the server still lets through."""
NOT_MESSAGES = (b"", b"\xc1", b"\xff" * 300, b"\x9d" * 5000, b'{"node": "n0"}', b"\x95\xa2n0\x01", LARGEST)

REPLACE = msgspec.structs.replace


async def publish(loop: RunningLoop, family: Family, data: bytes, node: str = NODE) -> None:
    await loop.bus.publish(subject(family, node), data)
    await loop.bus.client.flush()  # a few of the largest would fill the witness's own buffer


async def counted(loop: RunningLoop, service: str, expected: dict[str, int], before: dict[str, float]) -> None:
    """Wait until the counters grew by at least this much."""
    deadline_s = time.monotonic() + 15.0
    while True:
        now = await loop.metrics(service)
        short = {
            name: (now.get(name, 0.0) - before.get(name, 0.0), number)
            for name, number in expected.items()
            if now.get(name, 0.0) - before.get(name, 0.0) < number
        }
        if not short:
            return
        assert time.monotonic() < deadline_s, f"{service} counted too few (found, expected): {short}"


def newer_version(codec: Codec[Any], message: Any) -> bytes:
    return codec.encode(REPLACE(message, schema_version=99))


async def test_bytes_that_are_no_message(loop: RunningLoop) -> None:
    before = {service: await loop.metrics(service) for service in SERVICES}
    families: tuple[Family, ...] = ("telemetry", "state", "action", "outcome", "transition")
    for data in NOT_MESSAGES:
        for family in families:
            await publish(loop, family, data)
    number = len(NOT_MESSAGES)
    await counted(
        loop,
        "featurizer",
        {"rejected_total{malformed,telemetry}": number, "rejected_total{malformed,outcome}": number},
        before["featurizer"],
    )
    await counted(loop, "decision", {"rejected_total{malformed}": number}, before["decision"])
    await counted(loop, "actuator", {"events_decode_errors_total": number}, before["actuator"])
    await counted(loop, "learner", {"messages_total{malformed}": number}, before["learner"])
    await go_on(loop)


async def test_messages_of_an_unknown_version(loop: RunningLoop) -> None:
    before = {service: await loop.metrics(service) for service in SERVICES}
    witness = loop.witness
    await publish(loop, "telemetry", newer_version(NODE_SAMPLE, witness.samples[-1]))
    await publish(loop, "state", newer_version(STATE_BATCH, witness.states[-1]))
    await publish(loop, "action", newer_version(ACTION_BATCH, witness.actions[-1]))
    await publish(loop, "outcome", newer_version(OUTCOME_BATCH, witness.outcomes[-1]))
    await publish(loop, "transition", newer_version(TRANSITION_BATCH, witness.transitions[-1]))
    await counted(
        loop,
        "featurizer",
        {"rejected_total{telemetry,unknown_version}": 1, "rejected_total{outcome,unknown_version}": 1},
        before["featurizer"],
    )
    await counted(loop, "decision", {"rejected_total{unknown_version}": 1}, before["decision"])
    await counted(loop, "actuator", {"events_decode_errors_total": 1}, before["actuator"])
    await counted(loop, "learner", {"messages_total{unknown_version}": 1}, before["learner"])
    await go_on(loop)


async def test_messages_older_than_the_step(loop: RunningLoop) -> None:
    before = {service: await loop.metrics(service) for service in SERVICES}
    witness = loop.witness
    await publish(loop, "telemetry", NODE_SAMPLE.encode(witness.samples[-3]))
    await publish(loop, "state", STATE_BATCH.encode(witness.states[-3]))
    await publish(loop, "action", ACTION_BATCH.encode(witness.actions[-3]))
    await publish(loop, "outcome", OUTCOME_BATCH.encode(witness.outcomes[-3]))
    await publish(loop, "transition", TRANSITION_BATCH.encode(witness.transitions[-3]))
    await counted(loop, "featurizer", {"events_total{,older}": 1, "pairing_total{old_outcome}": 1},
                  before["featurizer"])  # fmt: skip
    await counted(loop, "decision", {"rejected_total{stale}": 1}, before["decision"])
    await counted(loop, "actuator", {"events_duplicates_total": 1}, before["actuator"])
    await counted(loop, "learner", {"transitions_total{stale}": 1}, before["learner"])
    await go_on(loop)


async def test_messages_about_somebody_unknown(loop: RunningLoop) -> None:
    before = {service: await loop.metrics(service) for service in SERVICES}
    witness = loop.witness
    strangers = ("n0/7/w7", "n0/7/w8")
    outcome = witness.outcomes[-1]
    await publish(loop, "telemetry", NODE_SAMPLE.encode(witness.samples[-1]), node="elsewhere")
    await publish(loop, "state", STATE_BATCH.encode(witness.states[-1]), node="elsewhere")
    await publish(loop, "outcome", OUTCOME_BATCH.encode(REPLACE(outcome, node="nobody")), node="nobody")
    await counted(loop, "decision", {"rejected_total{wrong_node}": 1}, before["decision"])
    await counted(
        loop,
        "featurizer",
        {"rejected_total{telemetry,wrong_subject}": 1, "pairing_total{unknown_node}": 1},
        before["featurizer"],
    )
    name, deadline_s = "events_unknown_workers_total", time.monotonic() + 15.0
    while (await loop.metrics("actuator"))[name] < before["actuator"][name] + 2:
        assert time.monotonic() < deadline_s, "the actuator counts strangers"
        # A little ahead of the loop, or it would be merely old; the real batches up to there are repeats then.
        action = witness.actions[-1]
        await publish(loop, "action", ACTION_BATCH.encode(REPLACE(action, step=action.step + 2, workers=strangers)))
    await go_on(loop)


async def test_pointers_that_name_nothing(loop: RunningLoop) -> None:
    before = await loop.metrics("decision")
    for value in (b"", b"\xff\xfe", b"[1, 2]", b'{"version": "x", "kind": "magic"}'):
        await loop.bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, value)
        await loop.until_in_control(policy="heuristic")
    await counted(loop, "decision", {"policies_refused_total{champion}": 1}, before)
    await go_on(loop)


async def go_on(loop: RunningLoop) -> None:
    await loop.until_in_control(steps=3)
    dead = {name: child.tail() for name, child in loop.processes.children.items() if not child.alive}
    assert not dead
