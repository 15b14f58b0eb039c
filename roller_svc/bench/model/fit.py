"""Measured plans → the constants of the CPU model that explain them best.

Least squares of ln(predicted / measured) over the logarithms of the constants (Levenberg and Marquardt), with Huber's
weights against outliers. Each case counts the same. What a ranking errs by counts beside: how far plans that are near
the best of their case are predicted from each other, other than they were measured. Constants that the measurements say
little about stay where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.bench.model.measured_plans import FitCase
from roller_svc.families import family_of, prepare_model
from roller_svc.ir.group import KernelGroup, TileSpace
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.model import Model

MAX_FACTOR = 4.0  # a constant stays within this factor of where it started: what it stands for does not vary more
HUBER = 0.3  # log ratio from which an error counts by its size and not by its square
RANKING_SCALE = 0.15  # plans so much slower than the best, in parts of it, count 1/e as much for the ranking
RANKING_WEIGHT = 2.0  # weight of errors of the ranking beside those of the times
PULL = 0.003  # of a constant's log ratio to its start, against the mean error of a case
STEP = 0.02  # of a constant's logarithm, for a derivative
ROUNDS, MIN_GAIN = 8, 2e-3  # rounds at most, and the share of the loss that a round must gain for another one
DAMPING = (0.0, 0.01, 0.1, 1.0, 10.0)  # tried in turn, until the loss falls

SHARED = "memory"  # the family of constants that all others rest on too

Vector = NDArray[np.float64]
Constant = tuple[str, str]  # a family of kernels and one of its constants
MachineCases = tuple[Sequence[FitCase], HardwareSpec]  # cases that were measured there


@dataclass(frozen=True, slots=True)
class Choice:
    """One group's rProgram with its model, and the family of constants that it rests on."""

    model: Model[Any]
    program: RProgram
    family: str

    def seconds(self, costs: CpuCosts) -> float:
        return self.model.with_costs(costs).timed(self.program).seconds


@dataclass(frozen=True, slots=True)
class Measurements:
    """All plans of all cases in a row. `parts`: which choices a plan consists of; `cases`: its case, as a number."""

    choices: tuple[Choice, ...]
    parts: tuple[tuple[int, ...], ...]
    cases: NDArray[np.int64]
    log_seconds: Vector

    def log_ratios(self, choice_seconds: Vector) -> Vector:
        """ln(predicted / measured) of each plan."""
        return np.log([choice_seconds[list(part)].sum() for part in self.parts]) - self.log_seconds


def fit_constants(cases: Sequence[FitCase], hw: HardwareSpec, start: CpuCosts) -> CpuCosts:
    """The constants that explain the measurements best, none further from `start` than a factor of WITHIN."""
    return fit_machines(((cases, hw),), start)


def fit_machines(machines: Sequence[MachineCases], start: CpuCosts) -> CpuCosts:
    """The same of measurements on several machines, each with its spec; every case of each counts the same."""
    if not any(cases for cases, _ in machines):
        return start
    measured = _measured(machines)
    constants = _constants(measured, start)
    fit = _Fit(measured, constants, start)
    theta = np.zeros(len(constants))
    seconds = fit.seconds(theta)
    loss = fit.loss(theta, seconds)
    for _ in range(ROUNDS):
        found = fit.improve(theta, seconds, loss)
        if found is None:
            break
        gained = loss - found[2]
        theta, seconds, loss = found
        if gained < MIN_GAIN * loss:
            break
    return fit.costs(theta)


def estimate_plans(cases: Sequence[FitCase], hw: HardwareSpec, costs: CpuCosts) -> tuple[tuple[float, ...], ...]:
    """Seconds that the model with these constants predicts for every plan of every case; plans of a case share what is
    prepared."""
    measured = _measured(((cases, hw),))
    seconds = np.array([choice.seconds(costs) for choice in measured.choices])
    plans = iter(float(seconds[list(part)].sum()) for part in measured.parts)
    return tuple(tuple(next(plans) for _ in case.plans) for case in cases)


@dataclass(frozen=True, slots=True)
class _Fit:
    """`theta`: logarithms of the constants over their values in `start`."""

    measured: Measurements
    constants: tuple[Constant, ...]
    start: CpuCosts

    def costs(self, theta: Vector) -> CpuCosts:
        costs = self.start
        for (family, name), log_factor in zip(self.constants, theta, strict=True):
            part = getattr(costs, family)
            costs = replace(costs, **{family: replace(part, **{name: getattr(part, name) * float(np.exp(log_factor))})})
        return costs

    def seconds(self, theta: Vector, family: str = "", known: Vector | None = None) -> Vector:
        """Of each choice; where some are known, only of those that rest on a family's constants."""
        costs = self.costs(theta)
        found = np.empty(len(self.measured.choices)) if known is None else known.copy()
        for i, choice in enumerate(self.measured.choices):
            if known is None or family in (choice.family, SHARED):
                found[i] = choice.seconds(costs)
        return found

    def loss(self, theta: Vector, seconds: Vector) -> float:
        errors, weights = self._errors(seconds)
        size = np.abs(errors)
        huber = np.where(size <= HUBER, 0.5 * errors**2, HUBER * (size - 0.5 * HUBER))
        return float((weights * huber).sum() + 0.5 * PULL * (theta**2).sum())

    def improve(self, theta: Vector, seconds: Vector, loss: float) -> tuple[Vector, Vector, float] | None:
        """One step to a smaller loss: constants, choices' seconds, loss. None where no damping finds one."""
        errors, weights = self._errors(seconds)
        slopes = np.stack([self._slope(theta, seconds, errors, i) for i in range(len(theta))], axis=1)
        weights = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-12))
        square = slopes.T @ (weights[:, None] * slopes)
        downhill = -(slopes.T @ (weights * errors) + PULL * theta)
        for damping in DAMPING:
            system = square + np.diag(damping * np.diag(square) + PULL)
            candidate = theta + _bounded_step(system, downhill, theta)
            candidate_seconds = self.seconds(candidate)
            candidate_loss = self.loss(candidate, candidate_seconds)
            if candidate_loss < loss:
                return candidate, candidate_seconds, candidate_loss
        return None

    def _slope(self, theta: Vector, seconds: Vector, errors: Vector, i: int) -> Vector:
        """How the errors change with one constant."""
        moved = theta.copy()
        step = STEP if theta[i] < 0 else -STEP
        moved[i] += step
        its_errors, _ = self._errors(self.seconds(moved, self.constants[i][0], seconds))
        return (its_errors - errors) / step

    def _errors(self, seconds: Vector) -> tuple[Vector, Vector]:
        """Errors of all times, then those of all rankings, and what each counts."""
        ratios, cases, measured = self.measured.log_ratios(seconds), self.measured.cases, self.measured.log_seconds
        count = np.bincount(cases)
        best = np.full(len(count), np.inf)
        np.minimum.at(best, cases, measured)
        near = np.exp(-(np.exp(measured - best[cases]) - 1) / RANKING_SCALE)
        total = np.bincount(cases, near)
        mean = np.bincount(cases, near * ratios) / total
        weights = (1 / count[cases], RANKING_WEIGHT * near / total[cases])
        return np.concatenate([ratios, ratios - mean[cases]]), np.concatenate(weights) / len(count)


def _bounded_step(system: NDArray[np.float64], downhill: Vector, theta: Vector) -> Vector:
    """The step that solves the system, but for constants that it would take out of their bounds: those stop there."""
    low, high = -np.log(MAX_FACTOR) - theta, np.log(MAX_FACTOR) - theta
    step = np.zeros_like(theta)
    free = np.ones(len(theta), dtype=bool)
    while free.any():
        right = downhill[free] - system[np.ix_(free, ~free)] @ step[~free]
        step[free] = np.linalg.solve(system[np.ix_(free, free)], right)
        out = free & ((step < low) | (step > high))
        if not out.any():
            break
        step[out] = np.clip(step[out], low[out], high[out])
        free &= ~out
    return step


def _constants(measured: Measurements, start: CpuCosts) -> tuple[Constant, ...]:
    """Of the families that were measured, in the order of the table."""
    families = {SHARED} | {choice.family for choice in measured.choices}
    return tuple(
        (family.name, constant.name)
        for family in fields(start)
        if family.name in families  # `single_task` is none
        for constant in fields(getattr(start, family.name))
    )


def _measured(machines: Sequence[MachineCases]) -> Measurements:
    choices: list[Choice] = []
    parts: list[tuple[int, ...]] = []
    found = [(case, hw) for cases, hw in machines for case in cases]
    for case, hw in found:
        known: dict[tuple[KernelGroup, RProgram], int] = {}
        models: dict[tuple[str, TileSpace, ComputeUnit], Model[Any]] = {}
        for plan in case.plans:
            pairs = [(g, c.program) for g, c in zip(plan.groups, plan.plan.choices, strict=True)]
            for group, program in pairs:
                if (group, program) not in known:
                    known[group, program] = len(choices)
                    choices.append(_choice(group, program, hw, models))
            parts.append(tuple(known[pair] for pair in pairs))
    numbers = [i for i, (case, _) in enumerate(found) for _ in case.plans]
    seconds = [plan.seconds for case, _ in found for plan in case.plans]
    return Measurements(tuple(choices), tuple(parts), np.array(numbers, dtype=np.int64), np.log(seconds))


def _choice(
    group: KernelGroup,
    program: RProgram,
    hw: HardwareSpec,
    models: dict[tuple[str, TileSpace, ComputeUnit], Model[Any]],
) -> Choice:
    """`models` are those of the same program; grow."""
    unit = next(u for u in hw.units if u.name == program.unit.name)
    key = (group.name, program.space, unit)
    model = models.get(key)
    if model is None:
        model = models[key] = prepare_model(replace(group, space=program.space), hw, unit)
    family = family_of(group, program, hw).name
    return Choice(model, replace(program, unit=unit), family.removeprefix("cpu/"))
