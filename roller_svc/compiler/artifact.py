"""BuildReport → KernelBundle: the winner's binary with its expression, target, digest, plan and report."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.compiler.reports import report_json
from roller_svc.compiler.request import request_body
from roller_svc.compiler.serialize import estimate_json, kernel_digest
from roller_svc.errors import ArgumentError, InvariantError, require
from roller_svc.ir import canonical
from roller_svc.ir.estimate import Estimate
from roller_svc.ir.printer import text
from roller_svc.ir.report import BuildReport, CandidateResult, Plan
from roller_svc.runtime.saved.serialization import KernelBundle

MAX_SECONDS, MAX_UNCERTAINTY = 1e9, 1e3  # plausible range of a saved estimate


def package_kernel(report: BuildReport) -> KernelBundle:
    """Return what `save` writes. Raises the winner's error if no plan compiled."""
    return package_candidate(report.winner, report)


def package_candidate(candidate: CandidateResult, report: BuildReport) -> KernelBundle:
    """Return what `save` writes for a candidate of a build. Raises its error if it did not compile."""
    if candidate.error is not None:
        raise candidate.error
    if candidate.compiled is None:
        raise InvariantError("a candidate of a build has neither a binary nor an error")
    return KernelBundle(
        candidate.compiled,
        expression=text(report.program),
        target=report.hardware.id,
        digest=kernel_digest(candidate.compiled),
        estimate=estimate_json(candidate.plan.estimate),
        extra={
            "plan": canonical.to_json(candidate.plan),
            "report": report_json(report),
            "request": request_body(report.request),
        },
    )


def replace_candidate(bundle: KernelBundle, candidate: CandidateResult) -> KernelBundle:
    """Return the bundle of a build with another candidate, which compiled."""
    compiled = require(candidate.compiled, "binary of a candidate")
    return replace(
        bundle,
        compiled=compiled,
        digest=kernel_digest(compiled),
        estimate=estimate_json(candidate.plan.estimate),
        extra={**bundle.extra, "plan": canonical.to_json(candidate.plan)},
    )


def load_plan(saved: KernelBundle) -> Plan | None:
    """Return the plan of a saved kernel, or None if this version cannot read it."""
    try:
        plan = canonical.from_json(Plan, saved.extra.get("plan"))
    except ArgumentError:
        return None
    return plan if plan.choices and all(_is_plausible(choice.estimate) for choice in plan.choices) else None


def _is_plausible(estimate: Estimate) -> bool:
    """Whether sums with the estimate stay finite: a saved kernel may come from anywhere."""
    limits = ((estimate.seconds, MAX_SECONDS), (estimate.uncertainty, MAX_UNCERTAINTY))
    return bool(estimate.stages) and all(0 < value < limit for value, limit in limits)


def floor_seconds(bundle: KernelBundle) -> float | None:
    """Return the floor of a kernel's program, as its build reported it; None of a kernel without a report."""
    floor = bundle.extra.get("report", {}).get("floor")
    return None if floor is None else float(floor["seconds"])
