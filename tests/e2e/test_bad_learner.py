"""A learner is never trusted: whatever it publishes, and when it falls silent, the workers fare as under the heuristic.

Each fault runs through the loop itself (see ``tight_loop`` and ``fed_loop``); goodput is compared with the
heuristic's on the same requests, offline.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save as save_tensors

from loadgen.engine.specs import FleetConfig
from loadgen.examiner.settings import Settings as ExaminerSettings
from loadgen.examiner.settings import ShadowLimits
from loadgen.examiner.trials import Result, Trial
from loadgen.load import tables_at
from loadgen.policies import TIDEGATE
from loadgen.workload import builtin
from schemas.codec import pack
from schemas.engine import Failure, SampleReply
from schemas.features import FEATURE, FEATURE_COUNT, FEATURE_HASH
from schemas.identity import SCHEMA_VERSION, STEP_NS
from schemas.metrics import COLUMN, METRICS
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer, Rejections
from schemas.states import STATE_BATCH
from schemas.subjects import BUCKET_POLICY, subject
from schemas.telemetry import NODE_SAMPLE, NodeSample
from schemas.transitions import REWARD_PARTS, TRANSITION_BATCH
from services import qweights
from services.learner.promotion import Limits
from services.learner.settings import Settings as LearnerSettings
from services.qweights import Weights
from tests.e2e.fed_loop import fed_loop
from tests.e2e.tight_loop import BOOT, NODE, TightLoop, tight_loop, under_heuristic
from tests.services.decision.rows import pointer, state, state_batch, weights
from tests.services.learner.batches import batch

DURATION_S = 300.0
STEPS = round(DURATION_S / 2.0)
WORKERS = tuple(f"{NODE}/0/w{k}" for k in range(2))
AS_WELL = 0.98
"""Of the heuristic's goodput."""
TIGHTEN = [0.0, 0.0, 9.0, 0.0, 0.0]
"""Always: fewer and fewer requests run."""
ANYTHING = ExaminerSettings(
    needed_ratio=1e-9, worst_ratio=0.0, shadow=ShadowLimits(steps=0), validity_s=1e6, fetch_timeout_s=0.01,
    live=Limits(block_steps=4, least_blocks=3, window_blocks=12),
)  # fmt: skip
"""An examiner whose traces let anything pass: what comes after them must catch it."""


@functools.cache
def trial() -> Trial:
    workload = builtin("chat", duration_s=DURATION_S, seed=5)
    return Trial(
        "chat", FleetConfig(workers_per_card=2, mode=TIDEGATE), tables_at(workload, 0.3, 2, DURATION_S, 5), DURATION_S
    )


@functools.cache
def pressed() -> Trial:
    """Who only holds here serves half of what the heuristic does: control that is lost shows."""
    workload = builtin("mixed", duration_s=DURATION_S, seed=5)
    return Trial(
        "mixed", FleetConfig(workers_per_card=2, mode=TIDEGATE), tables_at(workload, 0.5, 2, DURATION_S, 5), DURATION_S
    )


@functools.cache
def two_cards() -> Trial:
    workload = builtin("chat", duration_s=900.0, seed=5)
    return Trial(
        "chat", FleetConfig(cards=2, workers_per_card=2, mode=TIDEGATE), tables_at(workload, 0.6, 4, 900.0, 5), 900.0
    )


@functools.cache
def reference() -> Result:
    return under_heuristic(trial())


def network(version: str, advantages: Sequence[float]) -> tuple[PolicyPointer, bytes]:
    made = weights(version, advantages)
    return pointer(made), qweights.save(made)


def varying(version: str, advantages: Sequence[float]) -> tuple[PolicyPointer, bytes]:
    """The same choices, from Q values that depend on the state: nothing looks constant about them but the actions."""
    made = weights(version, advantages)
    tensors = {name: tensor.copy() for name, tensor in made.tensors.items()}
    tensors["hidden.0.weight"][:] = np.random.default_rng(0).normal(0, 0.1, tensors["hidden.0.weight"].shape)
    tensors["advantage.weight"][:] = np.random.default_rng(1).normal(0, 0.1, tensors["advantage.weight"].shape)
    changed = Weights(tensors, made.hidden, version, transitions=100)
    return pointer(changed), qweights.save(changed)


def not_finite(version: str) -> tuple[PolicyPointer, bytes]:
    """Bytes that fit their pointer in everything but the numbers."""
    good = qweights.save(weights(version, TIGHTEN))
    header = msgspec.json.decode(good[8 : 8 + int.from_bytes(good[:8], "little")])
    tensors = dict(weights(version, TIGHTEN).tensors) | {"value.bias": np.array([np.nan], np.float32)}
    data = save_tensors(tensors, header["__metadata__"])
    named = PolicyPointer(version=version, kind="dqn", sha256=qweights.digest(data), feature_hash=FEATURE_HASH)
    return named, data


def fared_as_well(loop: TightLoop) -> None:
    assert loop.step == STEPS
    assert loop.goodput() >= AS_WELL * reference().goodput


async def test_weights_that_are_not_numbers_never_act() -> None:
    async with tight_loop(trial()) as loop:
        examiner = await loop.launch_examiner(ANYTHING)
        await loop.advance(20)
        await loop.publish(KEY_CANDIDATE, *not_finite("nan-1"))
        await loop.until(lambda: len(examiner.examination.verdicts) == 1, "it is examined")
        verdict = examiner.examination.verdicts[0]
        assert (verdict.promoted, verdict.stage) == (False, "weights")
        assert "not finite" in verdict.why
        await loop.publish(KEY_CHAMPION, *not_finite("nan-2"))  # past the examiner
        await loop.until(lambda: loop.metric("decision", "policies_refused_total", pointer="champion") == 1, "refused")
        await loop.advance(STEPS - 20)
        assert set(loop.acting) == {"heuristic"}
        fared_as_well(loop)


async def test_constant_output_fails_on_the_traces_and_in_shadow() -> None:
    async with tight_loop(trial()) as loop:
        strict = await loop.launch_examiner(msgspec.structs.replace(ANYTHING, needed_ratio=1.0, worst_ratio=0.98))
        await loop.advance(35)
        await loop.publish(KEY_CANDIDATE, *network("constant-1", TIGHTEN))
        await loop.until(lambda: len(strict.examination.verdicts) == 1, "it is examined")
        assert (strict.examination.verdicts[0].promoted, strict.examination.verdicts[0].stage) == (False, "traces")
        assert strict.examination.verdicts[0].ratio < 0.9
        await loop.services.pop("examiner").stop()
        shadow = ShadowLimits(steps=10, decisions=10, limit_s=20.0)
        lenient = await loop.launch_examiner(msgspec.structs.replace(ANYTHING, shadow=shadow))
        examination = lenient.examination
        for number, bad in enumerate((network("constant-2", [0, 0, 1, 0, 0]), varying("constant-3", TIGHTEN)), start=1):
            await loop.publish(KEY_CANDIDATE, *bad)
            await loop.until(lambda: examination.shadowing, "it passed the traces")
            await loop.until(lambda n=number: len(examination.verdicts) >= n, "it is judged", stepping=True)  # type: ignore[misc]
            verdict = examination.verdicts[-1]
            assert (verdict.version, verdict.promoted, verdict.stage) == (bad[0].version, False, "shadow")
            assert "constant output" in verdict.why
        await loop.advance(STEPS - loop.step)
        assert set(loop.acting) == {"heuristic"}
        fared_as_well(loop)


async def test_stale_weights_expire_and_the_heuristic_acts() -> None:
    """Nobody confirmed them for as long as they were valid: the learner that made them stopped."""
    async with tight_loop(trial()) as loop:
        old, data = network("old-1", [9.0, 0.0, 0.0, 0.0, 0.0])
        await loop.publish(KEY_CHAMPION, msgspec.structs.replace(old, expires_ns=BOOT - 1), data)
        await loop.until(lambda: loop.metric("decision", "policies_refused_total", pointer="champion") == 1, "expired")
        await loop.advance(10)
        assert set(loop.acting) == {"heuristic"}, "it was out of force before it came"
        soon_ns = time.time_ns() + 3 * 10**9
        await loop.publish(KEY_CHAMPION, msgspec.structs.replace(old, expires_ns=soon_ns), data)
        await loop.until(lambda: loop.metric("decision", "policy_info", role="acting", version="old-1") == 1, "acts")
        await loop.advance(10)
        assert loop.acting[-1] == "old-1"
        await loop.until(
            lambda: loop.metric("decision", "policy_info", role="acting", version="heuristic") == 1, "it expired"
        )
        await loop.advance(STEPS - 20)
        assert set(loop.acting[20:]) == {"heuristic"}
        fared_as_well(loop)


async def test_a_learner_that_stops_leaves_the_heuristic_in_the_end() -> None:
    """The network that it left acts until it expires; nothing of it is waited for."""
    async with tight_loop(trial()) as loop:
        await loop.launch_learner(LearnerSettings(hidden=(16,), capacity_rows=512, warmup_rows=64, checkpoint_dir=""))
        await loop.launch_examiner(msgspec.structs.replace(ANYTHING, needed_ratio=1.0, worst_ratio=0.98))
        left, data = network("left-1", [9.0, 0.0, 0.0, 0.0, 0.0])
        await loop.publish(KEY_CHAMPION, msgspec.structs.replace(left, expires_ns=time.time_ns() + 2 * 10**9), data)
        await loop.until(lambda: loop.metric("decision", "policy_info", role="acting", version="left-1") == 1, "acts")
        await loop.advance(40)
        assert set(loop.acting) == {"left-1"}
        await loop.kill("learner")
        await loop.advance(10)
        assert loop.acting[-1] == "left-1", "decision needs no learner"
        await loop.until(
            lambda: loop.metric("decision", "policy_info", role="acting", version="heuristic") == 1, "it expired"
        )
        await loop.advance(STEPS - loop.step)
        assert set(loop.acting[50:]) == {"heuristic"}
        fared_as_well(loop)


async def test_the_last_words_of_a_learner_act_on_one_card_and_are_taken_back() -> None:
    """A bad candidate that came through: tried on half of the cards, found out beside the other half, never promoted
    again. That costs little enough for the fleet to fare as well, over a quarter of an hour."""
    async with tight_loop(two_cards()) as loop:
        examiner = await loop.launch_examiner(ANYTHING, [trial()])
        await loop.advance(75)
        bad, data = varying("last-words", TIGHTEN)
        await loop.publish(KEY_CANDIDATE, bad, data)
        await loop.until(lambda: len(examiner.examination.verdicts) == 1, "it is examined")
        assert examiner.examination.verdicts[0].promoted
        await loop.until(lambda: loop.metric("decision", "policy_info", role="acting", version="last-words") == 1, "on")
        assert loop.metric("decision", "policy_info", role="former", version="heuristic") == 1
        for _ in range(75):
            await loop.advance(1)
            await loop.settle()
            if loop.acting[-1] == "heuristic":
                break
        assert loop.acting[-1] == "heuristic", examiner.watch.judgement
        assert examiner.watch.judgement.figures["split"] == 1.0
        assert "beside it" in examiner.watch.judgement.why
        assert loop.metric("examiner", "rollbacks_total") == 1
        on_trial = [row for row in loop.by_worker if "dqn:last-words" in row]
        assert {sum(name == "dqn:last-words" for name in row) for row in on_trial} == {2}, "one card of two"
        assert len(on_trial) < 40
        rejected = await loop.bus.kv_get(BUCKET_POLICY, "rejected")
        assert rejected is not None
        assert msgspec.json.decode(rejected.value or b"", type=Rejections).of(bad) is not None
        await loop.publish(KEY_CANDIDATE, msgspec.structs.replace(bad, transitions=7))
        await loop.until(lambda: len(examiner.examination.verdicts) == 2, "it is examined again")
        assert "rejected before" in examiner.examination.verdicts[1].why
        await loop.advance(round(two_cards().duration_s / 2.0) - loop.step)
        assert [row for row in loop.by_worker if "dqn:last-words" in row] == on_trial
        assert loop.goodput() >= AS_WELL * under_heuristic(two_cards()).goodput


async def test_a_good_champion_gets_all_workers_once_its_window_is_sound() -> None:
    async with tight_loop(trial()) as loop:
        live = Limits(block_steps=4, least_blocks=3, window_blocks=6)
        examiner = await loop.launch_examiner(msgspec.structs.replace(ANYTHING, live=live))
        await loop.advance(40)
        await loop.publish(KEY_CANDIDATE, *network("good-1", [9.0, 0.0, 0.0, 0.0, 0.0]))
        await loop.until(lambda: len(examiner.examination.verdicts) == 1, "it is examined")
        for _ in range(60):
            await loop.advance(1)
            await loop.settle()
        # One card: its two workers are parted.
        assert list(dict.fromkeys(sum(name != "heuristic" for name in row) for row in loop.by_worker)) == [0, 1, 2]
        assert loop.by_worker.count(("dqn:good-1",) * 2) >= 20, "it acts on both after a window of 24 steps"
        await loop.publish(KEY_CANDIDATE, *network("next-1", [8.0, 0.0, 0.0, 0.0, 0.0]))
        await loop.until(
            lambda: len(examiner.examination.verdicts) == 2, "the next is examined, now it is off probation"
        )
        await loop.advance(STEPS - loop.step)
        fared_as_well(loop)


async def test_a_flood_of_poison_reaches_neither_the_network_nor_the_workers() -> None:
    """On every way in: what telemetry reads from the node, samples, states and transitions on the bus."""
    async with fed_loop(pressed()) as loop:
        settings = LearnerSettings(
            hidden=(16,), batch=16, capacity_rows=512, warmup_rows=64, publish_updates=20, updates_per_transition=0.5,
            checkpoint_dir="", fetch_timeout_s=0.01, reward_low=-25.0, reward_high=25.0,
        )  # fmt: skip
        learner = await loop.launch_learner(settings)
        await loop.launch_examiner(msgspec.structs.replace(ANYTHING, needed_ratio=1.0, worst_ratio=0.98))
        poison, node = poisoned(), Liar()
        loop.lie = node
        for part in range(10):
            for _ in range(STEPS // 10):
                for data in poisoned_samples(loop.step):
                    await loop.bus.publish(subject("telemetry", NODE), data)
                await loop.bus.publish(subject("telemetry", "n8"), poisoned_samples(loop.step, "n8")[-1])
                await loop.advance(1)
            for k, data in enumerate(poison):
                await loop.bus.publish_stream(subject("transition", NODE), data, message_id=f"poison-{part}-{k}")
                await loop.bus.publish(subject("state", NODE), data)
            for data in poisoned_states():
                await loop.bus.publish(subject("state", "n9"), data)
            await loop.settle()
        last = loop.network.streams["TG_TRANSITIONS"].last_sequence
        await loop.until(lambda: loop.metric("learner", "stream_sequence") == last, "all was taken in")
        await loop.until(lambda: learner.trainer.owed < 1.0, "all was learned from")
        for reason in ("state_not_finite", "state_range", "reward_range", "action_masked", "ahead", "too_old"):
            assert loop.metric("learner", "transitions_total", result=reason) > 0, reason
        assert loop.metric("telemetry", "source_errors_total", kind="EngineUnreachable") == node.cut_short > 0
        assert loop.metric("telemetry", "source_errors_total", kind="EngineRefused") == node.refused > 0
        assert node.lies > 10
        replay = learner.trainer.intake.replay
        assert 0 < replay.size <= 512
        assert np.abs(replay.rewards).max() <= 25.0
        assert not np.isinf(replay.states).any()
        assert np.isfinite(learner.trainer.agent.online.q_values(np.tile(state(), (4, 1)))).all()
        assert set(loop.acting) == {"heuristic"}
        assert loop.metric("decision", "rejected_total", reason="malformed") > 0
        assert loop.step == STEPS
        assert loop.goodput() >= AS_WELL * under_heuristic(pressed()).goodput


class Liar:
    """A node that says what cannot be in one step of five: numbers that are none, beyond any range or against each
    other; an answer cut short; a refusal."""

    def __init__(self) -> None:
        self.lies = self.cut_short = self.refused = 0

    def __call__(self, step: int, metrics: NDArray[np.float64]) -> SampleReply | Failure | NDArray[np.float64]:
        if step % 5 != 4:
            return metrics
        kind = step // 5 % 8
        if kind == 0:
            self.cut_short += 1
            return SampleReply(step, WORKERS, (0, 0), (0, 0), metrics.tobytes()[:-8])
        if kind == 1:
            self.refused += 1
            return Failure("busy", "poison")
        self.lies += 1
        said = metrics.copy()
        if kind == 2:  # one worker holds more than the card has
            said[0, COLUMN["kv_bytes"]] = 2.0 * said[0, COLUMN["hbm_bytes"]]
        elif kind == 3:
            said[:, COLUMN["preemptions"]] = -1.0
        else:
            said[kind % 2 :] = {4: np.nan, 5: np.inf, 6: -1e300, 7: 2.0**64}[kind]
        return said


def poisoned_samples(step: int, node: str = NODE) -> list[bytes]:
    """What no telemetry would send: bytes that are no sample, another node's, samples of an earlier life, numbers that
    cannot be."""
    wild = np.full((2, len(METRICS)), np.inf)
    workers = tuple(f"{node}/0/w{k}" for k in range(2))
    forged = [
        NodeSample(node, boot, step, SCHEMA_VERSION, step * STEP_NS, workers, (0, 0), (0, 0), pack(wild, "<f8"))
        for boot in (1, BOOT - 10**12)
    ]
    odd = [
        msgspec.structs.replace(forged[0], node="n7"),
        msgspec.structs.replace(forged[0], workers=workers[:1] * 2),
        msgspec.structs.replace(forged[0], metrics=b"123"),
        forged[1],
    ]
    return [b"\xc1", b"", bytes(1000), *[NODE_SAMPLE.encode(one) for one in odd]]


def poisoned() -> list[bytes]:
    """Transitions of the loop's own node that no featurizer would send."""
    wild = np.full((1, FEATURE_COUNT), np.inf, np.float32)
    huge = state()
    huge[0, FEATURE["u_alloc"]] = 1e30
    rich = np.full((1, len(REWARD_PARTS)), 1e9, np.float32)
    worker = {"node": NODE, "workers": (f"{NODE}/0/w0",)}
    spoilt = [
        batch(10**6, boot=BOOT, states=wild, **worker), batch(10**6, boot=BOOT, next_states=huge, **worker),
        batch(10**6, boot=BOOT, rewards=rich, **worker), batch(10**6, boot=BOOT, rewards=-rich, **worker),
        batch(10**6, boot=BOOT, actions=[4], masks=[1], **worker), batch(1 << 31, boot=BOOT, **worker),
        batch(5, boot=(1 << 62) + 1, **worker),
        batch(5, boot=1, **worker),
    ]  # fmt: skip
    return [TRANSITION_BATCH.encode(one) for one in spoilt] + [b"\xc1", b"", bytes(1000)]


def poisoned_states() -> list[bytes]:
    """States of another node: numbers that are none, numbers that cannot be."""
    wild, huge = state(), state()
    wild[:] = np.nan
    huge[:] = np.inf
    return [STATE_BATCH.encode(state_batch(one, node="n9", step=k)) for k, one in enumerate((wild, huge), start=1)]
