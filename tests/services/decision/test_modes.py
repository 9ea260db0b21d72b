"""Whom operators keep from being commanded: which order counts, until when, and what the engine is told."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.actions import OPERATOR, Action, ActionBatch, Hold, WorkerAction, actions_of, left_alone
from schemas.config import (
    KEY_KILL,
    KEY_MODE,
    KEY_PAUSE,
    KEY_PIN,
    KillOrder,
    ModeOrder,
    Order,
    OverrideOrder,
    PauseOrder,
    PinOrder,
    mode_key,
    override_key,
    place_of,
    read_order,
)
from schemas.states import features_of
from services.decision.book import InForce
from services.decision.commands import Decider
from services.decision.heuristic import HeuristicSettings
from services.decision.intake import Admitted
from services.decision.modes import Modes, Standing, in_share
from services.decision.policy import DqnPolicy, Policy, rule
from services.decision.settings import Settings
from tests.services.decision.rows import state, state_batch, weights

W, OTHER = "n0/0/w0", "n0/0/w1"
NOW = 1_000
BY: dict[str, Any] = {"who": "ann", "when_ns": 1, "why": "test"}
ENFORCE, SHADOW, OFF = [ModeOrder(mode=mode, **BY) for mode in ("enforce", "shadow", "off")]
PAUSE = PauseOrder(active=True, **BY)
KILL = KillOrder(active=True, **BY)
RHO = OverrideOrder(active=True, rho=1.3, **BY)
CHAT = mode_key(service_class="chat")
MINE = mode_key(worker=W)


def modes(orders: dict[str, Order], default: str = "enforce") -> Modes:
    made = Modes(default)  # type: ignore[arg-type]
    for revision, (key, order) in enumerate(orders.items(), start=1):
        made.enter(key, msgspec.json.encode(order), revision)
    return made


def ended(order: Order, at_ns: int = NOW) -> Order:
    return msgspec.structs.replace(order, expires_ns=at_ns)


@pytest.mark.parametrize(
    ("orders", "hold", "key"),
    [
        ({}, Hold.NONE, ""),
        ({KEY_MODE: SHADOW}, Hold.SHADOW, KEY_MODE),
        ({KEY_MODE: OFF}, Hold.MODE_OFF, KEY_MODE),
        ({KEY_MODE: SHADOW, CHAT: ENFORCE}, Hold.NONE, CHAT),
        ({KEY_MODE: ENFORCE, CHAT: ENFORCE, MINE: SHADOW}, Hold.SHADOW, MINE),
        ({KEY_MODE: ENFORCE, mode_key(service_class="batch"): OFF}, Hold.NONE, KEY_MODE),
        ({KEY_MODE: SHADOW, MINE: ModeOrder(mode="inherit", **BY)}, Hold.SHADOW, KEY_MODE),
        ({KEY_MODE: SHADOW, MINE: ended(ENFORCE)}, Hold.SHADOW, KEY_MODE),
        ({KEY_MODE: SHADOW, MINE: ended(ENFORCE, NOW + 1)}, Hold.NONE, MINE),
        ({mode_key(worker=OTHER): OFF}, Hold.NONE, ""),
        ({KEY_PAUSE: PAUSE}, Hold.PAUSED, KEY_PAUSE),
        ({KEY_PAUSE: ended(PAUSE)}, Hold.NONE, ""),
        ({KEY_PAUSE: PauseOrder(active=False, **BY)}, Hold.NONE, ""),
        ({KEY_PAUSE: PAUSE, KEY_MODE: SHADOW}, Hold.SHADOW, KEY_MODE),
        ({override_key(W): RHO}, Hold.OVERRIDE, override_key(W)),
        ({override_key(W): RHO, KEY_PAUSE: PAUSE, KEY_MODE: OFF}, Hold.OVERRIDE, override_key(W)),
        ({override_key(W): ended(RHO), KEY_PAUSE: PAUSE}, Hold.PAUSED, KEY_PAUSE),
        ({override_key(OTHER): RHO}, Hold.NONE, ""),
        ({KEY_KILL: KILL, override_key(W): RHO, MINE: ENFORCE}, Hold.KILLED, KEY_KILL),
        ({KEY_KILL: KillOrder(active=False, **BY), MINE: ENFORCE}, Hold.NONE, MINE),
        ({KEY_PIN: PinOrder(active=True, version="v1", **BY)}, Hold.NONE, ""),
    ],
)  # fmt: skip
def test_the_strongest_order_that_still_stands_counts(orders: dict[str, Order], hold: Hold, key: str) -> None:
    made = modes(orders)
    (standing,) = made.standings([W], [0], NOW)
    assert (standing.hold, standing.key) == (hold, key)
    if made.plain(NOW):
        assert hold == Hold.NONE, "the short way must not pass over anybody"


def test_without_an_order_the_setting_counts() -> None:
    (standing,) = modes({}, "shadow").standings([W], [0], NOW)
    assert standing == Standing("shadow", Hold.SHADOW)
    assert not modes({}, "shadow").plain(NOW)
    assert modes({}, "canary").standings([W], [0], NOW)[0].hold == Hold.SHADOW, "no share was ever named"


def test_a_canary_mode_commands_the_same_share_always_and_a_worker_of_its_own_wholly() -> None:
    canary = ModeOrder(mode="canary", share=0.2, **BY)
    workers = [f"n{k}/0/w0" for k in range(500)]
    standings = modes({KEY_MODE: canary}).standings(workers, [0] * 500, NOW)
    chosen = [worker for worker, one in zip(workers, standings, strict=True) if one.hold == Hold.NONE]
    assert 60 <= len(chosen) <= 140, "about a fifth"
    assert all(in_share(worker, 0.2) for worker in chosen)
    assert all(one.canary == (one.hold == Hold.NONE) for one in standings)
    assert modes({MINE: canary}).standings([W], [0], NOW)[0].canary


def test_a_key_or_a_value_without_sense_changes_nothing() -> None:
    made = modes({KEY_MODE: SHADOW})
    for key, value in [
        (KEY_MODE, b"shadow"),
        (KEY_MODE, b'{"mode":"shadw","who":"a","when_ns":1,"why":"b"}'),
        (KEY_MODE, b'{"mode":"off","when_ns":1,"why":"b"}'),
        (override_key(W), b'{"active":true,"rho":1.7,"who":"a","when_ns":1,"why":"b"}'),
        ("mode.class.turtle", msgspec.json.encode(OFF)),
        ("override", msgspec.json.encode(RHO)),
        ("mode.worker._zz", msgspec.json.encode(OFF)),
    ]:
        with pytest.raises(ValueError, match=r"."):
            made.enter(key, value, 9)
    assert made.standings([W], [0], NOW)[0].hold == Hold.SHADOW
    made.enter(KEY_MODE, None, 10)
    assert made.standings([W], [0], NOW)[0].hold == Hold.NONE, "a deleted order says nothing"


def test_keys_can_be_read_back() -> None:
    assert place_of(mode_key(worker=W)) == ("mode", "worker", W)
    assert place_of(override_key("a.b/0/w_1")) == ("override", "worker", "a.b/0/w_1")
    assert place_of(mode_key(service_class="Agent")) == ("mode", "class", "agent")
    assert read_order(KEY_KILL, msgspec.json.encode(KILL)) == KILL
    with pytest.raises(ValueError, match="expected one of chat"):
        mode_key(service_class="chatty")


DQN = DqnPolicy(weights("v1", [0, 0, 0, 0, 1]))
"""Always evicts."""


def decided(orders: dict[str, Order], *, acting: Policy = DQN, holds: list[int] | None = None, workers: int = 2,
            default: str = "enforce", **features: float) -> ActionBatch:  # fmt: skip
    batch = state_batch(np.repeat(state(**features), workers, axis=0), holds=holds)
    decider = Decider(Settings(), np.random.default_rng(0))
    admitted = [Admitted(batch, features_of(batch), bytes(batch.classes), bytes(batch.holds))]
    standings = modes(orders, default).standings(batch.workers, batch.classes, NOW)
    return decider.decide(admitted, InForce(acting, None), standings).batches[0]


def first(batch: ActionBatch) -> WorkerAction:
    return actions_of(batch)[0]


def test_an_enforced_node_gets_the_same_bytes_with_and_without_orders_for_others() -> None:
    batch = decided({mode_key(worker="n9/0/w0"): OFF})
    assert (first(batch).action, first(batch).policy, first(batch).hold) == (Action.EVICT, "dqn:v1", Hold.NONE)
    assert (batch.policies, batch.policy_index, batch.shadows) == (("dqn:v1",), b"", ())


@pytest.mark.parametrize(
    ("orders", "hold", "rho", "ceiling"),
    [
        ({MINE: SHADOW}, Hold.SHADOW, 1.0, 256),
        ({KEY_PAUSE: PAUSE}, Hold.PAUSED, 1.4, 300),
        ({KEY_KILL: KILL}, Hold.KILLED, 1.0, 256),
        ({override_key(W): RHO}, Hold.OVERRIDE, 1.3, 300),
        ({override_key(W): OverrideOrder(active=True, max_running=64, **BY)}, Hold.OVERRIDE, 1.4, 64),
    ],
)
def test_a_held_worker_holds_and_the_policys_decision_travels_as_a_shadow(
    orders: dict[str, Order], hold: Hold, rho: float, ceiling: int
) -> None:
    command = first(decided(orders, rho=1.4, max_running=300))
    assert (command.action, command.hold, command.policy, command.probability) == (Action.HOLD, hold, OPERATOR, 1.0)
    assert (command.target_rho, command.target_max_running) == (rho, ceiling)
    assert [(one.policy, one.action) for one in command.shadows] == [("dqn:v1", Action.EVICT)]
    assert len(command.q_values) == 5
    assert command.mask == 31, "the shield's mask, which learning needs, is not the operator's word"


def test_an_off_worker_is_held_at_its_baseline_and_nothing_is_recommended() -> None:
    command = first(decided({MINE: OFF}, rho=1.4))
    assert (command.action, command.hold, command.target_rho) == (Action.HOLD, Hold.MODE_OFF, 1.0)
    assert (command.shadows, command.q_values) == ((), ())


def test_the_neighbour_of_a_held_worker_goes_on_under_its_policy() -> None:
    batch = decided({MINE: SHADOW})
    held, free = actions_of(batch)
    assert (free.action, free.policy, free.hold) == (Action.EVICT, "dqn:v1", Hold.NONE)
    assert (held.policy, batch.policies) == (OPERATOR, ("dqn:v1", OPERATOR))


def test_an_overrides_action_is_taken_where_the_shield_allows_it() -> None:
    order = {override_key(W): OverrideOrder(active=True, action="compact", **BY)}
    assert first(decided(order)).action == Action.COMPACT
    assert first(decided(order, f_frag=0.0)).action == Action.HOLD, "nothing is fragmented"
    widen = {override_key(W): OverrideOrder(active=True, action="widen", **BY)}
    assert first(decided(widen, rho=1.2)).target_rho == 1.3


def test_an_override_stays_below_what_its_class_allows() -> None:
    order = {override_key(W): OverrideOrder(active=True, rho=1.6, **BY)}
    batch = state_batch(state(), classes=[3])
    decider = Decider(Settings(), np.random.default_rng(0))
    admitted = [Admitted(batch, features_of(batch), bytes(batch.classes), bytes(batch.holds))]
    standings = modes(order).standings(batch.workers, batch.classes, NOW)
    command = first(decider.decide(admitted, InForce(DQN, None), standings).batches[0])
    assert command.target_rho == 1.3, "copilot's highest"


@pytest.mark.parametrize(
    ("orders", "hold", "rho"),
    [
        ({MINE: SHADOW}, Hold.STALE, 1.0),
        ({KEY_PAUSE: PAUSE}, Hold.STALE, 1.4),
        ({KEY_KILL: KILL}, Hold.KILLED, 1.0),
        ({override_key(W): RHO}, Hold.OVERRIDE, 1.3),
    ],
)
def test_a_doubt_about_the_state_stays_visible_but_stops_no_kill_switch(
    orders: dict[str, Order], hold: Hold, rho: float
) -> None:
    command = first(decided(orders, holds=[Hold.STALE, 0], rho=1.4))
    assert (command.action, command.hold, command.target_rho) == (Action.HOLD, hold, rho)


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_under_a_doubt_the_order_is_told_beside_it_so_that_nothing_is_done_to_the_worker(mode: str) -> None:
    batch = decided({KEY_MODE: ModeOrder(mode=mode, **BY)}, holds=[Hold.STALE, 0])
    assert first(batch).hold == Hold.STALE
    assert left_alone(batch) == [True, True]
    paused = decided({KEY_PAUSE: PAUSE}, holds=[Hold.STALE, 0])
    assert left_alone(paused) == [False, False], "a pause keeps what is in force, and renews it"


def test_only_commanded_workers_explore_and_a_canary_mode_names_them() -> None:
    decider = Decider(Settings(epsilon=0.2), np.random.default_rng(0))
    heuristic = rule("heuristic", HeuristicSettings(), np.random.default_rng(0))
    batch = state_batch(np.repeat(state(), 200, axis=0))
    admitted = [Admitted(batch, features_of(batch), bytes(batch.classes), bytes(batch.holds))]
    made = modes({KEY_MODE: ModeOrder(mode="canary", share=0.5, **BY)})
    standings = made.standings(batch.workers, batch.classes, NOW)
    rows = actions_of(decider.decide(admitted, InForce(heuristic, None), standings).batches[0])
    assert {row.hold for row in rows} == {Hold.NONE, Hold.SHADOW}
    assert all(row.probability == 1.0 for row in rows if row.hold)
    assert all(row.probability < 1.0 for row in rows if not row.hold)
    shadow = [row.shadows[-1].action for row in rows if row.hold]
    assert set(shadow) == {Action.HOLD}, "what is recommended is the policy's own choice"
