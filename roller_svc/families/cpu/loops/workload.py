"""Facts of a loop nest on a CPU: the work of each of its statements."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.cpu.op_counts import StatementWork, count_statement_work, subtract_folded_flops
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class LoopFacts:
    statements: tuple[StatementWork, ...]
    serial: bool  # a scatter: its writes may collide, so one task does them in order


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[LoopFacts] | None:
    """Prepare any loop nest or scatter on a CPU; None for contractions and other devices."""
    if base.machine.is_gpu or base.is_contraction:
        return None
    facts = LoopFacts(count_statement_work(group, base.machine.unit.shape[-1]), group.kind is GroupKind.SCATTER)
    return subtract_folded_flops(group, base.with_facts(facts))
