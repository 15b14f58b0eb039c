"""Two-fold cross-validation: evaluate the model on each half of the cases with constants fitted to the other."""

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
    """The result of a cross-validation."""

    cases: tuple[EvaluatedCase, ...]
    constants: tuple[CpuCosts, CpuCosts]  # fitted to the first and to the second half


def with_shipped_constants(cases: Sequence[FitCase], hw: HardwareSpec) -> tuple[EvaluatedCase, ...]:
    """Evaluate all cases with the shipped constants."""
    return evaluate(cases, hw, FITTED)


def cross_validate(cases: Sequence[FitCase], hw: HardwareSpec) -> CrossValidation:
    """Evaluate each half with constants fitted to the other; fits start from `cpu_costs.py`."""
    first, second = split_halves(cases)
    of_first, of_second = (fit_constants(half, hw, CpuCosts()) if half else CpuCosts() for half in (first, second))
    evaluated = {case.id: case for case in (*evaluate(first, hw, of_second), *evaluate(second, hw, of_first))}
    return CrossValidation(tuple(evaluated[case.id] for case in cases), (of_first, of_second))


def split_halves(cases: Sequence[FitCase]) -> tuple[tuple[FitCase, ...], tuple[FitCase, ...]]:
    """Split the cases alternately by class and id, so that each class is in both halves."""
    ordered = sorted(cases, key=lambda case: (case.cls, case.id))
    return tuple(ordered[::2]), tuple(ordered[1::2])


def evaluate(cases: Sequence[FitCase], hw: HardwareSpec, costs: CpuCosts) -> tuple[EvaluatedCase, ...]:
    """Evaluate cases with these constants."""
    return tuple(
        EvaluatedCase(
            case.id,
            case.cls,
            tuple(zip(seconds, (plan.seconds for plan in case.plans), strict=True)),
            halves=tuple(plan.half_s for plan in case.plans if plan.half_s is not None),
        )
        for case, seconds in zip(cases, estimate_plans(cases, hw, costs), strict=True)
    )
