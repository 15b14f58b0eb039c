"""Kernel families: one folder for each kind of kernel on each kind of unit.

A new family is one folder, one line in FAMILIES, and one line in `schedules.SCHEDULES` (docs/adding.md).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from roller_svc.errors import NoCandidateError
from roller_svc.families.cpu.channel_window import CPU_CHANNEL_WINDOW
from roller_svc.families.cpu.contraction import CPU_CONTRACTION
from roller_svc.families.cpu.convolution import CPU_CONVOLUTION
from roller_svc.families.cpu.loops import CPU_LOOPS
from roller_svc.families.cpu.scan import CPU_SCAN
from roller_svc.families.cpu.transpose import CPU_TRANSPOSE
from roller_svc.families.cpu.window import CPU_WINDOW
from roller_svc.families.cpu.winograd import CPU_WINOGRAD
from roller_svc.families.family import Family
from roller_svc.families.gpu.elementwise import ELEMENTWISE
from roller_svc.families.gpu.mma_attention import MMA_ATTENTION
from roller_svc.families.gpu.mma_contraction import MMA_CONTRACTION
from roller_svc.families.gpu.reduction import REDUCTION
from roller_svc.families.gpu.scan import SCAN
from roller_svc.families.gpu.scatter import SCATTER
from roller_svc.families.gpu.simt_contraction import SIMT_CONTRACTION
from roller_svc.families.gpu.streamed_rows import STREAMED_ROWS
from roller_svc.families.gpu.wgmma_attention import WGMMA_ATTENTION
from roller_svc.families.gpu.wgmma_contraction import WGMMA_CONTRACTION
from roller_svc.families.gpu.window import WINDOW
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.footprint import Footprints
from roller_svc.perf.model import Model
from roller_svc.perf.workload import Workload, prepare_workload

# In order of preference: the first one that takes a group on a unit computes it.
FAMILIES: tuple[Family[Any], ...] = (
    WGMMA_ATTENTION,
    MMA_ATTENTION,
    WGMMA_CONTRACTION,
    MMA_CONTRACTION,
    SIMT_CONTRACTION,
    STREAMED_ROWS,
    SCATTER,
    SCAN,
    ELEMENTWISE,
    WINDOW,
    REDUCTION,
    CPU_WINOGRAD,
    CPU_CONVOLUTION,
    CPU_CONTRACTION,
    CPU_CHANNEL_WINDOW,
    CPU_WINDOW,
    CPU_TRANSPOSE,
    CPU_SCAN,
    CPU_LOOPS,
)


def prepare(
    group: KernelGroup,
    hw: HardwareSpec,
    unit: ComputeUnit,
    footprints: Footprints | None = None,
    program: RProgram | None = None,
) -> tuple[Family[Any], Workload[Any]]:
    """Find the family that computes a group on a unit, and prepare its workload.

    Args:
        footprints: Footprints of the same program's spaces, from other devices and units. Grows.
        program: Tiles that the family must be able to build, where there are any.

    Raises:
        NoCandidateError: No family computes such a group on the unit.
    """
    if program is not None and program.space is not group.space:
        group = replace(group, space=program.space)
    base = prepare_workload(group.space, hw, unit, footprints)
    for family in FAMILIES:
        if program is not None and program.family not in ("", family.name):
            continue
        workload = family.prepare(group, base)
        if workload is not None and (program is None or family.accepts(workload, program)):
            return family, workload
    raise NoCandidateError(
        f"{unit.name} of {hw.id}: no rules for a {group.kind.value} on units of kind {unit.kind.value}",
        rejections={"unit kind": 1},
    )


def family_of(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Family[Any]:
    """Return the family that built an rProgram; of one that does not say, the first that can build it."""
    if program.family:
        return next(family for family in FAMILIES if family.name == program.family)
    family, _ = prepare(group, hw, program.unit, program=program)
    return family


def stored_tensors(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> dict[str, TensorType]:
    """Return the tensors that the launches of a group write and read in memory."""
    launches = family_of(group, program, hw).launches(group, program, hw)
    return {name: type_ for each in launches for name, type_ in (*each.group.stored, *each.workspace)}


def model_of(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Model[Any]:
    """Return the model of the group by the family that built the rProgram."""
    family, workload = prepare(group, hw, program.unit, program=program)
    return family.model(workload)


def prepare_model(group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit) -> Model[Any]:
    """Return the model of a group on a unit, by the family that computes it there."""
    family, workload = prepare(group, hw, unit)
    return family.model(workload)
