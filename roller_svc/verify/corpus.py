"""Verify corpus cases: compile, run on random inputs, and compare with the reference interpreter."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError, InputError, RollerError
from roller_svc.frontend.parse import parse
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.constraints import OpClass
from roller_svc.ir.kernel import CompiledKernel, Language
from roller_svc.ir.options import RuntimeChoice
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.cuda.module import device_present
from roller_svc.semantics.inputs import random_inputs
from roller_svc.verify.kernel_stats import count_features, summarize_kernels
from roller_svc.verify.run_and_verify import accumulation_of, load_kernel, verify_results

Json = dict[str, Any]
STATUS_ORDER = {"ok": 0, "refused": 1, "wrong": 2, "error": 3}


@dataclass(frozen=True, slots=True)
class Case:
    """A case of a corpus, full-sized or small."""

    id: str
    cls: str
    expression: str
    inputs: Json
    outputs: tuple[str, ...] | None
    options: Json
    hints: Json  # for the random inputs

    @property
    def program_key(self) -> str:
        """A key that is equal for cases with the same program."""
        return json.dumps([self.expression, self.inputs, self.outputs, self.options], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Run:
    """How cases are compiled and run."""

    target: str
    emulate: bool = False
    seeds: int = 1  # random inputs of seeds 0 ... seeds - 1, each with another thread schedule in the emulator
    races: bool = False  # run the emulator's race detector
    family: OpClass | None = None  # constraints on every kernel (ir/constraints.py)
    tiles: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """Cases of one program, which is compiled once."""

    cases: tuple[Case, ...]
    run: Run


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a case."""

    id: str
    cls: str
    status: str  # a key of STATUS_ORDER
    detail: str = ""
    max_abs_error: float | None = None
    compile_seconds: float | None = None
    spill_bytes: int | None = None  # of all launches; None if nothing was compiled
    kernels: Sequence[Json] = ()  # summaries of the program's kernels (kernel_stats.py)

    def as_json(self) -> Json:
        return {name: getattr(self, name) for name in self.__slots__}


def parse_cases(document: object, *, small: bool, every: int = 1) -> list[Case]:
    """Return every `every`-th case of a corpus file, chosen by a hash of the id. Raises ArgumentError."""
    raw = document.get("cases") if isinstance(document, Mapping) else None
    if not isinstance(raw, list):
        raise ArgumentError('invalid corpus: expected an object with a list "cases"', code="invalid-corpus")
    cases = [_parse_case(number, entry, small=small) for number, entry in enumerate(raw)]
    return [case for case in cases if zlib.crc32(case.id.encode()) % every == 0]


def group_tasks(cases: Iterable[Case], run: Run) -> list[Task]:
    """Group cases by program, preserving their order."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.program_key, []).append(case)
    return [Task(tuple(group), run) for group in groups.values()]


def verify_task(task: Task) -> tuple[Row, ...]:
    """Verify the cases of a task and return a row for each. Errors become rows; a bug ends the worker process."""
    first = task.cases[0]
    try:
        request = case_request(first, task.run)
        report = build_kernel(request)
        kernel = package_kernel(report).compiled
    except InputError as error:
        detail = f"{type(error).__name__} {error.code}: {error.message}"
        return tuple(Row(case.id, case.cls, "refused", detail) for case in task.cases)
    except RollerError as failure:
        detail = f"{type(failure).__name__} {failure.code}: {failure.message}"
        return tuple(Row(case.id, case.cls, "error", detail) for case in task.cases)
    kernel_stats = summarize_kernels(report.groups, report.winner.plan, report.hardware)
    accumulation = accumulation_of(report.winner.plan, report.hardware)
    return tuple(replace(_run_case(case, request, kernel, task.run, accumulation), kernels=kernel_stats) for case in task.cases)


def case_request(case: Case, run: Run) -> BuildRequest:
    return build_request(
        case.expression,
        case.inputs,
        outputs=case.outputs,
        target=run.target,
        top_k=1,
        select="model",
        runtime="emulator" if run.emulate else "auto",
        allow_tf32=case.options.get("allow_tf32", False),
        allow_expanded_squares=case.options.get("allow_expanded_squares", False),
        family=run.family,
        tiles=dict(run.tiles),
    )


def failed_rows(task: Task, error: RollerError) -> tuple[Row, ...]:
    """Return rows for a task whose worker was lost."""
    return tuple(Row(case.id, case.cls, "error", error.message) for case in task.cases)


def summarize(rows: Iterable[Row]) -> Json:
    """Return counts in total and by class, the median compile time, and features of the kernels of passing cases."""
    all_rows = list(rows)
    counts = {status: sum(row.status == status for row in all_rows) for status in STATUS_ORDER}
    times = sorted(row.compile_seconds for row in all_rows if row.compile_seconds is not None)
    classes: dict[str, dict[str, int]] = {}
    for row in all_rows:
        class_counts = classes.setdefault(row.cls, dict.fromkeys(STATUS_ORDER, 0))
        class_counts[row.status] += 1
    return {
        "cases": len(all_rows),
        **counts,
        "ok_share": counts["ok"] / len(all_rows) if all_rows else 0.0,
        "spilled": sum(bool(row.spill_bytes) for row in all_rows),
        "compile_median_s": times[len(times) // 2] if times else None,
        "classes": dict(sorted(classes.items())),
        "kernels": count_features(kernel for row in all_rows if row.status == "ok" for kernel in row.kernels),
    }


def _parse_case(number: int, entry: object, *, small: bool) -> Case:
    try:
        if not isinstance(entry, dict):
            raise TypeError("not an object")
        variant: Json = (entry.get("small") if small else None) or entry
        outputs = entry.get("outputs") or list(entry.get("out_meta") or ())
        return Case(
            id=str(entry["id"]),
            cls=str(entry.get("cls", "")),
            expression=str(variant["expr"]),
            inputs={name: {"dtype": kind["dtype"], "shape": kind["shape"]} for name, kind in variant["inputs"].items()},
            outputs=tuple(outputs) or None,
            options=dict(entry.get("options") or {}),
            hints=dict(entry.get("hints") or {}),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as failure:
        raise ArgumentError(f"case {number} of the corpus: {failure!r}", code="invalid-corpus") from failure


def _run_case(
    case: Case, request: BuildRequest, kernel: CompiledKernel, run: Run, accumulation: AccumulatorPrecision | None
) -> Row:
    """Run a case on the inputs of every seed until one fails."""
    spilled = sum(resources.spill_bytes for resources in kernel.resources)
    row = Row(case.id, case.cls, "ok", "", None, kernel.compile_seconds, spilled)
    emulate = request.runtime is RuntimeChoice.EMULATOR
    if not emulate and not _may_run(kernel.source.language):
        return replace(row, detail="compiled only")
    program = parse(request.expression, dict(request.inputs), request.outputs)
    max_error: float | None = None
    for seed in range(run.seeds):
        try:
            arrays = random_inputs(program, seed=seed, hints=case.hints)
            results = load_kernel(kernel, arrays, request.runtime, races=run.races).results()
            agreement = verify_results(
                program,
                arrays,
                results,
                allow_tf32=request.allow_tf32,
                allow_expanded_squares=request.allow_expanded_squares,
                accumulation=accumulation,
            )
        except RollerError as failure:
            detail = f"{type(failure).__name__} {failure.code}: {failure.message}"
            return replace(row, status="error", detail=_with_seed(detail, seed))
        max_error = max((e for e in (max_error, agreement.max_abs_error) if e is not None), default=None)
        if not agreement.ok:
            return replace(row, status="wrong", detail=_with_seed(agreement.detail, seed), max_abs_error=max_error)
    return replace(row, max_abs_error=max_error)


def _with_seed(detail: str, seed: int) -> str:
    return f"inputs of seed {seed}: {detail}" if seed else detail


def _may_run(language: Language) -> bool:
    """Whether this machine may have a device for kernels in a language."""
    return language is Language.C or (language is Language.CUDA and device_present())
