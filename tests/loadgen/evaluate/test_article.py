"""The article's cluster: its traffic is as told, its sample covers the day, its table says what cannot be had."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.evaluate.article import Capacity, Comparison, Job, Load, run
from loadgen.evaluate.article_report import QUICK, html, lines
from loadgen.evaluate.article_traffic import DAY_S, LONG_TOKENS, Sample, rate_at, tables
from loadgen.evaluate.entrants import entrant


def test_prompts_outputs_and_rate_are_those_of_the_digest() -> None:
    sample = Sample(segments=28, cards=2, seconds=900.0)
    found = [table for segment in range(28) for table in tables(sample, 1.0, segment, seed=1)]
    prompts = np.concatenate([table.prompt_tokens for table in found])
    outputs = np.concatenate([table.output_tokens for table in found])
    long = prompts >= LONG_TOKENS
    assert long.mean() == pytest.approx(0.1, abs=0.01)
    assert np.median(prompts[prompts < LONG_TOKENS]) == pytest.approx(500, rel=0.03)
    assert prompts.max() <= 8000
    assert np.median(outputs) == pytest.approx(129, rel=0.05), "Azure chat's median"
    assert len(prompts) / (28 * 2 * sample.duration_s) == pytest.approx(1.0, rel=0.08), "the mean is what was asked for"
    for table in found[:4]:
        table.check()


def test_day_and_night_are_three_to_one_and_the_sample_sees_both() -> None:
    day = np.arange(0.0, DAY_S, 60.0)
    assert rate_at(day).max() / rate_at(day).min() == pytest.approx(3.0, rel=1e-3)
    sample = Sample()
    hours = sample.begins_s() % DAY_S / 3600.0
    assert np.histogram(hours, bins=8, range=(0, 24))[0].min() >= 3
    assert len(set(sample.begins_s() // DAY_S)) == 14, "every day is there"
    assert rate_at(sample.begins_s()).mean() == pytest.approx(1.0, abs=0.02)


def test_a_run_is_repeatable_and_its_table_says_what_cannot_be_had() -> None:
    job = Job(entrant=entrant("static"), admission="fcfs", rate_per_s=0.3, sample=QUICK)
    first, again = run(job), run(job)
    assert first.tokens_per_s == again.tokens_per_s > 0
    heuristic = run(Job(entrant=entrant("heuristic"), admission="deadline_cap_shed", rate_per_s=0.3, sample=QUICK))
    assert heuristic.oom == 0
    capacities = [
        Capacity(policy="static", admission="fcfs", rate_per_s=0.1, goodput_tokens_per_s=100.0),
        Capacity(policy="heuristic", admission="deadline_cap_shed", rate_per_s=0.2, goodput_tokens_per_s=200.0),
    ]
    load = Load(meaning="a test", rate_per_s=0.3, brought=[first, heuristic])
    found = Comparison(sample=QUICK, searched=QUICK, loads=[load], capacities=capacities, cpu_s=1.0)
    told = "\n".join(lines(found))
    for figure in ("38.4 %", "78.6 %", "14,200", "26,500", "3.8 s", "0.95 s", "3 to 5", "54.2"):
        assert figure in told
    assert "44.2 % of the card" in told, "why 38.4 % cannot be had"
    assert "50.0 cost" in told, "twice the load within the SLO at half the cost"
    page = html(found)
    assert page.count("<table>") == 2
    assert "26,500" in page
