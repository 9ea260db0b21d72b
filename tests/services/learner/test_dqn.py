from __future__ import annotations

import numpy as np
import pytest
import torch

from schemas.features import INPUT_COUNT
from services.errors import PolicyError
from services.learner import dqn
from services.learner.agent import Agent, layout, make_agent, restore_agent, tensors_of
from services.learner.replay_buffer import NOTHING_SHOWN


def one(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_online_network_chooses_and_the_target_network_values() -> None:
    online = torch.tensor([[0.0, 9.0, 1.0, 0.0, 0.0]])
    target = torch.tensor([[5.0, 2.0, 7.0, 0.0, 0.0]])
    best = dqn.masked_argmax(online, np.array([31], np.uint8))
    y = dqn.target_q(one(1.0), one(0.5), best, target)
    assert y.tolist() == [1.0 + 0.5 * 2.0], "Q' of the action that Q prefers, not the greatest Q' (7)"


def test_the_maximum_runs_over_the_next_mask_alone() -> None:
    online = torch.tensor([[0.0, 9.0, 1.0, 0.5, 0.0]])
    target = torch.tensor([[5.0, 2.0, 7.0, 4.0, 0.0]])
    best = dqn.masked_argmax(online, np.array([0b01001], np.uint8))
    assert best.tolist() == [3], "of hold and compact, the online network prefers compact"
    assert dqn.target_q(one(1.0), one(0.9), best, target).item() == pytest.approx(1 + 0.9 * 4)


@pytest.mark.parametrize("said", [1e6, float("nan"), float("inf")])
def test_a_terminal_row_has_no_bootstrap(said: float) -> None:
    best = dqn.masked_argmax(torch.ones(1, 5), np.array([0], np.uint8))
    y = dqn.target_q(one(-20.0), one(0.0), best, torch.full((1, 5), said))
    assert y.tolist() == [-20.0]


def test_the_loss_is_a_weighted_huber() -> None:
    errors, weights = np.array([0.5, -3.0], np.float32), np.array([1.0, 0.5], np.float32)
    loss, slope = dqn.weighted_huber(errors, weights)
    assert loss == pytest.approx((1.0 * 0.5 * 0.5**2 + 0.5 * (3.0 - 0.5)) / 2)
    assert slope.tolist() == [1.0 * 0.5 / 2, 0.5 * -1.0 / 2], "the derivative of huber is the error, cut at 1"


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
    loss, _ = dqn.margin_loss(q, torch.tensor([2]), torch.tensor([mask], dtype=torch.uint8), torch.ones(1), 0.5)
    assert loss.item() == pytest.approx(expected)


def test_a_demonstration_that_leads_by_the_margin_costs_nothing_and_other_rows_never_do() -> None:
    q = torch.tensor([[0.0, 1.0, 0.4, 0.0, 0.0], [0.0, 9.0, 0.0, 0.0, 0.0]])
    masks = torch.full((2,), 31, dtype=torch.uint8)
    weights = torch.tensor([1.0, 0.0])
    loss, slopes = dqn.margin_loss(q, torch.tensor([1, 0]), masks, weights, 0.5)
    assert loss.item() == 0.0
    assert (slopes == 0).all()


def test_the_margin_loss_lifts_the_demonstrated_action_and_lowers_its_best_rival() -> None:
    q = torch.tensor([[0.0, 1.0, 0.2, 0.9, 0.4], [0.0, 0.0, 0.0, 0.0, 5.0]])
    masks = torch.full((2,), 31, dtype=torch.uint8)
    _, slopes = dqn.margin_loss(q, torch.tensor([2, 4]), masks, torch.tensor([0.5, 1.0]), 0.5)
    assert slopes.tolist() == [[0.0, 0.25, -0.25, 0.0, 0.0], [0.0] * 5], "weight 0.5, mean over two rows"


def test_the_margin_loss_teaches_what_the_returns_do_not() -> None:
    agent = make_agent((8,), 1e-2, seed=5)
    shown = batch(0.0, masks=torch.full((2,), 31, dtype=torch.uint8), shown=torch.tensor([3, 3]))
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


def by_autograd(agent: Agent, batch: dqn.Batch, margin: float, margin_weight: float) -> tuple[float, torch.Tensor]:
    """The loss written as the equations say it, and the gradient that torch finds."""
    rows = torch.arange(len(batch.actions))
    q = agent.online(batch.inputs)
    huber = torch.nn.functional.huber_loss(q[rows, batch.actions], batch.targets, reduction="none")
    shown = torch.where(batch.shown == NOTHING_SHOWN, batch.actions, batch.shown)
    rivals = q + margin * (torch.arange(5) != shown.unsqueeze(1))
    forbidden = torch.tensor([[not mask >> action & 1 for action in range(5)] for mask in batch.masks.tolist()])
    gap = rivals.masked_fill(forbidden, -torch.inf).amax(dim=1) - q[rows, shown]
    logits = agent.online.risk_logits(batch.inputs)[rows, batch.actions]
    known = ~batch.exhausted.isnan()
    bce = torch.nn.functional.binary_cross_entropy_with_logits(
        logits[known], batch.exhausted[known], reduction="none", weight=batch.weights[known]
    )
    loss = (batch.weights * (huber + margin_weight * (batch.shown != NOTHING_SHOWN) * gap)).mean() + bce.mean()
    named = dict(agent.online.named_parameters())
    found = torch.autograd.grad(loss, [named[name] for name in layout(agent.online)])
    return loss.item(), torch.cat([one.reshape(-1) for one in found])


def test_loss_and_gradient_are_those_of_the_equations() -> None:
    generator = torch.Generator().manual_seed(4)
    agent = make_agent((12, 9), 1e-2, seed=5, risk_size=7)
    rows = 33
    some = dqn.Batch(
        inputs=torch.randn(rows, INPUT_COUNT, generator=generator),
        actions=torch.randint(0, 5, (rows,), generator=generator),
        targets=torch.randn(rows, generator=generator) * 3,
        weights=torch.rand(rows, generator=generator),
        masks=torch.randint(0, 32, (rows,), generator=generator, dtype=torch.uint8),
        shown=torch.where(
            torch.rand(rows, generator=generator) < 0.5,
            NOTHING_SHOWN,
            torch.randint(0, 5, (rows,), generator=generator),
        ),
        exhausted=torch.where(
            torch.rand(rows, generator=generator) < 0.3, torch.nan, torch.rand(rows, generator=generator).round()
        ),
    )
    # What was done and what was shown was allowed.
    allowed = some.masks | (1 << some.actions).to(torch.uint8) | (1 << some.shown.clamp(max=7)).to(torch.uint8)
    some = dqn.Batch(*(allowed if n == "masks" else getattr(some, n) for n in some.__struct_fields__))
    loss, gradient = by_autograd(agent, some, 0.3, 0.7)
    made = dqn.gradient_step(agent, some, tau=0.01, clip_norm=1e9, margin=0.3, margin_weight=0.7)
    assert made.loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(agent.gradient, gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_splits_into_batches_one_after_the_other() -> None:
    whole = dqn.Batch(
        torch.arange(12.0).view(6, 2), torch.arange(6), torch.arange(6.0), torch.ones(6), exhausted=torch.zeros(6)
    )
    parts = whole.split(2)
    assert [part.actions.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5]]
    assert parts[1].inputs.tolist() == [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]
    assert parts[0].masks is None
    assert parts[0].exhausted is not None
