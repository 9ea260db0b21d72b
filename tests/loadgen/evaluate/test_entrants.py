"""Policies by name: known ones act as named, unknown ones are told what is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.control import Seen
from loadgen.evaluate import matrix
from loadgen.evaluate.entrants import ABLATIONS, VARIANTS, entrant
from loadgen.evaluate.runs import promising
from loadgen.policies import ADMISSIONS
from loadgen.workload import builtin
from schemas.actions import Action
from schemas.features import FEATURE, FEATURE_COUNT
from services import qweights
from services.decision.heuristic import HeuristicSettings
from services.errors import PolicyError, UserError

ALL = 0b11111


def _seen(**features: float) -> Seen:
    raw = np.zeros((1, FEATURE_COUNT), np.float32)
    raw[0, [at for name, at in FEATURE.items() if name.startswith("since_")]] = 99.0
    for name, value in features.items():
        raw[0, FEATURE[name]] = value
    none = np.zeros(1, np.uint8)
    parts = np.zeros((1, 8), np.float32)
    return Seen(0, raw, np.array([ALL], np.uint8), np.zeros((1, 5), np.uint8), none, none.astype(np.int64), parts)


def _choice(name: str, weights: Path | None = None, **features: float) -> int:
    rule = entrant(name, weights).rule([slice(0, 1)], [1])
    return int(rule(_seen(**features))[0])


def _network(path: Path, bias: Action) -> Path:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in qweights.shapes((8,)).items()}
    tensors["advantage.bias"][bias] = 1.0
    path.write_bytes(qweights.save(qweights.Weights(tensors, (8,), "constant")))
    return path


HALF_FULL = {"u_alloc": 0.6, "quota_hard": 1.0, "q0_share": 1.0}


def test_variants_of_the_heuristic_differ_where_they_say() -> None:
    assert _choice("heuristic:early", **HALF_FULL) == Action.EVICT
    assert _choice("heuristic:late", **HALF_FULL) == Action.HOLD
    assert _choice("heuristic:late", **HALF_FULL | {"u_alloc": 0.99}) == Action.EVICT
    assert _choice("heuristic:never", **HALF_FULL | {"u_alloc": 0.99}) == Action.HOLD
    assert len({*VARIANTS.values(), HeuristicSettings()}) == len(VARIANTS) + 1, "each is another setting"


def test_a_policy_without_an_action_or_a_feature_does_without(tmp_path: Path) -> None:
    assert _choice("heuristic:early-no_evict", **HALF_FULL) == Action.HOLD
    growing = HALF_FULL | {"u_alloc": 0.2, "du_alloc": 0.1}
    assert _choice("heuristic:early", **growing) == Action.EVICT
    assert _choice("heuristic:early-no_slope", **growing) == Action.HOLD
    path = _network(tmp_path / "p", Action.COMPACT)
    assert _choice("dqn", path) == Action.COMPACT
    assert _choice("dqn-no_compact", path) != Action.COMPACT


def test_engines_of_another_mode_admit_as_they_are_told() -> None:
    for name, admission in (("heuristic", "deadline_cap_shed"), ("heuristic-physical", "fcfs")):
        mode = entrant(name).mode(admission)
        assert (mode.order, mode.running_cap, mode.shed) == (
            ("deadline", True, True) if admission != "fcfs" else ("fcfs", False, False)
        )
    assert entrant("heuristic-physical").mode("fcfs").admission == "physical"
    assert entrant("heuristic-oracle_returns").mode("fcfs").returns == "oracle"
    assert entrant("static").mode("deadline").air_bag_bytes > 0


def test_random_is_the_same_beside_whatever_other_traces() -> None:
    seen = _seen()
    two = Seen(*(np.repeat(field, 2, axis=0) if isinstance(field, np.ndarray) else field for field in seen))
    alone = entrant("random").rule([slice(0, 1)], [7])
    beside = entrant("random").rule([slice(0, 1), slice(1, 2)], [3, 7])
    assert [int(alone(seen)[0]) for _ in range(20)] == [int(beside(two)[1]) for _ in range(20)]


@pytest.mark.parametrize("name", ["magic", "heuristic:magic", "heuristic-no_magic", "dqn"])
def test_a_name_that_means_nothing_is_a_mistake_that_is_explained(name: str) -> None:
    with pytest.raises(UserError, match=r"expected|needs --policy"):
        entrant(name)


def test_a_file_that_is_no_network_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"no")
    with pytest.raises(PolicyError):
        entrant("dqn", tmp_path / "p")
    with pytest.raises(UserError, match="No such file"):
        entrant("dqn", tmp_path / "q")


def test_every_baseline_of_the_design_is_examined_under_both_orders(tmp_path: Path) -> None:
    path = _network(tmp_path / "p", Action.HOLD)
    cells = matrix.cells(matrix.Plan(), [path, path], [f"dqn-{one}" for one in ABLATIONS])
    names = {(cell.entrant.name, cell.admission) for cell in cells}
    for policy in ("static", "rho_1.0", "vllm_recompute", "vllm_offload", "one_line", "heuristic", "random", "dqn"):
        assert {(policy, "fcfs"), (policy, "deadline"), (policy, "deadline_cap_shed")} <= names
    assert {("heuristic", admission) for admission in ADMISSIONS} <= names
    assert ("dqn:2", "deadline_cap_shed") in names
    assert sum(not cell.timeouts for cell in cells) == 3, "the baseline, the heuristic and the network"


def test_another_default_of_max_tokens_leaves_code_completion_and_true_outputs_alone() -> None:
    chat = builtin("chat", duration_s=60.0, seed=1).requests
    more = promising(chat, 8192, 131_072)
    assert (more.max_tokens == 8192).all()
    less = promising(chat, 100, 131_072)
    assert (less.max_tokens == np.maximum(100, chat.output_tokens)).all()
    code = builtin("code", duration_s=60.0, seed=1).requests
    assert (promising(code, 8192, 131_072).max_tokens == code.max_tokens).all()
