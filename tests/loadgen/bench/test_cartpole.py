"""The sanity benchmark, in short: it runs, repeats, and learns something. Whether it is solved the bench says."""

from __future__ import annotations

import msgspec
import numpy as np

from loadgen.bench.cartpole import Play, play

BRIEF = Play(
    learner=msgspec.structs.replace(Play().learner, hidden=(64, 64), learning_rate=1e-3, warmup_rows=200, batch=32),
    epsilon_steps=1_000,
)


def test_three_thousand_steps_learn_something() -> None:
    found = play(0, 3_000, BRIEF)
    early, late = np.mean(found.returns[:30]), np.mean(found.returns[-10:])
    assert late > 2 * early, f"from {early:.0f} to {late:.0f} steps an episode"
    assert found.updates > 1_000


def test_the_same_seed_is_the_same_game() -> None:
    assert play(3, 400, BRIEF).returns == play(3, 400, BRIEF).returns
    assert play(3, 400, BRIEF).returns != play(4, 400, BRIEF).returns
