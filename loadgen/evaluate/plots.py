"""The report's plots as inline SVG."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray

from loadgen.bench.returns_scores import Question
from loadgen.evaluate.records import Curve
from loadgen.evaluate.result import Result, Worst, plain
from schemas.actions import Action

COLOURS: Final = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c")
ACTIONS: Final = tuple(action.name.lower() for action in Action)
_STYLE: Final[Any] = {
    "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "svg.hashsalt": "tidegate",
}  # fmt: skip
_numbers = itertools.count()


@contextmanager
def _figure(wide: float, high: float, columns: int = 1) -> Iterator[tuple[Any, Any, Callable[[], str]]]:
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(wide, high), layout="constrained")

        def svg() -> str:
            out = io.StringIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            return _alone(out.getvalue())

        try:
            yield figure, axes, svg
        finally:
            plt.close(figure)


def _alone(svg: str) -> str:
    """Only the element, its ids unlike those of the page's other plots."""
    text = svg[svg.index("<svg") :]
    prefix = f"p{next(_numbers)}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'(href=")#', rf"\1#{prefix}", text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    text = re.sub(r' height="[^"]*pt"', "", text, count=1)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 style="max-width:100%"', text, count=1)


def goodput_bars(result: Result, admissions: Sequence[str]) -> str:
    """Goodput by policy, a colour an admission, intervals as whiskers."""
    names = [name for name in result.policies if plain(name) and any(a in result.policies[name] for a in admissions)]
    places = np.arange(len(names))
    width = 0.8 / len(admissions)
    with _figure(11, 4) as (_, axes, svg):
        for k, admission in enumerate(admissions):
            there = [i for i, name in enumerate(names) if admission in result.policies[name]]
            found = [result.policies[names[i]][admission] for i in there]
            height = np.array([one.goodput_tokens_per_s for one in found])
            low, high = (np.array([one.ci95[end] for one in found]) for end in (0, 1))
            axes.bar(places[there] + (k - (len(admissions) - 1) / 2) * width, height, width, label=admission,
                     color=COLOURS[k], yerr=np.abs([height - low, high - height]), error_kw={"lw": 0.8})  # fmt: skip
        axes.set_xticks(places, names, rotation=40, ha="right")
        axes.set_ylabel("goodput, tokens/s a card")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8, ncols=len(admissions), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
        return svg()


def ratio_map(values: NDArray[np.float64], policies: Sequence[str], configurations: Sequence[str], over: str) -> str:
    """Ratios [policies, configurations], a cell each, written in."""
    with _figure(11, 1.3 + 0.33 * len(policies)) as (figure, axes, svg):
        shown = np.log2(np.clip(values, 0.25, 4.0))
        image = axes.imshow(shown, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
        axes.set_xticks(np.arange(len(configurations)), configurations, rotation=40, ha="right")
        axes.set_yticks(np.arange(len(policies)), policies)
        for (row, column), value in np.ndenumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7,
                      color="white" if abs(shown[row, column]) > 0.7 else "black")  # fmt: skip
        bar = figure.colorbar(image, ax=axes, label=f"over {over}", ticks=[-1, 0, 1])
        bar.ax.set_yticklabels(["0.5", "1", "2"])
        return svg()


def tails(result: Result, entries: Sequence[tuple[str, str]]) -> str:
    """Queue wait and TPOT P99 of every configuration, a colour a (policy, admission)."""
    names = [regime.configuration for regime in result.regimes]
    places = np.arange(len(names))
    with _figure(11, 4.2, columns=2) as (_, axes, svg):
        for field, axis, label in (
            ("queue_wait_p99_s", axes[0], "queue wait P99, s"), ("tpot_p99_ms", axes[1], "TPOT P99, ms"),
        ):  # fmt: skip
            for k, (policy, admission) in enumerate(entries):
                found = [getattr(regime.policies[policy][admission], field) for regime in result.regimes]
                axis.plot(np.array([np.nan if one is None else one for one in found]), places, "o", ms=5,
                          color=COLOURS[k], alpha=0.85, label=f"{policy}, {admission}")  # fmt: skip
            axis.set_xscale("symlog", linthresh=0.1)
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
            axis.invert_yaxis()
        axes[0].set_yticks(places, names)
        axes[1].set_yticks(places, [""] * len(names))
        axes[0].legend(fontsize=7, ncols=2, loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False)
        return svg()


def action_mix(mixes: dict[str, NDArray[np.float64]], configurations: Sequence[str]) -> str:
    """Shares [configurations, 5] of the actions that were not hold, a panel a policy."""
    with _figure(11, 1.2 + 0.25 * len(configurations), columns=len(mixes)) as (_, axes, svg):
        panels = [axes] if len(mixes) == 1 else list(axes)
        for panel, (name, shares) in zip(panels, mixes.items(), strict=True):
            left = np.zeros(len(configurations))
            for k in range(1, 5):
                panel.barh(np.arange(len(configurations)), shares[:, k], left=left, color=COLOURS[k], label=ACTIONS[k])
                left += shares[:, k]
            panel.set_title(name, fontsize=9)
            panel.set_xlabel("share of decisions (the rest is hold)")
            panel.set_yticks(np.arange(len(configurations)), configurations if panel is panels[0] else [])
            panel.invert_yaxis()
        panels[0].legend(fontsize=7)
        return svg()


def losses(found: Sequence[Worst], over: str) -> str:
    """Ratio by configuration with its interval, the worst on top."""
    ordered = sorted(found, key=lambda one: one.ratio)
    places = np.arange(len(ordered))
    middle = np.array([one.ratio for one in ordered])
    low, high = (np.array([one.ci95[end] for one in ordered]) for end in (0, 1))
    with _figure(8, 1.2 + 0.25 * len(ordered)) as (_, axes, svg):
        axes.errorbar(middle, places, xerr=np.abs([middle - low, high - middle]), fmt="o", color=COLOURS[0], lw=1)
        axes.axvline(1.0, color="black", lw=0.8)
        axes.set_yticks(places, [one.configuration for one in ordered])
        axes.set_xlabel(f"goodput over {over}")
        axes.grid(axis="x", alpha=0.3)
        axes.invert_yaxis()
        return svg()


def learning(curves: Sequence[Curve]) -> str:
    """Validation goodput over the heuristic's against transitions, a line a run, its worst scenario dashed."""
    with _figure(8, 3.5) as (_, axes, svg):
        for k, curve in enumerate(curves):
            at = [point.transitions for point in curve.points]
            colour = COLOURS[k % len(COLOURS)]
            axes.plot(at, [point.ratio for point in curve.points], color=colour, label=curve.name)
            worst = [np.nan if point.worst is None else point.worst for point in curve.points]
            axes.plot(at, worst, "--", color=colour, lw=0.8, alpha=0.6)
        axes.axhline(1.0, color="black", lw=0.8)
        axes.set_xlabel("transitions")
        axes.set_ylabel("goodput over the heuristic's")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        return svg()


def diagram(questions: Sequence[Question]) -> str:
    """What the return estimator said against what came true; points as large as they are many."""
    with _figure(5, 4.5) as (_, axes, svg):
        axes.plot([0, 1], [0, 1], color="black", lw=0.8)
        for k, question in enumerate(questions):
            told = question.reliability
            size = [8 + 120 * count / max(1, question.asked) for count in told.count]
            said, true = told.predicted, told.observed
            axes.plot(said, true, lw=0.8, color=COLOURS[k % len(COLOURS)])
            axes.scatter(said, true, s=size, color=COLOURS[k % len(COLOURS)], label=question.name)
        axes.set_xlabel("probability that was said")
        axes.set_ylabel("share that came true")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
        return svg()
