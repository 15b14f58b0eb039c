"""Q, K and V of attention on warpgroups: how each is loaded, for reports."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.families.common.gpu.warpgroups.staged_operands import describe_wgmma_load
from roller_svc.families.family import StagedOperand
from roller_svc.families.gpu.wgmma_attention.workload import wgmma_attention_facts, wgmma_attention_tile
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram


def attention_operands(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Sequence[StagedOperand]:
    """Return Q, K and V."""
    facts = wgmma_attention_facts(group, program.unit, hw.arch)
    tile = wgmma_attention_tile(program, facts)
    feeds = (facts.operands.q, facts.operands.k, facts.operands.v)
    return tuple(
        StagedOperand(f.dtype, f.operand.memory_dtype, describe_wgmma_load(o))
        for f, o in zip(feeds, (tile.q, tile.k, tile.v), strict=True)
    )
