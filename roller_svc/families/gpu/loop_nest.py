"""Nest group and its rProgram → schedule tree for a GPU: maps, windows, and rows that threads share out."""

from __future__ import annotations

from roller_svc.families.gpu.elementwise.schedule import is_map_group, lower_map_gpu
from roller_svc.families.gpu.reduction.schedule import lower_reduction_gpu
from roller_svc.families.gpu.window.schedule import lower_window_gpu, slides_windows
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import ScheduleTree


def lower_nest_gpu(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """One tree. Whatever is neither a map nor slides windows walks a row for each of its outer points."""
    if is_map_group(group):
        return lower_map_gpu(group, program)
    if slides_windows(group, program):
        return lower_window_gpu(group, program, hw)
    return lower_reduction_gpu(group, program, hw)
