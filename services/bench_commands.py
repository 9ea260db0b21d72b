"""``tidegate bench``: what is measured, with both sides in one run. Imports what it runs when it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from services.errors import UserError


def add_benches(commands: Any) -> None:
    """Add them to the ``tidegate`` parser's subparsers."""
    bench = commands.add_parser("bench", help="measure").add_subparsers(dest="what", required=True)
    engine = bench.add_parser("engine", help="worker-steps per second and core of the emulated engine")
    engine.add_argument("--steps", type=int, default=200, help="simulated steps of 2 s (default %(default)s)")
    engine.add_argument("--seed", type=int, default=1)
    engine.add_argument(
        "--calibration", type=Path, metavar="FOLDER", help="also the error against this folder's measured timings"
    )
    engine.add_argument("--json", type=Path, metavar="FILE")
    engine.set_defaults(command=_bench_engine)
    loop = bench.add_parser("loop", help="telemetry-to-action latency and CPU of the five services")
    loop.add_argument("--workers", type=int, default=10_000)
    loop.add_argument("--per-node", type=int, default=8)
    loop.add_argument("--seconds", type=float, default=30.0)
    loop.add_argument("--json", type=Path, metavar="FILE")
    loop.set_defaults(command=_bench_loop)
    memory = bench.add_parser("memory", help="moves of KV blocks against plain copies of the same bytes")
    memory.add_argument("--backend", choices=("auto", "numpy", "cupy"), default="auto")
    memory.add_argument("--json", type=Path, metavar="FILE")
    memory.set_defaults(command=_bench_memory)
    reclaim = bench.add_parser("reclaim", help="tenants on one card: how fast memory changes hands, by method")
    reclaim.add_argument("--tenants", type=int, nargs="+", metavar="N", help="2 to 4 (default: each of them)")
    reclaim.add_argument("--seconds", type=float, help="simulated, of each run (default 240)")
    reclaim.add_argument("--seeds", type=int, nargs="+", metavar="SEED", help="none that the rules were tuned on")
    reclaim.add_argument("--json", type=Path, metavar="FILE")
    reclaim.set_defaults(command=_bench_reclaim)
    returns = bench.add_parser("returns", help="how well the times at which sessions come back are estimated")
    returns.add_argument(
        "--trace", type=Path, metavar="FILE", help="sessions of this trace; left out, the built-in agent workload's"
    )
    returns.add_argument("--goodput", action="store_true", help="also what it is worth on emulated fleets (minutes)")
    returns.add_argument("--json", type=Path, metavar="FILE")
    returns.set_defaults(command=_bench_returns)
    cartpole = bench.add_parser("cartpole", help="the agent's code on CartPole-v1: solved within 100k steps?")
    cartpole.add_argument("--seeds", type=int, default=5, metavar="N", help="so many (default %(default)s)")
    cartpole.add_argument("--json", type=Path, metavar="FILE")
    cartpole.set_defaults(command=_bench_cartpole)
    gradient = bench.add_parser("gradient", help="gradient steps per second beside Stable-Baselines3's DQN")
    gradient.add_argument("--json", type=Path, metavar="FILE")
    gradient.set_defaults(command=_bench_gradient)
    inside = bench.add_parser("vllm", help="what Tidegate inside a vLLM costs in tokens a second")
    inside.add_argument("--off", required=True, metavar="URL", help="a server without Tidegate")
    inside.add_argument("--on", required=True, metavar="URL", help="the same with it")
    inside.add_argument("--socket", type=Path, metavar="FILE", help="its engine socket: commanded every step meanwhile")
    inside.add_argument("--rounds", type=int, default=4, metavar="N", help="(default %(default)s)")
    inside.add_argument("--json", type=Path, metavar="FILE")
    inside.set_defaults(command=_bench_vllm)
    headroom = bench.add_parser(
        "headroom", help="what the slow control could gain at all: the heuristic with foresight"
    )
    headroom.add_argument("--admission", default="deadline_cap_shed", metavar="NAME", help="(default %(default)s)")
    headroom.add_argument("--seconds", type=float, default=240.0, help="simulated of each fleet (default %(default)g)")
    headroom.add_argument("--horizon", type=int, default=45, metavar="STEPS", help="seen ahead (default %(default)s)")
    headroom.add_argument("--every", type=int, default=4, metavar="STEPS", help="between looks (default %(default)s)")
    headroom.add_argument("--fleets", nargs="+", default=[], metavar="NAME", help="held-out ones (default: all)")
    headroom.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default %(default)s)")
    headroom.add_argument("--json", type=Path, metavar="FILE")
    headroom.set_defaults(command=_bench_headroom)
    cold = bench.add_parser("cold-weights", help="a long-tail model's weights off the card: what it brings and costs")
    cold.add_argument("--seconds", type=float, default=3600.0, help="simulated of each run (default %(default)g)")
    cold.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    cold.add_argument("--load", type=float, default=0.4, help="of the busy model's workload (default %(default)g)")
    cold.add_argument("--json", type=Path, metavar="FILE")
    cold.set_defaults(command=_bench_cold_weights)


def _bench_engine(namespace: argparse.Namespace) -> None:
    from loadgen.bench import engine
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.steps < 10:
        raise UserError(f"--steps: found {namespace.steps}, expected 10 or more")
    _report(
        engine.bench_all(steps=namespace.steps, seed=namespace.seed, calibration=namespace.calibration), namespace.json
    )


def _bench_loop(namespace: argparse.Namespace) -> None:
    from loadgen.bench import loop
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    _report(
        loop.bench_loop(workers=namespace.workers, per_node=namespace.per_node, seconds=namespace.seconds),
        namespace.json,
    )


def _bench_memory(namespace: argparse.Namespace) -> None:
    from loadgen.bench import memory
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    _report(memory.bench_memory(backend=namespace.backend), namespace.json)


def _bench_cold_weights(namespace: argparse.Namespace) -> None:
    from loadgen.bench import cold_weights
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.seconds < 600 or namespace.load <= 0:
        raise UserError(f"--seconds {namespace.seconds:g}, --load {namespace.load:g}: expected 600 or more, above 0")
    figures = cold_weights.bench_cold_weights(namespace.seeds, namespace.seconds, namespace.load)
    _report(figures, namespace.json)


def _bench_reclaim(namespace: argparse.Namespace) -> None:
    from loadgen.bench import reclaim
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    asked = {name: getattr(namespace, name) for name in ("tenants", "seeds", "seconds")}
    result = reclaim.bench_reclaim(**{name: value for name, value in asked.items() if value is not None})
    print(reclaim.table(result))
    _write(result, namespace.json)


def _bench_returns(namespace: argparse.Namespace) -> None:
    import msgspec

    from loadgen.bench import returns
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    report = returns.bench_returns(namespace.trace)
    print("\n".join(returns.render(report)))
    found = msgspec.to_builtins(report)
    if namespace.goodput:
        from loadgen.bench import returns_worth

        worth = returns_worth.returns_worth(namespace.trace)
        print("\n".join(returns_worth.render(worth)))
        found["goodput"] = msgspec.to_builtins(worth)
    _write(found, namespace.json)


def _bench_cartpole(namespace: argparse.Namespace) -> None:
    from loadgen.bench import cartpole
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.seeds < 1:
        raise UserError(f"--seeds: found {namespace.seeds}, expected 1 or more")
    _report(cartpole.bench_cartpole(seeds=namespace.seeds), namespace.json)


def _bench_gradient(namespace: argparse.Namespace) -> None:
    from loadgen.bench import gradient
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    _report(gradient.bench_gradient(), namespace.json)


def _bench_vllm(namespace: argparse.Namespace) -> None:
    import asyncio

    import msgspec

    from loadgen.bench import vllm
    from loadgen.outputs import check_file

    check_file("--json", namespace.json)
    if namespace.rounds < 1:
        raise UserError(f"--rounds: found {namespace.rounds}, expected 1 or more")
    cost = asyncio.run(vllm.bench_vllm(namespace.off, namespace.on, socket=namespace.socket, rounds=namespace.rounds))
    print("\n".join(vllm.render(cost)))
    _write(msgspec.to_builtins(cost), namespace.json)


def _bench_headroom(namespace: argparse.Namespace) -> None:
    import msgspec

    from loadgen.bench import headroom
    from loadgen.outputs import check_file
    from loadgen.policies import ADMISSIONS

    check_file("--json", namespace.json)
    if namespace.admission not in ADMISSIONS:
        raise UserError(f"--admission: found {namespace.admission!r}, expected one of {', '.join(ADMISSIONS)}")
    if min(namespace.seconds, namespace.horizon, namespace.every, namespace.jobs) <= 0:
        raise UserError("--seconds, --horizon, --every, --jobs: expected more than 0")
    found = headroom.bench_headroom(
        admission=namespace.admission, seconds=namespace.seconds, horizon_steps=namespace.horizon,
        every_steps=namespace.every, names=namespace.fleets, jobs=namespace.jobs, tell=print,
    )  # fmt: skip
    _report(msgspec.to_builtins(found), namespace.json)


def _report(result: dict[str, Any], path: Path | None) -> None:
    """Print the figures, and write them to ``path`` whole or not at all."""
    print(json.dumps(result, indent=2))
    _write(result, path)


def _write(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        from loadgen.outputs import write_atomically

        write_atomically(path, json.dumps(result, indent=2) + "\n")
