"""Contraction group and its rProgram → schedule trees for matrix units that a warp drives (`mma.sync`, MFMA).

A block stages tiles of both operands in shared memory, several steps ahead; its warps load fragments from there and
multiply; the sums go through shared memory once more so that the epilogue reads and writes memory in wide rows.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.build import ceil_div, num
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.operand import operands, second_operand
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Loop, LoopKind, Node, ScheduleTree
from roller_svc.lower.contraction import View
from roller_svc.lower.mma_epilogue import Epilogue
from roller_svc.lower.mma_fragments import SHARED_A, SHARED_B
from roller_svc.lower.mma_pipeline import Pipeline
from roller_svc.lower.paired_staging import PairedStaging
from roller_svc.lower.ring import Steps
from roller_svc.lower.staging import Staging
from roller_svc.lower.stream_k import streamed
from roller_svc.perf.compiled import planned_needs
from roller_svc.perf.mma_tile import MmaTile, load_class, mma_tile, staged
from roller_svc.perf.occupancy import blocks_per_core


def lower_contraction_mma(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """A block computes block.m x block.n of the output, a warp thread.m x thread.n of that. One tree, or two where
    the steps of all tiles are streamed."""
    view, arch = View.of(group, program), hw.arch
    a, b = operands(group)
    tile = mma_tile(program, a, b)
    pipeline = Pipeline(
        view.dtype, tile,
        Staging(SHARED_A, a, tile.a, load_class(a, tile.a.dtype, arch), view.m, view.k, (tile.m, tile.k), tile.threads),
        _right_staging(group, program, tile, hw),
    )  # fmt: skip
    epilogue = Epilogue(view, tile)
    if program.stream_k:
        multiplying, joining = streamed(group.name, program, pipeline, epilogue)
        return replace(multiplying, resident=_resident(group, program, hw)), joining
    steps = ceil_div(view.k.extent, tile.k)
    nodes = (*pipeline.run(Steps(num(0), num(steps), steps)), Barrier(), *epilogue.nodes())
    nodes = tile_blocks(view, (tile.m, epilogue.columns), pipeline.threads(pipeline.accumulators(nodes)))
    return (ScheduleTree(group.name, nodes, raster=program.raster, resident=_resident(group, program, hw)),)


def _right_staging(group: KernelGroup, program: RProgram, tile: MmaTile, hw: HardwareSpec) -> Staging:
    """Of b, or of what stands for it in both sums of a pair."""
    view, (_, b), second = View.of(group, program), operands(group), second_operand(group)
    load, dtype = load_class(b, tile.b.dtype, hw.arch), tile.b.dtype
    if second is None:
        return Staging(SHARED_B, b, tile.b, load, view.n, view.k, (tile.n, tile.k), tile.threads)
    extents = (tile.n // program.space.sums, tile.k)
    half = staged(b, dtype, *extents, tile.fragment)
    return PairedStaging(SHARED_B, b, tile.b, load, view.n, view.k, extents, tile.threads, second, half)


def _resident(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> int:
    """Blocks that a core shall hold. NVRTC takes as few registers as it can; LLVM, where nobody asks for more than one
    wave of a SIMD, all 512 of it: there as many as the model counts on."""
    needs = planned_needs(group, program, hw) if program.unit.kind is UnitKind.MFMA else None
    return 1 if needs is None else blocks_per_core(needs, hw)


def tile_blocks(view: View, tile: tuple[int, int], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """A block for each tile of each batch."""
    for axis, extent in ((view.n, tile[1]), (view.m, tile[0])):
        nodes = (Loop(f"{axis.role.value}.block", ceil_div(axis.extent, extent), LoopKind.BLOCK, nodes),)
    for batch in reversed(view.batch):
        nodes = (Loop(batch.name, batch.extent, LoopKind.BLOCK, nodes),)
    return nodes
