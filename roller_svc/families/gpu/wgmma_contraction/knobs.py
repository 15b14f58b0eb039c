"""Fields of an rProgram that a caller may set on a wgmma GEMM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from roller_svc.families.common.gpu.knobs import MATRIX_KNOBS
from roller_svc.families.common.gpu.warpgroups.knobs import GUARDED, nearest_blocks
from roller_svc.families.common.gpu.warpgroups.terms import CLUSTER_PARTS, MAX_CLUSTER_BLOCKS
from roller_svc.families.common.gpu.warpgroups.tile import CONSUMER_REGISTERS
from roller_svc.families.family import Knob, Nearest
from roller_svc.families.gpu.wgmma_contraction.cost import wgmma_block
from roller_svc.families.gpu.wgmma_contraction.workload import WgmmaFacts
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.model import Model
from roller_svc.perf.occupancy import exceeded_limits


def _nearest_cluster(side: int) -> Knob[WgmmaFacts]:
    """Return the search for blocks of a cluster along m (side 0) or n."""

    def search(group: KernelGroup, model: Model[WgmmaFacts], program: RProgram, wanted: int) -> Nearest:
        if wanted == 1:
            return Nearest(1)
        if program.pipeline.stream_k_blocks:
            return Nearest(1, "stream-K blocks do not form clusters")
        if group.space.k_bounds is not None:
            return Nearest(1, GUARDED)
        reason = _unsupported_cluster(model, program, side, wanted)
        if not reason:
            return Nearest(wanted)
        halves = (n for n in (1 << i for i in range(wanted.bit_length() - 1, 0, -1)) if n < wanted)
        return Nearest(next((n for n in halves if not _unsupported_cluster(model, program, side, n)), 1), reason)

    return search


def _unsupported_cluster(model: Model[WgmmaFacts], program: RProgram, side: int, wanted: int) -> str:
    """Return why a cluster cannot have `wanted` blocks along `side`; '' if it can."""
    other = program.pipeline.cluster[1 - side] * program.pipeline.cluster_k
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


def _nearest_pingpong(group: KernelGroup, model: Model[WgmmaFacts], program: RProgram, wanted: int) -> Nearest:
    if wanted == 0:
        return Nearest(0)
    reason = "pingpong is 0 or 1" if wanted != 1 else _unsupported_pingpong(model, program)
    return Nearest(0 if wanted != 1 or reason else 1, reason)


def _unsupported_pingpong(model: Model[WgmmaFacts], program: RProgram) -> str:
    """Return why two consumers cannot take tiles in turn; '' if they can."""
    if not program.pipeline.persistent_blocks:
        return "only persistent blocks have a ping-pong schedule; set blocks"
    taken, p = program.as_pingpong(), model.workload
    known = wgmma_block(p, p.footprint.tile(taken.block), p.footprint.tile(taken.thread))
    tile = known.tile.as_pingpong._replace(pipeline=taken.pipeline)
    registers = tile.accumulator_registers + CONSUMER_REGISTERS
    if registers > tile.consumer_registers:
        return f"{taken.tile_text} takes {registers} registers of a consumer, which has {tile.consumer_registers}"
    if limits := exceeded_limits(tile.resources, p.machine.hw):
        return f"ping-pong with {taken.pipeline.stages} stages of {taken.tile_text} takes {' and '.join(limits)}"
    clusters = (_unsupported_cluster(model, taken, side, taken.pipeline.cluster[side]) for side in (0, 1))
    return next((reason for side, reason in enumerate(clusters) if reason and taken.pipeline.cluster[side] > 1), "")


def _nearest_parts(group: KernelGroup, model: Model[WgmmaFacts], program: RProgram, wanted: int) -> Nearest:
    """Return the nearest number of blocks of a cluster that share a tile's k-tiles."""
    if wanted == 1:
        return Nearest(1)
    if group.forbids_split_k:
        return Nearest(1, "a reduction that others follow cannot be split")
    if group.space.k_bounds is not None:
        return Nearest(1, GUARDED)
    if program.pipeline.stream_k_blocks or program.split_k > 1:
        return Nearest(1, "a reduction is split once")
    size = math.prod(program.pipeline.cluster)
    p = model.workload
    tile = wgmma_block(p, p.footprint.tile(program.block), p.footprint.tile(program.thread)).tile
    fitting = [n for n in CLUSTER_PARTS if n * size <= MAX_CLUSTER_BLOCKS and n <= tile.k_order.steps]
    if program.pipeline.stages < tile.min_partial_stages:
        return Nearest(1, f"{program.pipeline.stages} stages of {program.tile_text} cannot hold the parts of its results")
    if wanted in fitting:
        return Nearest(wanted)
    near = next((n for n in fitting if n < wanted), 1)
    if wanted * size > MAX_CLUSTER_BLOCKS:
        return Nearest(near, f"a cluster has 1 to {MAX_CLUSTER_BLOCKS} blocks")
    return Nearest(near, f"a cluster has {', '.join(map(str, sorted(CLUSTER_PARTS)))} parts with a k-tile each")


KNOBS: Mapping[str, Knob[Any]] = {
    **MATRIX_KNOBS,
    "cluster_m": _nearest_cluster(0),
    "cluster_n": _nearest_cluster(1),
    "cluster_k": _nearest_parts,
    "blocks": nearest_blocks,
    "pingpong": _nearest_pingpong,
}
