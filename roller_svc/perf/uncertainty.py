"""Stages of an estimate, sources of the device's fields → factor within which the true time is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.ir.estimate import FLOOR, StageCost
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec

# Published or measured fields: nine in ten of ROLLER's operators on a V100 are within this factor (docs/model.md).
# Assumed fields: they are taken from similar devices, and are wrong by 1.5 at worst.
MEASURED_UNCERTAINTY = 1.3
ASSUMED_UNCERTAINTY = 2.0
CO_BOUND_RATIO = 0.75  # a stage with this fraction of the longest one may be the real bound
LAUNCH_STAGES = ("launch", "combine", "copy")
LATENCY = "latency"
# Time of a matrix-unit launch in addition to its longest stage: prologue, epilogue, tail of the last wave, uneven
# warps, and the parts of other stages that do not overlap.
EXPOSED = "exposed"


@dataclass(frozen=True, slots=True)
class AssumedStages:
    """Stages that rest on an assumed field of the spec.

    `exposed` rests on latencies and on the arithmetic rate. Any other stage that names no memory level, latency or
    launch rests on the arithmetic rate: work of the cores.
    """

    levels: tuple[tuple[str, bool], ...]
    arithmetic: bool
    latency: bool
    launch: bool

    def __contains__(self, stage: str) -> bool:
        if stage in LAUNCH_STAGES:
            return self.launch
        if stage == LATENCY:
            return self.latency
        if stage == EXPOSED:
            return self.latency or self.arithmetic
        level = stage.removesuffix(FLOOR)
        for name, is_assumed in self.levels:
            if name == level:
                return is_assumed
        return self.arithmetic


def find_assumed_stages(hw: HardwareSpec, unit: ComputeUnit) -> AssumedStages:
    """Find the stages whose fields the spec marks as assumed."""
    return AssumedStages(
        levels=tuple((lv.name, hw.is_assumed(f"levels.{lv.name}.bandwidth_bytes_per_s")) for lv in hw.levels),
        arithmetic=hw.is_assumed(f"units.{unit.name}.flops_per_s"),
        latency=hw.is_assumed(f"levels.{hw.dram.name}.latency_s"),
        launch=hw.is_assumed("limits.launch_overhead_s"),
    )


def uncertainty(stages: Sequence[StageCost], seconds: float, assumed: AssumedStages) -> float:
    """Return 1.3 for published fields, 2.0 for assumed ones, interpolated by their share of the time.

    Launches count with their own seconds. The rest of the time counts with the longest stage, or with an assumed one
    close to it.
    """
    launch_s = sum([s.seconds for s in stages if s.name in LAUNCH_STAGES])
    body = [s for s in stages if s.name not in LAUNCH_STAGES]
    shortest_s = CO_BOUND_RATIO * max([s.seconds for s in body], default=0.0)
    share = min(1.0, launch_s / seconds)
    on_body = any(s.name in assumed for s in body if s.seconds >= shortest_s)
    weight = share * assumed.launch + (1 - share) * on_body
    return MEASURED_UNCERTAINTY * math.pow(ASSUMED_UNCERTAINTY / MEASURED_UNCERTAINTY, weight)
