"""The policies that the table compares, by name (DESIGN section 7, "Examination")."""

from __future__ import annotations

from typing import Final, Literal, TypedDict

import msgspec

from loadgen.engine.specs import EngineMode

AIR_BAG_BYTES: Final = 20e9
"""What article 1's operators keep free on every card."""

TIDEGATE: Final = EngineMode(reservation="expected", offload=True)
"""The engine that Tidegate acts on: reserves the output to be expected, and copies finished turns to host memory."""

Control = Literal["hold", "fixed", "heuristic", "dqn"]


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine admits and caches, and who decides every 2 s."""

    name: str
    mode: EngineMode
    control: Control = "hold"
    rho: float = 1.0


class Admission(TypedDict):
    """The fields of :class:`EngineMode` that an admission's name stands for."""

    order: Literal["fcfs", "deadline"]
    running_cap: bool
    shed: bool


ADMISSIONS: Final = tuple(
    order + suffix for order in ("fcfs", "deadline") for suffix in ("", "_cap", "_shed", "_cap_shed")
)
"""Order, AIMD running cap and shedding, each with each (DESIGN section 7)."""


def admission_named(name: str) -> Admission:
    """What the name switches on in an :class:`EngineMode`; ValueError for an unknown one."""
    if name not in ADMISSIONS:
        raise ValueError(f"admission {name!r}: expected one of {', '.join(ADMISSIONS)}")
    return Admission(
        order="deadline" if name.startswith("deadline") else "fcfs", running_cap="_cap" in name, shed="_shed" in name
    )


def tidegate_mode(admission: str) -> EngineMode:
    """Tidegate's engine under an admission."""
    return msgspec.structs.replace(TIDEGATE, **admission_named(admission))


def with_admission(spec: PolicySpec, admission: str) -> PolicySpec:
    """The same policy, by the same name, on engines that admit so."""
    return msgspec.structs.replace(spec, mode=msgspec.structs.replace(spec.mode, **admission_named(admission)))


def policy_named(name: str) -> PolicySpec:
    """The policy of a DESIGN name; ValueError for an unknown one."""
    kind, _, value = name.partition(":")
    if kind == "fixed" and value:
        return PolicySpec(name=name, mode=TIDEGATE, control="fixed", rho=float(value))
    if name not in _NAMED:
        raise ValueError(f"policy {name!r}: expected fixed:RHO or one of {', '.join(_NAMED)}")
    return _NAMED[name]


_NAMED: Final = {
    spec.name: spec
    for spec in (
        PolicySpec(name="static", mode=EngineMode(air_bag_bytes=AIR_BAG_BYTES)),
        PolicySpec(name="rho_1.0", mode=EngineMode()),
        PolicySpec(name="vllm_recompute", mode=EngineMode(admission="physical")),
        PolicySpec(name="vllm_offload", mode=EngineMode(admission="physical", offload=True)),
        PolicySpec(name="heuristic", mode=TIDEGATE, control="heuristic"),
        PolicySpec(name="dqn", mode=TIDEGATE, control="dqn"),
    )
}
"""static          article 1's air-bag: reserves max_tokens against Q0 less 20 GB a card
rho_1.0         reserves max_tokens against Q0
vllm_recompute  admits what fits now, preempts and recomputes
vllm_offload    the same with finished turns copied to host memory
heuristic, dqn  Tidegate's engine; its rules, or its network, every 2 s"""
