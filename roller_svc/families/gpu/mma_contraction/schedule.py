"""Contraction group and its rProgram → schedule trees for tensor cores driven by a warp (`mma.sync`, MFMA).

A block stages k-tiles of both operands in shared memory, several stages ahead (CUTLASS multistage). Its warps load
fragments and multiply. Accumulators go through shared memory again, so the epilogue accesses memory in wide rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.analysis.operand import Operand, operand_b2, operands
from roller_svc.families.common.gpu.launch_bounds import mfma_resident_blocks
from roller_svc.families.common.gpu.matrix.block_scales import BlockScales, ScaledMmaMainloop
from roller_svc.families.common.gpu.matrix.epilogue import MmaEpilogue
from roller_svc.families.common.gpu.matrix.guarded_k_tiles import GuardedKTiles, tile_loops
from roller_svc.families.common.gpu.matrix.mainloop import MmaMainloop
from roller_svc.families.common.gpu.matrix.multistage_pipeline import EPILOGUE
from roller_svc.families.common.gpu.matrix.staging import MmaOperandCopy
from roller_svc.families.common.gpu.matrix.stream_k_fixup import stream_k_launches
from roller_svc.families.common.gpu.matrix.tile import SHARED_A, SHARED_B, MmaTile, StagedTile, load_class, mma_tile, staged
from roller_svc.families.common.view import GemmView
from roller_svc.families.gpu.mma_contraction import MMA_CONTRACTION
from roller_svc.families.gpu.mma_contraction.workload import MmaFacts
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import KernelGroup, TileSpace
from roller_svc.ir.hardware import Arch
from roller_svc.ir.index import add, ceil_div, lt, mul, num, ref
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Loop, LoopKind, Node, ScheduleTree
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class DualGemmCopy(MmaOperandCopy):
    """Copy of both B operands of a dual GEMM into one buffer.

    `operand` fills the first half of the rows (of each row, if rows follow n), `second` the other half. `tile` is that
    of one operand, and `half` its layout.
    """

    second: Operand
    half: StagedTile

    def allocate_registers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the registers of prefetched elements around the nodes that load and store them."""
        if not self.is_prefetched:
            return body
        for half in self._halves:
            body = half.allocate_registers(body)
        return body

    def cp_async(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Start asynchronous copies of a k-tile to a stage."""
        return tuple(node for half in self._halves for node in half.cp_async(step, stage))

    def load_to_registers(self, step: Expr) -> tuple[Node, ...]:
        """Load a k-tile to registers."""
        return tuple(node for half in self._halves for node in half.load_to_registers(step))

    def store_to_shared(self, stage: Expr) -> tuple[Node, ...]:
        """Store the loaded elements to a stage."""
        return tuple(node for half in self._halves for node in half.store_to_shared(stage))

    def copy_through_registers(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Copy a k-tile to a stage, one item after the other."""
        return tuple(node for half in self._halves for node in half.copy_through_registers(step, stage))

    @property
    def _halves(self) -> tuple[_DualGemmHalf, _DualGemmHalf]:
        first, second = (
            _DualGemmHalf(self.buffer, operand, self.half, self.load, self.axis, self.k, self.tile, self.threads, offset)
            for operand, offset in ((self.operand, 0), (self.second, self.tile[0]))
        )
        return first, second


@dataclass(frozen=True, slots=True)
class _DualGemmHalf(MmaOperandCopy):
    """Copy of one operand, at `offset` along m or n in the buffer."""

    offset: int

    @property
    def fetched(self) -> str:
        """Return the name of the registers between global and shared memory."""
        return f"{self.buffer}.fetched.{self.offset}"

    def _smem_index(self, stage: Expr, lane: Expr) -> tuple[Expr, ...]:
        stage, row, element = MmaOperandCopy._smem_index(self, stage, lane)
        if self.staged.k_major:
            return stage, add(row, num(self.offset)), element
        return stage, row, add(element, num(self.offset))


def lower(group: KernelGroup, program: RProgram, workload: Workload[MmaFacts]) -> tuple[ScheduleTree, ...]:
    """Return one tree, or two under stream-K.

    A block computes block.m x block.n of the output, a warp thread.m x thread.n of that.
    """
    view, arch = GemmView.of(group, program.space), workload.machine.hw.arch
    a, b = operands(group)
    tile = mma_tile(program, a, b)
    load = load_class(a, tile.a.dtype, arch)
    copy_of_a = MmaOperandCopy(SHARED_A, a, tile.a, load, view.m, view.k, (tile.m, tile.k), tile.threads)
    copies = copy_of_a, _copy_of_b(group, program, tile, arch)
    scales = _block_scales(view, tile)
    mainloop = MmaMainloop(view.dtype, tile, *copies) if scales is None else ScaledMmaMainloop(view.dtype, tile, *copies, scales)
    epilogue = MmaEpilogue(view, tile)
    resident = mfma_resident_blocks(MMA_CONTRACTION.model(workload), program)
    if program.pipeline.stream_k_blocks:
        mainloop_tree, fixup_tree = stream_k_launches(group.name, program, mainloop, epilogue)
        return replace(mainloop_tree, resident=resident), fixup_tree
    extents = tile.m, epilogue.columns
    k_tiles = GuardedKTiles(program.space, (view.m, view.n), extents, tile.k, ceil_div(view.k.extent, tile.k))
    nodes = k_tiles.bind((*mainloop.nodes(k_tiles.range), EPILOGUE, Barrier(), *epilogue.nodes()))
    nodes = tile_blocks(view, program.space, extents, mainloop.threads(mainloop.accumulators(nodes)))
    return (ScheduleTree(group.name, nodes, raster=program.pipeline.raster, resident=resident),)


def _copy_of_b(group: KernelGroup, program: RProgram, tile: MmaTile, arch: Arch) -> MmaOperandCopy:
    """Return the copy of B, or of both B operands of a dual GEMM."""
    view, (_, b), second = GemmView.of(group, program.space), operands(group), operand_b2(group)
    load, dtype = load_class(b, tile.b.dtype, arch), tile.b.dtype
    if second is None:
        return MmaOperandCopy(SHARED_B, b, tile.b, load, view.n, view.k, (tile.n, tile.k), tile.threads)
    extents = (tile.n // program.space.num_accumulators, tile.k)
    half = staged(b, dtype, *extents, tile.fragment)
    return DualGemmCopy(SHARED_B, b, tile.b, load, view.n, view.k, extents, tile.threads, second, half)


def _block_scales(view: GemmView, tile: MmaTile) -> BlockScales | None:
    """Return the scales of a warp's part of a k-tile's sums."""
    if tile.scale_runs is None or (registers := tile.scales) is None:
        return None
    row = add(mul(ref("m.block"), num(tile.m)), mul(ref("m.warp"), num(tile.warp_m)))
    row = add(row, mul(ref("m.fragment"), num(tile.fragment.rows)))
    column = add(mul(ref("n.block"), num(tile.n)), mul(ref("n.warp"), num(tile.warp_n)))
    return BlockScales(view, registers, row, column, (tile.m, tile.n), tile.scale_runs.sum_dtype)


def tile_blocks(view: GemmView, space: TileSpace, tile: tuple[int, int], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Loop over blocks: one for each tile of each batch."""
    nodes = tile_loops(space, tuple(zip((view.m, view.n), tile, strict=True)), nodes)
    limit = view.group.num_batches
    if limit is not None:
        nodes = (Branch(lt(ref(view.batch[0].name), limit), nodes),)
    for batch in reversed(view.batch):
        nodes = (Loop(batch.name, batch.extent, LoopKind.BLOCK, nodes),)
    return nodes
