"""Scatter on a GPU → schedule trees: atomics for combining writes, plain writes in order otherwise."""

from __future__ import annotations

from roller_svc.families.common.scatter import lower_scatter
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    return lower_scatter(group, hw.family)
