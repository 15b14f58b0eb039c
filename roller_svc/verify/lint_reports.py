"""Lint the kernels of builds, and return what was found as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from roller_svc.compiler.artifact import package_kernel
from roller_svc.errors import ArgumentError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.report import BuildReport
from roller_svc.verify.lint import FindingKind, LintedLaunch, LintResult, PlannedKernel, lint

Json = dict[str, Any]

HALVES = (DType.FLOAT16, DType.BFLOAT16)
# A half-precision contraction with at least these extents should use tensor cores.
MIN_M = MIN_N = 64
MIN_K = 32
TENSOR_CORE_FAMILIES = ("HMMA", "HGMMA")
WARPGROUP_FAMILY = "HGMMA"  # expected where the device has it


def lint_reports(reports: Sequence[BuildReport]) -> list[LintResult]:
    """Lint the winners of builds for one device. Raises ArgumentError if it is not a CUDA device."""
    if not reports:
        return []
    hw = reports[0].hardware
    check_target(hw)
    kernels = [PlannedKernel(package_kernel(report).compiled, report.winner.plan, report.groups) for report in reports]
    return lint(kernels, hw)


def check_target(hw: HardwareSpec) -> None:
    """Raise ArgumentError if the device's kernels are not CUDA."""
    if hw.family is not TargetKind.CUDA:
        raise ArgumentError(
            f"lint reads the machine code of CUDA kernels; {hw.id} has none",
            code="invalid-option",
            hint="--target nvidia-...: roller targets lists the devices",
        )


def lint_json(report: BuildReport, result: LintResult) -> Json:
    """Return the results for one program, in total and by launch."""
    counts: Counter[str] = Counter()
    for launch in result.launches:
        counts.update(dict(launch.code.counts))
    halves = half_contractions(report.groups)
    compiled = package_kernel(report).compiled
    main = [result.launches[compiled.source.main_launch(group.name)].code for group in halves]
    return {
        "kernels": len(result.launches),
        "unit": report.winner.plan.dominant_choice.program.unit.name,
        "registers": max(launch.resources.registers_per_thread for launch in result.launches),
        "spill_bytes": sum(launch.resources.spill_bytes for launch in result.launches),
        "c75xx": result.count(FindingKind.WARNING),
        "half_contractions": len(halves),
        "tensor_core_contractions": sum(code.count(*TENSOR_CORE_FAMILIES) > 0 for code in main),
        "warpgroup_contractions": sum(code.count(WARPGROUP_FAMILY) > 0 for code in main),
        "instructions": dict(sorted(counts.items())),
        "launches": [_launch_json(launch) for launch in result.launches],
        "compile_seconds": compiled.compile_seconds,
        "findings": [{"kind": f.kind.value, "launch": f.launch, "message": f.message} for f in result.findings],
    }


def half_contractions(groups: Sequence[KernelGroup]) -> tuple[KernelGroup, ...]:
    """Return the contractions of float16 or bfloat16 operands that are large enough for tensor cores."""
    return tuple(
        group
        for group in groups
        if group.kind is GroupKind.CONTRACTION
        and group.operands is not None
        and _given(group.operands.a).dtype in HALVES
        and _given(group.operands.b).dtype in HALVES
        and _extent(group, AxisRole.M) >= MIN_M
        and _extent(group, AxisRole.N) >= MIN_N
        and _extent(group, AxisRole.K) >= MIN_K
    )


def _launch_json(launch: LintedLaunch) -> Json:
    planned = launch.planned
    needs = planned.needs if planned is not None else None
    return {
        "name": launch.launch.name,
        "unit": planned.unit.name if planned is not None else None,
        "registers_per_thread": launch.resources.registers_per_thread,
        "shared_bytes": launch.resources.shared_bytes,
        "spill_bytes": launch.resources.spill_bytes,
        "planned_registers_per_thread": needs.registers_per_thread if needs is not None else None,
        "planned_shared_bytes": needs.shared_bytes if needs is not None else None,
        "instructions": launch.code.instructions,
        "counts": dict(launch.code.counts),
    }


def _given(factor: Expr) -> Expr:
    """Return the operand as the program has it, before its conversion to the accumulator's type."""
    return _given(factor.arg) if isinstance(factor, Cast) and factor.implicit else factor


def _extent(group: KernelGroup, role: AxisRole) -> int:
    return math.prod(axis.extent for axis in group.space.role(role))
