"""Q, K and V of attention on warps: how each is loaded, for reports."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.families.common.gpu.attention.tile import prepare_attention_operands
from roller_svc.families.common.gpu.matrix.staged_operands import describe_load
from roller_svc.families.family import StagedOperand
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def attention_operands(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Sequence[StagedOperand]:
    """Return Q and K of each product, and V."""
    found = prepare_attention_operands(group, program.unit, hw.arch)
    return tuple(
        StagedOperand(f.dtype, f.operand.memory_dtype, describe_load(f.load, f.dtype))
        for f in (found.q, found.k, *(found.second or ()), found.v)
    )
