"""Plan, HardwareSpec → what more of each resource would give: the derivative of the estimated time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from roller_svc.construct.construct import prepared
from roller_svc.ir.estimate import Sensitivity
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.report import Plan
from roller_svc.perf.model import Model

STEP = 0.1  # far enough for terms that move in whole blocks, near enough to be a slope
MIN_SAVED_FRACTION = 0.001  # less is not worth a line


def analyze_sensitivity(plan: Plan, groups: Sequence[KernelGroup], hw: HardwareSpec) -> tuple[Sensitivity, ...]:
    """What a tenth more of each resource of the device (of a latency, a tenth less) saves of this very plan's time,
    tiles left as they are; most first."""
    now_s = _seconds(plan, groups, hw)
    results = [Sensitivity(name, 1.0 - _seconds(plan, groups, better) / now_s) for name, better in _improved_specs(hw)]
    return tuple(
        sorted(
            (s for s in results if s.time_saved_fraction >= MIN_SAVED_FRACTION), key=lambda s: -s.time_saved_fraction
        )
    )


def _seconds(plan: Plan, groups: Sequence[KernelGroup], hw: HardwareSpec) -> float:
    units = {unit.name: unit for unit in hw.units}
    total = 0.0
    for group, choice in zip(groups, plan.choices, strict=True):
        program = replace(choice.program, unit=units[choice.program.unit.name])
        view = replace(group, space=program.space)  # a convolution may be read as one, or as a contraction
        total += Model(prepared(view, hw, program.unit)).estimate(program).seconds
    return total


def _improved_specs(hw: HardwareSpec) -> Iterator[tuple[str, HardwareSpec]]:
    for i, level in enumerate(hw.levels):
        if level.name == hw.tile_levels[1]:
            continue  # registers: what they deliver is part of the arithmetic rate
        faster = replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * (1 + STEP))
        nearer = replace(level, latency_s=level.latency_s * (1 - STEP))
        for quantity, changed in (("bandwidth", faster), ("latency", nearer)):
            yield f"{level.name} {quantity}", replace(hw, levels=(*hw.levels[:i], changed, *hw.levels[i + 1 :]))
    yield "issue rate", replace(hw, clock_hz=hw.clock_hz * (1 + STEP))  # arithmetic and memory keep theirs
    units = tuple(replace(unit, flops_per_s=unit.flops_per_s * (1 + STEP)) for unit in hw.units)
    yield "arithmetic rate", replace(hw, units=units)
    if any(unit.quotients_per_s for unit in hw.units):
        yield "division rate", replace(hw, units=tuple(map(_with_faster_division, hw.units)))
    launch = replace(hw.limits, launch_overhead_s=hw.limits.launch_overhead_s * (1 - STEP))
    yield "launch overhead", replace(hw, limits=launch)


def _with_faster_division(unit: ComputeUnit) -> ComputeUnit:
    rate = unit.quotients_per_s
    return unit if rate is None else replace(unit, quotients_per_s=rate * (1 + STEP))
