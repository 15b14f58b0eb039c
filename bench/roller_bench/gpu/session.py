"""Run the stages one after the other, each within its share of the time, and record their rows."""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from roller_bench.gpu import machine
from roller_bench.gpu.baselines import BASELINES
from roller_bench.gpu.baselines.triton_baseline import has_triton_kernel
from roller_bench.gpu.cases import in_order_of_value
from roller_bench.gpu.cases.check import Check
from roller_bench.gpu.device_errors import OUT_OF_MEMORY
from roller_bench.gpu.graphs import BUILD_S, MODELS, REHEARSED, GraphTask, build_graphs, ids, time_graphs
from roller_bench.gpu.probing import ProbeTask, probe_names, run_probe
from roller_bench.gpu.record import Record
from roller_bench.gpu.samples import TimedCase, references
from roller_bench.gpu.sanitized import TOOLS as SANITIZERS
from roller_bench.gpu.sanitized import sample_checks, sanitize
from roller_bench.gpu.smoke import MODULES, first_of_each_family, imported, tools
from roller_bench.gpu.timing import (
    BuildTask,
    BuiltCandidate,
    CheckTask,
    TimingTask,
    build_candidates,
    check_result,
    copy_bandwidth,
    memory_bound,
    time_case,
)
from roller_bench.gpu.verify import Verification, verify
from roller_bench.gpu.workers import BoundedPool, BoundedWorker, end_processes, map_unordered, running_workers
from roller_svc.errors import RollerError

Json = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")
Device = Callable[[Callable[[T], R]], Callable[[T], R]]

# Minutes of each stage if all run, ten in total, in order of value. Other totals are divided in these proportions.
STAGE_MINUTES = {
    "smoke": 1.25, "verify": 1.75, "measure": 3.0, "probe": 0.75, "graphs": 1.0, "compare": 1.25, "sanitize": 1.0,
}  # fmt: skip
DRY_STAGES = ("verify", "measure", "probe", "graphs")
MAX_JOBS_ON_DEVICE = 12  # each opens a context: about 0.5 GB and one second
STOP_S = 4.0  # reserved at the end of each stage to stop its processes
ALIVE_S = 15.0  # time limit for a fresh process to open the device after a failure
COMPILER_S = 60.0  # time limit of a baseline compiler for one case: the first case starts its worker processes
SMOKE_SETS = 2
TOOLS_STEP, COPY_STEP = "tools", "copy bandwidth"


class DeviceLostError(Exception):
    """The device does not respond: nothing more can be measured."""


class TimeIsUpError(Exception):
    """The time of a stage is up; a task that it interrupts is not an error."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run."""

    out: Path
    target: str
    minutes: float
    dry: bool
    only: re.Pattern[str]  # searched in ids
    stages: tuple[str, ...]
    jobs: int
    sets: int  # of inputs for a check
    cases_per_class: int  # and operand type
    top_k: int
    timeout_s: float  # for one check or case
    rehearse: bool = False
    verdicts: Path | None = None


@dataclass(frozen=True, slots=True)
class Tasks:
    """The checks and cases of a run."""

    checks: Sequence[Check]
    cases: Sequence[TimedCase]
    verdicts: dict[str, Json]  # by check id: the emulator's, from an earlier dry run


def stage_seconds(stages: Sequence[str], minutes: float) -> dict[str, float]:
    """Return the seconds of each stage."""
    total = sum(STAGE_MINUTES[stage] for stage in stages)
    return {stage: 60 * minutes * STAGE_MINUTES[stage] / total for stage in stages}


class Session:
    """One run. `device` wraps functions that run on the device; `bus_id` is for reading its clocks."""

    def __init__(self, options: Options, record: Record, work: Tasks, device: Device[Any, Any], bus_id: str | None) -> None:
        self.options = options
        self.record = record
        self.work = work
        self._device = device
        self._bus_id = bus_id
        self._until = 0.0
        self._best: dict[str, tuple[TimedCase, BuiltCandidate]] = {}
        self._done = self._left = 0
        self._other_workers = running_workers()

    def run(self) -> None:
        """Run all stages."""
        runs = {"smoke": self.smoke, "verify": self.verify, "measure": self.measure, "probe": self.probe,
                "graphs": self.graphs, "compare": self.compare, "sanitize": self.sanitize}  # fmt: skip
        began, end, lost = time.monotonic(), 0.0, ""
        for stage, seconds in stage_seconds(self.options.stages, self.options.minutes).items():
            end += seconds
            if lost:
                self.record.add("skipped", {"stage": stage, "why": lost})
                continue
            lost = self._stage(stage, runs[stage], began + end)

    def _stage(self, stage: str, run: Callable[[], None], end: float) -> str:
        """Run one stage; return why no further stage can run, or ''."""
        began, ended = time.monotonic(), "done"
        self._until, self._done, self._left = end - STOP_S, 0, 0
        print(f"== {stage}: {end - began:.0f} s", flush=True)
        try:
            run()
            if self._left:
                ended = "time"
        except TimeIsUpError:
            ended = "time"
        except DeviceLostError as lost:
            ended = f"device lost: {lost}"
        end_processes(self._other_workers)
        self.record.add(
            "stages",
            {
                "stage": stage,
                "seconds": time.monotonic() - began,
                "allowed_s": end - began,
                "done": self._done,
                "left": self._left,
                "ended": ended,
            },
        )
        if self._left:
            self.record.add("skipped", {"stage": stage, "tasks": self._left, "why": ended})
        return ended if ended.startswith("device lost") else ""

    # stages -----------------------------------------------------------------------------------------------------------
    def smoke(self) -> None:
        """Check tools and modules, a copy, the reference product and one kernel of each family."""
        chosen = first_of_each_family(self.work.checks)
        self._left = len(MODULES) + len(chosen) + 3
        self._add_smoke(TOOLS_STEP, tools())
        for name in MODULES:
            self._add_smoke(f"import {name}", self._run_isolated(imported, name))
        self._measure_copy()
        self._time(references()[:1])
        tasks = [Verification(check, self.options.target, SMOKE_SETS, on_device=True) for check in chosen]
        for task, answer in self._map_on_device(self._device(verify), tasks):
            self._add_verification(task, answer)

    def probe(self) -> None:
        """Run the probes one by one in a worker process, so that a failed probe leaves the others."""
        names = [name for name in probe_names(self.options.target) if self.options.only.search(f"probe/{name}")]
        self._left = len(names)
        worker = BoundedWorker(self._device(run_probe), self.options.timeout_s)
        for name in names:
            if self._is_over():
                break
            found = self._call_worker(worker, ProbeTask(name, self.options.target, run=not self.options.dry))
            for row in found if isinstance(found, list) else [{"name": name, "status": "error", **found}]:
                self.record.add("probes", {**row, "probe": name, "measured": self._measured(row)})
                print(f"{row.get('value', row['status'])!s:>12.12}  {row['name']}  {row.get('unit', '')}", flush=True)
            self._done, self._left = self._done + 1, self._left - 1
        worker.close()

    def verify(self) -> None:
        """Run all checks, the latest code first."""
        options = self.options
        tasks = [
            Verification(check, options.target, options.sets, not options.dry, self.work.verdicts.get(check.id))
            for check in in_order_of_value(self.work.checks)
        ]
        self._left = len(tasks)
        for task, answer in self._map_on_device(verify if options.dry else self._device(verify), tasks):
            self._add_verification(task, answer)

    def sanitize(self) -> None:
        """Run one check of each family under compute-sanitizer."""
        chosen = sample_checks(list(self.work.checks))
        self._left = 1
        for row in sanitize(chosen, self.options.target, max(0.0, self._until - time.monotonic())):
            self.record.add("sanitizer", row)
            print(f"{row['status']:>9}  {row['tool']}", flush=True)
        self._done, self._left = 1, 0

    def measure(self) -> None:
        """Time one case at a time on the device, while the CPU builds other cases and checks results."""
        self._left = len(self.work.cases)
        if not self.options.dry:
            self._left += 1
            self._measure_copy()
        self._time(self.work.cases)

    def graphs(self) -> None:
        """Time whole models by every lowering, one model at a time, while the CPU builds others."""
        options, models = self.options, _models(self.options)
        self._left = len(ids(models))
        limit_s = max(BUILD_S, options.timeout_s)
        worker = BoundedWorker(self._device(time_graphs), limit_s)
        with tempfile.TemporaryDirectory(prefix="gpu-bench-graphs-") as folder:
            tasks = [GraphTask(model, options.target, folder, self._bus_id) for model in models]
            for task, built in map_unordered(build_graphs, tasks, max(1, options.jobs - 1), limit_s, self._until):
                if isinstance(built, RollerError):
                    built = [{"id": each, "status": "error", "detail": error_text(built)} for each in ids([task.model])]
                timed = []
                if not options.dry and any(row["status"] == "built" for row in built):
                    timed = self._call_worker(worker, task)
                failed: Json = {"status": "error", "detail": timed["error"]} if isinstance(timed, dict) else {}
                rows = {} if failed else {row["id"]: row for row in timed}
                for row in built:
                    more = rows.get(row["id"], failed) if row["status"] == "built" else {}
                    self._add_row("graphs", row | more)
                    print(_graph_line(row | more), flush=True)
            worker.close()

    def compare(self) -> None:
        """Time baseline compilers, each in its own process, interleaved with our kernels."""
        names, pairs = _compilers(), _pairs(self.work.cases)
        self._left = len(pairs)
        limit_s = max(COMPILER_S, self.options.timeout_s)
        workers_by_name = {name: BoundedWorker(self._device(time_case), limit_s) for name in names}
        for case, built in self._built_candidates(list(dict.fromkeys(case.id for case, _ in pairs))):
            for name in (name for one, name in pairs if one.id == case.id):
                if self._is_over():
                    break
                if isinstance(built, RollerError) or not _should_compare(name, case, built):
                    self._done, self._left = self._done + 1, self._left - 1
                    continue
                found = self._call_worker(workers_by_name[name], TimingTask(case, built, (name,), self._bus_id))
                row, _ = found if isinstance(found, tuple) else (found, None)
                baseline_row = row.get("peers", {}).get(name, {"name": name, "error": row.get("error", "")})
                roller_row = {key: value for key, value in row.items() if key != "peers"}
                self._add_row(
                    "comparisons",
                    {"id": case.id, "peer": name, "ours": _case_columns(case) | roller_row, "found": baseline_row},
                )
                print(f"{_time_of(baseline_row):>9}  {name} {case.id}", flush=True)
        for worker in workers_by_name.values():
            worker.close()

    def _measured(self, row: Json) -> bool:
        """Return whether a probe's row was measured on a device."""
        return row["status"] == "ok" and not self.options.rehearse

    # steps of stages --------------------------------------------------------------------------------------------------
    def _time(self, cases: Sequence[TimedCase]) -> None:
        options = self.options
        worker = BoundedWorker(self._device(time_case), options.timeout_s)
        checkers: BoundedPool[CheckTask, str] = BoundedPool(check_result, max(1, options.jobs // 4), options.timeout_s)
        tasks = [BuildTask(case, options.target, options.top_k) for case in cases]
        try:
            for task, answer in map_unordered(build_candidates, tasks, max(1, options.jobs - 1), options.timeout_s, self._until):
                row = _case_columns(task.case)
                if isinstance(answer, RollerError):
                    row |= {"error": error_text(answer)}
                elif options.dry:
                    row |= {"built": len(answer), "predicted_s": answer[0].predicted_s}
                else:
                    found, check_task = self._time_with_library(worker, task.case, answer)
                    row |= found
                    self._submit_check(row, task.case, answer, checkers, check_task)
                self._add_row("measurements", row)
                print(_line(row), flush=True)
                self._collect_checked(checkers, time.monotonic())
        finally:
            self._collect_checked(checkers, self._until)
            checkers.close()
            worker.close()

    def _time_with_library(
        self, worker: BoundedWorker[TimingTask, Any], case: TimedCase, built: tuple[BuiltCandidate, ...]
    ) -> tuple[Json, CheckTask | None]:
        """Time our kernels with the library; without it if its call breaks the process that both run in."""
        task = TimingTask(case, built, ("library",), self._bus_id, cold=True)
        found = self._call_worker(worker, task)
        if isinstance(found, tuple):
            return found
        alone = self._call_worker(worker, dataclasses.replace(task, baselines=()))
        if not isinstance(alone, tuple):
            return alone, None
        return {**alone[0], "peers": {"library": {"name": "library", **found}}}, alone[1]

    def _submit_check(
        self,
        row: Json,
        case: TimedCase,
        built: tuple[BuiltCandidate, ...],
        checkers: BoundedPool[CheckTask, str],
        task: CheckTask | None,
    ) -> None:
        """Keep the fastest candidate for later stages and submit the results for checking."""
        if "best_rank" not in row:
            return
        self._best[case.id] = case, next(one for one in built if one.rank == row["best_rank"])
        if task is not None:
            checkers.submit(task)

    def _collect_checked(self, checkers: BoundedPool[CheckTask, str], until: float) -> None:
        while checkers.pending and (found := checkers.next(until)) is not None:
            task, answer = found
            verdict = f"not checked: {error_text(answer)}" if isinstance(answer, RollerError) else answer
            self.record.add("checked", {"id": task.case.id, "checked": verdict})
            if verdict.startswith("wrong"):
                print(f"{'wrong':>9}  {task.case.id}  {verdict[:160]}", flush=True)

    def _built_candidates(self, ids: Sequence[str]) -> Iterator[tuple[TimedCase, tuple[BuiltCandidate, ...] | RollerError]]:
        """Yield the fastest kernel of measured cases, and newly built candidates of the other cases."""
        for case, best in [self._best[name] for name in ids if name in self._best]:
            yield case, (best,)
        unmeasured = [case for case in self.work.cases if case.id in set(ids) - self._best.keys()]
        tasks = [BuildTask(case, self.options.target, self.options.top_k) for case in unmeasured]
        jobs, limit_s = max(1, self.options.jobs - 1), self.options.timeout_s
        for task, answer in map_unordered(build_candidates, tasks, jobs, limit_s, self._until):
            yield task.case, answer

    def _measure_copy(self) -> None:
        self._add_smoke(COPY_STEP, self._run_isolated(copy_bandwidth, None))

    def _add_smoke(self, name: str, row: Json) -> None:
        row = {"name": name, "status": "error" if "error" in row else "ok", **row}
        self._add_row("smoke", row)
        print(f"{row['status']:>9}  {name}  {row.get('detail', row.get('error', ''))}", flush=True)

    def _add_verification(self, task: Verification, answer: Json | RollerError) -> None:
        lost = {"id": task.check.id, "family": task.check.family, "status": "error"}
        row = lost | {"detail": error_text(answer)} if isinstance(answer, RollerError) else answer
        self._add_row("verification", row)
        print(f"{row['status']:>9}  {row['id']}  {row['detail'][:160]}", flush=True)
        if isinstance(answer, RollerError):
            self._check_device()

    def _map_on_device(self, work: Callable[[T], R], tasks: Sequence[T]) -> Iterator[tuple[T, R | RollerError]]:
        options = self.options
        yield from map_unordered(work, tasks, min(options.jobs, MAX_JOBS_ON_DEVICE), options.timeout_s, self._until)

    def _call_worker(self, worker: BoundedWorker[T, Any], task: T) -> Any:
        """Return the result of a task, or a row with `error`. Raises TimeIsUpError, DeviceLostError."""
        try:
            return worker.call(task, self._until)
        except RollerError as failure:
            if self._is_over():
                raise TimeIsUpError from failure
            if failure.code != OUT_OF_MEMORY:
                self._check_device()
            return {"error": error_text(failure)}

    def _run_isolated(self, work: Callable[[T], Json], task: T) -> Json:
        """Run a task in its own process, so that a crash affects nothing else."""
        worker: BoundedWorker[T, Json] = BoundedWorker(self._device(work), self.options.timeout_s)
        try:
            return dict(self._call_worker(worker, task))
        finally:
            worker.close()

    def _check_device(self) -> None:
        """Raise DeviceLostError if the device does not respond to a fresh process."""
        if self.options.dry:
            return
        worker: BoundedWorker[None, Json] = BoundedWorker(self._device(machine.device), ALIVE_S)
        try:
            worker.call(None, self._until)
        except RollerError as failure:
            if not self._is_over():
                raise DeviceLostError(error_text(failure)) from failure
        finally:
            worker.close()

    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    def _add_row(self, section: str, row: Json) -> None:
        self.record.add(section, row)
        self._done, self._left = self._done + 1, max(0, self._left - 1)


def planned_rows(options: Options, work: Tasks) -> dict[str, dict[str, list[str]]]:
    """Return {stage: {section: ids of the rows that the stage adds if nothing stops it}}, in the order of the run."""
    checks, cases = [check.id for check in in_order_of_value(work.checks)], [case.id for case in work.cases]
    probes = [name for name in probe_names(options.target) if options.only.search(f"probe/{name}")]
    steps = [TOOLS_STEP, *(f"import {name}" for name in MODULES), COPY_STEP]
    rows = {
        "smoke": {
            "smoke": steps,
            "measurements": [references()[0].id],
            "verification": [check.id for check in first_of_each_family(work.checks)],
        },
        "verify": {"verification": checks},
        "measure": {"measurements": cases},
        "probe": {"probes": probes},
        "graphs": {"graphs": ids(_models(options))},
        "compare": {"comparisons": [f"{case.id} {name}" for case, name in _pairs(work.cases)]},
        "sanitize": {"sanitizer": list(SANITIZERS)},
    }
    return {stage: rows[stage] for stage in options.stages}


def _models(options: Options) -> list[str]:
    """Return the models of the stage `graphs`."""
    names = REHEARSED if options.rehearse else MODELS
    return [name for name in names if options.only.search(f"graph/{name}")]


def _graph_line(row: Json) -> str:
    if "median_s" not in row:
        return f"{row['status']:>9}  {row['id']}  {row.get('detail', '')[:160]}"
    return f"{row['median_s'] * 1e6:>9.1f}  us {row['id']}, predicted {row['predicted_s'] * 1e6:.1f}, {row['checked'][:80]}"


def error_text(failure: RollerError) -> str:
    return f"{failure.code}: {failure.message}"


def _case_columns(case: TimedCase) -> Json:
    return {"id": case.id, "cls": case.cls, "dtype": case.dtype, "flops": case.flops}


def _compilers() -> list[str]:
    return [name for name in BASELINES if name != "library"]


def _pairs(cases: Sequence[TimedCase]) -> list[tuple[TimedCase, str]]:
    """Return the cases with the compilers that may have kernels for them."""
    return [(case, name) for case in cases for name in _compilers() if _may_compare(name, case)]


def _may_compare(name: str, case: TimedCase) -> bool:
    """Return whether a baseline may apply, before the kernels are known."""
    program = case.program()
    return has_triton_kernel(case) if name == "triton" else len(program.statements) > 1 or _streams(case)


def _streams(case: TimedCase) -> bool:
    return memory_bound((), case.program(), case.flops)


def _should_compare(name: str, case: TimedCase, built: Sequence[BuiltCandidate]) -> bool:
    """Return whether to time a baseline: Triton if it has a kernel, torch.compile for fused or memory-bound cases."""
    program = case.program()
    fused = len(program.statements) > 1
    return has_triton_kernel(case) if name == "triton" else fused or memory_bound(built[0].kernels, program, case.flops)


def _time_of(baseline_row: Json) -> str:
    if "median_s" in baseline_row:
        return f"{baseline_row['median_s'] * 1e6:.1f} us"
    return "skipped" if "skipped" in baseline_row else "error"


def _line(row: Json) -> str:
    if "error" in row:
        return f"{'error':>9}  {row['id']}  {row['error'][:160]}"
    if "best_s" not in row:
        return f"{'built':>9}  {row['id']}  {row['built']} candidates"
    library = row["peers"].get("library", {})
    library_text = f", {library['name']} {library['median_s'] * 1e6:.1f} us" if "median_s" in library else ""
    return f"{row['best_s'] * 1e6:>9.1f}  us {row['id']}, predicted {row['predicted_s'] * 1e6:.1f}{library_text}"
