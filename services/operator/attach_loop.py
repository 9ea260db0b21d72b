"""The processes of an attachment: a NATS server of its own or a given one, telemetry and actuator, and with its own
server featurizer and decision too. All die with this process; what ends by itself is started again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from loadgen.demo.processes import Processes, Server
from loadgen.demo.ready import until_ready
from schemas.subjects import subject
from services.bus import Bus, Message
from services.bus.embedded import EmbeddedServer
from services.errors import UserError
from services.operator import session
from services.operator.report import EMBEDDED_FOLDER
from services.settings import CommonSettings

STREAM_BYTES: Final = 256 * 1024 * 1024
"""Of each stream of an embedded server: weeks of one worker."""
CALM_S: Final = 600.0
"""After so long without a restart, earlier ones are forgiven."""
HEARD_S: Final = 3.0
"""How long a given bus is listened to for somebody who measures this node already: more than a step."""


class Given(NamedTuple):
    """A NATS server that somebody else runs."""

    url: str
    user: str
    password: str


class Wiring(NamedTuple):
    """What the services are told."""

    node: str
    engines: Sequence[Mapping[str, Any]]
    """``[[telemetry.engines]]``."""
    sockets: Path | None
    """Folder of engine sockets; None: nothing is commanded."""
    mode: str
    config: Path | None
    """Settings file of the operator's own, beneath what attach says."""
    actuator: Mapping[str, str] = {}
    """What the actuator is told beside it."""


class AttachedLoop:
    """Starts and stops the processes; ``folder`` holds their logs, and the embedded server's store."""

    def __init__(self, folder: Path, wiring: Wiring, common: CommonSettings | None) -> None:
        """``common``: where the given NATS server is; None: an embedded one."""
        self._folder = folder
        self._wiring = wiring
        self._common = common
        self._embedded = EmbeddedServer(folder / EMBEDDED_FOLDER) if common is None else None
        self.processes = Processes(folder)
        self._calm_since_s = 0.0

    @property
    def server(self) -> Server:
        if self._embedded is not None:
            return self._embedded
        assert self._common is not None
        return Given(self._common.nats_url, self._common.nats_user, self._common.nats_password)

    @property
    def token(self) -> str:
        return self._common.nats_token if self._common is not None else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The services, in the order of their start: telemetry last, so that its first sample is heard."""
        return (("featurizer", "decision") if self._embedded is not None else ()) + ("actuator", "telemetry")

    async def connect(self) -> Bus:
        """Start the embedded server, if it is one, and connect. UserError when somebody measures this node already."""
        if self._embedded is not None:
            await self._embedded.start()
        server = self.server
        common = CommonSettings(nats_url=server.url, nats_user=server.user, nats_password=server.password,
                                nats_token=self.token)  # fmt: skip
        bus = await session.connected(common)
        if self._embedded is None and await _measured(bus, self._wiring.node):
            await bus.drain(1.0)
            raise UserError(
                f"--node {self._wiring.node}: found somebody who measures it on this bus already, expected a name of "
                "its own: one telemetry a node"
            )
        return bus

    async def start(self) -> None:
        """Start the services and wait for them. ChildDied when one ends, TidegateError when one is not ready."""
        children = []
        for name in self.names:
            common = {"nats_token": self.token} if self.token else {}
            children.append(
                await self.processes.start_service(
                    name, name, self.server, self._settings(name), common, self._wiring.config
                )
            )
        await until_ready(self.processes, children)
        self._calm_since_s = asyncio.get_running_loop().time()

    async def mend(self) -> list[str]:
        """Start again what ended by itself; what was, in words. ChildDied for what goes on dying."""
        told = []
        now_s = asyncio.get_running_loop().time()
        if self._embedded is not None and not self._embedded.running:
            await self._embedded.start()
            told.append("the NATS server ended and was started again, with all that it had stored")
        for name in await self.processes.revive(lambda _: True):
            told.append(f"{name} ended and was started again; its log is {self.processes.children[name].log}")
        if told:
            self._calm_since_s = now_s
        elif now_s - self._calm_since_s > CALM_S:
            self.processes.restarts.clear()
        return told

    async def stop_services(self) -> list[str]:
        """End them; names of those that had to be killed."""
        return await self.processes.stop()

    async def stop_server(self) -> None:
        if self._embedded is not None:
            await self._embedded.stop()

    def _settings(self, service: str) -> dict[str, str]:
        wiring = self._wiring
        sockets = {"sockets": str(wiring.sockets)} if wiring.sockets is not None else {}
        streams = {"stream_max_bytes": str(STREAM_BYTES)} if self._embedded is not None else {}
        match service:
            case "telemetry":
                return {
                    "node": wiring.node, "source": "engines", "boot_file": str(self._folder / "telemetry.boot"),
                    "engines": msgspec.json.encode(list(wiring.engines)).decode(), **sockets,
                }  # fmt: skip
            case "actuator":
                engine = "socket" if wiring.sockets is not None else "observed"
                kept = {"audit_max_bytes": str(STREAM_BYTES)} if streams else {}
                return {"node": wiring.node, "engine": engine, **sockets, **kept, **wiring.actuator}
            case "decision":
                # Beneath the order in tg_config: whatever becomes of that, nobody is enforced who was not asked.
                return {"mode": "shadow"}
        return streams


async def _measured(bus: Bus, node: str) -> bool:
    """Whether samples of this node come over the bus."""
    heard = asyncio.Event()

    async def on_batch(messages: list[Message]) -> None:
        heard.set()

    subscription = await bus.subscribe(subject("telemetry", node), on_batch)
    try:
        await asyncio.wait_for(heard.wait(), HEARD_S)
    except TimeoutError:
        return False
    finally:
        await subscription.unsubscribe()
    return True
