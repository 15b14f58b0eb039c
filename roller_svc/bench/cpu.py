"""Cases on this CPU: our kernels and numpy's and torch's calls for the same programs, timed in turns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roller_svc.bench.cases import BenchCase
from roller_svc.bench.cpu_report import Taken, bound_of, case_row, failed_row
from roller_svc.bench.cpu_worker import (
    OURS,
    Answer,
    BuildOurs,
    Built,
    FindPeer,
    MeasureLimits,
    Start,
    TakeSample,
    Task,
    work,
)  # fmt: skip
from roller_svc.bench.limits import Limits
from roller_svc.bench.sampling import Sample
from roller_svc.errors import ArgumentError, InvariantError, RollerError
from roller_svc.farm.lanes import Lane

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
_TIMEOUT_S = 600.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Freed memory stays in the process and in large pages: a library that makes its results anew must not fault them in.
_MALLOC = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1"


@dataclass(frozen=True, slots=True)
class Settings:
    target: str = "local"
    select: str = "measure"
    top_k: int = 10
    peers: tuple[str, ...] = ("numpy", "torch")


@dataclass(slots=True)
class Workers:
    """A process for ours and for every peer, on the same cores."""

    threads: int
    settings: Settings
    lanes: dict[str, Lane[Task, Answer]] = field(default_factory=dict)
    versions: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Raises ArgumentError where there are too few cores; a peer that is not installed becomes a note."""
        cores = sorted(os.sched_getaffinity(0))[-self.threads :]
        if len(cores) < self.threads:
            raise ArgumentError(f"--threads {self.threads}: this process may use {len(cores)} cores")
        for name in (OURS, *self.settings.peers):
            lane: Lane[Task, Answer] = Lane(work, _TIMEOUT_S)
            try:
                with pinned(cores):
                    versions = lane.call(Start(name, self.threads))
            except ArgumentError as missing:
                lane.close(at_once=True)
                self.notes.append(missing.message)
                continue
            self.lanes[name] = lane
            if isinstance(versions, dict) and name != OURS:
                self.versions |= versions

    def close(self) -> None:
        for lane in self.lanes.values():
            lane.close(at_once=True)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Processes started within run on these cores only, from their first instruction on."""
    before = os.sched_getaffinity(0)
    wanted = dict.fromkeys(_THREAD_VARIABLES, str(len(cores))) | {"GLIBC_TUNABLES": _MALLOC}
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


class Turnstile:
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
    found = workers.lanes[OURS].call(MeasureLimits(workers.settings.target))
    if not isinstance(found, Limits):
        raise InvariantError("the worker answered something else")
    return found


def bench_case(case: BenchCase, workers: Workers, limits: Limits) -> Json:
    """One row: the case built, checked and timed beside its peers, or its `error`."""
    settings = workers.settings
    try:
        program = case.program()
        built = workers.lanes[OURS].call(BuildOurs(case, settings.target, settings.select, settings.top_k))
    except RollerError as failure:
        return failed_row(case, failure)
    if not isinstance(built, Built):
        raise InvariantError("the worker answered something else")
    calls: dict[str, list[str]] = {}
    failures: dict[str, str] = {}
    for name, lane in workers.lanes.items():
        if name != OURS:
            try:
                calls[name] = peer_calls(lane.call(FindPeer(case, built.want)))
            except RollerError as failure:
                failures[name] = f"{failure.code}: {failure.message}"
    taken = in_turns({name: workers.lanes[name] for name in (OURS, *calls)})
    row = case_row(case, taken, bound_of(program, limits))
    return row | {
        "build_s": built.build_s, "model_build_s": built.model_build_s, "candidates": built.candidates,
        "peer_calls": calls, "peer_errors": failures,
    }  # fmt: skip


def peer_calls(answer: Answer) -> list[str]:
    if not isinstance(answer, tuple):
        raise InvariantError("the worker answered something else")
    return list(answer)


def in_turns(lanes: dict[str, Lane[Task, Answer]]) -> Taken:
    """Rounds of one sample each; a disturbed sample is taken again as long as there are repetitions left."""
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    repeated, start = 0, time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() - start > CASE_S:
            break
        for name, lane in lanes.items():
            sample = lane.call(TakeSample())
            while isinstance(sample, Sample) and sample.is_disturbed and repeated < MOST_REPEATED:
                repeated += 1
                sample = lane.call(TakeSample())
            if isinstance(sample, Sample):
                seconds[name].append(sample.seconds)
    return Taken(seconds, repeated)
