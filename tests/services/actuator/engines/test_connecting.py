"""What the settings say of an engine is around its socket, in the order in which it has to be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from schemas.actions import ACTION_BATCH, ALL_ACTIONS, Action, WorkerAction, action_batch
from schemas.outcomes import OUTCOME_BATCH, outcomes_of
from schemas.subjects import subject
from services.actuator.engines.connecting import Connector, EngineSettings
from services.actuator.engines.kvcached.adapter import KvcachedEngine
from services.actuator.engines.protocol import SocketEngine
from services.actuator.engines.vllm.asleep import SleepingEngine
from services.actuator.service import ActuatorService, Settings
from services.bus.api import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.errors import SettingsError
from services.kvsegment import LAYOUT, read_usage
from services.observe import Observe
from services.settings import load
from services.shell import Shell
from tests.services.actuator.quota_engine import MIB, QuotaEngine

W = "n0/0/w0"


def write(path: Path, limit_bytes: int, used_bytes: int) -> None:
    path.write_bytes(LAYOUT.pack(limit_bytes, used_bytes, 0))


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/tidegate-test-{os.getpid()}-connecting")
    write(path, 1000 * MIB, 100)
    yield path
    path.unlink()
    path.with_name(f".{path.name}.tidegate").unlink(missing_ok=True)


async def test_sleep_is_around_the_limit_and_the_limit_around_the_socket(tmp_path: Path) -> None:
    both = EngineSettings(worker=W, kvcached="kv0", sleep_url="http://h:1", weights_bytes=1)
    connector = Connector([both], 1.0, ManualClock())
    engine = connector.connect(tmp_path, W)
    assert isinstance(engine, SleepingEngine)
    assert isinstance(engine._inner, KvcachedEngine)
    assert isinstance(engine._inner._inner, SocketEngine)
    assert isinstance(connector.connect(tmp_path, "n0/0/w1"), SocketEngine), "of others nothing was said"
    await connector.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"worker": "w0"}]', "expected <node>/<gpu>/<name>"),
        ('[{"worker": "n0/0/w0", "kvcache": "a"}]', "engines[0].kvcache: found an unknown key"),
        ('[{"worker": "n0/0/w0", "kvcached": ".."}]', "expected the name in KVCACHED_IPC_NAME"),
        ('[{"worker": "n0/0/w0", "sleep_url": "h:8000", "weights_bytes": 1}]', "expected http://host:port"),
        ('[{"worker": "n0/0/w0", "sleep_url": "http://h:8000"}]', "sleep_url without weights_bytes"),
        ('[{"worker": "n0/0/w0"}, {"worker": "n0/0/w0"}]', "two engines with worker"),
        ('[{"worker": "n0/0/w0", "kvcached": "a"}, {"worker": "n0/0/w1", "kvcached": "a"}]', "with kvcached 'a'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Settings, "actuator", file=None, environ={}, overrides={"engines": text})
    assert expected in str(caught.value)


def test_a_table_of_the_settings_file_names_an_engine(tmp_path: Path) -> None:
    file = tmp_path / "tidegate.toml"
    file.write_text('[[actuator.engines]]\nworker = "n0/0/w0"\nkvcached = "/dev/shm/kv0"\n')
    (one,) = load(Settings, "actuator", file=file, environ={}).engines
    assert (one.segment, one.weights_bytes) == (Path("/dev/shm/kv0"), 0)
    assert EngineSettings(worker=W, kvcached="kv0").segment == one.segment


async def test_a_command_over_the_bus_moves_the_limit_and_others_writes_are_on_the_metrics_page(
    tmp_path: Path, segment: Path
) -> None:
    clock = ManualClock(1)
    engine = QuotaEngine(W, clock, 400 * MIB, 600 * MIB)
    await engine.serve(tmp_path)
    bus, observe = MemoryBus(MemoryNetwork()), Observe("actuator")
    settings = Settings(
        node="n0", sockets=str(tmp_path), engines=(EngineSettings(worker=W, kvcached=str(segment)),),
        engine_timeout_s=10.0,
    )  # fmt: skip
    service, heard, news = ActuatorService(settings), list[Message](), asyncio.Event()
    shell = Shell("actuator", "t", bus=bus, observe=observe, clock=clock)

    async def hear(messages: list[Message]) -> None:
        heard.extend(messages)
        news.set()

    await bus.subscribe("tg.v1.outcome.*", hear)
    await service.start(shell)
    for step in (1, 2):
        row = WorkerAction(
            W, f"{W}@7.{step}", Action.HOLD, 1.0, 256, engine.quota.generation, 10**9, 10**9, "heuristic", 1.0,
            ALL_ACTIONS, (0,) * 5,
        )  # fmt: skip
        news.clear()
        await bus.publish(subject("action", "n0"), ACTION_BATCH.encode(action_batch("n0", 7, step, 1, [row])))
        async with asyncio.timeout(10):
            await news.wait()
        assert read_usage(segment).limit_bytes == 600 * MIB
        write(segment, 500 * MIB, 100)
    (outcome,) = outcomes_of(OUTCOME_BATCH.decode(heard[-1].data))
    assert "1 changes by others" in outcome.detail
    assert "tidegate_actuator_events_kvcached_foreign_writes_total 1.0" in observe.render().decode()
    await service.stop()
    await shell.cancel_tasks()
    await engine.sockets.close()


def test_settings_travel_as_json() -> None:
    one = EngineSettings(worker=W, sleep_url="http://h:8000", weights_bytes=16 * 10**9)
    text = msgspec.json.encode([one]).decode()
    assert load(Settings, "actuator", file=None, environ={"TIDEGATE_ACTUATOR_ENGINES": text}).engines == (one,)
