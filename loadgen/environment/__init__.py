"""The emulated fleet as Gymnasium environments, so that anybody's agent runs on it (``docs/environment.md``).

Importing this package registers ``Tidegate-v0``: ``gymnasium.make`` gives one worker's control, ``gymnasium.make_vec``
every worker of a fleet as a sub-environment.
"""

from __future__ import annotations

from typing import Final

import gymnasium

from loadgen.environment.scenario import Episode, Scenario, configured, generated
from loadgen.environment.single import TidegateEnv
from loadgen.environment.vector import TidegateVectorEnv

__all__ = ["ENV_ID", "Episode", "Scenario", "TidegateEnv", "TidegateVectorEnv", "configured", "generated"]

ENV_ID: Final = "Tidegate-v0"

if ENV_ID not in gymnasium.registry:
    gymnasium.register(
        id=ENV_ID,
        entry_point="loadgen.environment.single:TidegateEnv",
        vector_entry_point="loadgen.environment.vector:TidegateVectorEnv",
    )
