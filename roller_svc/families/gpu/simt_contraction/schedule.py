"""Contraction group and its rProgram → schedule tree for a GPU's FMA units (SIMT GEMM): shared and register tiles.

A block stages k-tiles of both operands in shared memory, some stages ahead, with one barrier for each k-tile. A
thread's tile consists of groups of adjacent elements, 16 bytes each, so that it reads, and if possible writes, whole
groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.matrix.guarded_k_tiles import GuardedKTiles, tile_loops
from roller_svc.families.common.gpu.matrix.multistage_pipeline import (
    EPILOGUE,
    MAIN_LOOP,
    PROLOGUE,
    STAGE,
    MultistagePipeline,
)
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.families.gpu.simt_contraction import SIMT_CONTRACTION
from roller_svc.families.gpu.simt_contraction.staging import THREAD, ReductionSteps, SimtOperandCopy
from roller_svc.families.gpu.simt_contraction.workload import SimtFacts, vector_elements
from roller_svc.ir.expr import Expr, Load, Op, OpKind
from roller_svc.ir.group import KernelGroup, TileAxis
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.index import add, div, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
    Scope,
    Storage,
)
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.perf.workload import Workload

SHARED_A, SHARED_B, ACC, A, B = ".a_shared", ".b_shared", ".acc", ".a", ".b"
# Maximal statements of one unrolled loop, and of consecutive unrolled loops: 16 KiB of instructions.
MAX_UNROLLED, MAX_IN_LINE = 512, 1024
# Loop iterations over the rows of a k-tile. LLVM sinks the products of straight-line code behind the next branch, but
# not their shared loads, which then all stay live in registers.
PASSES = {TargetKind.AMD: 2}


def lower(group: KernelGroup, program: RProgram, workload: Workload[SimtFacts]) -> tuple[ScheduleTree, ...]:
    """Return one tree: a block computes block.m x block.n of C by k-tiles of block.k, a thread thread.m x thread.n."""
    view, hw, loads = GemmView.of(group, program.space), workload.machine.hw, workload.facts.loads
    if loads is None:
        raise InvariantError(f"expected operands of FMA units, got {program.unit.name}")
    rows, types, warp = program.block[view.k.name], dict(group.inputs), hw.limits.warp_size
    steps = ReductionSteps(view.k, rows, loads.inner_member(rows))
    copies = tuple(
        SimtOperandCopy(buffer, load, axis, program.block[axis.name], steps, program.threads, warp, types)
        for buffer, load, axis in ((SHARED_A, loads.a, view.m), (SHARED_B, loads.b, view.n))
    )
    kernel = _Kernel(view, program, steps, copies, warp, PASSES.get(hw.family, 1))
    needs = SIMT_CONTRACTION.model(workload).resources(program)
    resident = 1 if needs is None else blocks_per_core(needs, hw)
    return (ScheduleTree(group.name, kernel.blocks(), raster=program.pipeline.raster, resident=resident),)


@dataclass(frozen=True, slots=True)
class _Kernel:
    view: GemmView
    program: RProgram
    steps: ReductionSteps
    copies: tuple[SimtOperandCopy, ...]
    warp: int  # threads of a warp
    passes: int

    def _block(self, axis: TileAxis) -> int:
        return self.program.block[axis.name]

    def _thread(self, axis: TileAxis) -> int:
        return self.program.thread[axis.name]

    def _threads(self, axis: TileAxis) -> int:
        return self._block(axis) // self._thread(axis)

    def _group(self, axis: TileAxis) -> int:
        """Return the adjacent elements of a thread's tile that one access moves."""
        return vector_elements(self._thread(axis), self.view.dtype.bytes)

    def blocks(self) -> tuple[Node, ...]:
        view = self.view
        # registers hold one k-tile at most
        stages = min(self.program.pipeline.stages, self.steps.count)
        pipeline = MultistagePipeline(stages, self.copies, register_stages=1)
        zero = identity(Combine.SUM, view.dtype)
        nodes: tuple[Node, ...] = (PROLOGUE, self._over_tile((Compute(ACC, (ref("m.element"), ref("n.element")), zero),)))
        tile = self._block(view.m), self._block(view.n)
        guarded = GuardedKTiles(self.program.space, (view.m, view.n), tile, self.steps.rows, self.steps.count)
        k_tiles = guarded.range
        nodes += (*pipeline.prologue(k_tiles), MAIN_LOOP, pipeline.mainloop(k_tiles, self._multiply()), EPILOGUE, self._store())
        nodes = guarded.bind(nodes)
        nodes = (Storage(ACC, view.dtype, (self._thread(view.m), self._thread(view.n)), Scope.REGISTER, nodes),)
        nodes = pipeline.allocate(nodes)
        row, column = self._thread_position()
        nodes = (Let("m.thread", row, (Let("n.thread", column, nodes),)),)
        nodes = (Loop(THREAD, self.program.threads, LoopKind.THREAD, nodes),)
        nodes = tile_loops(self.program.space, ((view.m, tile[0]), (view.n, tile[1])), nodes)
        for batch in reversed(view.batch):
            nodes = (Loop(batch.name, batch.extent, LoopKind.BLOCK, nodes),)
        return nodes

    def _thread_position(self) -> tuple[Expr, Expr]:
        """Return a thread's position among the rows and columns of threads; a warp is a rectangle of them."""
        thread, rows, columns = ref(THREAD), self._threads(self.view.m), self._threads(self.view.n)
        for height, width in _warp_shapes(self.warp):
            if rows % height == 0 and columns % width == 0:
                warp, (down, across) = div(thread, self.warp), _interleave_lanes(mod(thread, self.warp), height, width)
                row = add(mul(div(warp, columns // width), num(height)), down)
                return row, add(mul(mod(warp, columns // width), num(width)), across)
        return div(thread, columns), mod(thread, columns)

    def _over_tile(self, nodes: tuple[Node, ...]) -> Node:
        columns = Loop("n.element", self._thread(self.view.n), LoopKind.UNROLL, nodes)
        return Loop("m.element", self._thread(self.view.m), LoopKind.UNROLL, (columns,))

    # compute ---------------------------------------------------------------------------------------------------------
    def _column(self, axis: TileAxis, group: Expr) -> Expr:
        """Return the first column of a thread's group in the tile; the groups of a row of threads are adjacent."""
        role, width = axis.role.value, self._group(axis)
        across = mul(group, num(self._threads(axis) * width))
        return add(across, mul(ref(f"{role}.thread"), num(width)))

    def _multiply(self) -> tuple[Node, ...]:
        view, dtype = self.view, self.view.dtype
        product = Op(OpKind.MUL, (Load(A, (ref("m.element"),), dtype), Load(B, (ref("n.element"),), dtype)), dtype)
        multiply_add = Compute(ACC, (ref("m.element"), ref("n.element")), product, Combine.SUM)
        nodes: tuple[Node, ...] = (self._load_fragment(A, SHARED_A, view.m), self._load_fragment(B, SHARED_B, view.n))
        nodes += (self._over_tile((multiply_add,)),)
        nodes = (Storage(B, dtype, (self._thread(view.n),), Scope.REGISTER, nodes),)
        nodes = (Storage(A, dtype, (self._thread(view.m),), Scope.REGISTER, nodes),)
        return self._over_rows(nodes)

    def _over_rows(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the rows of a k-tile, unrolled as far as the instruction cache allows."""
        rows, m, n = self.steps.rows, self._thread(self.view.m), self._thread(self.view.n)
        each = m * n + m + n
        max_rows = max(1, rows // self.passes)
        in_line = max(u for u in range(1, max_rows + 1) if rows % u == 0 and (u == 1 or u * each <= MAX_IN_LINE))
        unrolled = max(u for u in range(1, in_line + 1) if in_line % u == 0 and (u == 1 or u * each <= MAX_UNROLLED))
        first = mul(ref("k.rows"), num(in_line))
        line = tuple(
            Loop("k.part", unrolled, LoopKind.UNROLL, (Let("k.row", add(add(first, num(at)), ref("k.part")), nodes),))
            for at in range(0, in_line, unrolled)
        )
        return (Loop("k.rows", rows // in_line, LoopKind.SERIAL, line),)

    def _load_fragment(self, register: str, shared: str, axis: TileAxis) -> Node:
        """Load a thread's elements of one row, one group at a time."""
        width = self._group(axis)
        at = add(self._column(axis, ref(".group")), ref(".lane"))
        value = Load(shared, (ref(STAGE), ref("k.row"), at), self.view.dtype)
        node: Node = Compute(register, (add(mul(ref(".group"), num(width)), ref(".lane")),), value)
        node = Loop(".lane", width, LoopKind.VECTOR, (node,))
        return Loop(".group", self._thread(axis) // width, LoopKind.UNROLL, (node,))

    # epilogue --------------------------------------------------------------------------------------------------------
    def _store(self) -> Node:
        """Store a thread's tile by vectors that are contiguous in the output."""
        view, width = self.view, math.gcd(self._group(self.view.n), self.view.n.members[-1].extent)
        lead = view.n.members[-1].name
        element = add(mul(ref("n.piece"), num(width)), ref("n.lane"))
        total = Load(ACC, (ref("m.element"), element), view.dtype)
        lanes = Loop("n.lane", width, LoopKind.VECTOR, ())
        nodes = view.vector_epilogue(total, lanes, {lead: add(ref(lead), ref("n.lane"))})
        if inside := logical_and(self._inside(view.m), self._inside(view.n)):
            nodes = (Branch(inside, nodes),)
        return self._for_each_row((self._for_each_vector(width, nodes),))

    def _for_each_row(self, nodes: tuple[Node, ...]) -> Node:
        m, group = self.view.m, self._group(self.view.m)
        row = add(self._column(m, div(ref("m.element"), group)), mod(ref("m.element"), group))
        nodes = (self._bind_position(m, row, bind_members(m, ref("m.place"), nodes)),)
        return Loop("m.element", self._thread(m), LoopKind.UNROLL, nodes)

    def _for_each_vector(self, width: int, nodes: tuple[Node, ...]) -> Node:
        n, vectors = self.view.n, self._group(self.view.n) // width
        column = add(self._column(n, div(ref("n.piece"), vectors)), mul(mod(ref("n.piece"), vectors), num(width)))
        nodes = (self._bind_position(n, column, bind_members(n, ref("n.place"), nodes)),)
        return Loop("n.piece", self._thread(n) // width, LoopKind.UNROLL, nodes)

    def _bind_position(self, axis: TileAxis, in_tile: Expr, nodes: tuple[Node, ...]) -> Node:
        role = axis.role.value
        return Let(f"{role}.place", add(mul(ref(f"{role}.block"), num(self._block(axis))), in_tile), nodes)

    def _inside(self, axis: TileAxis) -> Expr | None:
        has_tail = axis.extent % self._block(axis)
        return lt(ref(f"{axis.role.value}.place"), num(axis.extent)) if has_tail else None


def _warp_shapes(warp: int) -> list[tuple[int, int]]:
    """Return the shapes of a warp as rows and columns of threads, best first.

    Squarer warps read fewer elements for a row of k, and 8 columns of 16 bytes cover all banks once.
    """
    shapes = [(height, warp // height) for height in range(1, warp + 1) if warp % height == 0]
    return sorted(shapes, key=lambda shape: (max(shape), shape))


def _interleave_lanes(lane: Expr, height: int, width: int) -> tuple[Expr, Expr]:
    """Return row and column of a lane in its warp: bit 0 varies the column, bit 1 the row.

    Lanes n and n ^ 1, or n and n ^ 2, then read the same 16 bytes of either operand, so a warp's shared load takes two
    wavefronts instead of four (NVIDIA's developer forum, "Unexpected shared memory bank conflict").
    """
    if min(height, width) == 1:
        return div(lane, width), mod(lane, width)
    row = add(mod(div(lane, 2), 2), mul(div(lane, 2 * width), num(2)))
    return row, add(mod(lane, 2), mul(mod(div(lane, 4), width // 2), num(2)))
