"""Fit the constants of the CPU model to measured plans.

Levenberg-Marquardt least squares of ln(predicted / measured) over the logarithms of the constants, with Huber weights
against outliers. Each case has the same weight. A second term penalises wrong relative times of plans near the best of
their case. A regularisation term keeps constants that the measurements do not determine at their start.
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

MAX_FACTOR = 4.0  # bound of a constant relative to its start
HUBER = 0.3  # log ratio above which the loss is linear
RANKING_SCALE = 0.15  # a plan this fraction slower than the best has weight 1/e in the ranking term
RANKING_WEIGHT = 2.0  # of the ranking term relative to the time term
PULL = 0.003  # regularisation: weight of a constant's squared log ratio to its start
STEP = 0.02  # finite difference of a constant's logarithm
ROUNDS, MIN_GAIN = 8, 2e-3  # maximum number of rounds; relative gain that ends the fit
DAMPING = (0.0, 0.01, 0.1, 1.0, 10.0)  # tried in this order until the loss decreases

SHARED = "memory"  # constants on which the kernels of all families depend

Vector = NDArray[np.float64]
Constant = tuple[str, str]  # a family of kernels and one of its constants
MachineCases = tuple[Sequence[FitCase], HardwareSpec]  # cases measured on one machine


@dataclass(frozen=True, slots=True)
class Choice:
    """One group's rProgram, its model, and the family of constants on which it depends."""

    model: Model[Any]
    program: RProgram
    family: str

    def seconds(self, costs: CpuCosts) -> float:
        return self.model.with_costs(costs).timed(self.program).seconds


@dataclass(frozen=True, slots=True)
class Measurements:
    """All plans of all cases."""

    choices: tuple[Choice, ...]
    parts: tuple[tuple[int, ...], ...]  # of each plan: the indices of its choices
    cases: NDArray[np.int64]  # of each plan: the number of its case
    log_seconds: Vector

    def log_ratios(self, choice_seconds: Vector) -> Vector:
        """Return ln(predicted / measured) of each plan."""
        return np.log([choice_seconds[list(part)].sum() for part in self.parts]) - self.log_seconds


def fit_constants(cases: Sequence[FitCase], hw: HardwareSpec, start: CpuCosts) -> CpuCosts:
    """Fit the constants to measurements of one machine, each within MAX_FACTOR of `start`."""
    return fit_machines(((cases, hw),), start)


def fit_machines(machines: Sequence[MachineCases], start: CpuCosts) -> CpuCosts:
    """Fit the constants to measurements of several machines; every case has the same weight."""
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
    """Return the predicted seconds of every plan of every case. Plans of a case share prepared models."""
    measured = _measured(((cases, hw),))
    seconds = np.array([choice.seconds(costs) for choice in measured.choices])
    plans = iter(float(seconds[list(part)].sum()) for part in measured.parts)
    return tuple(tuple(next(plans) for _ in case.plans) for case in cases)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A fit. `theta` are the logarithms of the constants relative to `start`."""

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
        """Return the seconds of each choice; given `known`, recompute only those that depend on `family`."""
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
        """Take one step to a smaller loss; return (theta, seconds, loss), or None if no damping finds one."""
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
        """Return the derivatives of the errors by one constant."""
        moved = theta.copy()
        step = STEP if theta[i] < 0 else -STEP
        moved[i] += step
        its_errors, _ = self._errors(self.seconds(moved, self.constants[i][0], seconds))
        return (its_errors - errors) / step

    def _errors(self, seconds: Vector) -> tuple[Vector, Vector]:
        """Return the errors of the time term, then of the ranking term, and their weights."""
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
    """Solve for the step, with constants clipped to their bounds (active set)."""
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
    """Return the constants of the measured families, in the order of the table."""
    families = {SHARED} | {choice.family for choice in measured.choices}
    return tuple(
        (family.name, constant.name)
        for family in fields(start)
        if family.name in families  # a plain number is not a family
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
    """Return the choice of a group; `models` caches prepared models of the program."""
    unit = next(u for u in hw.units if u.name == program.unit.name)
    key = (group.name, program.space, unit)
    model = models.get(key)
    if model is None:
        model = models[key] = prepare_model(replace(group, space=program.space), hw, unit)
    family = family_of(group, program, hw).name
    return Choice(model, replace(program, unit=unit), family.removeprefix("cpu/"))
