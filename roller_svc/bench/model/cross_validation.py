"""Measured cases → the model judged on each half with constants fitted to the other half."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.bench.model.fit import all_estimated, fitted
from roller_svc.bench.model.measured_plans import FitCase
from roller_svc.bench.model.regret import JudgedCase
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.cpu_costs_fitted import FITTED


@dataclass(frozen=True, slots=True)
class Judged:
    """Every case, judged with constants that it had no part in; and the constants, fitted to the first half and to the
    second."""

    cases: tuple[JudgedCase, ...]
    constants: tuple[CpuCosts, CpuCosts]


def as_shipped(cases: Sequence[FitCase], hw: HardwareSpec) -> tuple[JudgedCase, ...]:
    """Every case, judged with the constants that the project ships."""
    return judged(cases, hw, FITTED)


def by_halves(cases: Sequence[FitCase], hw: HardwareSpec) -> Judged:
    """Each half judged with constants fitted to the other, in the order of the cases. Fits start from the table
    that none has touched."""
    first, second = halves(cases)
    of_first, of_second = (fitted(half, hw, CpuCosts()) if half else CpuCosts() for half in (first, second))
    found = {case.id: case for case in (*judged(first, hw, of_second), *judged(second, hw, of_first))}
    return Judged(tuple(found[case.id] for case in cases), (of_first, of_second))


def halves(cases: Sequence[FitCase]) -> tuple[tuple[FitCase, ...], tuple[FitCase, ...]]:
    """By class and id, one here and one there, so that each class is in both."""
    ordered = sorted(cases, key=lambda case: (case.cls, case.id))
    return tuple(ordered[::2]), tuple(ordered[1::2])


def judged(cases: Sequence[FitCase], hw: HardwareSpec, costs: CpuCosts) -> tuple[JudgedCase, ...]:
    """The cases with what the model says of their plans with these constants."""
    return tuple(
        JudgedCase(
            case.id,
            case.cls,
            tuple(zip(seconds, (plan.seconds for plan in case.plans), strict=True)),
            halves=tuple(plan.half_s for plan in case.plans if plan.half_s is not None),
        )
        for case, seconds in zip(cases, all_estimated(cases, hw, costs), strict=True)
    )
