"""Measured cases → the model judged on each half with constants fitted to the other half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.bench.model.fit import estimate_plans, fit_constants
from roller_svc.bench.model.measured_plans import FitCase
from roller_svc.bench.model.regret import EvaluatedCase
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.cpu_costs_fitted import FITTED


@dataclass(frozen=True, slots=True)
class CrossValidation:
    """Every case, judged with constants that it had no part in; and the constants, fitted to the first half and to the
    second."""

    cases: tuple[EvaluatedCase, ...]
    constants: tuple[CpuCosts, CpuCosts]


def with_shipped_constants(cases: Sequence[FitCase], hw: HardwareSpec) -> tuple[EvaluatedCase, ...]:
    """Every case, judged with the constants that the project ships."""
    return evaluate(cases, hw, FITTED)


def cross_validate(cases: Sequence[FitCase], hw: HardwareSpec) -> CrossValidation:
    """Each half judged with constants fitted to the other, in the order of the cases. Fits start from the table
    that none has touched."""
    first, second = split_halves(cases)
    of_first, of_second = (fit_constants(half, hw, CpuCosts()) if half else CpuCosts() for half in (first, second))
    evaluated = {case.id: case for case in (*evaluate(first, hw, of_second), *evaluate(second, hw, of_first))}
    return CrossValidation(tuple(evaluated[case.id] for case in cases), (of_first, of_second))


def split_halves(cases: Sequence[FitCase]) -> tuple[tuple[FitCase, ...], tuple[FitCase, ...]]:
    """By class and id, one here and one there, so that each class is in both."""
    ordered = sorted(cases, key=lambda case: (case.cls, case.id))
    return tuple(ordered[::2]), tuple(ordered[1::2])


def evaluate(cases: Sequence[FitCase], hw: HardwareSpec, costs: CpuCosts) -> tuple[EvaluatedCase, ...]:
    """The cases with what the model says of their plans with these constants."""
    return tuple(
        EvaluatedCase(
            case.id,
            case.cls,
            tuple(zip(seconds, (plan.seconds for plan in case.plans), strict=True)),
            halves=tuple(plan.half_s for plan in case.plans if plan.half_s is not None),
        )
        for case, seconds in zip(cases, estimate_plans(cases, hw, costs), strict=True)
    )
