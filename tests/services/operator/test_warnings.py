"""What the commands say beside their answers: doubts about the loop, and orders that may not mean what they seem to."""

from __future__ import annotations

import asyncio
import json

import msgspec
import numpy as np
import pytest

from schemas.config import KillOrder, ModeOrder
from schemas.policies import (
    HEURISTIC_POINTER,
    KEY_CHAMPION,
    KEY_REJECTED,
    PolicyPointer,
    Rejection,
    Rejections,
)
from schemas.subjects import BUCKET_POLICY
from services.operator import changes
from services.operator.session import NothingFound
from tests.services.decision.rows import message, pointer, state, state_batch, weights
from tests.services.operator.fleet import BOOT, Fleet

V1, V2, V3 = (weights(version, [0, 0, 0, 0, 1]) for version in ("v1", "v2", "v3"))
BY = "--who ann --why 'a test'"
HEARING = "status --wait 0.15"


async def heard(fleet: Fleet, line: str, *, decides: bool = False) -> tuple[int, str]:
    """Exit code and output of a status during which a step's states come, and are answered if ``decides``."""
    showing = asyncio.create_task(fleet.ended(line))
    await asyncio.sleep(0.03)
    if decides:
        await fleet.step()
    else:
        await fleet.bus.publish(*message(state_batch(np.repeat(state(), 2, axis=0), boot_id=BOOT, step=1)))
    return await showing


async def test_a_silent_decision_is_told_and_no_mode_is_claimed_for_its_workers() -> None:
    fleet = Fleet()
    assert "warning: nobody was heard" in (await fleet.ended("status --wait 0.01"))[1]
    await fleet.typed(f"mode shadow {BY}")
    code, said = await heard(fleet, HEARING)
    assert code == 1
    assert "warning: no commands were heard: decision is silent" in said
    assert "actuators" not in said, "nobody commanded them"
    assert [line.split()[2] for line in said.splitlines()[2:4]] == ["-", "-"], "enforce would be a guess, and wrong"
    _, told = await heard(fleet, f"{HEARING} --json")
    assert [one["mode"] for one in json.loads(told)["workers"]] == ["-", "-"]
    code, said = await heard(fleet, f"{HEARING} --worker n0/0/w9")
    assert (code, "n0/0/w9 is not among the 2 workers heard" in said) == (1, True)


async def test_a_champion_that_does_not_act_is_told() -> None:
    fleet = Fleet()
    await fleet.champion(V1)
    await fleet.start()
    async with asyncio.timeout(5):
        while (await fleet.step()).policy != "dqn:v1":
            pass
    code, said = await heard(fleet, HEARING, decides=True)
    assert (code, "warning" in said) == (0, False)
    newer = json.loads(msgspec.json.encode(pointer(V2))) | {"from_tomorrow": 1}
    await fleet.bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, json.dumps(newer).encode())
    assert "pointer cannot be read; what acts: v1" in (await heard(fleet, HEARING, decides=True))[1]
    await fleet.point(pointer(V3))  # whose weights nobody put there
    assert "the champion v3 does not act, v1 does" in (await heard(fleet, HEARING, decides=True))[1]
    await fleet.point(msgspec.structs.replace(pointer(V1), expires_ns=10**18))
    assert "v1 expired at 2001-09-09T01:46:40Z: the heuristic acts" in (await heard(fleet, HEARING, decides=True))[1]
    assert "v1 expired at 2001-09-09T01:46:40Z: the heuristic acts" in await fleet.typed("policy list")
    await fleet.stop()


async def test_an_order_for_a_worker_never_heard_of_is_taken_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet()
    await fleet.start()
    await fleet.step()
    await fleet.typed(f"mode shadow --worker n0/0/w0 {BY}")
    assert capsys.readouterr().err == "", "it is there"
    said = await fleet.typed(f"override n0/0/w7 --rho 1.1 {BY}")
    assert "override of worker n0/0/w7: rho 1.1" in said
    assert "n0/0/w7 is in none of the newest audit records; node n0 has n0/0/w0, n0/0/w1" in capsys.readouterr().err
    await fleet.stop()


async def test_taking_back_what_did_not_stand_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet()
    for line, about in (("pause --resume", "pause"), ("kill-switch off", "kill"), ("mode inherit", "mode")):
        await fleet.typed(f"{line} {BY}")
        assert f"there was nothing to take back: no {about} stood" in capsys.readouterr().err
    await fleet.typed(f"pause {BY}")
    await fleet.typed(f"pause --resume {BY}")
    assert capsys.readouterr().err == ""


async def test_a_rollback_passes_over_what_was_taken_back_rejected_or_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fleet = Fleet()
    await fleet.point(HEURISTIC_POINTER)
    await fleet.point(pointer(V3))  # its weights are gone
    for network in (V1, V2):
        await fleet.champion(network)
    assert "champion: v1 (dqn), by ann" in await fleet.typed(f"policy rollback {BY}")
    said = await fleet.typed(f"policy rollback {BY}")
    assert "passed over v2: rejected: ann rolled back: a test" in said
    assert "passed over v3: policy 'v3': no such object in tg_weights" in said
    assert "champion: heuristic, by ann" in said
    with pytest.raises(NothingFound, match="found no champion before heuristic"):
        await fleet.typed(f"policy rollback {BY}")
    listed = await fleet.typed("policy list")
    assert [line.split()[1] for line in listed.splitlines() if line.startswith("rejected:")] == ["v1", "v2"]
    assert "v2 rejected: ann rolled back: a test" in await fleet.typed("audit --changes")
    assert capsys.readouterr().err == ""
    assert "champion: v2 (dqn)" in await fleet.typed(f"policy promote v2 {BY}"), "by hand one may"
    assert "warning: v2 was rejected at 20" in capsys.readouterr().err
    assert "rejected: at 20" in await fleet.typed("policy show v2")


async def test_an_examiners_word_is_shown_with_its_reason_and_its_end() -> None:
    fleet = Fleet()
    moved = PolicyPointer(
        version="v1", kind="dqn", why="examined: 1.02 of\nheuristic's goodput", when_ns=10**18 + 10**9,
        expires_ns=4 * 10**18, share=0.25, parent="heuristic",
    )  # fmt: skip
    await fleet.point(moved)
    told = changes.told(KEY_CHAMPION, msgspec.json.encode(moved))
    assert told == (
        "v1 (dqn) on 25% of the workers, by the loop itself at 2001-09-09T01:46:41Z, until 2096-10-02T07:06:40Z: "
        "examined: 1.02 of heuristic's goodput"
    )
    assert "the others on heuristic, until 2096" in await fleet.typed("policy list")
    rejections = Rejections(rejected=(Rejection(version="v0", sha256="", why="live regression", when_ns=1),))
    await fleet.bus.kv_put(BUCKET_POLICY, KEY_REJECTED, msgspec.json.encode(rejections))
    assert "tg_policy/rejected revision 2: v0 rejected: live regression" in await fleet.typed("audit --changes")


async def test_filters_that_let_nothing_pass_say_what_was_looked_through(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet()
    assert await fleet.typed("audit --worker n0/0/w0") == ""
    assert "there is no audit stream" in capsys.readouterr().err
    await fleet.start()
    await fleet.step()
    assert await fleet.typed("audit --status refused --json") == ""
    assert "records 1 to 1 of TG_AUDIT" in capsys.readouterr().err
    await fleet.stop()


def test_an_order_is_written_without_what_it_does_not_say() -> None:
    kill = KillOrder(active=True, who="ann", when_ns=1, why="x")
    assert set(json.loads(msgspec.json.encode(kill))) == {"active", "who", "when_ns", "why"}, (
        "a decision of yesterday refuses fields that it does not know, and must not refuse a kill switch"
    )
    mode = ModeOrder(mode="canary", share=0.3, who="ann", when_ns=1, why="x", expires_ns=7)
    assert msgspec.json.decode(msgspec.json.encode(mode), type=ModeOrder) == mode
