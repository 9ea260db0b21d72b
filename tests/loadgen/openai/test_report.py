"""Percentiles, goodput and what a screen says of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.openai.driving import Progress
from loadgen.openai.records import Failure, RequestRecord
from loadgen.openai.report import Report, Tally, is_good
from loadgen.openai.view import progress_line, report_lines
from schemas.classes import DEFAULT_LIMITS, ServiceClass


def record(**more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "session": 0, "turn": 0, "service_class": "chat", "intended_s": 0.0, "sent_s": 0.0, "end_s": 1.0, "ttft_s": 0.5,
        "tpot_s": 0.01, "prompt_tokens": 100, "output_tokens": 10,
    }  # fmt: skip
    return RequestRecord(**{**fields, **more})


def told(tally: Tally, **more: Any) -> Report:
    fields: dict[str, Any] = {"held_back": 0, "not_sent": {}, "left_out": {}, **more}
    return tally.report(url="http://h", model="m", loop="open", started_unix_s=0.0, **fields)


def test_percentiles_are_those_of_all_classes_together() -> None:
    tally = Tally()
    values = np.random.default_rng(0).exponential(1.0, 500)
    for at, value in enumerate(values):
        tally.add(record(ttft_s=float(value), service_class=("chat", "agent")[at % 2]))
    report = told(tally)
    assert report.ttft_s.p99 == pytest.approx(np.quantile(values, 0.99))
    assert report.classes["agent"].ttft_s.p50 == pytest.approx(np.quantile(values[1::2], 0.5))


@pytest.mark.parametrize(
    ("more", "good"),
    [
        ({"ttft_s": 2.0}, True),
        ({"ttft_s": 2.03}, False),
        ({"ttft_s": 2.2, "prompt_tokens": 1000}, True),
        ({"ttft_s": 2.2, "prompt_tokens": 1000, "kept_tokens": 900}, False),
        ({"tpot_s": 0.051}, False),
        ({"tpot_s": math.nan}, True),
        ({"failure": Failure.CUT}, False),
        ({"service_class": "batch", "ttft_s": 500.0, "end_s": 599.0}, True),
        ({"service_class": "batch", "end_s": 601.0}, False),
    ],
)
def test_goodput_is_what_kept_its_class_limits(more: dict[str, Any], good: bool) -> None:
    one = record(**more)
    assert is_good(one, DEFAULT_LIMITS[ServiceClass[one.service_class.upper()]]) is good


def test_failures_are_in_every_share_and_in_no_latency() -> None:
    tally = Tally()
    tally.add(record())
    tally.add(record(failure=Failure.TIMEOUT, detail="not finished", ttft_s=99.0))
    report = told(tally)
    assert (report.requests, report.good, report.ttft_s.count) == (2, 1, 1)
    text = "\n".join(report_lines(report))
    assert "1 answered, 1 failed" in text
    assert "timeout" in text
    assert "50.0% of requests" in text


def test_nothing_measured_is_null_and_a_dash() -> None:
    report = told(Tally())
    assert b'"p50":null' in msgspec.json.encode(report), "missing is not zero"
    assert report_lines(report)[-1].split() == ["end", "to", "end", *"------"]


def test_a_client_that_is_the_bottleneck_says_so() -> None:
    tally = Tally()
    tally.add(record(sent_s=0.2))
    assert "bottleneck" in told(tally).notes[0]
    assert told(tally, held_back=1).notes == (), "the bound on concurrency explains it"


def test_lines_fit_a_terminal() -> None:
    tally = Tally()
    for one in ("chat", "agent"):
        tally.add(record(service_class=one, prompt_tokens=10**6, kept_tokens=10**6))
    report = told(tally, held_back=3, not_sent={"turns of sessions that had failed": 3})
    assert max(map(len, report_lines(report))) <= 80
    progress = Progress(tally)
    progress.in_flight = 12
    assert "2 answered  12 under way  TTFT P50 500.0 ms" in progress_line(progress)
    assert len(progress_line(progress)) <= 80
