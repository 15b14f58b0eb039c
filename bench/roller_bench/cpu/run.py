"""Run cases on this CPU: time our kernels interleaved with baselines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roller_bench.baselines import DEFAULT_BASELINES
from roller_bench.cases import BenchCase
from roller_bench.cpu.report import Samples, case_row, failed_row, roofline_bound
from roller_bench.cpu.worker import (
    ROLLER,
    Answer,
    BaselineCalls,
    BuildRoller,
    Built,
    FindBaseline,
    MeasureLimits,
    Start,
    TakeSample,
    Task,
    work,
)
from roller_bench.timing_worker import Sample
from roller_svc.calibration.cpu.limits import Limits
from roller_svc.errors import (
    ArgumentError,
    BuildServiceError,
    InvariantError,
    KernelTimeoutError,
    RollerError,
    WrongAnswerError,
)
from roller_svc.farm.workers import WorkerProcess

Json = dict[str, Any]

ROUNDS = 9
MIN_ROUNDS = 3
# Time limit for the samples of a case, after MIN_ROUNDS.
CASE_S = 4.0
# Disturbed samples are repeated, up to this often for a case.
MAX_REPEATED = 20
# The lock is released after _LOCK_S, at the end of the current case, for _UNLOCKED_S.
_LOCK_S = 40.0
_UNLOCKED_S = 0.2
_TIMEOUT_S = 120.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS")
# Freed memory stays in the process, in large pages: libraries that allocate results must not page-fault at each call.
_MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"


@dataclass(frozen=True, slots=True)
class Settings:
    target: str = "local"
    select: str = "measure"
    top_k: int = 10
    baselines: tuple[str, ...] = DEFAULT_BASELINES


@dataclass(slots=True)
class Workers:
    """A worker process for roller and for each baseline, on the same cores."""

    threads: int
    settings: Settings
    processes: dict[str, WorkerProcess[Task, Answer]] = field(default_factory=dict)
    versions: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    lost: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Start the workers. Raises ArgumentError for too few cores; a missing baseline becomes a note."""
        for name in (ROLLER, *self.settings.baselines):
            self.processes[name] = WorkerProcess(work, _TIMEOUT_S)
            try:
                self._begin(name)
            except ArgumentError as missing:
                if name == ROLLER:
                    raise
                self.processes.pop(name).close(kill=True)
                self.notes.append(missing.message)

    @property
    def baselines(self) -> list[str]:
        return [name for name in self.processes if name != ROLLER]

    def call(self, name: str, task: Task) -> Answer:
        """Run a task in a worker; a worker that exited is restarted for its next task."""
        if name in self.lost:
            self._begin(name)
        try:
            return self.processes[name].call(task)
        except (BuildServiceError, KernelTimeoutError, InvariantError):
            self.lost.add(name)
            raise

    def _begin(self, name: str) -> None:
        cores = sorted(os.sched_getaffinity(0))[-self.threads :]
        if len(cores) < self.threads:
            raise ArgumentError(f"--threads {self.threads}: this process may use {len(cores)} cores")
        with pinned(cores):
            versions = self.processes[name].call(Start(name, self.threads))
        self.lost.discard(name)
        if isinstance(versions, dict) and name != ROLLER:
            self.versions |= versions

    def close(self) -> None:
        for process in self.processes.values():
            process.close(kill=True)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin processes that are started in this context to these cores."""
    before = os.sched_getaffinity(0)
    # TVM would bind its threads to the first cores of the machine, whatever the affinity
    variables = dict.fromkeys(_THREAD_VARIABLES, str(len(cores))) | {"GLIBC_TUNABLES": _MALLOC, "TVM_BIND_THREADS": "0"}
    saved = {name: os.environ.get(name) for name in variables}
    os.sched_setaffinity(0, cores)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class MachineLock:
    """A file lock that is released from time to time, for shared machines; None: no lock."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self._since: float | None = None

    def enter(self) -> None:
        """Take the lock; release and retake it if it has been taken for long."""
        if self._file is None:
            return
        if self._since is not None and time.monotonic() - self._since > _LOCK_S:
            self.leave()
            time.sleep(_UNLOCKED_S)
        if self._since is None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def leave(self) -> None:
        if self._file is not None and self._since is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # also unlocks


def limits_of(workers: Workers) -> Limits:
    found = workers.call(ROLLER, MeasureLimits(workers.settings.target))
    if not isinstance(found, Limits):
        raise InvariantError("the worker returned a result of another type")
    return found


def bench_case(case: BenchCase, workers: Workers, limits: Limits) -> Json:
    """Return one row: the case built, checked and timed with its baselines, or its `error`."""
    settings = workers.settings
    try:
        bound = roofline_bound(case.program(), limits)
        built = workers.call(ROLLER, BuildRoller(case, settings.target, settings.select, settings.top_k))
        if not isinstance(built, Built):
            raise InvariantError("the worker returned a result of another type")
        found, failures = _find_baselines(case, workers, built)
        if not built.checked_by_reference and failures and not found:
            raise WrongAnswerError(f"no baseline agrees with roller: {'; '.join(failures.values())}")
        samples = sample_interleaved((ROLLER, *found), workers.call)
    except RollerError as failure:
        return failed_row(case, failure)
    return case_row(case, samples, bound) | {
        "build_s": built.build_s,
        "model_build_s": built.model_build_s,
        "candidates": built.candidates,
        "proven": built.checked_by_reference,
        "peer_errors": failures,
        "peer_calls": {name: list(baseline.calls) for name, baseline in found.items()},
    }


def _find_baselines(case: BenchCase, workers: Workers, built: Built) -> tuple[dict[str, BaselineCalls], dict[str, str]]:
    """Return the calls of each baseline, and the errors of those that do not count."""
    found: dict[str, BaselineCalls] = {}
    failures: dict[str, str] = {}
    for name in workers.baselines:
        try:
            found[name] = _expect_calls(workers.call(name, FindBaseline(case, built.expected)))
        except RollerError as failure:
            failures[name] = f"{failure.code}: {failure.message}"
    return found, failures


def _expect_calls(answer: Answer) -> BaselineCalls:
    if not isinstance(answer, BaselineCalls):
        raise InvariantError("the worker returned a result of another type")
    return answer


def sample_interleaved(names: Sequence[str], call: Callable[[str, Task], Answer]) -> Samples:
    """Take rounds of one sample each, repeating disturbed samples."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: list[float] = []
    repeated, start = 0, time.perf_counter()
    for number in range(ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() - start > CASE_S:
            break
        for name in names:
            sample = call(name, TakeSample())
            while isinstance(sample, Sample) and sample.is_disturbed and repeated < MAX_REPEATED:
                repeated += 1
                sample = call(name, TakeSample())
            if isinstance(sample, Sample):
                seconds[name].append(sample.seconds)
                peaks += [] if sample.peak_flops_per_s is None else [sample.peak_flops_per_s]
    return Samples(seconds, repeated, tuple(peaks))
