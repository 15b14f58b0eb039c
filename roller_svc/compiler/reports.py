"""JSON of build reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roller_svc.compiler.post_compile import reestimate_plan
from roller_svc.compiler.serialize import Json, error_json, estimate_json, floor_json, interpret_space, plan_json
from roller_svc.compiler.story import tell_story
from roller_svc.ir.canonical import to_json
from roller_svc.ir.options import options_json
from roller_svc.ir.printer import text
from roller_svc.ir.report import BuildReport, CandidateResult, GroupedPlan


def result_json(result: CandidateResult, report: BuildReport) -> Json:
    """Encode the result of one plan.

    `estimate_compiled` is the estimate with the registers and shared memory of the binary; None for CPUs and without
    a binary.
    """
    compiled = reestimate_plan(result.plan, result.groups, result.compiled, report.hardware)
    return {
        "plan": plan_json(result.plan, report.hardware),
        "groups": partition_json(result),
        "estimate": estimate_json(result.plan.estimate),
        "estimate_compiled": None if compiled is None else estimate_json(compiled.estimate),
        "measurement": None if result.measurement is None else to_json(result.measurement),
        "error": None if result.error is None else error_json(result.error),
        "compile_seconds": None if result.compiled is None else result.compiled.compile_seconds,
        "resources": [] if result.compiled is None else list(map(to_json, result.compiled.resources)),
    }


def partition_json(result: CandidateResult) -> list[Json]:
    """Return, for each kernel, the tensors it computes, its kind and its interpretation."""
    return [
        {
            "name": group.name,
            "kind": group.kind.value,
            "as": interpret_space(group, choice.program.space),
            "computes": [statement.output for statement in group.statements],
        }
        for group, choice in zip(result.groups, result.plan.choices, strict=True)
    ]


def report_json(report: BuildReport, *, limits: bool = False) -> Json:
    """Encode a build report, with the story of its candidates.

    Args:
        limits: Whether the story says what limits the first candidate.
    """
    plans = tuple(GroupedPlan(result.plan, result.groups) for result in report.results)
    story = tell_story(
        *(report.program, report.hardware, report.explored, plans),
        *(report.floor, (*report.notes, *report.remarks)),
        limits=limits,
    )
    facts: Json = finite(_report(report) | {"story": to_json(story)})
    return facts


def _report(report: BuildReport) -> Json:
    hardware = report.hardware
    return {
        "expression": text(report.program),
        "target": hardware.id,
        "arch": str(hardware.arch),
        "options": options_json(report.request),
        "groups": [
            {
                "name": group.name,
                "kind": group.kind.value,
                "axes": [{"name": axis.name, "role": axis.role.value, "extent": axis.extent} for axis in group.space.axes],
                "flops": group.space.flops,
                "stored": [name for name, _ in group.stored],
            }
            for group in report.groups
        ],
        "attempts": [result_json(result, report) for result in report.results],
        "floor": None if report.floor is None else floor_json(report.floor),
        "notes": [*report.notes, *report.remarks],
        "remarks": list(report.remarks),  # those of the notes that are on the build
        "stage_seconds": dict(report.stage_seconds),
    }


def finite(value: object) -> Any:
    """Replace infinities and NaN, which JSON does not have, by null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
    return value
