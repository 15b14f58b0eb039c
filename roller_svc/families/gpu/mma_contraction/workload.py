"""Facts of a GEMM on warps (`mma.sync`, MFMA)."""

from __future__ import annotations

from dataclasses import dataclass, field

from roller_svc.analysis.operand import operands
from roller_svc.families.common.gpu.matrix.terms import MatrixStep, MmaBlock
from roller_svc.families.common.gpu.matrix.tile import Fragment, OperandLoad, fragment_of, plan_operand_loads
from roller_svc.ir.group import KernelGroup
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class MmaFacts:
    """How operands A and B are staged. `blocks` and `steps` cache by (block's tile, warp's tile)."""

    loads: tuple[OperandLoad, OperandLoad]
    fragment: Fragment
    blocks: dict[tuple[Tile, Tile], MmaBlock] = field(default_factory=dict, compare=False)
    steps: dict[tuple[Tile, Tile], MatrixStep] = field(default_factory=dict, compare=False)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[MmaFacts] | None:
    """Prepare a contraction on a unit that takes fragments; None for any other group or unit."""
    unit, hw = base.machine.unit, base.machine.hw
    if not unit.takes_fragments or group.attention is not None or not base.is_contraction:
        return None
    return base.with_facts(MmaFacts(plan_operand_loads(unit, operands(group), hw.arch), fragment_of(unit)))
