"""One run of the bench: stage after stage, each until its share of the time is spent, rows into the record."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpu_bench.check import Check
from gpu_bench.clocks import Nvml, watched
from gpu_bench.compiled_peer import compiled_timed
from gpu_bench.peers import library_timed
from gpu_bench.record import Record
from gpu_bench.samples import TimedCase
from gpu_bench.sanitized import sanitize
from gpu_bench.timing import BuildTask, Built, TimingTask, build, calibrated, copy_bandwidth, timed
from gpu_bench.triton_peer import triton_timed, written_for
from gpu_bench.verify import Verification, verify
from roller_svc.errors import RollerError
from roller_svc.farm.lanes import Lane, spread

Json = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")

# Shares of the time at which a stage must have ended; what it did not get to is listed as skipped.
SHARES = {"verify": 0.4, "sanitize": 0.5, "measure": 0.78, "compare": 0.94}
DRY_SHARES = {"verify": 0.8, "sanitize": 0.8, "measure": 0.94, "compare": 0.94}  # the emulator takes most
MOST_JOBS_ON_DEVICE = 12  # a context each, which takes about half a gigabyte and a second
CALIBRATION_S = 8.0  # of measuring, after its kernels are compiled
COMPILER_S = 30.0  # what another compiler may take for one case; of nine minutes, what the last share leaves


@dataclass(frozen=True, slots=True)
class Options:
    """`only`: what ids must match. `each`: cases of every class and type. `timeout_s`: for one check or case."""

    out: Path
    target: str
    minutes: float
    dry: bool
    only: re.Pattern[str]
    stages: tuple[str, ...]
    jobs: int
    sets: int
    each: int
    top_k: int
    timeout_s: float


class Session:
    """One run: its options, its record, its clock. `device`: what tells the clocks of the one that is measured."""

    def __init__(self, options: Options, record: Record, device: Nvml | None) -> None:
        self.options = options
        self.record = record
        self._device = device
        self._began = time.monotonic()
        self._measured: list[tuple[TimedCase, Json]] = []

    def verify(self, found: Sequence[Check]) -> None:
        """Large ones first: they take longest, and the others fill the cores beside them."""
        options = self.options
        ordered = sorted(found, key=lambda check: not check.family.endswith("-large"))
        tasks = [Verification(check, options.target, options.sets, not options.dry) for check in ordered]
        for task, answer in self._until("verify", verify, tasks, min(options.jobs, MOST_JOBS_ON_DEVICE)):
            lost = {"id": task.check.id, "family": task.check.family, "status": "error"}
            row = lost | {"detail": _said(answer)} if isinstance(answer, RollerError) else answer
            self.record.add("verification", row)
            print(f"{row['status']:>9}  {row['id']}  {row['detail'][:160]}", flush=True)

    def sanitize(self, found: list[Check]) -> None:
        if self.options.dry or self._left_s("sanitize") <= 0:
            self.record.add("skipped", {"stage": "sanitize", "tasks": len(found)})
            return
        for row in sanitize(found, self.options.target, max(10.0, self._left_s("sanitize"))):
            self.record.add("sanitizer", row)
            print(f"{row['status']:>9}  {row['tool']}", flush=True)

    def measure(self, cases: Sequence[TimedCase]) -> None:
        """Kernels are built on all cores but one while those that are ready are timed, one at a time, and the vendor's
        library right after each."""
        options = self.options
        if not options.dry:
            self.record.document["bandwidth"] = self._alone(copy_bandwidth, None)
            self.record.document["calibration"] = self._alone(calibrated, CALIBRATION_S)
        ours: Lane[TimingTask, Json] = Lane(timed, options.timeout_s)
        theirs: Lane[TimedCase, Json | None] = Lane(library_timed, options.timeout_s)
        tasks = [BuildTask(case, options.target, options.top_k) for case in cases]
        try:
            for task, answer in self._until("measure", build, tasks, max(1, options.jobs - 1)):
                row: Json = {"id": task.case.id, "cls": task.case.cls, "dtype": task.case.dtype,
                             "flops": task.case.flops}  # fmt: skip
                if isinstance(answer, RollerError):
                    row |= {"error": _said(answer)}
                elif options.dry:
                    row |= {"built": len(answer), "predicted_s": answer[0].predicted_s}
                else:
                    row |= self._timed(ours, theirs, task.case, answer)
                    self._measured.append((task.case, row))
                self.record.add("measurements", row)
                print(_line(row), flush=True)
        finally:
            ours.close(at_once=True)
            theirs.close(at_once=True)

    def compare(self) -> None:
        """The same cases by other compilers, which take their time: each in the order they were measured in."""
        compilers: tuple[tuple[str, Callable[[TimedCase], Json]], ...] = (
            ("torch.compile", compiled_timed), ("triton", triton_timed),
        )  # fmt: skip
        lanes = {name: Lane(work, min(COMPILER_S, self.options.timeout_s)) for name, work in compilers}
        todo = [(name, case, row) for case, row in self._measured for name in lanes if _compared(name, case, row)]
        done = 0
        try:
            for name, case, row in todo:
                if self._left_s("compare") <= 0:
                    break
                row["peers"][name] = self._watched(lanes[name], case)
                self.record.touched()
                print(f"{_time_of(row['peers'][name]):>9}  {name} {case.id}", flush=True)
                done += 1
        finally:
            for lane in lanes.values():
                lane.close(at_once=True)
        if done < len(todo):
            self.record.add("skipped", {"stage": "compare", "tasks": len(todo) - done})

    def _timed(
        self, ours: Lane[TimingTask, Json], theirs: Lane[TimedCase, Json | None], case: TimedCase,
        built: tuple[Built, ...],
    ) -> Json:  # fmt: skip
        """Our times and the library's, each from a process of its own: what breaks one leaves the other."""
        row = self._watched(ours, TimingTask(case, built)) or {}
        row["peers"] = {}
        library = self._watched(theirs, case)
        if library is not None:
            row["peers"]["library"] = library
        return row

    def _watched(self, lane: Lane[T, Json] | Lane[T, Json | None], task: T) -> Json | None:
        """What comes of a measurement, with the clocks beside it."""
        with watched(self._device) as watch:
            try:
                found = lane.call(task)
            except RollerError as failure:
                return {"error": _said(failure), "clocks": watch.told()}
        return None if found is None else {**found, "clocks": watch.told()}

    def _until(
        self, stage: str, work: Callable[[T], R], tasks: Sequence[T], jobs: int
    ) -> Iterator[tuple[T, R | RollerError]]:
        """Tasks with their results, as they come, until the stage's share of the time is spent."""
        done = 0
        if self._left_s(stage) > 0:
            for task, answer in spread(work, tasks, jobs, self.options.timeout_s):
                yield task, answer
                done += 1
                if self._left_s(stage) <= 0:
                    break
        if done < len(tasks):
            self.record.add("skipped", {"stage": stage, "tasks": len(tasks) - done})

    def _left_s(self, stage: str) -> float:
        """The last stage that runs may take what is left for those that do not."""
        shares = DRY_SHARES if self.options.dry else SHARES
        stages = [name for name in shares if name in self.options.stages]
        share = max(shares.values()) if stage == stages[-1] else shares[stage]
        return self._began + share * self.options.minutes * 60 - time.monotonic()

    def _alone(self, work: Callable[[T], Json], task: T) -> Json:
        """In a process of its own: what breaks it leaves the rest."""
        lane: Lane[T, Json] = Lane(work, self.options.timeout_s)
        try:
            return self._watched(lane, task) or {}
        finally:
            lane.close(at_once=True)


def _compared(name: str, case: TimedCase, row: Json) -> bool:
    """torch.compile for what it might fuse or stream; Triton for what a kernel is written for."""
    if "best_s" not in row:
        return False
    return written_for(case) if name == "triton" else row["fused"] or row["memory_bound"]


def _said(failure: RollerError) -> str:
    return f"{failure.code}: {failure.message}"


def _time_of(peer: Json | None) -> str:
    found = peer or {}
    if "seconds" in found:
        return f"{found['seconds'] * 1e6:.1f} us"
    return "skipped" if "skipped" in found else "error"


def _line(row: Json) -> str:
    if "error" in row:
        return f"{'error':>9}  {row['id']}  {row['error'][:160]}"
    if "best_s" not in row:
        return f"{'built':>9}  {row['id']}  {row['built']} candidates"
    library = row["peers"].get("library", {})
    beside = f", {library['name']} {library['seconds'] * 1e6:.1f} us" if "seconds" in library else ""
    wrong = "" if not row["judged"].startswith("wrong") else f"  {row['judged'][:100]}"
    return f"{row['best_s'] * 1e6:>9.1f}  us {row['id']}, predicted {row['predicted_s'] * 1e6:.1f}{beside}{wrong}"
