"""Fields of an rProgram that a caller may set on a wgmma GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roller_svc.families.common.gpu.knobs import MATRIX_KNOBS
from roller_svc.families.common.gpu.warpgroups.knobs import nearest_blocks
from roller_svc.families.family import Knob, Nearest
from roller_svc.families.gpu.wgmma_contraction.cost import wgmma_block
from roller_svc.families.gpu.wgmma_contraction.workload import WgmmaFacts
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model

MAX_CLUSTER_BLOCKS = 8  # portable cluster size (CUDA Programming Guide)


def _nearest_cluster(side: int) -> Knob[WgmmaFacts]:
    """Return the search for blocks of a cluster along m (side 0) or n."""

    def search(group: KernelGroup, model: Model[WgmmaFacts], program: RProgram, wanted: int) -> Nearest:
        if wanted == 1:
            return Nearest(1)
        if program.stream_k_blocks:
            return Nearest(1, "stream-K blocks do not form clusters")
        reason = _unsupported_cluster(model, program, side, wanted)
        if not reason:
            return Nearest(wanted)
        halves = (n for n in (1 << i for i in range(wanted.bit_length() - 1, 0, -1)) if n < wanted)
        return Nearest(next((n for n in halves if not _unsupported_cluster(model, program, side, n)), 1), reason)

    return search


def _unsupported_cluster(model: Model[WgmmaFacts], program: RProgram, side: int, wanted: int) -> str:
    """Return why a cluster cannot have `wanted` blocks along `side`; '' if it can."""
    other = program.cluster[1 - side]
    if wanted < 1 or wanted * other > MAX_CLUSTER_BLOCKS:
        return f"a cluster has 1 to {MAX_CLUSTER_BLOCKS} blocks"
    (axis,) = program.space.role((AxisRole.M, AxisRole.N)[side])
    tiles = -(-axis.extent // program.block[axis.name])
    if tiles % wanted:
        return f"{tiles} tiles of {program.tile_text} along {axis.name} are not a multiple of clusters of {wanted}"
    p = model.workload
    known = wgmma_block(p, p.footprint.tile(program.block), p.footprint.tile(program.thread))
    shared = (known.tile.b, known.tile.a)[side]
    if not p.facts.loads.can_multicast(1 - side, shared, wanted):
        return f"tiles of {'ba'[side]} of {program.tile_text} cannot be multicast in {wanted} parts by TMA"
    return ""


KNOBS: Mapping[str, Knob[Any]] = {
    **MATRIX_KNOBS,
    "cluster_m": _nearest_cluster(0),
    "cluster_n": _nearest_cluster(1),
    "blocks": nearest_blocks,
}
