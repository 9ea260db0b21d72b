"""Policies are swapped while the loop runs; one that is not valid never acts."""

from __future__ import annotations

import time

import msgspec
import pytest

from schemas.actions import actions_of
from schemas.features import FEATURE_HASH
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from services import qweights
from tests.e2e.loop import RunningLoop
from tests.services.decision.rows import weights

pytestmark = pytest.mark.asyncio(loop_scope="package")


def network(version: str, advantages: list[float]) -> tuple[PolicyPointer, bytes]:
    """A small valid network that prefers the action of the greatest advantage, and its pointer."""
    data = qweights.save(weights(version, advantages))
    pointer = PolicyPointer(version=version, kind="dqn", sha256=qweights.digest(data), feature_hash=FEATURE_HASH)
    return pointer, data


async def refusals(loop: RunningLoop) -> float:
    return (await loop.metrics("decision")).get("policies_refused_total{champion}", 0.0)


async def test_a_champion_acts_from_the_next_steps_on_and_a_bad_one_never(loop: RunningLoop) -> None:
    widening, data = network("e2e-1", [0.0, 9.0, 0.0, 0.0, 0.0])
    await loop.publish_network(KEY_CHAMPION, widening, data)
    await loop.until_in_control(policy="e2e-1")
    newest = loop.witness.actions[-1]
    assert {one.policy for one in actions_of(newest)} == {"dqn:e2e-1"}
    assert all(len(one.q_values) == 5 for one in actions_of(newest)), "what it thought travels with the action"
    await loop.until_rho(lambda rho: rho > 1.0, "the network's wish reaches the engines")

    mark = loop.witness.actions[-1]
    good, data = network("e2e-2", [1.0, 0.0, 0.0, 0.0, 0.0])
    torn = data[: len(data) // 2]
    for bad, its_data, why in (
        (good, data[:-1] + bytes([data[-1] ^ 1]), "other bytes than the pointer's sha256 says"),
        (msgspec.structs.replace(good, sha256=qweights.digest(torn)), torn, "half a file"),
        (msgspec.structs.replace(good, feature_hash="another"), data, "trained on another feature table"),
    ):
        before = await refusals(loop)
        await loop.publish_network(KEY_CHAMPION, bad, its_data)
        deadline_s = time.monotonic() + 15.0
        while await refusals(loop) == before:
            assert time.monotonic() < deadline_s, f"not refused: {why}"
    await loop.until_in_control(steps=5, policy="e2e-1")
    later = [batch for batch in loop.witness.actions if (batch.boot_id, batch.step) > (mark.boot_id, mark.step)]
    assert {batch.policy_version for batch in later} == {"e2e-1"}, "what was in force stays"

    await loop.publish_network(KEY_CHAMPION, good, data)
    await loop.until_in_control(policy="e2e-2")


async def test_a_candidate_decides_in_shadow_while_the_heuristic_acts(loop: RunningLoop) -> None:
    evicting, data = network("shadow-1", [0.0, 0.0, 0.0, 0.0, 9.0])
    await loop.publish_network(KEY_CANDIDATE, evicting, data)
    try:
        await loop.until(
            lambda: (
                [shadow.policy for one in actions_of(loop.witness.actions[-1]) for shadow in one.shadows]
                == ["dqn:shadow-1"] * 2
            ),
            "each worker's action carries the shadow's choice",
        )
        newest = loop.witness.actions[-1]
        assert newest.policy_version == "heuristic"
        assert {one.policy for one in actions_of(newest)} == {"heuristic"}
        for one in actions_of(newest):
            assert one.mask >> one.shadows[0].action & 1, "a shadow keeps to the mask too"
            assert len(one.shadows[0].q_values) == 5
    finally:
        await loop.withdraw_candidate()
    await loop.until(lambda: not any(one.shadows for one in actions_of(loop.witness.actions[-1])), "it is withdrawn")
