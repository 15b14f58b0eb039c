"""Facts of attention on warps: how Q, K and V are staged."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.families.common.gpu.attention.terms import attention_operations
from roller_svc.families.common.gpu.attention.tile import AttentionOperands, prepare_attention_operands
from roller_svc.ir.group import KernelGroup
from roller_svc.perf.workload import Workload


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[AttentionOperands] | None:
    """Prepare attention on a unit that takes fragments; None for any other group or unit."""
    unit, hw = base.machine.unit, base.machine.hw
    if group.attention is None or not unit.takes_fragments:
        return None
    found = prepare_attention_operands(group, unit, hw.arch)
    return replace(base.with_facts(found), operations=attention_operations(base, found))
