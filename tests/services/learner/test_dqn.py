from __future__ import annotations

import numpy as np
import pytest
import torch

from schemas.features import INPUT_COUNT
from services.errors import PolicyError
from services.learner import dqn
from services.learner.agent import Agent, make_agent, restore_agent, tensors_of


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
    agent = make_agent((4,), 1e-3, seed=0)
    with torch.no_grad():
        agent.online.value.bias.fill_(1.0)
        agent.target.value.bias.fill_(0.0)
    dqn.polyak(agent, 0.25)
    assert agent.target.value.bias.item() == pytest.approx(0.25)


def batch(target: float, **more: torch.Tensor) -> dqn.Batch:
    return dqn.Batch(
        inputs=torch.zeros(2, INPUT_COUNT),
        actions=torch.tensor([0, 1]),
        targets=torch.full((2,), target),
        weights=torch.ones(2),
        **more,
    )


def step(agent: Agent, target: float) -> dqn.Step:
    return dqn.gradient_step(agent, batch(target), tau=0.01, clip_norm=10.0)


def test_steps_approach_the_target_and_repeat_exactly() -> None:
    runs = []
    for _ in range(2):
        agent = make_agent((8,), 1e-2, seed=5)
        runs.append([step(agent, 1.0).loss for _ in range(60)])
    assert runs[0] == runs[1], "the same seed gives the same numbers"
    assert runs[0][-1] < 0.01 * runs[0][0]


def test_a_step_that_is_not_finite_is_not_made() -> None:
    agent = make_agent((8,), 1e-2, seed=5)
    before = tensors_of(agent)
    made = step(agent, float("nan"))
    assert not made.applied
    after = tensors_of(agent)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert agent.updates == 0


def test_an_agent_goes_on_from_its_tensors_as_if_never_stopped() -> None:
    agent = make_agent((8,), 1e-2, seed=5)
    for _ in range(5):
        step(agent, 1.0)
    other = make_agent((8,), 1e-2, seed=99)
    restore_agent(other, tensors_of(agent), agent.updates)
    assert [step(agent, 1.0).loss for _ in range(5)] == [step(other, 1.0).loss for _ in range(5)]


def test_tensors_that_do_not_fit_are_refused() -> None:
    agent = make_agent((8,), 1e-2, seed=5)
    with pytest.raises(PolicyError):
        restore_agent(make_agent((9,), 1e-2, seed=5), tensors_of(agent), 0)
    spoilt = tensors_of(agent)
    spoilt["online.value.bias"][:] = np.inf
    with pytest.raises(PolicyError, match="not finite"):
        restore_agent(agent, spoilt, 0)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (0b11111, 1.0 + 0.5 - 0.2),  # action 1 has 1.0, and needs to be 0.5 below the demonstrated one's 0.2
        (0b10101, 0.4 + 0.5 - 0.2),  # of the allowed ones action 4 is the best
        (0b00100, 0.0),  # nothing else is allowed, so nothing is to be beaten
    ],
)
def test_the_margin_loss_is_what_the_best_rival_lacks_of_being_beaten(mask: int, expected: float) -> None:
    q = torch.tensor([[0.0, 1.0, 0.2, 0.9, 0.4]])
    loss = dqn.margin_loss(q, torch.tensor([2]), torch.tensor([mask], dtype=torch.uint8), torch.ones(1), 0.5)
    assert loss.item() == pytest.approx(expected)


def test_a_demonstration_that_leads_by_the_margin_costs_nothing_and_other_rows_never_do() -> None:
    q = torch.tensor([[0.0, 1.0, 0.4, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0, 0.0]])
    masks = torch.full((2,), 31, dtype=torch.uint8)
    weights = torch.tensor([1.0, 0.0])
    assert dqn.margin_loss(q, torch.tensor([1, 0]), masks, weights, 0.5).item() == 0.0


def test_the_margin_loss_teaches_what_the_returns_do_not() -> None:
    agent = make_agent((8,), 1e-2, seed=5)
    shown = batch(0.0, masks=torch.full((2,), 31, dtype=torch.uint8), demonstrated=torch.ones(2))
    shown = dqn.Batch(**{n: getattr(shown, n) for n in shown.__struct_fields__} | {"actions": torch.tensor([3, 3])})
    for _ in range(80):
        made = dqn.gradient_step(agent, shown, tau=0.01, clip_norm=10.0, margin=0.5, margin_weight=1.0)
    assert agent.online(shown.inputs).argmax(dim=1).tolist() == [3, 3], "every action returns the same, one is shown"
    assert made.margin < 0.05


def test_the_risk_head_leaves_q_alone() -> None:
    """With and without it the same seed and batch give the same Q but for rounding, with every step clipped."""
    plain, with_risk = make_agent((8,), 1e-2, seed=5), make_agent((8,), 1e-2, seed=5, risk_size=4)
    for _ in range(20):
        dqn.gradient_step(plain, batch(1.0), tau=0.01, clip_norm=0.1)
        dqn.gradient_step(with_risk, batch(1.0, exhausted=torch.tensor([1.0, 0.0])), tau=0.01, clip_norm=0.1)
    ours, theirs = tensors_of(plain), tensors_of(with_risk)
    for name, tensor in ours.items():
        np.testing.assert_allclose(theirs[name], tensor, rtol=1e-4, atol=1e-6, err_msg=name)
    risk = torch.sigmoid(with_risk.online.risk_logits(torch.zeros(1, INPUT_COUNT)))[0]
    assert risk[0] > 0.54 > 0.46 > risk[1], "action 0 ran out of memory, action 1 did not"


def test_an_agent_with_a_risk_head_goes_on_from_its_tensors() -> None:
    agent = make_agent((8,), 1e-2, seed=5, risk_size=4)
    labelled = batch(1.0, exhausted=torch.tensor([1.0, 0.0]))
    for _ in range(5):
        dqn.gradient_step(agent, labelled, tau=0.01, clip_norm=10.0)
    other = make_agent((8,), 1e-2, seed=99, risk_size=4)
    restore_agent(other, tensors_of(agent), agent.updates)
    for _ in range(5):
        one, two = (dqn.gradient_step(a, labelled, tau=0.01, clip_norm=10.0) for a in (agent, other))
        assert (one.loss, one.risk) == (two.loss, two.risk)


def test_gradients_are_clipped_to_the_norm() -> None:
    agent = make_agent((8,), 1e-2, seed=5)
    dqn.gradient_step(agent, batch(1000.0), tau=0.01, clip_norm=0.5)
    assert agent.gradient.norm().item() == pytest.approx(0.5, rel=1e-4)
