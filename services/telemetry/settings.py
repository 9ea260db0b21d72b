"""Settings of telemetry: table ``[telemetry]``, variables ``TIDEGATE_TELEMETRY_<KEY>``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from schemas.identity import STEP_S
from services.errors import SettingsError

_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which nodes are measured, and where."""

    node: str = ""
    """The node that this process serves."""
    nodes: tuple[str, ...] = ()
    """Several nodes instead, as a list or separated by commas; ``node`` counts with them."""
    source: Literal["emulated", "synthetic"] = "emulated"
    """``emulated``: nodes of the emulator, over their sockets; ``synthetic``: made-up numbers for measuring
    the loop without engines."""
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
    """Step of made-up nodes, seconds; emulated ones have their own."""
    seed: int = 0
    """Of the made-up numbers."""

    @property
    def served(self) -> tuple[str, ...]:
        """All nodes, each once. SettingsError when there is none."""
        made_up = range(self.synthetic_nodes if self.source == "synthetic" else 0)
        names = (self.node, *self.nodes, *(f"n{k}" for k in made_up))
        served = tuple(dict.fromkeys(name for name in names if name))
        bad = [name for name in served if "/" in name]
        if bad:
            raise SettingsError("settings [telemetry]", "nodes", repr(bad[0]), "names without '/'")
        if not served:
            raise SettingsError("settings [telemetry]", "node", "no node", "the node to serve (--node n0)")
        return served
