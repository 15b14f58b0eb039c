"""Operands of a matrix-unit kernel: how each is loaded, for reports."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.analysis.operand import operands
from roller_svc.families.common.gpu.matrix.tile import LoadClass, LoadKind, plan_operand_loads
from roller_svc.families.family import StagedOperand
from roller_svc.fusion.split.reduction import split_group
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def describe_load(load: LoadClass, dtype: DType) -> str:
    """Return async4, async8 or async16 (`cp.async` of that many bytes), vector, or element (through registers)."""
    if load.kind is LoadKind.ASYNC:
        return f"async{load.elements * dtype.bytes}"
    return str(load.kind.value)


def split_part(group: KernelGroup, program: RProgram) -> tuple[KernelGroup, RProgram]:
    """Return the group of one part of a split reduction; without a split, the group itself."""
    if program.split_k == 1:
        return group, program
    halves = split_group(group, program)
    return halves.partial, halves.partial_program


def mma_operands(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Sequence[StagedOperand]:
    """Return A and B, and B again for the second product of a dual GEMM."""
    part, _ = split_part(group, program)
    factors = operands(part)
    staged = tuple(
        StagedOperand(feed.dtype, factor.memory_dtype, describe_load(feed.load, feed.dtype))
        for factor, feed in zip(factors, plan_operand_loads(program.unit, factors, hw.arch), strict=True)
    )
    return (*staged, *staged[1:]) if group.is_dual_gemm else staged
