"""Sensitivity analysis: re-estimate a plan with each hardware resource improved by 10 %."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roller_svc.families import model_of
from roller_svc.ir.estimate import Sensitivity
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.report import Plan

STEP = 0.1  # large enough for terms that change in whole blocks, small enough to approximate a derivative
MIN_SAVED_FRACTION = 0.001  # less is not worth a line


def analyze_sensitivity(plan: Plan, groups: Sequence[KernelGroup], hw: HardwareSpec) -> tuple[Sensitivity, ...]:
    """Return the fraction of the time saved by 10 % more of each resource (10 % less latency), largest first.

    Tiles stay as they are.
    """
    now_s = _seconds(plan, groups, hw)
    results = [Sensitivity(name, 1.0 - _seconds(plan, groups, better) / now_s) for name, better in _improved_specs(hw)]
    return tuple(sorted((s for s in results if s.time_saved_fraction >= MIN_SAVED_FRACTION), key=lambda s: -s.time_saved_fraction))


def _seconds(plan: Plan, groups: Sequence[KernelGroup], hw: HardwareSpec) -> float:
    units = {unit.name: unit for unit in hw.units}
    total = 0.0
    for group, choice in zip(groups, plan.choices, strict=True):
        if choice.runs_once:
            continue
        program = replace(choice.program, unit=units[choice.program.unit.name])
        total += model_of(group, program, hw).estimate(program).seconds
    return total


def _improved_specs(hw: HardwareSpec) -> Iterator[tuple[str, HardwareSpec]]:
    for i, level in enumerate(hw.levels):
        if level.name == hw.tile_levels[1]:
            continue  # register bandwidth is part of the arithmetic rate
        faster = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * (1 + STEP))
        nearer = replace(level, latency_s=level.latency_s * (1 - STEP))
        for quantity, changed in (("bandwidth", faster), ("latency", nearer)):
            yield f"{level.name} {quantity}", replace(hw, levels=(*hw.levels[:i], changed, *hw.levels[i + 1 :]))
    yield (
        "issue rate",
        replace(hw, clock_hz=hw.clock_hz * (1 + STEP)),
    )  # rates of arithmetic and memory are separate fields
    units = tuple(replace(unit, flops_per_s=unit.flops_per_s * (1 + STEP)) for unit in hw.units)
    yield "arithmetic rate", replace(hw, units=units)
    if any(unit.quotients_per_s for unit in hw.units):
        yield "division rate", replace(hw, units=tuple(map(_with_faster_division, hw.units)))
    launch = replace(hw.limits, launch_overhead_s=hw.limits.launch_overhead_s * (1 - STEP))
    yield "launch overhead", replace(hw, limits=launch)


def _with_faster_division(unit: ComputeUnit) -> ComputeUnit:
    rate = unit.quotients_per_s
    return unit if rate is None else replace(unit, quotients_per_s=rate * (1 + STEP))
