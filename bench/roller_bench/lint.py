"""Lint the compiled CUDA kernels of all cases: spills, compiler warnings, instructions, compile time."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_bench.cases import BenchCase
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.errors import RollerError
from roller_svc.ir.report import BuildReport
from roller_svc.verify.lint_reports import lint_json, lint_reports

Json = dict[str, Any]

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-l40s")  # sm_80 and sm_89
CASES_PER_TASK = 8  # amortises the start of the disassembler


@dataclass(frozen=True, slots=True)
class LintTask:
    """Cases that are built one by one and disassembled together, for one device."""

    cases: tuple[BenchCase, ...]
    target: str


def batch_tasks(cases: Sequence[BenchCase], target: str, size: int = CASES_PER_TASK) -> list[LintTask]:
    return [LintTask(tuple(cases[i : i + size]), target) for i in range(0, len(cases), size)]


def lint_cases(task: LintTask) -> list[Json]:
    """Return one row per case: the lint of the kernel that the model ranks first, or its `error`."""
    reports: list[BuildReport | RollerError] = []
    for case in task.cases:
        try:
            request = build_request(case.expression, case.inputs, outputs=case.outputs, target=task.target, top_k=1, select="model")
            reports.append(build_kernel(request))
        except RollerError as failure:
            reports.append(failure)
    result = iter(lint_reports([report for report in reports if isinstance(report, BuildReport)]))
    return [
        failed_row(case, report)
        if isinstance(report, RollerError)
        else {"id": case.id, "cls": case.cls, **lint_json(report, next(result)), "error": None}
        for case, report in zip(task.cases, reports, strict=True)
    ]


def failed_row(case: BenchCase, error: RollerError) -> Json:
    """Return the row of a case without a kernel."""
    return {"id": case.id, "cls": case.cls, "error": f"{error.code}: {error.message}"}


def summary(rows: Sequence[Json]) -> Json:
    """Return the metrics of one target; None for a fraction or median of nothing."""
    built = [row for row in rows if row["error"] is None]
    seconds = sorted(row["compile_seconds"] for row in built)
    launches = [launch for row in built for launch in row["launches"]]
    unspilled = sum(launch["spill_bytes"] == 0 for launch in launches)
    halves = sum(row["half_contractions"] for row in built)
    on_tensor_cores = sum(row["tensor_core_contractions"] for row in built)
    by_warpgroups = sum(row["warpgroup_contractions"] for row in built)
    return {
        "kernels": len(launches),
        "zero_spill_share": unspilled / len(launches) if launches else None,
        "c75xx": sum(row["c75xx"] for row in built),
        "half_contractions": halves,
        "tensor_core_share": on_tensor_cores / halves if halves else None,
        "warpgroup_share": by_warpgroups / halves if halves else None,
        "compile_median_s": statistics.median(seconds) if seconds else None,
        "compile_p95_s": seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        "errors": len(rows) - len(built),
        "findings": dict(sorted(Counter(finding["kind"] for row in built for finding in row["findings"]).items())),
    }
