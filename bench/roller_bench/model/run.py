"""Measure cases on this CPU: build and time the model's first plans and random plans, interleaved."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from roller_bench.cases import BenchCase
from roller_bench.cpu.run import pinned
from roller_bench.interleaved_timing import (
    InterleavedSamples,
    Rounds,
    fast_quantiles_s,
    low_noise_s,
    time_interleaved,
)
from roller_bench.model.candidate_plans import TrialPlans, trial_plans
from roller_bench.model.measured_plans import plan_of, tiles_of
from roller_bench.model.measurement_passes import PASSES
from roller_bench.model.regret import EvaluatedCase
from roller_bench.model.worker import Answer, Describe, LoadKernels, Task, TimeKernel, work
from roller_bench.timing_worker import Sample
from roller_svc.compiler.autotune import build_candidates
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.errors import (
    ArgumentError,
    BuildServiceError,
    InvariantError,
    KernelTimeoutError,
    LaunchError,
    RollerError,
)
from roller_svc.farm.workers import WorkerProcess
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import CandidateResult, Plan

Json = dict[str, Any]

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run."""

    target: str = "local"
    threads: int = 1
    top: int = 10  # of the model's first plans, for each case
    sample: int = 10  # random plans of each case, at least
    class_sample: int = 60  # random plans of each class, at least
    seed: int = 0
    passes: int = PASSES  # over all cases; cases whose halves disagree get as many again, at most EXTRA_PASSES
    calibrate: bool = True  # measure the spec at the start; else use the shipped spec


@dataclass(slots=True)
class Worker:
    """The timing process on its own cores; it is restarted after a crash or timeout."""

    target: str
    threads: int
    _process: WorkerProcess[Task, Answer] = field(default_factory=lambda: WorkerProcess(work, _TIMEOUT_S))

    def start(self, *, calibrate: bool) -> HardwareSpec:
        """Start the process; return the spec of its cores. Raises ArgumentError for too few cores."""
        cores = sorted(os.sched_getaffinity(0))[-self.threads :]
        if len(cores) < self.threads:
            raise ArgumentError(f"--threads {self.threads}: this process may use {len(cores)} cores")
        with pinned(cores):
            spec = self._process.call(Describe(self.target, calibrate))
        if not isinstance(spec, HardwareSpec):
            raise InvariantError("the worker returned a result of another type")
        return spec

    def recalibrate(self, before: HardwareSpec) -> HardwareSpec:
        """Calibrate again; return the spec from before if the machine is busy."""
        try:
            return self.start(calibrate=True)
        except LaunchError as failure:
            if failure.code != "machine-busy":
                raise
            return before

    def call(self, task: Task) -> Answer:
        try:
            return self._process.call(task)
        except (BuildServiceError, KernelTimeoutError, InvariantError):
            self._process.close(kill=True)
            self.start(calibrate=False)  # the spec from before stays in use
            raise

    def close(self) -> None:
        self._process.close(kill=True)


@dataclass(slots=True)
class BuiltCase:
    """The candidates of a case, built once for all passes."""

    case: BenchCase
    trial: TrialPlans
    attempts: tuple[CandidateResult, ...]
    build_s: float
    errors: list[RollerError | None]  # of each candidate
    is_known: bool = False  # the results were checked in the first pass


def build_case(case: BenchCase, settings: Settings, sample: int, hw: HardwareSpec) -> BuiltCase:
    """Build the candidates of a case, `sample` random ones among them. Raises RollerError if there are none."""
    program = case.program()
    trial = trial_plans(program, hw, settings.top, sample, f"{settings.seed} {case.id}")
    start = time.perf_counter()
    attempts = build_candidates(trial.grouped, program, hw)
    return BuiltCase(case, trial, attempts, time.perf_counter() - start, [attempt.error for attempt in attempts])


def measure_pass(built: BuiltCase, hw: HardwareSpec, worker: Worker) -> Json:
    """Time the candidates of a case in one pass; return its row. Raises RollerError if the worker is lost."""
    case, trial, samples = built.case, built.trial, _time_case(built, worker)
    rows = [
        _candidate(plan, error, rounds) | {"drawn": number >= len(trial.ranked)} | {"kernels": tiles_of(plan, trial.groups, hw)}
        for number, (plan, error, rounds) in enumerate(zip(trial.plans, built.errors, samples.samples, strict=True))
    ]
    return _row_of(case) | {
        "error": None,
        "build_s": built.build_s,
        "repeated": samples.repeated,
        "disturbed": samples.is_disturbed,
        "candidates": rows,
    }


def failed_case(case: BenchCase, failure: RollerError) -> Json:
    """Return the row of a case that could not be built or timed."""
    return _row_of(case) | {"error": f"{failure.code}: {failure.message}", "candidates": []}


def _row_of(case: BenchCase) -> Json:
    return {"id": case.id, "cls": case.cls, "program": case.digest}


def evaluate_case(row: Json, case: BenchCase, hw: HardwareSpec) -> EvaluatedCase:
    """Return the times of a case's timed candidates, and the estimates of today's model.

    Raises ArgumentError if the tiles of the row no longer fit the program.
    """
    groups = PartitionCache(case.program()).groups(hw)
    timed = [c for c in row["candidates"] if c["error"] is None]
    pairs = tuple((plan_of(c["kernels"], groups, hw).estimate.seconds, measured_s(c)) for c in timed)
    return EvaluatedCase(case.id, case.cls, pairs, tuple((c["half_s"][0], c["half_s"][1]) for c in timed if c.get("half_s")))


def measured_s(candidate: Json) -> float:
    """Return the low-noise time of a candidate, or its minimum in documents that lack it."""
    seconds: float = candidate.get("quiet_s") or candidate["min_s"]
    return seconds


def _time_case(built: BuiltCase, worker: Worker) -> InterleavedSamples:
    """Take the samples of each candidate, none for candidates with an error."""
    pairs = enumerate(zip(built.attempts, built.errors, strict=True))
    kernels = [(i, a.compiled) for i, (a, error) in pairs if a.compiled is not None and error is None]
    answer = worker.call(LoadKernels(built.case, tuple(kernel for _, kernel in kernels), built.is_known))
    if not isinstance(answer, tuple):
        raise InvariantError("the worker returned a result of another type")
    for (i, _), error in zip(kernels, answer, strict=True):
        built.errors[i] = error
    built.is_known = True
    right = [(i, number) for number, (i, _) in enumerate(kernels) if built.errors[i] is None]

    def take(position: int) -> Sample:
        sample = worker.call(TimeKernel(right[position][1]))
        if not isinstance(sample, Sample):
            raise InvariantError("the worker returned a result of another type")
        return sample

    samples = time_interleaved(len(right), take)
    by_attempt = {i: rounds for (i, _), rounds in zip(right, samples.samples, strict=True)}
    return InterleavedSamples(tuple(by_attempt.get(i, ()) for i in range(len(built.attempts))), samples.repeated)


def _candidate(plan: Plan, error: RollerError | None, rounds: Rounds) -> Json:
    estimate, calls = plan.estimate, [seconds for sample in rounds for seconds in sample]
    return {
        "predicted_s": estimate.seconds,
        "stages": {stage.name: stage.seconds for stage in estimate.stages},
        "quiet_s": low_noise_s(rounds),
        "quietest_s": fast_quantiles_s(rounds),
        "min_s": min(calls, default=None),
        "median_s": statistics.median(calls) if calls else None,
        "samples": len(rounds),
        "error": None if error is None else f"{error.code}: {error.message}",
    }
