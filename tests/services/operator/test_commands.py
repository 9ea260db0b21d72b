"""The operators' commands beside a running decision: what they order happens, and what they show is so."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator

import msgspec
import pytest

from schemas.actions import OPERATOR, Action, Hold
from schemas.config import KEY_MODE, KEY_PIN, PauseOrder
from schemas.policies import HEURISTIC_POINTER, KEY_CHAMPION
from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY
from services.decision.heuristic import HeuristicSettings
from services.errors import PolicyError, UserError
from services.operator.changes import ChangedMeanwhile
from services.operator.policy import Pinned
from services.operator.session import NothingFound
from tests.services.decision.rows import weights
from tests.services.operator.fleet import BOOT, Fleet, parsed

EVICTS, COMPACTS = weights("v1", [0, 0, 0, 0, 1]), weights("v2", [0, 0, 0, 1, 0])
BY = "--who ann --why 'a test'"


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    running = Fleet()
    await running.champion(EVICTS)
    await running.start()
    async with asyncio.timeout(5):
        while (await running.step()).action != Action.EVICT:
            pass
    yield running
    await running.stop()


async def test_a_shadow_mode_holds_the_workers_and_records_what_would_have_been_done(fleet: Fleet) -> None:
    said = await fleet.typed(f"mode shadow --ttl 1h {BY}")
    assert "mode: shadow, by ann" in said
    assert "until 20" in said
    assert "a test (revision 1)" in said
    command = await fleet.until(Hold.SHADOW, rho=1.4)
    assert (command.action, command.policy, command.target_rho) == (Action.HOLD, OPERATOR, 1.0)
    assert [(one.policy, one.action) for one in command.shadows] == [("dqn:v1", Action.EVICT)]
    said = await fleet.typed(f"mode enforce --worker n0/0/w0 {BY}")
    assert "mode of worker n0/0/w0: enforce" in said
    assert (await fleet.until(Hold.NONE)).action == Action.EVICT, "the worker's own word stands above all's"


async def test_a_paused_system_keeps_what_is_in_force_until_it_is_resumed(fleet: Fleet) -> None:
    await fleet.typed(f"pause --ttl 15m {BY}")
    command = await fleet.until(Hold.PAUSED, rho=1.4)
    assert (command.action, command.target_rho) == (Action.HOLD, 1.4)
    assert command.shadows[-1].action == Action.EVICT, "it goes on recommending"
    said = await fleet.typed(f"pause --resume {BY}")
    assert "before: paused, by ann" in said
    assert (await fleet.until(Hold.NONE)).action == Action.EVICT


async def test_an_override_names_the_worker_and_its_neighbour_goes_on(fleet: Fleet) -> None:
    await fleet.typed(f"override n0/0/w0 --rho 1.1 --max-running 32 {BY}")
    command = await fleet.until(Hold.OVERRIDE, rho=1.4)
    assert (command.action, command.target_rho, command.target_max_running) == (Action.HOLD, 1.1, 32)
    status = await fleet_status(fleet)
    assert [row["mode"] for row in status["workers"]] == ["override", "enforce"]
    assert "rho 1.1, max running 32" in status["orders"][0]
    await fleet.typed(f"override n0/0/w0 --clear {BY}")
    await fleet.until(Hold.NONE)


async def test_the_kill_switch_stands_above_everything_and_forces_its_way(fleet: Fleet) -> None:
    await fleet.typed(f"override n0/0/w0 --rho 1.6 {BY}")
    await fleet.typed(f"kill-switch on {BY}")
    command = await fleet.until(Hold.KILLED, rho=1.4)
    assert (command.action, command.target_rho, command.target_max_running) == (Action.HOLD, 1.0, 256)
    await fleet.typed(f"kill-switch off {BY}")
    await fleet.until(Hold.OVERRIDE)


async def test_orders_that_were_there_before_decision_started_count_from_its_first_command() -> None:
    fleet = Fleet()
    await fleet.typed(f"mode off {BY}")
    await fleet.start()
    assert (await fleet.step(rho=1.4)).hold == Hold.MODE_OFF
    await fleet.bus.kv_put(BUCKET_CONFIG, KEY_MODE, b"rubbish")
    assert (await fleet.step()).hold == Hold.MODE_OFF, "what makes no sense changes nothing"
    await fleet.stop()


async def test_an_order_that_expires_ends_by_itself(fleet: Fleet) -> None:
    passed = PauseOrder(active=True, who="ann", why="x", when_ns=1, expires_ns=2)
    await fleet.bus.kv_put(BUCKET_CONFIG, "pause", msgspec.json.encode(passed))
    for _ in range(3):
        assert (await fleet.step()).hold == Hold.NONE


async def test_two_writers_conflict_visibly(fleet: Fleet) -> None:
    await fleet.typed(f"mode shadow {BY}")
    await fleet.typed("mode off --who bob --why 'card replaced'")
    with pytest.raises(ChangedMeanwhile) as caught:
        await fleet.typed(f"mode enforce --revision 1 {BY}")
    words = str(caught.value)
    assert "revision 1 was expected, found revision 2" in words
    assert "off, by bob" in words
    assert "card replaced" in words
    both = await asyncio.gather(
        fleet.ended(f"mode shadow {BY}"), fleet.ended(f"mode canary {BY}"), return_exceptions=True
    )
    assert not all(isinstance(one, BaseException) for one in both), "one of them gets through"
    changes = [json.loads(line) for line in (await fleet.typed("audit --changes --json")).splitlines()]
    assert [(one["what"].split(",")[0], one["who"]) for one in changes if one["key"] == "mode"][:2] == [
        ("shadow", "ann"),
        ("off", "bob"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mode shadow --worker w0", "expected <node>/<gpu>/<name>"),
        ("mode shadow --class chatty", "expected one of chat"),
        ("mode shadow --worker n0/0/w0 --class chat", "found both"),
        ("mode shadow --ttl soon", "such as 90s"),
        ("mode canary --share 2", "--share: found 2.0, expected float <= 1.0"),
        ("pause --ttl 0s", "such as 90s"),
        ("override n0/0/w0", "expected one of them"),
        ("override n0/0/w0 --clear --rho 1.2", "one or the other"),
        ("override n0/0/w0 --rho 1.7", "rho"),
        ("override n0/0/w0 --max-running 1", "--max-running: found 1, expected int >= 4"),
        ("override n0/0/w0 --rho nan", "--rho: found nan, expected float >= 1.0"),
        ("mode canary --share 0.5 --worker n0/0/w0", "commanded or it is not"),
        ("mode inherit --ttl 5m", "only an order that stands"),
        ("pause --resume --ttl 5m", "only an order that stands"),
        ("pause --ttl ''", "such as 90s"),
        ("override n0/0/w0 --clear --ttl 5m", "only an order that stands"),
        ("policy pin --clear --ttl 5m", "only a pin that stands"),
        ("policy promote nobody", "expected champion"),
        ("policy promote fixed:9", "nothing was changed"),
    ],
)
async def test_a_mistake_is_told_and_changes_nothing(fleet: Fleet, line: str, words: str) -> None:
    before = await fleet.bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
    with pytest.raises(UserError, match=words):
        await fleet.typed(f"{line} {BY}")
    assert await fleet.bus.kv_history(BUCKET_CONFIG) == []
    assert await fleet.bus.kv_get(BUCKET_POLICY, KEY_CHAMPION) == before


async def test_policies_are_listed_promoted_rolled_back_and_pinned(fleet: Fleet) -> None:
    await fleet.point(HEURISTIC_POINTER)
    said = await fleet.typed("policy list")
    assert said.splitlines()[1].split()[:4] == ["champion", "heuristic", "heuristic", "2"]
    assert said.splitlines()[2].split()[:3] == ["former", "champion", "v1"]
    await fleet.typed(f"policy promote v1 {BY}")
    entry = await fleet.bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
    assert entry is not None
    assert json.loads(entry.value or b"")["who"] == "ann"
    said = await fleet.typed(f"policy rollback {BY}")
    assert "champion: heuristic, by ann" in said
    assert ": rollback from v1: a test" in said
    assert "rejected: v1: no examiner promotes it again" in said
    said = await fleet.typed(f"policy pin v1 {BY}")
    assert "pinned to v1" in said
    with pytest.raises(Pinned, match="policy pin --clear first"):
        await fleet.typed(f"policy promote heuristic {BY}")
    assert "pin: pinned to v1" in await fleet.typed("policy list")
    await fleet.typed(f"policy pin --clear {BY}")
    assert "pin:" not in await fleet.typed("policy list")
    await fleet.typed(f"policy promote fixed:1.3 {BY}")
    assert "hidden layers 4" in await fleet.typed("policy show v1")
    assert (await fleet.bus.kv_get(BUCKET_CONFIG, KEY_PIN)) is not None


async def test_weights_that_decision_would_refuse_cannot_be_promoted(fleet: Fleet) -> None:
    await fleet.bus.object_put("tg_weights", "v9", b"noise")
    with pytest.raises(PolicyError, match="nothing was changed"):
        await fleet.typed(f"policy promote v9 {BY}")


async def fleet_status(fleet: Fleet) -> dict[str, list[dict[str, object]]]:
    """What status shows of the step that is taken while it listens."""
    showing = asyncio.create_task(fleet.typed("status --json --wait 0.1"))
    await asyncio.sleep(0.03)
    await fleet.step()
    status: dict[str, list[dict[str, object]]] = json.loads(await showing)
    return status


async def test_status_shows_what_each_worker_is_told_and_does(fleet: Fleet) -> None:
    (first, second) = (await fleet_status(fleet))["workers"]
    assert first == {
        "node": "n0", "worker": "n0/0/w0", "mode": "enforce", "held": "", "policy": "v1", "rho_asked": 1.2,
        "rho_real": 1.2, "u_alloc": 0.5, "tpot_over_limit": 0.5, "action": "evict", "status": "accepted",
        "age_s": first["age_s"],
    }  # fmt: skip
    assert second["worker"] == "n0/0/w1"
    showing = asyncio.create_task(fleet.typed("status --wait 0.1"))
    await asyncio.sleep(0.03)
    await fleet.step()
    lines = (await showing).splitlines()
    assert lines[0] == "1 node, 2 workers heard in 0.1 s"
    assert lines[2].split()[:9] == ["n0", "n0/0/w0", "enforce", "v1", "1.20", "1.20", "0.50", "0.50", "evict"]
    assert (await fleet.ended("status --wait 0.01"))[0] == 1, "nobody was heard"


async def test_audit_filters_and_gives_json_lines(fleet: Fleet) -> None:
    for _ in range(3):
        await fleet.step()
    await fleet.typed(f"mode shadow --worker n0/0/w1 {BY}")
    lines = [json.loads(line) for line in (await fleet.typed("audit --worker n0/0/w0 --json")).splitlines()]
    acted = [one for one in lines if one["kind"] == "receipt"]
    assert {one["worker"] for one in acted} == {"n0/0/w0"}
    assert (acted[-1]["done"], acted[-1]["evicted_bytes"], acted[-1]["policy"]) == ("evict", 10**9, "dqn:v1")
    assert not any(one.get("key", "").startswith("mode.worker") for one in lines), "that change is another worker's"
    assert (await fleet.typed("audit --action widen")) == ""
    assert (await fleet.typed("audit --status refused")) == ""
    assert (await fleet.typed("audit --node n9 --action evict")) == ""
    assert (await fleet.typed("audit --until 2001-01-01")) == ""
    recent = (await fleet.typed("audit --since 1h --limit 4")).splitlines()
    assert len(recent) == 4
    assert "change" in recent[-1]
    assert "change  n0/0/w1  tg_config/mode.worker.n0_2f0_2fw1 revision 1: shadow, by ann" in recent[-1]
    for line, words in (
        ("audit --worker n0/0/w0 --node n1", "another node"),
        ("audit --worker w0", "expected <node>/<gpu>/<name>"),
        ("audit --changes --action evict", "which changes do not have"),
        ("audit --since 1h --until 2h", "an end before the beginning"),
        ("audit --until ''", "ISO 8601"),
        ("audit -f --until 1h", "found both"),
        ("status --worker w0", "expected <node>/<gpu>/<name>"),
    ):
        with pytest.raises(UserError, match=words):
            await fleet.typed(line)
    with pytest.raises(UserError, match="1 or more"):
        await fleet.typed("audit --limit 0")
    with pytest.raises(UserError, match="ISO 8601"):
        await fleet.typed("audit --since yesterday")


async def test_explain_tells_the_newest_decision_live_and_an_old_one_from_the_streams(fleet: Fleet) -> None:
    old = fleet.number
    explaining = asyncio.create_task(fleet.typed("explain n0/0/w0"))
    await asyncio.sleep(0.03)
    await fleet.step(u_alloc=0.55, f_frag=0.01)
    said = await explaining
    assert said.startswith(f"decision n0/0/w0@{BOOT}.{fleet.number}, from live messages")
    assert "evict   Q +1.8  chosen" in said or "evict   Q +1.7" in said
    assert "forbidden, nothing_fragmented: f_frag 0.01 <= " in said
    assert "u_alloc 0.55" in said
    assert "receipt: accepted, asked evict, done evict" in said
    assert "evicted 1000.0 MB" in said
    said = await fleet.typed(f"explain n0/0/w0@{BOOT}.{old}")
    assert "from TG_AUDIT, state from TG_TRANSITIONS" in said
    assert "u_alloc 0.5 " in said
    assert await fleet.typed(f"explain n0/0/w0@{old}") == said, "a step is of the newest boot"
    with pytest.raises(UserError, match="for a step of the newest boot"):
        await fleet.typed("explain n0/0/w0@x")
    silent = await fleet.typed("explain n0/0/w1 --wait 0.01")
    assert f"n0/0/w1@{BOOT}.{fleet.number}, from TG_AUDIT" in silent, "nothing is heard: the newest that is kept"
    with pytest.raises(NothingFound, match="not found"):
        await fleet.typed(f"explain n0/0/w0@{BOOT}.999 --wait 0.01")
    with pytest.raises(NothingFound, match="not heard of"):
        await fleet.typed("explain n0/0/w7 --wait 0.01")


async def test_explain_tells_the_heuristics_rules_and_an_operators_word(fleet: Fleet) -> None:
    await fleet.point(HEURISTIC_POINTER)
    await fleet.typed(f"pause {BY}")
    limit = HeuristicSettings().latency_high
    below = round(limit - 0.01, 4)
    await fleet.until(Hold.PAUSED, tpot_p95=below)
    async with asyncio.timeout(5):
        while (await fleet.step(tpot_p95=below)).shadows[-1].policy != "heuristic":
            pass
    said = await fleet.typed(f"explain n0/0/w0@{BOOT}.{fleet.number}")
    assert "held by an operator (paused): pause: paused, by ann" in said
    assert "heuristic would have chosen hold" in said
    assert f"tighten does not: tpot_p95 {below:g} < {limit:g}" in said
    assert f"tighten: tpot_p95 at or above {limit:g} instead of {below:g}" in said
    story = json.loads(await fleet.typed(f"explain n0/0/w0@{BOOT}.{fleet.number} --json"))
    assert story["flips"][0]["to"] == "tighten"
    assert story["action"]["recommended"] == {"policy": "heuristic", "action": "hold"}


async def test_audit_follows_what_is_done_and_what_is_changed(fleet: Fleet) -> None:
    command, options = parsed("audit -f --worker n0/0/w0 --json --limit 1")
    out = io.StringIO()
    following = asyncio.create_task(command(fleet.bus, options, out))
    await asyncio.sleep(0.03)
    await fleet.typed(f"mode shadow {BY}")
    await fleet.until(Hold.SHADOW)
    async with asyncio.timeout(5):
        while "shadow, by ann" not in out.getvalue() or '"hold": "shadow"' not in out.getvalue():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert sum(one["kind"] == "change" for one in lines[1:]) == 1, "the champion of before is no news"
    assert len({one["decision"] for one in lines[1:] if "decision" in one}) == sum(
        "decision" in one for one in lines[1:]
    )
