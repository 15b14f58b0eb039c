"""Operands of a warpgroup kernel: how each is loaded, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roller_svc.analysis.operand import all_operands, operands
from roller_svc.families.common.gpu.matrix.staged_operands import describe_load, split_part
from roller_svc.families.common.gpu.matrix.tile import LoadClass
from roller_svc.families.common.gpu.warpgroups.tile import WgmmaOperand, wgmma_tile
from roller_svc.families.family import StagedOperand
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def describe_wgmma_load(operand: WgmmaOperand) -> str:
    """Return tma or im2col (TMA copies), or what `describe_load` says of copies by threads."""
    feed = operand.copy_plan
    return describe_load(feed, operand.dtype) if isinstance(feed, LoadClass) else str(operand.load.value)


def wgmma_operands(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Sequence[StagedOperand]:
    """Return A and B, and B again for the second product of a dual GEMM."""
    part, tiles = split_part(group, program)
    part = replace(part, space=tiles.space)
    tile = wgmma_tile(tiles, all_operands(part), hw.arch)
    staged = tuple(
        StagedOperand(operand.dtype, factor.memory_dtype, describe_wgmma_load(operand))
        for factor, operand in zip(operands(part), (tile.a, tile.b), strict=True)
    )
    if tiles.space.transposed:
        staged = staged[::-1]
    return (*staged, *staged[1:]) if group.is_dual_gemm else staged
