"""Cases on this CPU: the plans that the model puts first and random ones, built and timed in turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roller_svc.bench.cases import BenchCase
from roller_svc.bench.cpu import pinned
from roller_svc.bench.measured_plans import FitCase, MeasuredPlan, plan_of, tiles_of
from roller_svc.bench.model_worker import Answer, Describe, Hold, Task, TimeKernel, work
from roller_svc.bench.sampling import Sample
from roller_svc.bench.trial_plans import trial_plans
from roller_svc.construct.shared import Shared
from roller_svc.errors import ArgumentError, FarmError, InvariantError, KernelTimeoutError, RollerError
from roller_svc.farm.lanes import Lane
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Attempt, Plan
from roller_svc.selection import built_for_trial

Json = dict[str, Any]

# Each candidate has so many samples, and more until the two least of each agree: what disturbs for seconds and shows in
# no counter, as a neighbour on the same physical core, has then passed.
LEAST_ROUNDS, MOST_ROUNDS = 5, 20
AGREE = 1.02
# A case's samples take no longer than this, but for LEAST_ROUNDS.
CASE_S = 9.0
POLISHED = 5  # times that candidates and rounds are told apart: no more changes then
# A candidate so many times slower than the best is not near it, whatever else is measured: so many rounds will do.
SLOW, SLOW_ROUNDS = 3.0, 2
# Samples that others disturbed are taken again after a pause, so often for a whole case; then the case is disturbed.
MOST_REPEATED = 60
PAUSE_S = 0.1
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """`top` plans that the model puts first and `sample` random ones of each case, `class_sample` of a class at least,
    drawn with `seed`, for so many threads. `calibrate`: the model works with figures measured at the start, else with
    the spec as it is shipped."""

    target: str = "local"
    threads: int = 1
    top: int = 10
    sample: int = 10
    class_sample: int = 60
    seed: int = 0
    calibrate: bool = True


@dataclass(slots=True)
class Worker:
    """The process that times, on cores of its own; one that died or was stopped is started again for its next task."""

    target: str
    threads: int
    _lane: Lane[Task, Answer] = field(default_factory=lambda: Lane(work, _TIMEOUT_S))

    def start(self, *, calibrate: bool) -> HardwareSpec:
        """The spec of its cores; ArgumentError where there are too few."""
        cores = sorted(os.sched_getaffinity(0))[-self.threads :]
        if len(cores) < self.threads:
            raise ArgumentError(f"--threads {self.threads}: this process may use {len(cores)} cores")
        with pinned(cores):
            spec = self._lane.call(Describe(self.target, calibrate))
        if not isinstance(spec, HardwareSpec):
            raise InvariantError("the worker answered something else")
        return spec

    def ask(self, task: Task) -> Answer:
        try:
            return self._lane.call(task)
        except (FarmError, KernelTimeoutError, InvariantError):
            self._lane.close(at_once=True)
            self.start(calibrate=False)  # what it answers is not used: the spec stays what it was
            raise

    def close(self) -> None:
        self._lane.close(at_once=True)


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds a call of every accepted sample, a list for each candidate, in turns; and how many were taken again."""

    seconds: tuple[tuple[float, ...], ...]
    repeated: int

    @property
    def is_disturbed(self) -> bool:
        """Whether samples had to be taken although others ran."""
        return self.repeated >= MOST_REPEATED


def measured_case(case: BenchCase, settings: Settings, sample: int, hw: HardwareSpec, worker: Worker) -> Json:
    """One row: the case's candidates, `sample` random ones among them, with what the model expects of them and what
    they took, or its `error`."""
    try:
        program = case.program()
        trial = trial_plans(program, hw, settings.top, sample, f"{settings.seed} {case.id}")
        start = time.perf_counter()
        attempts = built_for_trial(trial.grouped, program, hw)
        build_s = time.perf_counter() - start
        errors, turns = _timed(case, attempts, worker)
    except RollerError as failure:
        return {"id": case.id, "cls": case.cls, "error": f"{failure.code}: {failure.message}", "candidates": []}
    rows = [
        _candidate(plan, error, seconds) | {"drawn": number >= len(trial.ranked), "quiet_s": quiet_s}
        | {"kernels": tiles_of(plan, trial.groups, hw)}
        for number, (plan, error, seconds, quiet_s) in enumerate(
            zip(trial.plans, errors, turns.seconds, in_quietest_round(turns.seconds), strict=True)
        )
    ]  # fmt: skip
    return {"id": case.id, "cls": case.cls, "error": None, "build_s": build_s, "repeated": turns.repeated,
            "disturbed": turns.is_disturbed, "candidates": rows}  # fmt: skip


def fit_case(row: Json, case: BenchCase, hw: HardwareSpec) -> FitCase:
    """The case with those of its candidates that were timed, in the order of the row, as today's model sees them.

    Raises ArgumentError where the row's tiles are no tiles of the program any more.
    """
    groups = Shared(case.program()).groups(hw)
    timed = [c for c in row["candidates"] if c["error"] is None]
    plans = (MeasuredPlan(plan_of(c["kernels"], groups, hw), groups, measured_s(c)) for c in timed)
    return FitCase(case.id, case.cls, tuple(plans))


def measured_s(candidate: Json) -> float:
    """What a candidate that was timed takes; in documents from before rounds were compared, its least sample."""
    seconds: float = candidate.get("quiet_s") or candidate["min_s"]
    return seconds


def in_turns(count: int, take: Callable[[int], Sample], pause: Callable[[float], None] = time.sleep) -> Turns:
    """Rounds of one sample for each that is near the best, all in every one: samples of one round met the same
    neighbours. A disturbed sample is taken again as long as there are repetitions left."""
    seconds: list[list[float]] = [[] for _ in range(count)]
    repeated, start = 0, time.perf_counter()
    for number in range(MOST_ROUNDS):
        best_s = min((min(taken) for taken in seconds if taken), default=0.0)
        near = [i for i, taken in enumerate(seconds) if number < SLOW_ROUNDS or min(taken) <= SLOW * best_s]
        agreed = number >= LEAST_ROUNDS and all(_agree(seconds[i]) for i in near)
        if agreed or (number >= LEAST_ROUNDS and time.perf_counter() - start > CASE_S):
            break
        for i in near:
            sample = take(i)
            while sample.is_disturbed and repeated < MOST_REPEATED:
                repeated += 1
                pause(PAUSE_S)
                sample = take(i)
            seconds[i].append(sample.seconds)
    return Turns(tuple(tuple(taken) for taken in seconds), repeated)


def in_quietest_round(seconds: Sequence[Sequence[float]]) -> list[float | None]:
    """What each candidate takes when the machine is at its quietest; None without samples.

    `seconds`: of each its samples, the i-th of round i. A candidate's least sample is as much luck as it is speed where
    memory is now busy and now not: of samples within a round all met the same. So a sample is what its candidate takes
    times what its round adds, both found as medians in turns (Tukey, Exploratory Data Analysis, 1977: median polish).
    """
    timed = [taken for taken in seconds if taken]
    logs = np.full((len(timed), max(map(len, timed), default=0)), np.nan)
    for row, taken in zip(logs, timed, strict=True):
        row[: len(taken)] = np.log(taken)
    rounds = np.zeros(logs.shape[1])
    for _ in range(POLISHED if timed else 0):
        own = np.nanmedian(logs - rounds, axis=1)
        rounds = np.nanmedian(logs - own[:, None], axis=0)
    found = iter(np.exp(own + rounds.min()).tolist() if timed else ())
    return [next(found) if taken else None for taken in seconds]


def _agree(taken: Sequence[float]) -> bool:
    """Whether a candidate's two least samples do."""
    least, second = sorted(taken)[:2]
    return second <= AGREE * least


def _timed(case: BenchCase, attempts: Sequence[Attempt], worker: Worker) -> tuple[list[RollerError | None], Turns]:
    """Of each attempt what was wrong with it, if anything, and its samples, none where something was."""
    errors: list[RollerError | None] = [attempt.error for attempt in attempts]
    kernels = [(i, a.compiled) for i, a in enumerate(attempts) if a.compiled is not None]
    answer = worker.ask(Hold(case, tuple(kernel for _, kernel in kernels)))
    if not isinstance(answer, tuple):
        raise InvariantError("the worker answered something else")
    for (i, _), error in zip(kernels, answer, strict=True):
        errors[i] = error
    right = [(i, number) for number, (i, _) in enumerate(kernels) if errors[i] is None]

    def take(position: int) -> Sample:
        sample = worker.ask(TimeKernel(right[position][1]))
        if not isinstance(sample, Sample):
            raise InvariantError("the worker answered something else")
        return sample

    turns = in_turns(len(right), take)
    by_attempt = {i: seconds for (i, _), seconds in zip(right, turns.seconds, strict=True)}
    return errors, Turns(tuple(by_attempt.get(i, ()) for i in range(len(attempts))), turns.repeated)


def _candidate(plan: Plan, error: RollerError | None, seconds: Sequence[float]) -> Json:
    estimate = plan.estimate
    return {
        "predicted_s": estimate.seconds,
        "stages": {stage.name: stage.seconds for stage in estimate.stages},
        "min_s": min(seconds, default=None),
        "median_s": statistics.median(seconds) if seconds else None,
        "samples": len(seconds),
        "error": None if error is None else f"{error.code}: {error.message}",
    }
