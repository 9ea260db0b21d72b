"""A Prometheus page as numbers: pure, no network.

The text is read by ``prometheus_client.parser`` (0.26), the maintained parser of the format. It gives every
sample under its full name (``x_total``, ``x_created``, ``x_bucket``), whatever family it stands in; adapters
ask by full name, so the wall-clock time in an ``x_created`` can never pass for a count of ``x``. A counter
that is published without ``_total`` (Triton's) gets it from the parser.

What cannot be is refused as a whole (:class:`~services.errors.ScrapeFailed`): an empty answer, HTML, a last
line that was cut, the same sample twice. A value that cannot be (NaN, an infinity, a wrapped number, a
negative one, which some exporters send for "unknown") is left out and named in :attr:`Page.refused`: missing is
not zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from services.errors import ScrapeFailed
from services.telemetry.sources.histograms import Histogram

MOST: Final = 1e18
"""No count, byte or token is more: a wrapped unsigned number."""
MAX_REFUSED: Final = 20
"""Refused values that are named; a page full of them need not fill the bus."""
_CREATED: Final = "_created"
_BROKEN: Final = (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError)
"""What the parser raises for text that is no page."""
_TIMES: Final = (("_seconds", 1.0), ("_ms", 1e-3), ("_us", 1e-6))


class Point(NamedTuple):
    """One sample: its labels and a finite value of 0 or more."""

    labels: Mapping[str, str]
    value: float


class Part:
    """Points by sample name: a page, or what of it belongs to one engine."""

    def __init__(self, points: Mapping[str, Sequence[Point]]) -> None:
        self.points = points

    def has(self, name: str) -> bool:
        return bool(self.points.get(name))

    def value(self, names: Sequence[str], **where: str | Sequence[str]) -> float:
        """Sum of the points of the first of ``names`` that has any with these labels; NaN when none has.

        ``where``: label = value, or one of several values.
        """
        for name in names:
            found = [point.value for point in self.points.get(name, ()) if _matches(point.labels, where)]
            if found:
                return math.fsum(found)
        return math.nan

    def label(self, names: Sequence[str], label: str) -> str:
        """A label of an ``..._info`` sample; empty where there is none or it says ``None``."""
        for name in names:
            for point in self.points.get(name, ()):
                text = point.labels.get(label, "")
                if text and text != "None":
                    return text
        return ""

    def histogram(self, names: Sequence[str], **where: str | Sequence[str]) -> Histogram | None:
        """The first of ``names`` that has buckets, its label sets summed, in seconds where the name ends in another
        unit of time. None where there is none, or the buckets contradict each other."""
        for name in names:
            found = [point for point in self.points.get(f"{name}_bucket", ()) if _matches(point.labels, where)]
            if not found:
                continue
            scale = next((factor for ending, factor in _TIMES if name.endswith(ending)), 1.0)
            by_edge: dict[float, list[float]] = {}
            for point in found:
                by_edge.setdefault(_edge(point.labels.get("le", "")), []).append(point.value)
            sets = {len(values) for values in by_edge.values()}
            if len(sets) != 1 or math.nan in by_edge or math.inf not in by_edge:
                return None
            edges = sorted(by_edge)
            counts = [math.fsum(by_edge[edge]) for edge in edges]
            total = self.value([f"{name}_sum"], **where)
            if any(later < earlier for earlier, later in pairwise(counts)):
                return None
            return Histogram(tuple(edge * scale for edge in edges), tuple(counts), total * scale)
        return None


class Page(Part):
    """A whole page. ``oldest_s``: the oldest time stamp that a sample carries, Unix seconds; NaN when none does,
    which is usual: the page is then of the moment it was asked."""

    def __init__(
        self, url: str, points: Mapping[str, Sequence[Point]], refused: Sequence[tuple[str, str]], oldest_s: float
    ) -> None:
        super().__init__(points)
        self.url = url
        self.refused = tuple(refused)
        """(sample name, why) of values that were left out."""
        self.oldest_s = oldest_s

    def starts(self, prefixes: Sequence[str]) -> bool:
        """Whether any sample's name begins with one of these."""
        return any(name.startswith(tuple(prefixes)) for name in self.points)


def parse_page(url: str, text: str, wanted: Sequence[str] = ()) -> Page:
    """The page's numbers; ScrapeFailed says why there are none.

    ``wanted``: beginnings of the names that will be asked for; the rest of the page is not read, which takes most of
    the time (a real vLLM page: 60 ms whole, a third of it with what Tidegate reads). A page without any of them is
    read whole, to tell a wrong one from a broken one.
    """
    check_text(url, text)
    points: dict[str, list[Point]] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    refused: list[tuple[str, str]] = []
    oldest_s = math.nan
    try:
        for family in text_string_to_metric_families(_only(text, tuple(wanted)) or text):
            for name, labels, value, timestamp, *_ in family.samples:
                if timestamp is not None:
                    oldest_s = min(float(timestamp), oldest_s) if oldest_s == oldest_s else float(timestamp)
                if not 0.0 <= value <= MOST:
                    if len(refused) < MAX_REFUSED and not name.endswith(_CREATED):
                        refused.append((name, f"said {value:g}"))
                    continue
                identity = (name, frozenset(labels.items()))
                if identity in seen:
                    raise ScrapeFailed(url, f"{name} twice with the same labels: two engines that nothing tells apart")
                seen.add(identity)
                points.setdefault(name, []).append(Point(labels, value))
    except _BROKEN as error:
        raise ScrapeFailed(url, f"not Prometheus text: {error or type(error).__name__}"[:200]) from error
    if not points:
        raise ScrapeFailed(url, "a page without a single number")
    return Page(url, points, refused, oldest_s)


def check_text(url: str, text: str) -> None:
    """ScrapeFailed for an answer that is no page, or the beginning of one."""
    if not text.strip():
        raise ScrapeFailed(url, "an empty answer")
    if text.lstrip()[:1] == "<":
        raise ScrapeFailed(url, "HTML or XML, expected Prometheus text")
    if not text.endswith("\n"):
        raise ScrapeFailed(url, f"cut in its last line: {text.rsplit(chr(10), 1)[-1][:60]!r}")


def families_of(url: str, text: str) -> list[Metric]:
    """The families of a whole page as the parser gives them, values unchecked; ScrapeFailed as :func:`parse_page`."""
    check_text(url, text)
    try:
        return list(text_string_to_metric_families(text))
    except _BROKEN as error:
        raise ScrapeFailed(url, f"not Prometheus text: {error or type(error).__name__}"[:200]) from error


def split(page: Part, prefixes: Sequence[str], labels: Sequence[Sequence[str]]) -> dict[tuple[str, ...], Part]:
    """The engines behind a page, by the labels that tell them apart.

    ``labels``: for each place of the key the label's possible names, the first that a point has counting. A point
    that lacks a label which others have belongs to the one engine that it fits; where it fits several, nobody knows
    whose it is, and it is left out. So are points outside ``prefixes`` (the process's own).
    """
    keyed: dict[tuple[str, ...], dict[str, list[Point]]] = {}
    loose: list[tuple[str, Point, tuple[str, ...]]] = []
    full = 0
    for name, points in page.points.items():
        if not name.startswith(tuple(prefixes)) or name.endswith(_CREATED):
            continue
        for point in points:
            key = tuple(next((point.labels[n] for n in names if n in point.labels), "") for names in labels)
            weight = sum(part != "" for part in key)
            full = max(full, weight)
            loose.append((name, point, key))
    for name, point, key in loose:
        if sum(part != "" for part in key) == full:
            keyed.setdefault(key, {}).setdefault(name, []).append(point)
    for name, point, key in loose:
        if sum(part != "" for part in key) == full:
            continue
        owners = [known for known in keyed if all(mine in ("", its) for mine, its in zip(key, known, strict=True))]
        if len(owners) == 1:
            keyed[owners[0]].setdefault(name, []).append(point)
    return {key: Part(points_of) for key, points_of in sorted(keyed.items())}


def _only(text: str, wanted: tuple[str, ...]) -> str:
    """The lines of these names with their types; empty where there is none."""
    if not wanted:
        return ""
    typed = tuple(f"# TYPE {name}" for name in wanted)
    kept, any_number = [], False
    for line in text.split("\n"):
        if line.startswith(wanted):
            if _CREATED in line[: line.find("{")]:
                continue
            any_number = True
            kept.append(line)
        elif line.startswith(typed):
            kept.append(line)
    return "\n".join(kept) + "\n" if any_number else ""


def _matches(labels: Mapping[str, str], where: Mapping[str, str | Sequence[str]]) -> bool:
    for label, wanted in where.items():
        value = labels.get(label, "")
        if value != wanted if isinstance(wanted, str) else value not in wanted:
            return False
    return True


def _edge(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
