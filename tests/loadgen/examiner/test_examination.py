"""What moves the champion pointer, and what does not, with traces whose outcome the test chooses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from loadgen.examiner.examination import Examination, Verdict
from loadgen.examiner.pointers import Pointers
from loadgen.examiner.settings import Settings, ShadowLimits
from loadgen.examiner.trials import Result
from schemas.actions import ACTION_BATCH, WorkerAction, action_batch
from schemas.config import KEY_PIN, PinOrder
from schemas.policies import HEURISTIC_POINTER, KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY, BUCKET_WEIGHTS, subject
from services import qweights
from services.bus.memory import MemoryBus, MemoryNetwork
from services.decision.policy import Policy
from tests.services.decision.rows import pointer, weights

NOW = 1_800_000_000_000_000_000
HOUR_S = 3600.0
SETTINGS = Settings(shadow=ShadowLimits(steps=0), validity_s=10 * HOUR_S)


class FakeTrials:
    """Goodput 100 on four traces of two configurations, but for the versions named."""

    def __init__(self) -> None:
        self.groups = ["a", "a", "b", "b"]
        self.stopping = threading.Event()
        self.goodput: dict[str, list[float]] = {}
        self.before_results: Callable[[], None] = lambda: None
        self.oom = 0

    def results(self, policy: Policy, keep: str = "") -> list[Result]:
        self.before_results()
        return [Result(value, 0 if keep else self.oom) for value in self.goodput.get(policy.version, [100.0] * 4)]


class Running:
    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryNetwork())
        self.trials = FakeTrials()
        self.now_ns = NOW
        self.verdicts: asyncio.Queue[Verdict] = asyncio.Queue()
        pointers = Pointers(self.bus, lambda: self.now_ns)
        self.examination = Examination(self.bus, SETTINGS, self.trials, pointers, self.verdicts.put_nowait)  # type: ignore[arg-type]

    async def examine(self, version: str, goodput: list[float], **changes: object) -> Verdict:
        made = weights(version, [0, 1, 0, 0, 0])
        self.trials.goodput[version] = goodput
        await self.bus.object_put(BUCKET_WEIGHTS, version, qweights.save(made))
        await self.bus.kv_put(BUCKET_POLICY, KEY_CANDIDATE, msgspec.json.encode(pointer(made, **changes)))
        return await asyncio.wait_for(self.verdicts.get(), 10)

    async def champion(self) -> PolicyPointer:
        entry = await self.bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
        return HEURISTIC_POINTER if entry is None else msgspec.json.decode(entry.value or b"", type=PolicyPointer)

    async def put_champion(self, new: PolicyPointer) -> None:
        await self.bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(new))


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    run = Running()
    task = asyncio.create_task(run.examination.run())
    yield run
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_better_candidate_becomes_champion_with_parent_evaluation_and_an_end(running: Running) -> None:
    verdict = await running.examine("v1", [103.0, 104.0, 103.0, 104.0])
    assert (verdict.promoted, verdict.ratio) == (True, pytest.approx(1.035))
    now = await running.champion()
    assert (now.version, now.parent, now.who) == ("v1", "heuristic", "")
    assert now.expires_ns == NOW + round(10 * HOUR_S * 1e9)
    assert now.evaluation["vs_heuristic"] == pytest.approx(1.035)
    second = await running.examine("v2", [104.0, 103.0, 105.0, 106.0])
    assert second.promoted is False, "the champion to beat is v1 now: its interval reaches below 1"
    assert (await running.examine("v3", [110.0] * 4)).promoted
    assert (await running.champion()).parent == "v1"


@pytest.mark.parametrize(
    ("why", "goodput"),
    [("interval", [99.0, 99.0, 99.0, 115.0]), ("worst", [97.0, 97.0, 120.0, 120.0]), ("not above", [100.0] * 4)],
)
async def test_a_candidate_that_is_not_surely_better_stays_out(
    running: Running, why: str, goodput: list[float]
) -> None:
    verdict = await running.examine("v1", goodput)
    assert (verdict.promoted, verdict.stage) == (False, "traces")
    assert why in verdict.why
    assert (await running.champion()).kind == "heuristic"
    assert (await running.examination._pointers.rejections()).rejected == (), "against another champion it may do"


async def test_one_that_runs_a_card_out_of_memory_is_rejected_for_good(running: Running) -> None:
    running.trials.oom = 1
    assert "out of memory" in (await running.examine("v1", [200.0] * 4)).why
    running.trials.oom = 0
    assert "rejected before" in (await running.examine("v1", [200.0] * 4, transitions=9)).why


async def test_bytes_that_are_not_what_the_pointer_says_are_rejected(running: Running) -> None:
    verdict = await running.examine("v1", [200.0] * 4, sha256="0" * 64)
    assert (verdict.promoted, verdict.stage) == (False, "weights")


async def test_an_operators_pin_and_an_operators_move_stand(running: Running) -> None:
    pin = PinOrder(active=True, version="heuristic", who="ada", when_ns=1, why="freeze")
    await running.bus.kv_put(BUCKET_CONFIG, KEY_PIN, msgspec.json.encode(pin))
    assert "ada pinned heuristic" in (await running.examine("v1", [200.0] * 4)).why
    await running.bus.kv_put(BUCKET_CONFIG, KEY_PIN, msgspec.json.encode(msgspec.structs.replace(pin, active=False)))
    theirs = PolicyPointer(version="fixed:1.3", kind="fixed", who="ada", why="mine")
    loop = asyncio.get_running_loop()
    running.trials.before_results = lambda: asyncio.run_coroutine_threadsafe(
        running.put_champion(theirs), loop
    ).result()  # type: ignore[func-returns-value]
    assert "meanwhile" in (await running.examine("v2", [200.0] * 4)).why
    assert (await running.champion()).version == "fixed:1.3"


async def test_a_champion_that_is_not_beaten_stays_valid_and_one_that_nobody_challenges_ends(running: Running) -> None:
    await running.examine("v1", [110.0] * 4)
    ends_ns = (await running.champion()).expires_ns
    running.now_ns += round(6 * HOUR_S * 1e9)
    assert not (await running.examine("v2", [110.0] * 4)).promoted
    assert (await running.champion()).expires_ns == ends_ns + round(6 * HOUR_S * 1e9)
    running.now_ns += round(11 * HOUR_S * 1e9)
    verdict = await running.examine("v3", [102.0] * 4)
    assert verdict.promoted, "what expired is not the one to beat: the heuristic acts"
    assert (await running.champion()).parent == "heuristic"


async def test_an_unreadable_pointer_is_no_end(running: Running) -> None:
    await running.bus.kv_put(BUCKET_POLICY, KEY_CANDIDATE, b"{")
    assert (await asyncio.wait_for(running.verdicts.get(), 10)).stage == "pointer"
    assert (await running.examine("v1", [110.0] * 4)).promoted


async def command(running: Running, node: str, *workers: str) -> None:
    rows = [WorkerAction(name, "", 0, 1.0, 64, 0, 9, 9, "heuristic", 1.0, 31, (0,) * 5) for name in workers]
    batch = action_batch(node, 1, 1, 0, rows)
    await running.bus.publish(subject("action", node), ACTION_BATCH.encode(batch))


async def test_a_new_champion_is_tried_on_a_share_of_the_fleet_and_the_next_waits_for_its_window(
    running: Running,
) -> None:
    await running.put_champion(msgspec.structs.replace(HEURISTIC_POINTER, who="ada"))
    await command(running, "n0", "n0/0/w0", "n0/0/w1", "n0/1/w0")
    await asyncio.sleep(0)
    assert (await running.examine("v1", [110.0] * 4)).promoted
    first = await running.champion()
    assert (first.on_probation, first.share, first.part_cards) == (True, 0.5, False)
    assert first.former is not None
    assert first.former.version == "heuristic"
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(running.examine("v2", [120.0] * 4), 0.2)
    assert running.examination.examining == ""
    await running.put_champion(first.for_all())
    assert (await asyncio.wait_for(running.verdicts.get(), 10)).promoted, "it waited for v1's window"
    second = await running.champion()
    assert second.former == first.for_all()
    assert (await running.examination._pointers.former(second)) == first.for_all()


async def test_one_worker_alone_gets_its_champion_at_once(running: Running) -> None:
    await command(running, "n0", "n0/0/w0")
    await asyncio.sleep(0)
    assert (await running.examine("v1", [110.0] * 4)).promoted
    assert (await running.champion()).share == 1.0
