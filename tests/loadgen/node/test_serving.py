"""The protocol over a real socket: whatever a caller sends, only its own connection can suffer."""

from __future__ import annotations

import asyncio
import socket
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadgen.node.emulation import Emulation
from loadgen.node.replay import NODE_SOCKET, Replay
from schemas.engine import (
    MAX_FRAME_BYTES,
    REPLY,
    Describe,
    Description,
    Failure,
    Request,
    Sample,
    SampleReply,
    SetQuota,
    Snapshot,
    frame,
)
from schemas.identity import STEP_NS, action_id
from services.actuator.engines import emulated
from services.actuator.engines.framing import Frames
from services.actuator.engines.protocol import EngineClient
from services.actuator.engines.serving import Sockets
from services.errors import EngineRefused, EngineUnreachable, ProtocolError, UserError

from .fake_fleet import GIB, FakeFleet

WORKERS = ("n0/0/w0", "n0/0/w1")
BOOT = 7


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[Replay, Path]]:
    replay = Replay(Emulation(FakeFleet(2), WORKERS, (0, 0)), duration_s=8, step_timeout_s=30, speed=0)
    await replay.open(tmp_path)
    work = asyncio.ensure_future(replay.run())
    yield replay, tmp_path
    work.cancel()
    await replay.close()


async def read_reply(reader: asyncio.StreamReader):
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return REPLY.decode(await reader.readexactly(length))


def quota(worker: str, step: int) -> SetQuota:
    now_ns = step * STEP_NS
    return SetQuota(
        BOOT, step, action_id(worker, BOOT, step), 1.1, 22 * GIB, 26 * GIB, 256, 99 + step, now_ns + 3 * STEP_NS, now_ns
    )


async def test_half_frames_wait_for_their_rest_and_answers_keep_their_order(node):
    _, folder = node
    reader, writer = await asyncio.open_unix_connection(str(folder / "0-w0.sock"))
    data = frame(Request(1, Describe())) + frame(Request(2, Snapshot())) + frame(Request(3, Describe()))
    for i in range(0, len(data), 3):
        writer.write(data[i : i + 3])
        await writer.drain()
    assert [(await read_reply(reader)).seq for _ in range(3)] == [1, 2, 3]
    writer.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x00\x00\x05hello",
        struct.pack(">I", MAX_FRAME_BYTES + 1),
        b"\xff" * 64,
        frame(Request(1, Describe()))[:-1] + b"\xc1",
        struct.pack(">I", 0),
    ],
    ids=["no message", "too large", "noise", "broken message", "empty"],
)
async def test_garbage_ends_its_own_connection_and_no_other(node, garbage):
    _, folder = node
    other = emulated.connect(folder, WORKERS[0], 5.0)
    await other.describe()
    reader, writer = await asyncio.open_unix_connection(str(folder / "0-w0.sock"))
    writer.write(garbage)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await reader.readexactly(1)
    writer.close()
    assert isinstance(await other.describe(), Description)
    assert other.connection == 1, "the other caller's connection lived on"
    await other.close()


async def test_socket_files_are_for_this_user_only_and_go_away(tmp_path):
    sockets = Sockets(lambda: 0)
    await sockets.serve(tmp_path / "a.sock", lambda _: Failure("unsupported"))
    assert stat.S_IMODE((tmp_path / "a.sock").stat().st_mode) == 0o600
    with pytest.raises(UserError, match="a process that serves it"):
        await Sockets(lambda: 0).serve(tmp_path / "a.sock", lambda _: Failure("unsupported"))
    await sockets.close()
    assert not (tmp_path / "a.sock").exists()


async def test_a_killed_nodes_socket_is_taken_over(tmp_path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "a.sock"))
    dead.close()
    sockets = Sockets(lambda: 0)
    await sockets.serve(tmp_path / "a.sock", lambda _: Failure("unsupported"))
    await sockets.close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="another kind of file"):
        await sockets.serve(tmp_path / "file", lambda _: Failure("unsupported"))


async def test_a_path_too_long_for_a_socket_is_the_callers_mistake(tmp_path):
    with pytest.raises(UserError, match="at most 107"):
        await Sockets(lambda: 0).serve(tmp_path / ("x" * 120), lambda _: Failure("unsupported"))


async def test_time_moves_in_lockstep_with_the_commands(node):
    replay, folder = node
    client = EngineClient("node", folder / NODE_SOCKET, 30.0)
    engines = [emulated.connect(folder, worker, 5.0) for worker in WORKERS]
    seen = []
    after = -1
    while True:
        sample = await client.request(Sample(after, BOOT, 30.0), SampleReply)
        seen.append((sample.step, sample.finished))
        after = sample.step
        if sample.finished:
            break
        for worker, engine in zip(WORKERS, engines, strict=True):
            await engine.set_quota(quota(worker, after))
    assert seen == [(0, False), (1, False), (2, False), (3, False), (4, True)]
    assert (replay.missed_steps, len(replay.latencies_ms)) == (0, 4)
    assert engines[0].t_ns == 3 * STEP_NS, "replies carry the node's clock"
    for one in (client, *engines):
        await one.close()


async def test_a_step_without_commands_ends_at_the_wall_limit_and_is_counted(tmp_path):
    replay = Replay(Emulation(FakeFleet(2), WORKERS, (0, 0)), duration_s=4, step_timeout_s=0.02, speed=0)
    await replay.open(tmp_path)
    work = asyncio.ensure_future(replay.run())
    client = EngineClient("node", tmp_path / NODE_SOCKET, 30.0)
    assert (await client.request(Sample(1, BOOT, 30.0), SampleReply)).finished
    await work
    assert replay.missed_steps == 2
    await client.close()
    await replay.close()


async def test_a_wait_for_a_sample_ends_at_its_own_limit(node):
    _, folder = node
    client = EngineClient("node", folder / NODE_SOCKET, 30.0)
    reply = await client.request(Sample(0, BOOT, 0.02), SampleReply)
    assert (reply.step, reply.workers) == (0, ()), "the asked step: nothing new came"
    with pytest.raises(EngineRefused, match="unsupported"):
        await client.request(Describe(), Description)
    await client.close()


async def test_a_client_connects_again_and_repeats_what_was_not_answered(tmp_path):
    async def serve() -> Replay:
        replay = Replay(Emulation(FakeFleet(2), WORKERS, (0, 0)), duration_s=8, step_timeout_s=30, speed=0)
        await replay.open(tmp_path)
        return replay

    first = await serve()
    engine = emulated.connect(tmp_path, WORKERS[0], 5.0)
    await engine.describe()
    await first.close()
    with pytest.raises(EngineUnreachable, match="No such file"):
        await engine.describe()
    second = await serve()
    await engine.describe()
    assert engine.connection == 2, "who described the engine before must do it again"
    await engine.close()
    await second.close()


async def test_a_silent_engine_is_unreachable_after_the_timeout(tmp_path):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "0-w0.sock"))
        silent.listen()
        engine = emulated.connect(tmp_path, WORKERS[0], 0.05)
        with pytest.raises(EngineUnreachable, match=r"no answer within 0\.05 s"):
            await engine.describe()
        await engine.close()


def test_frames_of_any_cut_come_out_whole():
    data = b"".join(struct.pack(">I", n) + bytes(n) for n in (0, 1, 300))
    for size in (1, 2, 3, 5, len(data)):
        frames = Frames()
        bodies = [body for i in range(0, len(data), size) for body in frames.feed(data[i : i + size])]
        assert [len(body) for body in bodies] == [0, 1, 300]
        assert frames.pending_bytes == 0
    with pytest.raises(ProtocolError, match="at most 10"):
        Frames(max_frame_bytes=10).feed(struct.pack(">I", 11))


def test_workers_are_found_by_their_socket_files(tmp_path):
    for name in ("0-w0.sock", "1-a-b.sock", "node.sock", "x-w0.sock"):
        (tmp_path / name).touch()
    assert emulated.workers_in(tmp_path, "n0") == ["n0/0/w0", "n0/1/a-b"]
    assert emulated.workers_in(tmp_path / "absent", "n0") == []
