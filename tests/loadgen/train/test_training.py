"""A training run end to end on a small scene: it learns, repeats, and goes on after a kill."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from loadgen.train import checkpoint, cli, validation
from loadgen.train.settings import TrainSettings
from loadgen.train.training import Training, differing
from schemas.features import FEATURE_COUNT
from services import cli as services_cli
from services import qweights
from services.errors import UserError
from services.learner.agent import tensors_of
from services.learner.replay_buffer import NOTHING_SHOWN
from tests.loadgen.train.scene import Scene, settings


def training(folder: Path, told: list[str] | None = None, **changes: object) -> Training:
    lines = [] if told is None else told
    return Training(
        settings(**changes), folder / "policy.safetensors", folder / "run", tell=lines.append,
        command="tidegate train --seed 0", scenarios=Scene(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, list[str]]:
    told: list[str] = []
    one = training(tmp_path_factory.mktemp("train"), told)
    one.run()
    return one, told


def test_a_run_ends_with_a_policy_that_says_how_it_was_made(ran: tuple[Training, list[str]]) -> None:
    one, _ = ran
    data = one.policy_file.read_bytes()
    weights = qweights.load(data)
    assert len(data) < 1_000_000
    assert weights.origin.seed == 0
    assert weights.origin.command == "tidegate train --seed 0"
    assert msgspec.convert(weights.origin.config, TrainSettings) == one.settings
    found = qweights.values(weights, np.zeros((1, FEATURE_COUNT), np.float32))
    assert found.q.shape == (1, 5)
    assert found.risk is not None


def test_the_process_reckons_as_before(ran: tuple[Training, list[str]]) -> None:
    smallest = torch.nextafter(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert (smallest * 1).item() > 0, "training left the smallest numbers flushed to zero for everybody"


def test_it_is_validated_on_the_way_and_the_best_network_is_kept(ran: tuple[Training, list[str]]) -> None:
    one, told = ran
    assert len(one.curve) >= 2
    assert one.best == max(point.ratio for point in one.curve)
    assert sum("(written)" in line for line in told) >= 1


def test_the_heuristic_acts_first_and_goes_on_on_some_cards(ran: tuple[Training, list[str]]) -> None:
    one, _ = ran
    replay = one.replay
    own = replay.probabilities[: replay.size] < 1
    assert not own[: one.settings.demonstrations].any()
    assert (replay.shown == replay.actions)[: one.settings.demonstrations].all()
    later = own[one.settings.demonstrations + 8 :]
    assert 0.2 < later.mean() < 0.7, "one of every fleet's two cards is the heuristic's"


def test_what_the_heuristic_would_do_is_shown_in_every_state(ran: tuple[Training, list[str]]) -> None:
    replay = ran[0].replay
    shown = replay.shown[: replay.size]
    assert (shown != NOTHING_SHOWN).all()
    assert (replay.masks[: replay.size] >> shown & 1).all(), "and it is allowed"
    assert (shown != replay.actions[: replay.size]).any(), "also where something else was done"


def test_rows_are_linked_and_behaviour_is_told(ran: tuple[Training, list[str]]) -> None:
    replay = ran[0].replay
    chain = replay.chain(np.arange(8), 3)
    assert (chain >= 0).all(), "an episode goes on"
    np.testing.assert_array_equal(replay.states[chain[1]], replay.next_states[chain[0]])
    assert (replay.probabilities[: replay.size] < 1).any()
    assert (replay.masks[: replay.size] >> replay.actions[: replay.size] & 1).all(), "nothing forbidden was done"


def test_the_same_seed_gives_the_same_policy(tmp_path: Path, ran: tuple[Training, list[str]]) -> None:
    again = training(tmp_path)
    again.run()
    assert again.policy_file.read_bytes() == ran[0].policy_file.read_bytes()


def test_after_a_kill_it_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    one = training(tmp_path, transitions=250)
    one.run()
    best, curve = one.best, list(one.curve)
    other = training(tmp_path, transitions=320)
    saved = checkpoint.load(other.folder)
    assert saved is not None
    other.restore(saved)
    ours, theirs = tensors_of(one.agent), tensors_of(other.agent)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours), "optimiser and all"
    assert (other.transitions, other.agent.updates) == (one.transitions, one.agent.updates)
    assert other.replay.size == one.replay.size
    assert (other.replay.tree.total, other.epsilon) == (one.replay.tree.total, one.epsilon)
    other.run()
    assert other.transitions >= 320
    assert other.curve[: len(curve)] == curve
    assert other.best >= best, "the policy file never gets worse"


def test_an_interrupt_writes_a_checkpoint(tmp_path: Path) -> None:
    one = training(tmp_path)

    def interrupt(fresh: int) -> None:
        if one.transitions > 150:
            raise KeyboardInterrupt

    one._learn = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        one.run()
    saved = checkpoint.load(one.folder)
    assert saved is not None
    assert saved.meta.transitions == one.transitions


def test_a_half_written_checkpoint_is_not_there_and_a_spoilt_one_is_told(tmp_path: Path) -> None:
    (tmp_path / f".{checkpoint.NAME}.part").write_bytes(b"half")
    assert checkpoint.load(tmp_path) is None
    (tmp_path / checkpoint.NAME).write_bytes(b"spoilt")
    with pytest.raises(UserError, match="not readable"):
        checkpoint.load(tmp_path)


def test_settings_that_only_make_a_run_longer_do_not_differ() -> None:
    assert differing(settings(), settings(transitions=9_999, report_every_s=1.0)) == []
    assert differing(settings(), settings(seed=1, cards=1)) == ["seed", "cards"]


def test_the_score_is_goodput_over_the_heuristics() -> None:
    found = validation.score([110.0, 45.0, 0.0], [100.0, 50.0, 0.0])
    assert (found.ratios, found.worst) == ([1.1, 0.9, 1.0], 0.9)
    assert found.ratio == pytest.approx(1.0)


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(list(words))


def test_mistakes_of_the_user_are_told(tmp_path: Path) -> None:
    out, config = tmp_path / "p.safetensors", tmp_path / "config.json"
    for text, expected in (
        ('{"epsilon": 1}', "epsilon"),
        ('{"transition": 1}', "transition: an unknown key, expected the known key 'transitions'"),
        ('{"learner": {"batchh": 1}}', "learner.batchh: an unknown key, expected the known key 'batch'"),
        ('{"learner": {"gamma": 7}}', "gamma"),
        ('{"admissions": ["best"]}', "expected some of"),
        ("not json", "config"),
    ):
        config.write_text(text)
        with pytest.raises(UserError, match=expected):
            cli.run(options("--out", str(out), "--config", str(config)))
    with pytest.raises(UserError, match="does not exist"):
        cli.run(options("--out", str(tmp_path / "no" / "p.safetensors")))


def test_a_run_too_short_to_learn_anything_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "policy.safetensors"
    assert services_cli.main(["train", "--out", str(out), "--transitions", "20000"]) == 2
    assert "nothing would be learned" in capsys.readouterr().err
    assert not out.exists()
