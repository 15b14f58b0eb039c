"""Benches of schedules: those by hand are short and legal, and kernels in turn have the reference's values."""

from __future__ import annotations

from pathlib import Path

import pytest

import roller_svc
from roller_bench.as_schedule import time_case
from roller_bench.by_hand import CASES, Times
from roller_bench.cases import performance_cases
from roller_bench.tune_schedules import Result, summarise

PUBLIC = Path(__file__).parents[3] / "bench" / "data" / "public.json"


@pytest.mark.parametrize("name", CASES)
def test_schedules_by_hand_are_short_and_legal(name: str) -> None:
    expression, inputs, steps = CASES[name]
    schedule = roller_svc.Schedule(expression, inputs, "cpu-x86-avx2", steps)
    assert schedule.check() == ()
    assert len(schedule.steps) <= 15


def test_a_summary_counts_wins_and_what_was_not_built() -> None:
    results = [
        Result("map", {}, 10, 4.0, ratio, reached, seconds, correlation, "", {"known": 2, "expensive": 1})
        for ratio, reached, seconds, correlation in ((2.0, 3, 1.5, 0.5), (0.5, None, None, None))
    ]
    summary = summarise(results)
    assert (summary["wins"], summary["reached"], summary["geometric mean"]) == (1, 1, 1.0)
    assert (summary["trials"], summary["median trials until then"], summary["median seconds until then"]) == (20, 3, 1.5)
    assert (summary["rank correlation"], summary["unbuilt"]) == (0.5, {"known": 4, "expensive": 2})


@pytest.mark.slow
def test_steps_are_timed_against_construction() -> None:
    case = next(each for each in performance_cases(PUBLIC) if each.id == "llm-rope-023")
    times = time_case(case, "local")
    assert isinstance(times, Times)
    assert times.differs == ""
    assert times.ratio > 0
