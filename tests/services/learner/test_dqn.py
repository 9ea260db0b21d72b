from __future__ import annotations

import numpy as np
import pytest
import torch

from schemas.features import INPUT_COUNT
from services.errors import PolicyError
from services.learner import dqn


def test_the_online_network_chooses_and_the_target_network_values() -> None:
    online = torch.tensor([[0.0, 9.0, 1.0, 0.0, 0.0]])
    target = torch.tensor([[5.0, 2.0, 7.0, 0.0, 0.0]])
    best = dqn.masked_argmax(online, torch.tensor([31], dtype=torch.uint8))
    y = dqn.target_q(torch.tensor([1.0]), torch.tensor([0.5]), best, target)
    assert y.tolist() == [1.0 + 0.5 * 2.0], "Q' of the action that Q prefers, not the greatest Q' (7)"


def test_the_maximum_runs_over_the_next_mask_alone() -> None:
    online = torch.tensor([[0.0, 9.0, 1.0, 0.5, 0.0]])
    target = torch.tensor([[5.0, 2.0, 7.0, 4.0, 0.0]])
    best = dqn.masked_argmax(online, torch.tensor([0b01001], dtype=torch.uint8))
    assert best.tolist() == [3], "of hold and compact, the online network prefers compact"
    assert dqn.target_q(torch.tensor([1.0]), torch.tensor([0.9]), best, target).item() == pytest.approx(1 + 0.9 * 4)


def test_a_terminal_row_has_no_bootstrap() -> None:
    best = dqn.masked_argmax(torch.ones(1, 5), torch.tensor([0], dtype=torch.uint8))
    y = dqn.target_q(torch.tensor([-20.0]), torch.tensor([0.0]), best, torch.full((1, 5), 1e6))
    assert y.tolist() == [-20.0]


def test_the_loss_is_a_weighted_huber() -> None:
    errors, weights = torch.tensor([0.5, -3.0]), torch.tensor([1.0, 0.5])
    expected = (1.0 * 0.5 * 0.5**2 + 0.5 * (3.0 - 0.5)) / 2
    assert dqn.weighted_huber(errors, weights).item() == pytest.approx(expected)


def test_polyak_moves_by_tau() -> None:
    agent = dqn.make_agent((4,), 1e-3, seed=0)
    with torch.no_grad():
        agent.online.value.bias.fill_(1.0)
        agent.target.value.bias.fill_(0.0)
    dqn.polyak(agent.target, agent.online, 0.25)
    assert agent.target.value.bias.item() == pytest.approx(0.25)


def step(agent: dqn.Agent, target: float) -> dqn.Step:
    return dqn.gradient_step(
        agent,
        torch.zeros(2, INPUT_COUNT),
        torch.tensor([0, 1]),
        torch.full((2,), target),
        torch.ones(2),
        tau=0.01,
        clip_norm=10.0,
    )


def test_steps_approach_the_target_and_repeat_exactly() -> None:
    runs = []
    for _ in range(2):
        agent = dqn.make_agent((8,), 1e-2, seed=5)
        runs.append([step(agent, 1.0).loss for _ in range(60)])
    assert runs[0] == runs[1], "the same seed gives the same numbers"
    assert runs[0][-1] < 0.01 * runs[0][0]


def test_a_step_that_is_not_finite_is_not_made() -> None:
    agent = dqn.make_agent((8,), 1e-2, seed=5)
    before = dqn.tensors_of(agent)
    made = step(agent, float("nan"))
    assert not made.applied
    after = dqn.tensors_of(agent)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert agent.updates == 0


def test_an_agent_goes_on_from_its_tensors_as_if_never_stopped() -> None:
    agent = dqn.make_agent((8,), 1e-2, seed=5)
    for _ in range(5):
        step(agent, 1.0)
    other = dqn.make_agent((8,), 1e-2, seed=99)
    dqn.restore_agent(other, dqn.tensors_of(agent), agent.updates)
    assert [step(agent, 1.0).loss for _ in range(5)] == [step(other, 1.0).loss for _ in range(5)]


def test_tensors_that_do_not_fit_are_refused() -> None:
    agent = dqn.make_agent((8,), 1e-2, seed=5)
    with pytest.raises(PolicyError):
        dqn.restore_agent(dqn.make_agent((9,), 1e-2, seed=5), dqn.tensors_of(agent), 0)
    spoilt = dqn.tensors_of(agent)
    spoilt["online.value.bias"][:] = np.inf
    with pytest.raises(PolicyError, match="not finite"):
        dqn.restore_agent(agent, spoilt, 0)
