"""The search of schedules: what it finds, its history, and what it rejects before it builds."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from schedule_support import BLUR, GATHER, MATMUL, NARROW, SCATTER, SOFTMAX, inputs_of, interpreted, judged, program

import roller_svc
from roller_svc import hardware
from roller_svc.cli import main
from roller_svc.compiler.schedule_cost import price_schedule
from roller_svc.compiler.schedule_tuner import MAX_PRICE_RATIO, Trial, search_schedules
from roller_svc.compiler.scheduled import emit_schedule
from roller_svc.errors import ArgumentError, CompileError, ScheduleError, ToolchainMissingError
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.device_launches import build_device_launches
from roller_svc.schedule.random_steps import Steps, StepSpace
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.step_text import parse_steps

HW = hardware.load("cpu-x86-avx512")
BLUR_TEXT = (
    "bx[y, x] = (A[y, x] + A[y, x + 1] + A[y, x + 2]) / 3.0 where y in 34, x in 32;"
    "B[y, x] = (bx[y, x] + bx[y + 1, x] + bx[y + 2, x]) / 3.0 where y in 32, x in 32"
)
LARGE_BLUR = program(BLUR_TEXT, A="float32 34 34")
LARGE_MATMUL = program("C[m, n] +=! A[m, k] * B[k, n]", A="float32 64 64", B="float32 64 64")
SCALAR_SUM = program("s[] +=! a[i]", a="float32 64")
LANES = 4


def operations_and_bytes(schedule: Schedule, source: KernelSource) -> float:
    """An oracle in place of a clock, by weights of its own: operations, and bytes that are stored."""
    cost = price_schedule(schedule, HW)
    return cost.operations + 0.5 * cost.stored_bytes


def search(
    of: TensorProgram,
    trials: int,
    seed: int,
    starts: Sequence[Steps] = ((),),
    ticks: int = 10**9,
    unbuilt: Counter[str] | None = None,
) -> tuple[Trial, ...]:
    left = iter(range(ticks))
    return search_schedules(
        StepSpace(default_schedule(of), LANES),
        starts,
        HW,
        operations_and_bytes,
        trials=trials,
        seed=seed,
        has_time=lambda: next(left, None) is not None,
        unbuilt=unbuilt,
    )


def test_row_38_the_search_is_at_least_as_good_as_construction_within_a_hundred_trials() -> None:
    """Construction inlines a blur, and computes each row of its first stage three times."""
    constructed = roller_svc.Schedule.from_construction(BLUR_TEXT, {"A": ("float32", (34, 34))}, HW.id)
    steps = constructed.steps
    scheduled = StepSpace(default_schedule(LARGE_BLUR), LANES).apply(steps)
    reference = operations_and_bytes(scheduled, emit_schedule(scheduled, HW))
    history = search(LARGE_BLUR, 15, seed=3, starts=(steps, ()))
    assert len(history) == 15
    best = min(history, key=lambda trial: trial.seconds or 0.0)
    assert best.seconds is not None
    assert best.seconds < reference


def test_row_38_a_seed_gives_one_history_whatever_the_clock_says() -> None:
    first, again, other = (search(LARGE_BLUR, 5, seed) for seed in (1, 1, 2))
    assert first == again
    assert [trial.steps for trial in first] != [trial.steps for trial in other]
    noise = random.Random(5)
    noisy = search_schedules(
        StepSpace(default_schedule(LARGE_BLUR), LANES),
        ((),),
        HW,
        lambda *_: noise.random() if noise.random() < 0.9 else None,
        trials=5,
        seed=1,
        has_time=lambda: True,
    )
    assert [trial.steps for trial in noisy] == [trial.steps for trial in first]


def test_a_search_ends_at_its_budgets() -> None:
    assert len(search(BLUR, 7, seed=0)) == 7
    assert len(search(BLUR, 50, seed=0, ticks=5)) == 5
    assert search(BLUR, 50, seed=0, ticks=0) == ()


def test_what_is_not_built_is_counted_by_the_reason() -> None:
    unbuilt: Counter[str] = Counter()
    assert len(search(BLUR, 8, seed=4, unbuilt=unbuilt)) == 8
    assert all(unbuilt[reason] > 0 for reason in ("known", "expensive", "same text", "schedule-extent"))
    assert {reason for reason in unbuilt if not reason.startswith("schedule-")} <= {"known", "expensive", "same text"}


def legal_schedules(of: TensorProgram, count: int) -> Iterator[Schedule]:
    space, chance = StepSpace(default_schedule(of), LANES), random.Random(11)
    steps: Steps = ()
    while count:
        mutated = space.mutate(steps, chance)
        if mutated is not None:
            steps, schedule = mutated if len(mutated[0]) < 24 else ((), mutated[1])
            count -= 1
            yield schedule


@pytest.mark.parametrize("of", [MATMUL, BLUR], ids=["matmul", "blur"])
def test_mutations_compute_the_program(of: TensorProgram) -> None:
    arrays = inputs_of(of)
    for schedule in legal_schedules(of, 25):
        assert judged(of, arrays, interpreted(schedule, arrays)).ok


def test_no_trial_is_built_twice_or_at_a_multiple_of_the_best_price() -> None:
    history = search(LARGE_BLUR, 8, seed=4)
    space = StepSpace(default_schedule(LARGE_BLUR), LANES)
    assert len({trial.steps for trial in history}) == 8
    best = history[0].priced_s
    for trial in history[1:]:
        assert trial.priced_s <= MAX_PRICE_RATIO * best
        best = min(best, trial.priced_s)
        space.apply(trial.steps)


@pytest.mark.slow
def test_the_best_of_a_search_runs(capsys: pytest.CaptureFixture[str]) -> None:
    expression, inputs = "C[m, n] +=! A[m, k] * B[k, n]", {"A": ("float32", (48, 40)), "B": ("float32", (40, 64))}
    found = roller_svc.tune(expression, inputs, trials=4, seed=1, budget_s=120.0)
    assert len(found.trials) == len(found.history) == 4
    assert all(trial.seconds is not None and trial.seconds > 0 for trial in found.trials)
    a, b = (np.random.default_rng(1).random(shape, np.float32) for _, shape in inputs.values())
    np.testing.assert_allclose(found.best.compile()(A=a, B=b)["C"], a @ b, rtol=1e-5)
    shapes = ["--input", "A=float32[48,40]", "--input", "B=float32[40,64]"]
    assert main(["schedule", "tune", expression, *shapes, "--trials", "2", "--seed", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["steps"] for each in document["history"]] == [each["steps"] for each in found.history[:2]]
    assert document["seconds"] > 0


def test_without_the_device_prices_decide(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is measured for a GPU that is absent."""
    found = roller_svc.tune("y[i] = x[i] * 2.0", {"x": ("float32", (4096,))}, "nvidia-h200-sxm", trials=1)
    assert found.best.text() == found.history[0]["steps"]
    assert found.history[0]["seconds"] is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("trials", value) for value in (0, -5, 2.5, "x", None, True)),
        *(("seed", value) for value in ([1], None, 1.5)),
        *(("budget_s", value) for value in (math.nan, -1, 0, "1", None)),
    ],
)
def test_numbers_of_a_search_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{name} must be a"):
        roller_svc.tune("y[i] = x[i] * 2.0", {"x": ("float32", (64,))}, "nvidia-h200-sxm", **{name: value})


@pytest.mark.parametrize("of", [MATMUL, BLUR, SOFTMAX, NARROW, GATHER], ids=["matmul", "blur", "softmax", "narrow", "gather"])
def test_a_search_for_a_gpu_begins_with_blocks_and_draws_tiles(of: TensorProgram) -> None:
    hw = hardware.load("nvidia-h200-sxm")
    space = StepSpace(default_schedule(of), LANES, on_gpu=True)
    assert any(step.op == "block" for step in space.start())
    history = search_schedules(space, (space.start(),), hw, lambda *_: None, trials=4, seed=0, has_time=lambda: True)
    assert history[0].steps == space.start()
    assert len(history) == 4
    for trial in history:
        build_device_launches(space.apply(trial.steps), hw)


def test_tiles_of_a_product_on_a_gpu_have_parts_of_its_inputs() -> None:
    space, chance = StepSpace(default_schedule(LARGE_MATMUL), LANES, on_gpu=True), random.Random(1)
    drawn = [mutated for _ in range(30) if (mutated := space.mutate(space.start(), chance)) is not None]
    assert {(step.op, step.subject) for steps, _ in drawn for step in steps} >= {("cache", "A"), ("cache", "B"), ("block", "C")}


def test_tiles_on_a_cpu_may_divide_a_row_that_no_vector_divides() -> None:
    of = program("C[m, n] +=! A[m, k] * B[k, n]", A="float32 9 4", B="float32 4 35")
    space, chance = StepSpace(default_schedule(of), LANES), random.Random(1)
    drawn = [mutated for _ in range(40) if (mutated := space.mutate((), chance)) is not None]
    values = [dict(step.values) for steps, _ in drawn for step in steps if step.op == "split"]
    widths = {each["factor"] for each in values if each["loop"] == "n" and "names" in each}
    assert widths == {4, 8, 12, 16, 7}  # whole vectors, and the largest divisor of 35 below three of them


@pytest.mark.parametrize("of", [SCALAR_SUM, SCATTER], ids=["one element", "scatter"])
def test_what_has_no_loop_for_blocks_is_not_searched_on_a_gpu(of: TensorProgram) -> None:
    space, hw = StepSpace(default_schedule(of), LANES, on_gpu=True), hardware.load("nvidia-h200-sxm")
    with pytest.raises(ScheduleError, match="no schedule that the search proposes is legal") as refused:
        search_schedules(space, (space.start(),), hw, lambda *_: None, trials=1, seed=0, has_time=lambda: True)
    assert refused.value.code == "schedule-tune"
    assert (refused.value.hint or "").startswith("compile it without a schedule")


def test_a_search_says_why_it_found_nothing() -> None:
    """On a GPU tiles of vectors are not launches; with a start there is no time, or nothing compiles."""
    hw = hardware.load("nvidia-h200-sxm")
    space = StepSpace(default_schedule(MATMUL), LANES)
    launch = parse_steps("C: block m\nC: accumulate_at n")
    start = tuple(placed.step for placed in launch)

    def fail(_schedule: Schedule, _source: KernelSource) -> float | None:
        raise CompileError("it spills")

    def lack(_schedule: Schedule, _source: KernelSource) -> float | None:
        raise ToolchainMissingError("no compiler")

    search = partial(search_schedules, space, hw=hw, trials=1, seed=0, has_time=lambda: True)
    with pytest.raises(ScheduleError, match="legal on nvidia-h200-sxm; of the first: C has two stages") as refused:
        search(starts=((),), measure=fail)
    assert refused.value.code == "schedule-tune"
    assert "`start`" in (refused.value.hint or "")
    assert [(trial.seconds, trial.error) for trial in search(starts=(start,), measure=fail)] == [(None, "it spills")]
    with pytest.raises(ToolchainMissingError):
        search(starts=(start,), measure=lack)


def test_an_interrupted_search_prints_the_best_so_far(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["schedule", "tune", "y[i] = x[i] * 2.0", "--input", "x=float32[4096]", "--target", "nvidia-h200-sxm", "--seed", "1"]
    trials = iter([True, True])

    def compile_source(_: object) -> None:
        if not next(trials, False):
            raise KeyboardInterrupt

    monkeypatch.setattr("roller_svc.schedules.compile_source", compile_source)
    monkeypatch.setattr("roller_svc.cli.progress.PROGRESS_S", 0.0)
    assert main(words) == 130
    printed = capsys.readouterr()
    assert printed.out.startswith("# not measured: cheapest by price, of 2 trials, interrupted\ny: ")
    assert printed.err.startswith("roller: trials: 1 of 100\n")
    assert main(words) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_a_failed_trial_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = partial(roller_svc.tune, "y[i] = x[i] * 2.0", {"x": ("float32", (4096,))}, "nvidia-h200-sxm")
    compiles: list[bool] = []

    def compile_source(_: object) -> None:
        if not compiles.pop():
            raise CompileError("it spills")

    monkeypatch.setattr("roller_svc.schedules.compile_source", compile_source)
    compiles[:] = [True, False]
    found = tune(trials=2, seed=1)
    assert [each["error"] for each in found.history] == ["it spills", None]
    assert found.best.text() == found.history[1]["steps"]
    compiles[:] = [False]
    with pytest.raises(ScheduleError, match="none of 1 schedules could be built; of the first: it spills"):
        tune(trials=1)
    with pytest.raises(ScheduleError, match="no trial has begun within 1e-09 s"):
        tune(budget_s=1e-9)
