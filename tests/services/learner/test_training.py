from __future__ import annotations

import numpy as np
import pytest

from schemas.actions import Action
from schemas.features import FEATURE
from schemas.transitions import REWARD_PARTS, TransitionBatch
from services import qweights
from services.errors import PolicyError
from services.learner.agent import tensors_of
from services.learner.settings import Settings
from services.learner.training import Trainer
from services.learner.update import targets
from services.qnet import QNet, digest
from services.qweights import Origin, veto_of
from tests.services.learner.batches import batch, deliver, state

SMALL = Settings(hidden=(32,), capacity_rows=512, warmup_rows=16, batch=16, publish_updates=10, seed=3)


def fed(settings: Settings = SMALL, steps: int = 40) -> Trainer:
    trainer = Trainer(settings)
    for step in range(steps):
        trainer.ingest(deliver(batch(step), first=step + 1))
        trainer.learn()
    return trainer


class Corridor:
    """States 0 .. 4 on a line. EVICT in state 4 pays 1 and ends, TIGHTEN steps back, WIDEN steps on, and HOLD
    pays 0.1 at once: a greedy eye stays, a patient one walks. COMPACT would pay 5 and is never allowed."""

    LENGTH = 5
    MASK = 0b11111 & ~(1 << Action.COMPACT)

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.at = 0

    def transition(self, step: int) -> TransitionBatch:
        allowed = [a for a in range(5) if self.MASK >> a & 1]
        action = int(self.rng.choice(allowed))
        here, reward, done = self.at, 0.0, False
        if action == Action.WIDEN:
            self.at = min(here + 1, self.LENGTH - 1)
        elif action == Action.TIGHTEN:
            self.at = max(here - 1, 0)
        elif action == Action.EVICT and here == self.LENGTH - 1:
            reward, done = 1.0, True
        elif action == Action.HOLD:
            reward = 0.01
        rewards = np.zeros((1, len(REWARD_PARTS)), np.float32)
        rewards[0, REWARD_PARTS.index("goodput")] = reward
        sent = batch(
            step,
            states=self.observe(here),
            next_states=self.observe(self.at),
            actions=[action],
            masks=[self.MASK],
            next_masks=[self.MASK],
            probabilities=[1 / len(allowed)],
            rewards=rewards,
            discounts=[0.0 if done else 1.0],
            dones=[int(done)],
        )
        if done:
            self.at = int(self.rng.integers(self.LENGTH))
        return sent

    @staticmethod
    def observe(place: int) -> np.ndarray:
        row = state(0.0)
        row[FEATURE["class_chat"] + place] = 1.0  # one-hot: the test is of the learning, not of the interpolation
        return row.reshape(1, -1)


@pytest.mark.parametrize("cut", ["greedy", "behaviour"])
def test_a_corridor_is_solved_from_random_steps_alone(cut: str) -> None:
    settings = Settings(
        hidden=(32,), gamma=0.9, learning_rate=3e-3, tau=0.05, updates_per_transition=1.0, warmup_rows=64, batch=32,
        beta_updates=400, off_policy_cut=cut, capacity_rows=4096, seed=1,
        updates_at_once=1,
    )  # fmt: skip
    corridor, trainer = Corridor(seed=7), Trainer(settings)
    for start in range(0, 440, 20):
        trainer.ingest(deliver(*(corridor.transition(step) for step in range(start, start + 20)), first=start + 1))
        trainer.learn()
    q = trainer.agent.online.q_values(np.concatenate([Corridor.observe(place) for place in range(Corridor.LENGTH)]))
    q[:, Action.COMPACT] = -np.inf
    expected = [Action.WIDEN] * (Corridor.LENGTH - 1) + [Action.EVICT]
    assert q.argmax(axis=1).tolist() == expected, f"Q:\n{q.round(2)}"
    if cut == "greedy":  # behaviour cuts every return here, since a random policy prefers nothing
        exact = [0.9 ** (Corridor.LENGTH - 1 - place) for place in range(Corridor.LENGTH)]
        assert np.abs(q.max(axis=1) - exact).max() < 0.15, "and the values are the discounted reward"


@pytest.mark.parametrize(
    ("cut", "second", "likely", "expected"),
    [
        ("greedy", Action.HOLD, 0.1, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 10),
        ("greedy", Action.WIDEN, 1.0, 1 + 0.5 * 10),
        ("behaviour", Action.WIDEN, 1.0, 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 10),
        ("behaviour", Action.HOLD, 0.1, 1 + 0.5 * 10),
    ],
)
def test_targets_join_rows_up_to_the_first_off_policy_action(
    cut: str, second: Action, likely: float, expected: float
) -> None:
    """The online network prefers hold everywhere, the target network says 10 everywhere; rewards are 1, 2, 4."""
    trainer = Trainer(Settings(hidden=(4,), gamma=0.5, n_step=3, off_policy_cut=cut, warmup_rows=1))  # type: ignore[arg-type]
    for net, value in ((trainer.agent.online, 0.0), (trainer.agent.target, 10.0)):
        for parameter in net.parameters():
            parameter.data.zero_()
        net.value.bias.data.fill_(value)
    trainer.agent.online.advantage.bias.data[Action.HOLD] = 1.0
    rewards = np.zeros((3, 1, len(REWARD_PARTS)), np.float32)
    rewards[:, 0, REWARD_PARTS.index("goodput")] = (1, 2, 4)
    trainer.ingest(
        deliver(
            batch(0, rewards=rewards[0], actions=[Action.EVICT]),
            batch(1, rewards=rewards[1], actions=[second], probabilities=[likely]),
            batch(2, rewards=rewards[2]),
        )
    )
    chain = trainer.intake.replay.chain(np.array([0]), 3)
    assert targets(trainer.agent, trainer.intake.replay, chain, trainer.settings).item() == pytest.approx(expected)


def test_updates_are_owed_per_transition_and_only_after_the_warm_up() -> None:
    trainer = fed(steps=SMALL.warmup_rows - 1)
    assert trainer.agent.updates == 0
    for step in range(100, 140):
        trainer.ingest(deliver(batch(step), first=step))
        trainer.learn()
    assert trainer.agent.updates == 40 * SMALL.updates_per_transition
    assert trainer.transitions == SMALL.warmup_rows - 1 + 40


def test_ratio_zero_stores_and_never_learns() -> None:
    trainer = fed(Settings(hidden=(32,), capacity_rows=512, warmup_rows=1, updates_per_transition=0.0))
    assert trainer.intake.replay.size == 40
    assert trainer.agent.updates == 0


def test_what_is_owed_beyond_a_fetch_is_forgiven_and_told() -> None:
    trainer = Trainer(Settings(hidden=(8,), warmup_rows=1, updates_per_transition=1.0, max_updates_per_fetch=4))
    trainer.ingest(deliver(batch(1, rows=10)))
    learned = trainer.learn()
    assert (learned.updates, learned.forgiven) == (4, 6)
    assert trainer.learn().updates == 0


def test_a_stop_leaves_the_rest_owed() -> None:
    trainer = Trainer(Settings(hidden=(8,), warmup_rows=1, updates_per_transition=1.0, updates_at_once=1))
    trainer.ingest(deliver(batch(1, rows=10)))
    answers = iter([False, False, True])
    assert trainer.learn(lambda: next(answers)).updates == 2
    assert trainer.owed == 8


def test_the_same_transitions_give_the_same_weights() -> None:
    one, two = (fed().make_candidate() for _ in range(2))
    assert one == two


def test_a_candidate_names_what_it_is_and_where_it_comes_from() -> None:
    trainer = fed(steps=80)
    assert trainer.candidate_due
    first = trainer.make_candidate()
    assert not trainer.candidate_due
    assert first.version.startswith("dqn-80-")
    assert first.sha256 == digest(first.data)
    assert QNet.load(first.data).version == first.version
    trainer.update()
    assert trainer.make_candidate().parent == first.version


def test_unfit_weights_are_not_published_and_the_agent_returns_to_sound_ones() -> None:
    trainer = fed(steps=80)
    sound = trainer.make_candidate()
    with_nan = next(trainer.agent.online.parameters())
    with_nan.data[:] = float("nan")
    with pytest.raises(PolicyError):
        trainer.make_candidate()
    assert digest(trainer.agent.online.save()) != ""
    restored = tensors_of(trainer.agent)
    expected = QNet.load(sound.data).state_dict()
    assert all(np.array_equal(restored[f"online.{name}"], t.numpy()) for name, t in expected.items())


def test_absurd_q_values_are_not_published() -> None:
    trainer = fed(steps=80)
    trainer.agent.online.value.bias.data[:] = 900.0
    trainer.agent.online.value.weight.data[:] = 900.0
    with pytest.raises(PolicyError, match="Q values"):
        trainer.make_candidate()


@pytest.mark.parametrize("keep_rows", [False, True])
def test_a_restored_learner_goes_on_where_the_checkpoint_was_written(keep_rows: bool) -> None:
    settings = Settings(hidden=(32,), capacity_rows=64, warmup_rows=16, batch=16, seed=3, checkpoint_replay=keep_rows)
    stream = deliver(*(batch(step) for step in range(100)))
    one = Trainer(settings)
    for delivery in stream[:90]:
        one.ingest([delivery])
        one.learn()
    saved = one.checkpoint("life")
    other = Trainer(settings)
    sequence = other.restore(saved, "life")
    assert sequence == (91 if keep_rows else 90 - 64 + 1), "without rows, from the oldest row in the replay"
    updates = other.agent.updates
    other.ingest(stream[sequence - 1 : 90])
    other.learn()
    assert other.agent.updates == updates, "rows that were learned from fill the replay and owe nothing"
    assert other.transitions == one.transitions
    assert other.intake.replay.size == 64
    for trainer in (one, other):
        trainer.ingest(stream[90:])
        trainer.learn()
    assert one.agent.updates == other.agent.updates
    if keep_rows:
        ours, theirs = tensors_of(one.agent), tensors_of(other.agent)
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours), "not one bit differs"


def test_a_restored_learners_candidates_keep_the_veto_of_the_champion_it_began_from() -> None:
    champion = QNet((32,), risk_size=4, origin=Origin(seed=7, command="tidegate train", config={"veto": 0.25}))
    one = Trainer(SMALL, start=champion)
    assert veto_of(qweights.load(one.make_candidate().data)) == 0.25
    other = Trainer(SMALL)
    other.restore(one.checkpoint("life"), "life")
    assert qweights.load(other.make_candidate().data).origin == champion.origin


def test_a_checkpoint_while_the_replay_is_refilled_does_not_go_back() -> None:
    settings = Settings(hidden=(32,), capacity_rows=64, warmup_rows=16, batch=16)
    saved = fed(settings, steps=60).checkpoint("life")
    trainer = Trainer(settings)
    trainer.restore(saved, "life")
    again = trainer.checkpoint("life").meta
    assert (again.sequence, again.replay_from) == (saved.meta.sequence, saved.meta.replay_from)


def test_another_life_of_the_stream_is_read_from_its_beginning_with_the_old_weights() -> None:
    saved = fed().checkpoint("one life")
    trainer = Trainer(SMALL)
    assert trainer.restore(saved, "another") == 1
    assert trainer.agent.updates > 0
    assert trainer.ingest(deliver(batch(0))).fresh == 1


def test_a_checkpoint_for_something_else_is_refused() -> None:
    saved = fed().checkpoint("life")
    for settings in (Settings(hidden=(16,)), Settings(hidden=(32,), objective="article")):
        with pytest.raises(PolicyError, match="expected"):
            Trainer(settings).restore(saved, "life")
