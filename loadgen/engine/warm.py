"""Compile all kernels once, so that the first replay starts at once: ``python -m loadgen.engine.warm``.

Takes about a minute of one core after a change of the engine's sources, a second otherwise.
"""

from __future__ import annotations

import numpy as np

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import FleetConfig
from loadgen.requests import empty_table


def warm() -> None:
    """Touch every entry of the engine; returns when their machine code is in the cache."""
    fleet = Fleet(FleetConfig(workers_per_card=1), [empty_table()])
    fleet.command(rho=1.0)
    fleet.advance()
    fleet.metrics()
    fleet.snapshot(0)
    fleet.owners(0)
    fleet.relocate(0, np.empty((0, 2), np.int64))
    none = np.empty(0, np.int64)
    fleet.reserve(0, none)
    fleet.unreserve(0, none)
    fleet.evict_sessions(0, none)
    fleet.prefetch_sessions(0, none)
    fleet.set_weights(0, on_card=False)
    fleet.set_weights(0, on_card=True)
    fleet.weights(0)


if __name__ == "__main__":
    warm()
