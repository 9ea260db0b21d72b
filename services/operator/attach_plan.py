"""What an attachment comes to: which worker, which engine socket, whether it can be enforced; each mistake named before
anything is started."""

from __future__ import annotations

import argparse
import math
import os
import socket
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from schemas.codec import DecodeError, fit_columns, unpack
from schemas.engine import Describe, Description, Sample, SampleReply, Snapshot, SnapshotReply
from schemas.identity import parse_worker_id, worker_id
from schemas.metrics import METRICS
from services.actuator.engines import emulated
from services.actuator.engines.protocol import EngineClient
from services.actuator.engines.vllm.flags import SOCKET_VARIABLE, START_FLAGS
from services.actuator.engines.vllm.versions import KNOWN
from services.errors import EngineRefused, EngineUnreachable, TidegateError, UserError
from services.operator import attach_folder, session
from services.operator.attach_endpoint import Endpoint
from services.telemetry.sources.endpoint import NEWEST

SOCKETS: Final = "/run/tidegate/{node}"
"""Where an engine's socket is looked for if none is named."""
ASK_S: Final = 2.0
"""For one question to an engine's socket."""


class Plan(NamedTuple):
    """What was asked for, checked."""

    kind: str
    url: str
    mode: str
    worker: str
    service_class: str
    socket: Path | None
    """The engine's, where there is one."""
    description: Description | None
    """What that engine says; None: nobody commands this server."""
    own: frozenset[str]
    """Columns of METRICS that the engine itself tells."""
    leased_s: float
    """For how long a command of somebody else still holds on that engine; 0: nobody commands it."""
    folder: Path
    duration_s: float
    every_s: float


async def plan_of(options: argparse.Namespace, endpoint: Endpoint) -> Plan:
    """What the options come to. UserError for those that do not go together."""
    node, gpu, name = options.node or socket.gethostname(), options.gpu, options.name
    path: Path | None = options.socket
    if path is not None:
        gpu, name = _named(path, options)
        if not path.exists():  # noqa: ASYNC240 - before anything runs
            raise UserError(f"--socket {path}: found nothing, expected the engine's socket (is the server started with "
                            f"{SOCKET_VARIABLE}={path}?)")  # fmt: skip
    else:
        gpu, name = 0 if gpu is None else gpu, "w0" if name is None else name
        found = emulated.socket_path(Path(SOCKETS.replace("{node}", node)), _worker(node, gpu, name))
        path = found if found.exists() else None
    description, own, leased_s = None, frozenset[str](), 0.0
    if path is not None:
        description, own, leased_s = await _described(path, node, gpu, name)
        said = parse_worker_id(description.worker).node
        if options.node is not None and said != options.node:
            raise UserError(f"--node {options.node}: found an engine that says it is of node {said}: start it with "
                            f"TIDEGATE_NODE={options.node}, or attach with --node {said}")  # fmt: skip
        node = said
    worker = _worker(node, gpu, name)
    return Plan(
        options.kind, endpoint.url, options.mode, worker, options.class_, path, description, own, leased_s,
        (options.folder or attach_folder.folder_of(worker, os.environ)).absolute(),
        0.0 if options.duration is None else session.duration_s(options.duration), options.every,
    )  # fmt: skip


def _worker(node: str, gpu: int, name: str) -> str:
    try:
        return worker_id(node, gpu, name)
    except ValueError as error:
        raise UserError(str(error)) from None


def _named(path: Path, options: argparse.Namespace) -> tuple[int, str]:
    """Card and worker that a socket's name tells. UserError where it tells none, or others than were given."""
    told = emulated.gpu_and_name(path)
    if told is None:
        raise UserError(f"--socket {path}: expected a name such as 0-w0.sock: card, worker")
    for option, given, its in (("--gpu", options.gpu, told[0]), ("--name", options.name, told[1])):
        if given not in (None, its):
            raise UserError(f"{option} {given}: found --socket {path}, which is of {its}: expected one of the two")
    return told


async def _described(path: Path, node: str, gpu: int, name: str) -> tuple[Description, frozenset[str], float]:
    """What the engine behind a socket says of itself, which metrics it tells, and for how many seconds by its own
    clock it is leased. TidegateError when it does not answer; one that describes itself and tells no more is one all
    the same."""
    engine = EngineClient(_worker(node, gpu, name), path, ASK_S)
    try:
        description = await engine.request(Describe(), Description)
        try:
            quota = await engine.request(Snapshot(), SnapshotReply)
            leased_s = max(quota.lease_until_ns - engine.t_ns, 0) / 1e9
        except (EngineUnreachable, EngineRefused):
            leased_s = 0.0
        try:
            reply = await engine.request(Sample(NEWEST, 0, ASK_S / 2), SampleReply)
            rows = fit_columns(unpack(reply.metrics, "<f8", len(reply.workers), "SampleReply"), len(METRICS))
        except (EngineUnreachable, EngineRefused, DecodeError):
            return description, frozenset(), leased_s
        own = frozenset(m.name for k, m in enumerate(METRICS) if len(rows) and np.isfinite(rows[0, k]))
        return description, own, leased_s
    except (EngineUnreachable, EngineRefused) as error:
        raise TidegateError(f"{path}: the engine's socket is there, but it does not answer: {error}") from error
    finally:
        await engine.close()


def check_mode(plan: Plan, endpoint: Endpoint) -> None:
    """UserError where enforcing was asked for and cannot be; TidegateError where somebody else does it already."""
    if plan.mode != "enforce":
        return
    if plan.kind != "vllm":
        raise UserError(f"--mode enforce: found {plan.kind}, expected vllm: others are watched only (--mode shadow)")
    if not endpoint.steerable:
        known = ", ".join(f"{one}.x" for one in KNOWN)
        found = endpoint.version or "a version that it does not tell"
        raise UserError(f"--mode enforce: found vLLM {found}, expected {known}: the adapter reaches into its insides")
    if plan.socket is None:
        name = parse_worker_id(plan.worker)
        path = emulated.socket_path(Path(SOCKETS.replace("{node}", name.node)), plan.worker)
        flags = " \\\n      ".join(START_FLAGS)
        raise UserError(
            f"--mode enforce: found no engine socket at {path}: the server runs without Tidegate inside, or its socket "
            "is elsewhere (--socket PATH). Start it with\n"
            f"    {SOCKET_VARIABLE}={path} TIDEGATE_NODE={name.node} TIDEGATE_CLASS={plan.service_class} \\\n"
            f"      python -m vllm.entrypoints.openai.api_server ... \\\n      {flags}\n"
            "  and attach again, or watch it: --mode shadow"
        )
    if plan.leased_s > 0:
        raise TidegateError(f"engine {plan.worker} at {plan.socket} is commanded by somebody else: its lease runs for "
                            f"another {math.ceil(plan.leased_s)} s; stop that first (or wait, where it has just "
                            "ended), or watch it: --mode shadow")  # fmt: skip


def engine_settings(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The server as telemetry is told of it."""
    name = parse_worker_id(plan.worker)
    engine: dict[str, Any] = {
        "kind": plan.kind, "url": plan.url, "gpu": name.gpu, "name": name.name, "service_class": plan.service_class,
        "socket": "" if plan.socket is None else str(plan.socket.absolute()),
    }  # fmt: skip
    if options.q0_share is not None:
        engine["q0_share"] = options.q0_share
    if options.hbm_gb is not None:
        engine["hbm_bytes"] = round(options.hbm_gb * 1e9)
    return engine
