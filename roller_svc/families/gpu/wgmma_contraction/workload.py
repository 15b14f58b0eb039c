"""Facts of a GEMM on warpgroups that rules, cost and schedule agree on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from roller_svc.analysis.operand import all_operands
from roller_svc.families.common.gpu.matrix.terms import epilogue_slots
from roller_svc.families.common.gpu.warpgroups.result_store import ResultStore
from roller_svc.families.common.gpu.warpgroups.tile import WgmmaBlock, WgmmaOperandLoads, plan_wgmma_loads
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import UnitKind
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class WgmmaFacts:
    """How the operands' tiles are filled. `blocks` caches the blocks of (block's tile, warpgroup's tile)."""

    loads: WgmmaOperandLoads
    epilogue_slots: float = 0.0  # issue slots of the epilogue for each output
    blocks: dict[tuple[Tile, Tile], WgmmaBlock] = field(default_factory=dict, compare=False)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[WgmmaFacts] | None:
    """Prepare a contraction on a unit that warpgroups drive; None for any other group or unit."""
    unit, hw = base.machine.unit, base.machine.hw
    if unit.kind is not UnitKind.WGMMA or group.attention is not None or not base.is_contraction:
        return None
    loads = plan_wgmma_loads(base.space, unit, all_operands(group), hw.arch)
    loads = replace(loads, results=ResultStore.of(group, base.space))
    return base.with_facts(WgmmaFacts(loads, epilogue_slots(base, 1)))
