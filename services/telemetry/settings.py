"""Settings of telemetry: table ``[telemetry]``, variables ``TIDEGATE_TELEMETRY_<KEY>``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from schemas.classes import ServiceClass
from schemas.identity import STEP_S
from services.errors import SettingsError

_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)]


_Bytes = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine to watch: a table ``[[telemetry.engines]]``."""

    kind: Literal["vllm", "sglang", "triton"]
    """Whose names its page uses."""
    url: str
    """The server, or its metrics page: http://127.0.0.1:8000 asks /metrics there."""
    gpu: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    """The card's index on the node; of several engines behind one page the k-th has card gpu + k."""
    name: str = "w0"
    """The worker's name on its card."""
    model: str = ""
    """The one model to watch behind this page; empty: all of them, as workers of their own."""
    service_class: Literal["chat", "agent", "batch", "copilot", "training"] = "chat"
    """What its clients were promised."""
    q0_share: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Baseline quota as a share of the card's KV capacity; 0: an equal share of what the card's others leave."""
    hbm_bytes: _Bytes = 0.0
    """The card's HBM; 0: as the device says, else assumed from the engine's pool."""
    weights_bytes: _Bytes = 0.0
    """What the model's weights take on the card; 0: as the model's folder says, where it can be read."""
    reference_tokens_per_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)] = 0.0
    """The card's calibrated peak decode rate; 0: the highest rate seen so far, once a minute of it was."""
    kvcached: str = ""
    """Its kvcached segment, a name in /dev/shm or a path, where the engine's KV is elastic; empty: none."""
    socket: str = ""
    """The engine's own socket, where Tidegate runs inside it; empty: ``<sockets>/<gpu>-<name>.sock`` if there."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or len(self.url) < 9:
            raise ValueError(f"url {self.url!r}: expected http://host:port")
        if not self.name or "/" in self.name:
            raise ValueError(f"name {self.name!r}: expected a non-empty name without '/'")

    @property
    def class_number(self) -> ServiceClass:
        return ServiceClass[self.service_class.upper()]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which nodes are measured, and where."""

    node: str = ""
    """The node that this process serves."""
    nodes: tuple[str, ...] = ()
    """Several nodes instead, as a list or separated by commas; ``node`` counts with them."""
    source: Literal["emulated", "engines", "synthetic"] = "emulated"
    """``emulated``: nodes of the emulator, over their sockets; ``engines``: the real ones of ``engines``;
    ``synthetic``: made-up numbers for measuring the loop without engines."""
    engines: tuple[Engine, ...] = ()
    """The node's engines: tables ``[[telemetry.engines]]``; as JSON in a variable or after ``--set engines=``."""
    scrape_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = STEP_S / 2
    """Time that every engine has to answer, all side by side; half a step, so that the others' news is fresh."""
    max_age_s: _Seconds = 2 * STEP_S
    """Numbers older than this, by the time stamps of the page, are not used: the worker is held instead."""
    devices: Literal["auto", "nvml", "none"] = "auto"
    """Who says what a card has and uses: ``nvml``, ``none``, or ``auto``: NVML where it works."""
    dcgm_url: str = ""
    """A DCGM exporter to ask for it instead, such as http://127.0.0.1:9400; empty: none."""
    sockets: str = "/run/tidegate/{node}"
    """Folder of a node's sockets; ``{node}`` stands for its name. Telemetry asks ``node.sock`` in it."""
    boot_file: str = "/var/lib/tidegate/telemetry.boot"
    """File that keeps boot ids increasing, one for each process; ``{node}`` stands for the first node.
    Empty: none, and a clock that was set back makes the restarted process look old."""
    poll_s: _Seconds = 2 * STEP_S
    """How long a node may let a request for the next step wait before it says that there is none."""
    retry_s: _Seconds = 0.1
    """Pause after a failure before the next try."""
    synthetic_nodes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    """Made-up nodes n0, n1, ... beside the named ones."""
    synthetic_workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    """Workers of each made-up node, two a card."""
    synthetic_spread: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Share of a step over which made-up nodes report, 0: all at once."""
    step_s: _Seconds = STEP_S
    """Step of engines and of made-up nodes, seconds; emulated nodes have their own."""
    seed: int = 0
    """Of the made-up numbers."""

    def __post_init__(self) -> None:
        if self.source == "engines":
            self._check_engines()

    def _check_engines(self) -> None:
        if not self.engines:
            raise ValueError('source "engines" without any: expected tables [[telemetry.engines]]')
        names = [(engine.gpu, engine.name) for engine in self.engines]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two engines named {twice[1]!r} on card {twice[0]}: expected a name of their own")
        for gpu in {engine.gpu for engine in self.engines}:
            shares = [engine.q0_share for engine in self.engines if engine.gpu == gpu]
            if sum(shares) > 1.0 + 1e-9 or (0.0 in shares and sum(shares) >= 1.0):
                raise ValueError(
                    f"q0_share of card {gpu}: {shares}: expected a sum of at most 1, something left for all"
                )
        if self.scrape_timeout_s >= self.step_s:
            raise ValueError(f"scrape_timeout_s {self.scrape_timeout_s:g}: expected less than step_s {self.step_s:g}")

    @property
    def served(self) -> tuple[str, ...]:
        """All nodes, each once. SettingsError when there is none."""
        made_up = range(self.synthetic_nodes if self.source == "synthetic" else 0)
        names = (self.node, *self.nodes, *(f"n{k}" for k in made_up))
        served = tuple(dict.fromkeys(name for name in names if name))
        bad = [name for name in served if "/" in name]
        if bad:
            raise SettingsError("settings [telemetry]", "nodes", repr(bad[0]), "names without '/'")
        if self.source == "engines" and len(served) > 1:
            raise SettingsError("settings [telemetry]", "nodes", repr(served), 'one node with source "engines"')
        if not served:
            raise SettingsError("settings [telemetry]", "node", "no node", "the node to serve (--node n0)")
        return served
