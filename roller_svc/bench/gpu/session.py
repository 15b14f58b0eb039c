"""One run of the bench: stage after stage, each of which ends by itself when its time is up; rows into the record."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roller_svc.bench.gpu import machine
from roller_svc.bench.gpu.baselines import PEERS
from roller_svc.bench.gpu.baselines.triton_baseline import written_for
from roller_svc.bench.gpu.cases.check import Check
from roller_svc.bench.gpu.device_errors import OUT_OF_MEMORY
from roller_svc.bench.gpu.probing import ProbeTask, probe_names, probed
from roller_svc.bench.gpu.record import Record
from roller_svc.bench.gpu.samples import TimedCase, references
from roller_svc.bench.gpu.sanitized import sample, sanitize
from roller_svc.bench.gpu.smoke import MODULES, imported, one_of_each, tools
from roller_svc.bench.gpu.timing import (
    BuildTask,
    Built,
    JudgeTask,
    TimingTask,
    build,
    copy_bandwidth,
    judge,
    memory_bound,
    timed,
)
from roller_svc.bench.gpu.verify import Verification, verify
from roller_svc.bench.gpu.workers import BoundedLane, Pool, end_processes, spread, workers
from roller_svc.errors import RollerError

Json = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")
Device = Callable[[Callable[[T], R]], Callable[[T], R]]

# Minutes of each stage where all run, thirty together; those that are given are shared out in these proportions.
STAGE_MINUTES = {"smoke": 3.0, "probe": 2.0, "verify": 6.0, "sanitize": 2.0, "measure": 10.0, "compare": 7.0}
DRY_STAGES = ("probe", "verify", "measure")
MOST_JOBS_ON_DEVICE = 12  # a context each, which takes about half a gigabyte and a second
ENDING_S = 4.0  # of each stage, to end its processes in
ALIVE_S = 15.0  # what a device gets to answer after a failure: a process has to start and open it
COMPILER_S = 60.0  # what another compiler may take for one case: the first one starts its own workers
SMOKE_SETS = 2


class DeviceLostError(Exception):
    """The device no longer answers: nothing more can be measured."""


class TimeIsUpError(Exception):
    """What was under way when a stage's time was up is not an error of its own."""


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
    rehearse: bool = False
    verdicts: Path | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to do. `verdicts`: the emulator's, of checks by id, from a run before."""

    checks: Sequence[Check]
    cases: Sequence[TimedCase]
    verdicts: dict[str, Json]


def shares_of(stages: Sequence[str], minutes: float) -> dict[str, float]:
    """Seconds of each stage."""
    total = sum(STAGE_MINUTES[stage] for stage in stages)
    return {stage: 60 * minutes * STAGE_MINUTES[stage] / total for stage in stages}


class Session:
    """One run. `device`: wraps work that is done on the device. `bus_id`: of it, for its clocks."""

    def __init__(
        self, options: Options, record: Record, work: Work, device: Device[Any, Any], bus_id: str | None
    ) -> None:
        self.options = options
        self.record = record
        self.work = work
        self._device = device
        self._bus_id = bus_id
        self._until = 0.0
        self._best: dict[str, tuple[TimedCase, Built]] = {}
        self._done = self._left = 0
        self._others = workers()

    def run(self) -> None:
        """All stages."""
        runs = {"smoke": self.smoke, "probe": self.probe, "verify": self.verify, "sanitize": self.sanitize,
                "measure": self.measure, "compare": self.compare}  # fmt: skip
        began, end, lost = time.monotonic(), 0.0, ""
        for stage, seconds in shares_of(self.options.stages, self.options.minutes).items():
            end += seconds
            if lost:
                self.record.add("skipped", {"stage": stage, "why": lost})
                continue
            lost = self._stage(stage, runs[stage], began + end)

    def _stage(self, stage: str, run: Callable[[], None], end: float) -> str:
        """Why nothing more can run, or ''."""
        began, ended = time.monotonic(), "done"
        self._until, self._done, self._left = end - ENDING_S, 0, 0
        print(f"== {stage}: {end - began:.0f} s", flush=True)
        try:
            run()
            if self._left:
                ended = "time"
        except TimeIsUpError:
            ended = "time"
        except DeviceLostError as lost:
            ended = f"device lost: {lost}"
        end_processes(self._others)
        self.record.add("stages", {"stage": stage, "seconds": time.monotonic() - began, "allowed_s": end - began,
                                   "done": self._done, "left": self._left, "ended": ended})  # fmt: skip
        if self._left:
            self.record.add("skipped", {"stage": stage, "tasks": self._left, "why": ended})
        return ended if ended.startswith("device lost") else ""

    # stages -----------------------------------------------------------------------------------------------------------
    def smoke(self) -> None:
        """What is there; a copy; the reference product; one kernel of each family."""
        chosen = one_of_each(self.work.checks)
        self._left = len(MODULES) + len(chosen) + 3
        self._add_smoke("tools", tools())
        for name in MODULES:
            self._add_smoke(f"import {name}", self._alone(imported, name))
        self._copy()
        self._time(references()[:1])
        tasks = [Verification(check, self.options.target, SMOKE_SETS, on_device=True) for check in chosen]
        for task, answer in self._spread(self._device(verify), tasks):
            self._verified(task, answer)

    def probe(self) -> None:
        """One process after another has the device; what one of them breaks leaves the rest."""
        names = [name for name in probe_names(self.options.target) if self.options.only.search(f"probe/{name}")]
        self._left = len(names)
        lane = BoundedLane(self._device(probed), self.options.timeout_s)
        for name in names:
            if self._over():
                break
            found = self._call(lane, ProbeTask(name, self.options.target, run=not self.options.dry))
            for row in found if isinstance(found, list) else [{"name": name, "status": "error", **found}]:
                self.record.add("probes", {**row, "probe": name, "measured": self._measured(row)})
                print(f"{row.get('value', row['status'])!s:>12.12}  {row['name']}  {row.get('unit', '')}", flush=True)
            self._done, self._left = self._done + 1, self._left - 1
        lane.close()

    def verify(self) -> None:
        """Large ones first: they take longest, and the others fill the cores beside them."""
        options = self.options
        ordered = sorted(self.work.checks, key=lambda check: not check.family.endswith("-large"))
        tasks = [
            Verification(check, options.target, options.sets, not options.dry, self.work.verdicts.get(check.id))
            for check in ordered
        ]
        self._left = len(tasks)
        for task, answer in self._spread(verify if options.dry else self._device(verify), tasks):
            self._verified(task, answer)

    def sanitize(self) -> None:
        chosen = sample(list(self.work.checks))
        self._left = 1
        for row in sanitize(chosen, self.options.target, max(0.0, self._until - time.monotonic())):
            self.record.add("sanitizer", row)
            print(f"{row['status']:>9}  {row['tool']}", flush=True)
        self._done, self._left = 1, 0

    def measure(self) -> None:
        """A device times one case at a time while kernels of others are built and results judged on the cores."""
        self._left = len(self.work.cases)
        if not self.options.dry:
            self._left += 1
            self._copy()
        self._time(self.work.cases)

    def compare(self) -> None:
        """Cases that other compilers might be good at, each compiler in a process of its own, in turns with ours."""
        names = [name for name in PEERS if name != "library"]
        wanted = [(case, name) for case in self.work.cases for name in names if _might_compare(name, case)]
        self._left = len(wanted)
        limit_s = max(COMPILER_S, self.options.timeout_s)
        lanes = {name: BoundedLane(self._device(timed), limit_s) for name in names}
        for case, built in self._built(list(dict.fromkeys(case.id for case, _ in wanted))):
            for name in (name for one, name in wanted if one.id == case.id):
                if self._over():
                    break
                if isinstance(built, RollerError) or not _compared(name, case, built):
                    self._done, self._left = self._done + 1, self._left - 1
                    continue
                found = self._call(lanes[name], TimingTask(case, built, (name,), self._bus_id))
                row, _ = found if isinstance(found, tuple) else (found, None)
                peer = row.get("peers", {}).get(name, {"name": name, "error": row.get("error", "")})
                ours = {key: value for key, value in row.items() if key != "peers"}
                self._did("comparisons", {"id": case.id, "peer": name, "ours": _described(case) | ours, "found": peer})
                print(f"{_time_of(peer):>9}  {name} {case.id}", flush=True)
        for lane in lanes.values():
            lane.close()

    def _measured(self, row: Json) -> bool:
        """Whether a probe's row is a device's answer."""
        return row["status"] == "ok" and not self.options.rehearse

    # parts of stages --------------------------------------------------------------------------------------------------
    def _time(self, cases: Sequence[TimedCase]) -> None:
        options = self.options
        lane = BoundedLane(self._device(timed), options.timeout_s)
        judges: Pool[JudgeTask, str] = Pool(judge, max(1, options.jobs // 4), options.timeout_s)
        tasks = [BuildTask(case, options.target, options.top_k) for case in cases]
        try:
            for task, answer in spread(build, tasks, max(1, options.jobs - 1), options.timeout_s, self._until):
                row = _described(task.case)
                if isinstance(answer, RollerError):
                    row |= {"error": said(answer)}
                elif options.dry:
                    row |= {"built": len(answer), "predicted_s": answer[0].predicted_s}
                else:
                    found, to_judge = self._beside_library(lane, task.case, answer)
                    row |= found
                    self._keep(row, task.case, answer, judges, to_judge)
                self._did("measurements", row)
                print(_line(row), flush=True)
                self._take_judged(judges, time.monotonic())
        finally:
            self._take_judged(judges, self._until)
            judges.close()
            lane.close()

    def _beside_library(
        self, lane: BoundedLane[TimingTask, Any], case: TimedCase, built: tuple[Built, ...]
    ) -> tuple[Json, JudgeTask | None]:
        """Our times and the library's; ours alone where its call breaks the process that both are in."""
        task = TimingTask(case, built, ("library",), self._bus_id, cold=True)
        found = self._call(lane, task)
        if isinstance(found, tuple):
            return found
        alone = self._call(lane, dataclasses.replace(task, peers=()))
        if not isinstance(alone, tuple):
            return alone, None
        return {**alone[0], "peers": {"library": {"name": "library", **found}}}, alone[1]

    def _keep(
        self, row: Json, case: TimedCase, built: tuple[Built, ...], judges: Pool[JudgeTask, str], task: JudgeTask | None
    ) -> None:
        """What later stages need of a case that was timed; and have its results judged."""
        if "best_rank" not in row:
            return
        self._best[case.id] = case, next(one for one in built if one.rank == row["best_rank"])
        if task is not None:
            judges.submit(task)

    def _take_judged(self, judges: Pool[JudgeTask, str], until: float) -> None:
        while judges.pending and (found := judges.next(until)) is not None:
            task, answer = found
            verdict = f"not judged: {said(answer)}" if isinstance(answer, RollerError) else answer
            self.record.add("judged", {"id": task.case.id, "judged": verdict})
            if verdict.startswith("wrong"):
                print(f"{'wrong':>9}  {task.case.id}  {verdict[:160]}", flush=True)

    def _built(self, ids: Sequence[str]) -> Iterator[tuple[TimedCase, tuple[Built, ...] | RollerError]]:
        """The fastest kernels of cases that were measured; candidates of others, built."""
        for case, best in [self._best[name] for name in ids if name in self._best]:
            yield case, (best,)
        others = [case for case in self.work.cases if case.id in set(ids) - self._best.keys()]
        tasks = [BuildTask(case, self.options.target, self.options.top_k) for case in others]
        jobs, limit_s = max(1, self.options.jobs - 1), self.options.timeout_s
        for task, answer in spread(build, tasks, jobs, limit_s, self._until):
            yield task.case, answer

    def _copy(self) -> None:
        self._add_smoke("copy bandwidth", self._alone(copy_bandwidth, None))

    def _add_smoke(self, name: str, row: Json) -> None:
        row = {"name": name, "status": "error" if "error" in row else "ok", **row}
        self._did("smoke", row)
        print(f"{row['status']:>9}  {name}  {row.get('detail', row.get('error', ''))}", flush=True)

    def _verified(self, task: Verification, answer: Json | RollerError) -> None:
        lost = {"id": task.check.id, "family": task.check.family, "status": "error"}
        row = lost | {"detail": said(answer)} if isinstance(answer, RollerError) else answer
        self._did("verification", row)
        print(f"{row['status']:>9}  {row['id']}  {row['detail'][:160]}", flush=True)
        if isinstance(answer, RollerError):
            self._check_device()

    def _spread(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R | RollerError]]:
        options = self.options
        yield from spread(work, tasks, min(options.jobs, MOST_JOBS_ON_DEVICE), options.timeout_s, self._until)

    def _call(self, lane: BoundedLane[T, Any], task: T) -> Any:
        """What comes of it, or a row that says why nothing did. Raises TimeIsUpError, DeviceLostError."""
        try:
            return lane.call(task, self._until)
        except RollerError as failure:
            if self._over():
                raise TimeIsUpError from failure
            if failure.code != OUT_OF_MEMORY:
                self._check_device()
            return {"error": said(failure)}

    def _alone(self, work: Callable[[T], Json], task: T) -> Json:
        """In a process of its own: what breaks it leaves the rest."""
        lane: BoundedLane[T, Json] = BoundedLane(self._device(work), self.options.timeout_s)
        try:
            return dict(self._call(lane, task))
        finally:
            lane.close()

    def _check_device(self) -> None:
        """After a failure: whether the device still answers a fresh process. Raises DeviceLostError."""
        if self.options.dry:
            return
        lane: BoundedLane[None, Json] = BoundedLane(self._device(machine.device), ALIVE_S)
        try:
            lane.call(None, self._until)
        except RollerError as failure:
            if not self._over():
                raise DeviceLostError(said(failure)) from failure
        finally:
            lane.close()

    def _over(self) -> bool:
        return time.monotonic() >= self._until

    def _did(self, section: str, row: Json) -> None:
        self.record.add(section, row)
        self._done, self._left = self._done + 1, max(0, self._left - 1)


def said(failure: RollerError) -> str:
    return f"{failure.code}: {failure.message}"


def _described(case: TimedCase) -> Json:
    return {"id": case.id, "cls": case.cls, "dtype": case.dtype, "flops": case.flops}


def _might_compare(name: str, case: TimedCase) -> bool:
    """Before its kernels are known: all but single products for torch.compile."""
    program = case.program()
    return written_for(case) if name == "triton" else len(program.statements) > 1 or _streams(case)


def _streams(case: TimedCase) -> bool:
    return memory_bound((), case.program(), case.flops)


def _compared(name: str, case: TimedCase, built: Sequence[Built]) -> bool:
    """torch.compile for what it might fuse or stream; Triton for what a kernel is written for."""
    program = case.program()
    fused = len(program.statements) > 1
    return written_for(case) if name == "triton" else fused or memory_bound(built[0].kernels, program, case.flops)


def _time_of(peer: Json) -> str:
    if "median_s" in peer:
        return f"{peer['median_s'] * 1e6:.1f} us"
    return "skipped" if "skipped" in peer else "error"


def _line(row: Json) -> str:
    if "error" in row:
        return f"{'error':>9}  {row['id']}  {row['error'][:160]}"
    if "best_s" not in row:
        return f"{'built':>9}  {row['id']}  {row['built']} candidates"
    library = row["peers"].get("library", {})
    beside = f", {library['name']} {library['median_s'] * 1e6:.1f} us" if "median_s" in library else ""
    return f"{row['best_s'] * 1e6:>9.1f}  us {row['id']}, predicted {row['predicted_s'] * 1e6:.1f}{beside}"
