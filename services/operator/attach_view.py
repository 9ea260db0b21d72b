"""What attach says while it runs: a line a worker now and then, of what is seen and what would be done about it."""

from __future__ import annotations

import math
import time
from typing import Final

from schemas.actions import OPERATOR_HOLDS, Action, Hold, MaskReason
from schemas.identity import STEP_S
from schemas.outcomes import Refusal
from services.decision.settings import Settings
from services.operator.live import Heard
from services.operator.reasons import heuristic_choice, heuristic_rules
from services.operator.story import recommended

SILENT_S: Final = 3 * STEP_S
"""Without a state for so long, the worker's step is over: its leases run out in the engine as well."""
DOUBTS: Final = {
    Hold.WINDOW_FILLING: "held: its window of the past is not full yet",
    Hold.STALE: "stale and held",
    Hold.ENGINE_STARTING: "held: the engine starts",
    Hold.SAMPLE_REJECTED: "stale and held: nothing that could be believed came from the server",
    Hold.FEATURE_TABLE_MISMATCH: "held: featurizer and decision are of different versions",
}


def line_of(worker: str, heard: Heard | None, settings: Settings, now_s: float) -> str:
    """One line; ``now_s``: this process's monotonic clock."""
    clock = time.strftime("%H:%M:%S", time.gmtime())
    return f"{clock}  {worker}  {_numbers(heard)}  {_words(heard, settings, now_s)}"


def _numbers(heard: Heard | None) -> str:
    if heard is None or heard.state is None:
        return "no state yet"
    get = heard.state.value
    queue = _number(get("l_queue"), ".0f")
    for_memory = get("l_queue_memory")
    if math.isfinite(for_memory) and get("l_queue") > 0:
        queue += f" ({for_memory:.0f} for memory)"
    return (
        f"u_alloc {_number(get('u_alloc'), '.2f')}  running {_number(get('running'), '.0f')}  queue {queue}  "
        f"TPOT {_times(get('tpot_p95'))}  TTFT {_times(get('ttft_p95'))}"
    )


def _words(heard: Heard | None, settings: Settings, now_s: float) -> str:
    """What is done, or would be, and why."""
    if heard is None or (heard.state is None and heard.action is None):
        return "nothing was heard yet"
    if now_s - heard.at_s > SILENT_S:
        return f"silent for {now_s - heard.at_s:.0f} s: telemetry or featurizer say nothing of it"
    action = heard.action
    if action is None:
        return "no command was heard: decision is silent (with --nats, somebody else runs it)"
    hold = Hold(action.hold)
    if hold and hold not in OPERATOR_HOLDS:
        return DOUBTS.get(hold, f"held: {hold.name.lower()}")
    policy, wish = recommended(action)
    name = Action(wish).name.lower()
    because = why(heard, settings)
    because = f" ({because})" if because else ""
    if hold in OPERATOR_HOLDS:
        return f"{hold.name.lower()}: {policy} would {name}{because}"
    done = f"{policy}: {name}{because}, rho {action.target_rho:g}"
    outcome = heard.outcome
    if outcome is not None and outcome.refusal:
        done += f"; refused: {Refusal(outcome.refusal).name.lower()}" + (
            f", {outcome.detail}" if outcome.detail else ""
        )
    elif outcome is not None and heard.judged == heard.acted:
        done += f", in force {outcome.effective_rho:g}"
    return done


def why(heard: Heard, settings: Settings) -> str:
    """The rule behind the heuristic's choice; of hold, which rule would fire and is forbidden. Empty where the policy
    is another, or the state is not the command's."""
    action, state = heard.action, heard.state
    if action is None or state is None or state.order != heard.acted:
        return ""
    policy, wish = recommended(action)
    if policy != "heuristic":
        return ""
    rules = heuristic_rules(state.features, settings.heuristic)
    if wish == Action.HOLD:
        barred = [rule.action for rule in rules if rule.fires and not action.mask >> rule.action & 1]
        if barred:
            reason = MaskReason(action.mask_reasons[barred[0]]).name.lower().replace("_", " ")
            return f"{barred[0].name.lower()} is forbidden: {reason}"
        return "no rule fires"
    if heuristic_choice(rules, action.mask) != wish:
        return ""
    return ", ".join(str(test) for rule in rules if rule.action == wish for test in rule.met_way())


def kind_of_choice(heard: Heard, settings: Settings) -> str:
    """The choice and its rule without the numbers of the moment, to be counted; empty where nobody chose."""
    action, state = heard.action, heard.state
    if action is None or state is None or state.order != heard.acted:
        return ""
    hold = Hold(action.hold)
    if (hold and hold not in OPERATOR_HOLDS) or hold == Hold.MODE_OFF:
        return ""
    policy, wish = recommended(action)
    name = Action(wish).name.lower()
    if policy != "heuristic" or wish == Action.HOLD:
        return f"{name}: by {policy}" if policy != "heuristic" else "hold"
    rules = heuristic_rules(state.features, settings.heuristic)
    if heuristic_choice(rules, action.mask) != wish:
        return name
    tests = [test for rule in rules if rule.action == wish for test in rule.met_way()]
    return f"{name}: " + ", ".join(f"{one.name} {'below' if one.below else 'from'} {one.threshold:g}" for one in tests)


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _times(value: float) -> str:
    return f"{value:.2f} x limit" if math.isfinite(value) else "-"
