"""The adapter on a real segment: hard quotas become limits, a shrink below use is completed, nothing is pretended."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas.engine import Description, Evict, Prepare, Receipt, SetQuota, Ticket
from services.actuator.engines.kvcached.adapter import KvcachedEngine
from services.actuator.engines.kvcached.limits import Limits
from services.actuator.engines.kvcached.shrink import Terms, shrink
from services.actuator.engines.loopback import LoopbackEngine
from services.clock import ManualClock
from services.errors import EngineRefused, SegmentError
from services.kvsegment import read_usage
from tests.services.actuator.engines.kvcached.conftest import POOL, Played
from tests.services.actuator.engines.kvcached.player import BLOCKS, PAGE

LEASE = 6_000_000_000


class PlayedEngine(LoopbackEngine):
    """The engine's side of the played process: it evicts and compacts what that one holds."""

    def __init__(self, played: Played, capabilities: tuple[str, ...] = ("evict", "compact")) -> None:
        super().__init__("n/0/w")
        self.played = played
        self.capabilities = capabilities
        self.order: list[str] = []
        self.refuses: dict[str, str] = {}

    async def describe(self) -> Description:
        return msgspec.structs.replace(await super().describe(), capabilities=self.capabilities)

    async def set_quota(self, command: SetQuota) -> Receipt:
        self.order.append(f"quota {command.hard_bytes // PAGE} at {read_limit(self.played) // PAGE}")
        return await super().set_quota(command)

    async def evict(self, command: Evict) -> Receipt:
        if "evict" in self.refuses:
            raise EngineRefused(self.worker, self.refuses["evict"])
        self.order.append("evict")
        freed = int(self.played.say(f"evict {-(-command.bytes * BLOCKS // PAGE)}").split()[0])
        return msgspec.structs.replace(await self.receipt(command.action_id), evicted_bytes=freed * PAGE // BLOCKS)

    async def prepare(self, command: Prepare) -> Ticket:
        return Ticket(1, 1, PAGE)

    async def commit(self, ticket: int) -> Receipt:
        self.order.append("compact")
        emptied = int(self.played.say("compact").split()[0])
        return msgspec.structs.replace(await self.receipt(""), compacted_bytes=emptied * PAGE)


def read_limit(played: Played) -> int:
    try:
        return read_usage(played.path).limit_bytes
    except SegmentError:
        return 0


def quota(hard: int, step: int = 1) -> SetQuota:
    return SetQuota(1, step, f"a{step}", 1.0, POOL, hard, 256, 0, LEASE, LEASE)


def adapter(engine: PlayedEngine) -> KvcachedEngine:
    return KvcachedEngine(engine, Limits(engine.played.path, ManualClock()), ManualClock())


async def until_done(wrapped: KvcachedEngine, action_id: str) -> Receipt:
    async with asyncio.timeout(5):
        # The protocol is asked, it does not call.
        while not (receipt := await wrapped.receipt(action_id)).done:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return receipt


async def test_a_lowering_reaches_the_engine_first_and_a_raise_the_limit_first(played: Played) -> None:
    engine = PlayedEngine(played)
    wrapped = adapter(engine)
    lowered = await wrapped.set_quota(quota(8 * PAGE, 1))
    raised = await wrapped.set_quota(quota(12 * PAGE, 2))
    assert engine.order == ["quota 8 at 16", "quota 12 at 12"]
    assert (lowered.quota_hard_bytes, raised.quota_hard_bytes) == (8 * PAGE, 12 * PAGE)
    assert lowered.done
    assert "not yet in use" in raised.detail
    await wrapped.close()


async def test_a_shrink_below_use_is_completed_by_eviction_and_compaction(played: Played) -> None:
    played.say("alloc 40")
    engine = PlayedEngine(played)
    wrapped = adapter(engine)
    begun = await wrapped.set_quota(quota(6 * PAGE))
    assert not begun.done
    assert f"{4 * PAGE} bytes above the limit are being given back" in begun.detail
    ended = await until_done(wrapped, "a1")
    usage = read_usage(played.path)
    assert usage.used_bytes <= 6 * PAGE, "kvcached alone would defer it for ever"
    assert "compact" in engine.order, "scattered blocks empty no page by themselves"
    assert ended.evicted_bytes >= 4 * PAGE
    assert ended.compacted_bytes > 0
    assert ended.quota_hard_bytes == 6 * PAGE
    assert played.say("alloc 1").split()[2] == "6", "and kvcached's own resize goes through"
    await wrapped.close()


async def test_without_means_the_shrink_is_left_to_kvcached_and_said_so(played: Played) -> None:
    played.say("alloc 40")
    wrapped = adapter(PlayedEngine(played, ("receipt",)))
    await wrapped.describe()
    await wrapped.set_quota(quota(6 * PAGE))
    receipt = await until_done(wrapped, "a1")
    assert "can neither evict nor compact" in receipt.detail
    assert read_usage(played.path).limit_bytes == 6 * PAGE, "kvcached stops growing, and defers the rest"
    assert played.say("alloc 4").startswith("full"), "deferral as kvcached does it"
    await wrapped.close()


async def test_a_refused_eviction_leaves_compaction(played: Played) -> None:
    played.say("alloc 40")
    played.say("evict 16")
    engine = PlayedEngine(played)
    engine.refuses["evict"] = "class_forbids"
    wrapped = adapter(engine)
    await wrapped.set_quota(quota(6 * PAGE))
    await until_done(wrapped, "a1")
    assert read_usage(played.path).used_bytes == 6 * PAGE
    await wrapped.close()


async def test_what_running_requests_hold_stays_and_the_rounds_end(played: Played) -> None:
    played.say("alloc 4")
    engine = PlayedEngine(played)
    terms = Terms(PAGE // 2, LEASE, LEASE, "a", poll_s=0.0)
    ended = await shrink(engine, lambda: read_usage(played.path), ("evict", "compact"), terms, ManualClock())
    assert not ended.done
    assert "running requests hold it" in ended.why
    assert ended.rounds == 3


async def test_a_shrink_ends_at_its_deadline(played: Played) -> None:
    played.say("alloc 40")
    terms = Terms(PAGE, 5, LEASE, "a")
    ended = await shrink(PlayedEngine(played), lambda: read_usage(played.path), ("evict",), terms, ManualClock(6))
    assert (ended.done, ended.why) == (False, "the deadline passed")


async def test_a_contested_limit_is_not_raised_and_the_lease_goes_on(played: Played) -> None:
    engine = PlayedEngine(played)
    limits = Limits(played.path, ManualClock())
    wrapped = KvcachedEngine(engine, limits, ManualClock())
    await wrapped.set_quota(quota(8 * PAGE, 1))
    limits.contest.contested = True
    receipt = await wrapped.set_quota(quota(12 * PAGE, 2))
    assert receipt.quota_hard_bytes == 8 * PAGE, "clipped to what is in force"
    assert "contested" in receipt.detail
    assert engine.order[-1] == "quota 8 at 8", "the engine hears of no more than it can map"
    assert read_limit(played) == 8 * PAGE
    await wrapped.close()


async def test_a_vanished_segment_is_survived_and_nothing_is_raised(played: Played) -> None:
    engine = PlayedEngine(played)
    errors: list[str] = []
    limits = Limits(played.path, ManualClock())
    wrapped = KvcachedEngine(engine, limits, ManualClock(), lambda worker, error: errors.append(f"{worker}: {error}"))
    await wrapped.set_quota(quota(8 * PAGE, 1))
    played.path.unlink()
    receipt = await wrapped.set_quota(quota(12 * PAGE, 2))
    assert "vanished" in receipt.detail
    assert engine.order[-1] == "quota 8 at 0"
    assert (await wrapped.describe()).mapped_bytes == 0, "the engine's own word"
    assert "n/0/w" in errors[-1]
    assert not played.path.exists(), "it is never made here"
    await wrapped.close()


async def test_mapped_bytes_and_quota_are_told_from_the_segment(played: Played) -> None:
    played.say("alloc 5")
    wrapped = adapter(PlayedEngine(played))
    await wrapped.set_quota(quota(8 * PAGE))
    described, snapshot = await wrapped.describe(), await wrapped.snapshot()
    assert described.engine == "loopback+kvcached"
    assert (described.mapped_bytes, snapshot.mapped_bytes, snapshot.quota_hard_bytes) == (2 * PAGE, 2 * PAGE, 8 * PAGE)
    await wrapped.close()


async def test_a_newer_target_takes_over(played: Played) -> None:
    played.say("alloc 40")
    wrapped = adapter(PlayedEngine(played))
    await wrapped.set_quota(quota(6 * PAGE, 1))
    await wrapped.set_quota(quota(4 * PAGE, 2))
    await until_done(wrapped, "a2")
    former = await wrapped.receipt("a1")
    assert former.done
    assert "a newer target took over" in former.detail
    assert read_usage(played.path).used_bytes <= 4 * PAGE
    await wrapped.close()


@pytest.mark.parametrize("fault", ["kill", "truncate"])
async def test_an_engine_lost_in_the_middle_of_a_shrink_ends_it_with_a_reason(played: Played, fault: str) -> None:
    played.say("alloc 40")
    engine = PlayedEngine(played)

    async def lost(command: Evict) -> Receipt:
        played.kill()
        if fault == "truncate":
            import os

            os.truncate(played.path, 3)
        raise EngineRefused("n/0/w", "busy")

    engine.evict = lost  # type: ignore[method-assign]
    engine.capabilities = ("evict",)
    wrapped = adapter(engine)
    await wrapped.set_quota(quota(6 * PAGE))
    receipt = await until_done(wrapped, "a1")
    assert ("truncated" if fault == "truncate" else "running requests hold it") in receipt.detail
    await wrapped.close()
