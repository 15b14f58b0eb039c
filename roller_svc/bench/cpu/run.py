"""Cases on this CPU: our kernels and what peers have for the same programs, timed in turns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roller_svc.bench.baselines import DEFAULT_PEERS
from roller_svc.bench.cases import BenchCase
from roller_svc.bench.cpu.report import Taken, bound_of, case_row, failed_row
from roller_svc.bench.cpu.worker import (
    OURS,
    Answer,
    BuildOurs,
    Built,
    FindPeer,
    Found,
    MeasureLimits,
    Start,
    TakeSample,
    Task,
    work,
)  # fmt: skip
from roller_svc.bench.timing_worker import Sample
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
LEAST_ROUNDS = 3
# A case's samples take no longer than this, but for LEAST_ROUNDS.
CASE_S = 4.0
# Samples that others disturbed are taken again, so often for a whole case.
MOST_REPEATED = 20
# How long the lock is held before others get it, but for the case under way, and how long they have to take it.
_HELD_S = 40.0
_BREATH_S = 0.2
_TIMEOUT_S = 120.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS")
# Freed memory stays in the process and in large pages: a library that makes its results anew must not fault them in.
_MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"


@dataclass(frozen=True, slots=True)
class Settings:
    target: str = "local"
    select: str = "measure"
    top_k: int = 10
    peers: tuple[str, ...] = DEFAULT_PEERS


@dataclass(slots=True)
class Workers:
    """A process for ours and for every peer, on the same cores."""

    threads: int
    settings: Settings
    lanes: dict[str, WorkerProcess[Task, Answer]] = field(default_factory=dict)
    versions: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    lost: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Raises ArgumentError where there are too few cores; a peer that is not installed becomes a note."""
        for name in (OURS, *self.settings.peers):
            self.lanes[name] = WorkerProcess(work, _TIMEOUT_S)
            try:
                self._begin(name)
            except ArgumentError as missing:
                if name == OURS:
                    raise
                self.lanes.pop(name).close(kill=True)
                self.notes.append(missing.message)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.lanes if name != OURS]

    def ask(self, name: str, task: Task) -> Answer:
        """One worker's answer; a worker that died or was stopped is started again for its next task."""
        if name in self.lost:
            self._begin(name)
        try:
            return self.lanes[name].call(task)
        except (BuildServiceError, KernelTimeoutError, InvariantError):
            self.lost.add(name)
            raise

    def _begin(self, name: str) -> None:
        cores = sorted(os.sched_getaffinity(0))[-self.threads :]
        if len(cores) < self.threads:
            raise ArgumentError(f"--threads {self.threads}: this process may use {len(cores)} cores")
        with pinned(cores):
            versions = self.lanes[name].call(Start(name, self.threads))
        self.lost.discard(name)
        if isinstance(versions, dict) and name != OURS:
            self.versions |= versions

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close(kill=True)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Processes started within run on these cores only, from their first instruction on."""
    before = os.sched_getaffinity(0)
    # TVM would bind its threads to the first cores of the machine, wherever it may run
    wanted = dict.fromkeys(_THREAD_VARIABLES, str(len(cores))) | {"GLIBC_TUNABLES": _MALLOC, "TVM_BIND_THREADS": "0"}
    kept = {name: os.environ.get(name) for name in wanted}
    os.sched_setaffinity(0, cores)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class MachineLock:
    """A lock on a file that is let go now and then, for machines that several measure on; None: no lock."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a")
        self._since: float | None = None

    def enter(self) -> None:
        """Wait for the lock, unless it is held and has not been for long."""
        if self._file is None:
            return
        if self._since is not None and time.monotonic() - self._since > _HELD_S:
            self.leave()
            time.sleep(_BREATH_S)
        if self._since is None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def leave(self) -> None:
        if self._file is not None and self._since is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()  # which lets go


def limits_of(workers: Workers) -> Limits:
    found = workers.ask(OURS, MeasureLimits(workers.settings.target))
    if not isinstance(found, Limits):
        raise InvariantError("the worker answered something else")
    return found


def bench_case(case: BenchCase, workers: Workers, limits: Limits) -> Json:
    """One row: the case built, checked and timed beside its peers, or its `error`."""
    settings = workers.settings
    try:
        bound = bound_of(case.program(), limits)
        built = workers.ask(OURS, BuildOurs(case, settings.target, settings.select, settings.top_k))
        if not isinstance(built, Built):
            raise InvariantError("the worker answered something else")
        found, failures = _peers(case, workers, built)
        if not built.proven and failures and not found:
            raise WrongAnswerError(f"no peer agrees with ours: {'; '.join(failures.values())}")
        taken = in_turns((OURS, *found), workers.ask)
    except RollerError as failure:
        return failed_row(case, failure)
    return case_row(case, taken, bound) | {
        "build_s": built.build_s, "model_build_s": built.model_build_s, "candidates": built.candidates,
        "proven": built.proven, "peer_errors": failures,
        "peer_calls": {name: list(peer.calls) for name, peer in found.items()},
    }  # fmt: skip


def _peers(case: BenchCase, workers: Workers, built: Built) -> tuple[dict[str, Found], dict[str, str]]:
    """What each peer calls, and of those that do not count, why."""
    found: dict[str, Found] = {}
    failures: dict[str, str] = {}
    for name in workers.peers:
        try:
            found[name] = _as_found(workers.ask(name, FindPeer(case, built.want)))
        except RollerError as failure:
            failures[name] = f"{failure.code}: {failure.message}"
    return found, failures


def _as_found(answer: Answer) -> Found:
    if not isinstance(answer, Found):
        raise InvariantError("the worker answered something else")
    return answer


def in_turns(names: Sequence[str], ask: Callable[[str, Task], Answer]) -> Taken:
    """Rounds of one sample each; a disturbed sample is taken again as long as there are repetitions left."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: list[float] = []
    repeated, start = 0, time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - start > CASE_S:
            break
        for name in names:
            sample = ask(name, TakeSample())
            while isinstance(sample, Sample) and sample.is_disturbed and repeated < MOST_REPEATED:
                repeated += 1
                sample = ask(name, TakeSample())
            if isinstance(sample, Sample):
                seconds[name].append(sample.seconds)
                peaks += [] if sample.peak_flops_per_s is None else [sample.peak_flops_per_s]
    return Taken(seconds, repeated, tuple(peaks))
