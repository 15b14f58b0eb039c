"""Stages of an estimate, a device's sources → the factor within which the truth is expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.ir.estimate import FLOOR, StageCost
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec

# Of an estimate all of whose figures are published or measured: nine in ten of ROLLER's operators on a V100 lie within
# (docs/model.md). Of one that rests on assumed figures alone: they are taken from like devices, and 1.5 off at worst.
MEASURED_UNCERTAINTY = 1.3
ASSUMED_UNCERTAINTY = 2.0
CO_BOUND_RATIO = 0.75  # a stage this near to the longest may well be the one that bounds
LAUNCH_STAGES = ("launch", "combine", "copy")
LATENCY = "latency"
# Of a launch on a matrix unit, what is left beside its longest stage: pipelines that fill, epilogues, the tail of the
# last wave, uneven warps, and what of the other stages does not hide.
EXPOSED = "exposed"


@dataclass(frozen=True, slots=True)
class AssumedStages:
    """Which kinds of stages rest on a figure that the spec assumes. What is exposed rests on latencies and on the
    arithmetic rate, and any other stage that is no memory level, latency or launch on the latter: work of the cores."""

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
        return dict(self.levels).get(stage.removesuffix(FLOOR), self.arithmetic)


def find_assumed_stages(hw: HardwareSpec, unit: ComputeUnit) -> AssumedStages:
    return AssumedStages(
        levels=tuple((lv.name, hw.is_assumed(f"levels.{lv.name}.bandwidth_bytes_per_s")) for lv in hw.levels),
        arithmetic=hw.is_assumed(f"units.{unit.name}.flops_per_s"),
        latency=hw.is_assumed(f"levels.{hw.dram.name}.latency_s"),
        launch=hw.is_assumed("limits.launch_overhead_s"),
    )


def uncertainty(stages: Sequence[StageCost], seconds: float, assumed: AssumedStages) -> float:
    """1.3 where the time rests on published figures, 2.0 where on assumed ones, between them by the share of the time.

    Launches count with their own seconds; the rest of the time with the longest stage, or with an assumed one near it.
    """
    launches = [s for s in stages if s.name in LAUNCH_STAGES]
    body = [s for s in stages if s.name not in LAUNCH_STAGES]
    longest = max((s.seconds for s in body), default=0.0)
    share = min(1.0, sum(s.seconds for s in launches) / seconds)
    on_body = any(s.name in assumed for s in body if s.seconds >= CO_BOUND_RATIO * longest)
    weight = share * assumed.launch + (1 - share) * on_body
    return MEASURED_UNCERTAINTY * math.pow(ASSUMED_UNCERTAINTY / MEASURED_UNCERTAINTY, weight)
