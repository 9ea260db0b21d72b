"""``python -m tests.loadgen.node.fake_node CONFIG``: a node process on a fleet of plain numbers, up in no time."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from loadgen.node.emulation import Emulation
from loadgen.node.files import read_config
from loadgen.node.process import live
from tests.loadgen.node.fake_fleet import FakeFleet

if __name__ == "__main__":
    config = read_config(Path(sys.argv[1]))
    emulation = Emulation(FakeFleet(2), config.workers(), (0, 0))
    asyncio.run(live(config, emulation, dict))
