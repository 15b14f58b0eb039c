"""Contraction group and its rProgram → schedule tree for a CPU: cache blocking and packing around a micro-kernel.

The structure is that of BLIS (Van Zee & van de Geijn, 2015). A task owns a tile of C. For each k block it packs B into
panels of NR columns. It packs A into panels of MR rows, in row blocks that fit L2, unless A is read unpacked. The
micro-kernel runs over all pairs of panels. If few panels of A meet a B that is near, the first panel of A packs B: its
micro-kernel stores the vectors of B that it has loaded, so packing overlaps with multiply-adds. Accumulators that are
the output stay in the output tensor. Others stay in a buffer of the accumulator's type until the last k block.

OperandPrefetch and OutputPrefetch add software prefetches to the micro-kernel's k loop. See
docs/families/cpu_contraction.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from roller_svc.analysis.fused_axis import member_values
from roller_svc.analysis.tile_bounds import IndexSpan
from roller_svc.errors import InvariantError, require
from roller_svc.families.common.cpu.dot import WORD, DotOperands, cast_element
from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.micro_kernel import LANE, CTile, KLoop, MicroKernel
from roller_svc.families.common.cpu.prefetch import PREFETCH_DISTANCE_BYTES, prefetch_is_profitable
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.families.cpu.contraction.block_scales import RUN, BlockScales
from roller_svc.families.cpu.contraction.blocking import Blocking, plan_blocking
from roller_svc.families.cpu.contraction.guarded_k import GuardedK, round_down
from roller_svc.families.cpu.contraction.packed_columns import PackedColumns
from roller_svc.families.cpu.contraction.packed_words import ONES, PackedWords
from roller_svc.families.cpu.contraction.packing import K_COUNT, K_FIRST, K_ROW, Packing, Panels, RunPacking, for_panel
from roller_svc.families.cpu.contraction.vnni_packing import VnniPacking
from roller_svc.families.cpu.contraction.workload import COMPUTED, ContractionFacts, CpuOperand
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, conjunction, div, eq, max_, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine, TensorExpr
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import nest_loops

PREFETCH_ROW = "m.prefetch"


@dataclass(frozen=True, slots=True)
class OperandPrefetch:
    """Prefetches of the next tile's rows of an unpacked A.

    The tile at (m.place, k.first) reads its `height` rows in parallel, one cache line of each, so hardware prefetchers
    do not follow. Each line of the next tile's rows is prefetched into L2. Rows a multiple of a page apart would evict
    the current ones from L1.
    """

    view: GemmView
    operand: CpuOperand
    height: int
    hw: HardwareSpec

    def nodes(self) -> tuple[Node, ...]:
        """Return the prefetches of one step along k."""
        is_far = self.hw.exceeds_caches(self.operand.tensor_bytes, self.view.group.space.compulsory_bytes)
        if not is_far or not self.height:
            return ()
        line = LINE_BYTES // self.view.dtype.bytes  # steps of k in which each row is prefetched once
        every = 1 << max(1, line // self.height).bit_length() - 1  # a power of two: the test must cost little
        rows_per_step = ceil_div(self.height, line)
        row = mul(div(mod(ref(K_ROW), line), every), num(rows_per_step))
        prefetches = tuple(self._prefetch(min_(add(row, num(i)), num(self.height - 1)), line) for i in range(rows_per_step))
        return prefetches if every == 1 else (Branch(eq(mod(ref(K_ROW), every), num(0)), prefetches),)

    def _prefetch(self, row: Expr, line: int) -> Node:
        """Prefetch the current line of a row of the next tile."""
        m, k, a = self.view.m.members[0].name, self.view.k.members[0].name, self.view.operands.a
        along = add(ref(K_FIRST), sub(ref(K_ROW), mod(ref(K_ROW), line)))
        load = substitute(a, {m: add(ref("m.place"), ref(PREFETCH_ROW)), k: along})
        if not isinstance(load, Load):
            raise InvariantError(f"unpacked operand A must be a plain load, got {load}")
        prefetch = Prefetch(load.tensor, load.index, self.height * self.operand.panel_stride, to_l2=True)
        return Let(PREFETCH_ROW, row, (prefetch,))


ROW, LINE = "m.row", ".line"
MAX_LINES_IN_FLIGHT = 8  # prefetched lines that delay no other load


@dataclass(frozen=True, slots=True)
class OutputPrefetch:
    """Prefetches for write of the lines that a tile of `height` rows at (m.place, n.place) fills.

    The members of n are bound. Columns are taken as contiguous. Rows are far apart, so hardware prefetchers do not
    follow, and stores to memory wait for their lines. All lines at once would delay the panels of B, so a row is
    prefetched every few steps along k.
    """

    view: GemmView
    height: int
    width: int

    def before_loop(self) -> tuple[Node, ...]:
        """Return all prefetches of a small tile, in front of the k loop, which then needs no test."""
        return (Loop(ROW, self.height, LoopKind.SERIAL, self._row()),) if self._is_small else ()

    def in_step(self, steps: int) -> tuple[Node, ...]:
        """Return the prefetches of one of `steps` along k: one or more rows every few steps."""
        if self._is_small or not self._lines():
            return ()
        every = 1 << max(1, steps // self.height).bit_length() - 1  # a power of two: the test must cost little
        rows_per_step = ceil_div(self.height, steps)
        row = mul(div(ref(K_ROW), every), num(rows_per_step))
        rows = tuple(Let(ROW, min_(add(row, num(i)), num(self.height - 1)), self._row()) for i in range(rows_per_step))
        return rows if every == 1 else (Branch(eq(mod(ref(K_ROW), every), num(0)), rows),)

    @property
    def _is_small(self) -> bool:
        lines = [node.extent for node in self._lines()]
        return 0 < self.height * sum(lines) <= MAX_LINES_IN_FLIGHT

    def _row(self) -> tuple[Node, ...]:
        return bind_members(self.view.m, add(ref("m.place"), ref(ROW)), self._lines())

    def _lines(self) -> tuple[Loop, ...]:
        loops = (_line_loop(self.view, statement, self.width) for statement in self.view.group.statements)
        return tuple(line for line in loops if line is not None) if self.height else ()


def _line_loop(view: GemmView, statement: TensorExpr, width: int) -> Loop | None:
    """Return a loop of prefetches over a row of results that is contiguous in memory, or None."""
    innermost = view.n.members[-1].name
    if statement.output in view.group.register_tensors or statement.index[-1] != AxisRef(innermost) or not width:
        return None
    line_elems = LINE_BYTES // statement.type.dtype.bytes
    position = {innermost: add(ref(innermost), mul(ref(LINE), num(line_elems)))}
    index = tuple(substitute(i, position) for i in statement.index)
    prefetch = Prefetch(statement.output, index, 0, for_write=True)
    return Loop(LINE, ceil_div(width, line_elems), LoopKind.UNROLL, (prefetch,))


PACKED_A, PACKED_B, TILE_C, EDGE_C = ".a_packed", ".b_packed", ".c_tile", ".c_edge"
COMPENSATION = ".b_flipped"
STEP, BLOCK = "k.step", "m.block"
COLUMN_VALUE, K_WORD = ".b_value", "k.word"  # of packed columns
ROW_SUMS, COLUMN_OFFSET = ".a_sums", ".b_offset"  # of packed words
K_BEGIN, K_END, K_STEPS = "k.begin", "k.end", "k.steps"  # of a task under a guard
PREFETCH_ROWS = 8  # prefetch distance in rows of B; 4 to 16 perform alike


def lower(group: KernelGroup, program: RProgram, workload: Workload[ContractionFacts]) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks, each a blocked contraction."""
    view = replace(GemmView.of(replace(group, space=program.space), program.space), dtype=group.product_sum_dtype)
    tile = workload.footprint.tile
    plan = plan_blocking(workload, tile(program.block), tile(program.thread))
    return (ScheduleTree(group.name, _Blocked(view, program, workload, plan).tasks()),)


def _padded(extent: int, tile: int) -> int:
    return ceil_div(extent, tile) * tile


@dataclass(frozen=True, slots=True)
class _Blocked:
    view: GemmView
    program: RProgram
    workload: Workload[ContractionFacts]
    plan: Blocking

    @property
    def hw(self) -> HardwareSpec:
        return self.workload.machine.hw

    @property
    def operands(self) -> tuple[CpuOperand, CpuOperand]:
        return self.workload.facts.a, self.workload.facts.b

    @property
    def dot(self) -> DotOperands | None:
        """Return the packed types for dot-product instructions; k then counts words of several elements."""
        return self.workload.facts.dot if self.packed_words is None else self.packed_words.dot

    @property
    def packed_words(self) -> PackedWords | None:
        """Return how the micro-kernel reads words of B, if panels have unsigned integers."""
        return self.workload.facts.packed_words if self.plan.has_packed_words else None

    # tile sizes -----------------------------------------------------------------------------------------------------
    @property
    def l2_bytes(self) -> int:
        return self.hw.block_level.capacity_bytes

    @property
    def lanes(self) -> int:
        return self.program.unit.shape[-1]

    @property
    def rows(self) -> Panels:
        """Return the row panels of one block of A, or of the whole task if A is not packed."""
        m, size = self.view.m, self.plan.mr
        rows = self.plan.block_rows if self.plan.packs_a else self.program.block[m.name]
        return Panels(m, rows // size, size, 0)

    @property
    def blocks(self) -> int:
        """Return the number of row blocks of a task; the last one may exceed the task's tile."""
        return ceil_div(self.program.block[self.view.m.name], self.rows.count * self.rows.size)

    @property
    def columns(self) -> Panels:
        n, size = self.view.n, self.plan.nr
        fill = _padded(n.extent % size, self.lanes)
        return Panels(n, self.program.block[n.name] // size, size, fill, self.plan.packs_b_on_first_use)

    @property
    def packed_dtype(self) -> DType:
        return self.view.dtype if self.dot is None else WORD

    @property
    def total_dtype(self) -> DType:
        """Return the type of the tile of C: that of the accumulators, or of sums of scaled ones."""
        return self.program.space.compute_dtype

    @property
    def scales(self) -> BlockScales | None:
        """Return the scales of sums over runs of k, if there are any."""
        if not self.view.operands.scales:
            return None
        return BlockScales(self.view, self.lanes, self.plan.run, self.plan.runs, 1 if self.dot is None else self.dot.group)

    @property
    def accumulates_in_output(self) -> bool:
        """Return whether the accumulators are the output, with contiguous rows, and need no buffer."""
        group, view = self.view.group, self.view
        first = group.statements[0]
        if len(group.statements) > 1 or first.type.dtype is not self.total_dtype or first.output in group.register_tensors:
            return False
        n = view.n.members[-1].name
        return len(view.m.members) == len(view.n.members) == 1 and first.index[-1] == AxisRef(n)

    # the tree, from the outside in ----------------------------------------------------------------------------------
    def tasks(self) -> tuple[Node, ...]:
        nodes = self._allocate(self._over_steps((*self._pack_b(), *self._over_blocks())))
        columns = self.columns
        remaining = sub(num(ceil_div(columns.axis.extent, columns.size)), mul(ref("n.task"), num(columns.count)))
        nodes = columns.bind_first(mul(ref("n.task"), num(columns.count)), remaining, nodes)
        tasks = [(batch.name, batch.extent) for batch in self.view.batch]
        for panels, blocks in ((self.rows, self.blocks), (columns, 1)):
            tasks.append((f"{panels.role}.task", ceil_div(panels.axis.extent, blocks * panels.count * panels.size)))
        return nest_loops(LoopKind.PARALLEL, tasks, nodes)

    def _over_steps(self, step: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the blocks of k: from the first word to the last one that a guard leaves to the task."""
        kc, depth = self.plan.kc, self.plan.depth
        if not self._task_has_own_k:
            remaining = min_(num(kc), sub(num(depth), ref(K_FIRST)))
            step = (Let(K_COUNT, remaining if depth % kc else num(kc), step),)
            step = (Let(K_FIRST, mul(ref(STEP), num(kc)), step),)
            return (Loop(STEP, self.plan.steps, LoopKind.SERIAL, step),)
        guarded, spans = self._guarded, self._task_spans
        granule = self.lanes if kc % self.lanes == 0 else kc  # packing takes whole vectors, but for the end of k
        first = round_down(min_(guarded.first_word(spans), num(depth - 1)), granule)
        end = min_(round_down(add(guarded.end_word(spans), num(granule - 1)), granule), num(depth))
        step = (Let(K_COUNT, min_(num(kc), sub(ref(K_END), ref(K_FIRST))), step),)
        step = (Let(K_FIRST, add(ref(K_BEGIN), mul(ref(STEP), num(kc))), step),)
        step = (Loop(STEP, self.plan.steps, LoopKind.SERIAL, step, ref(K_STEPS)),)
        step = (Let(K_STEPS, div(add(sub(ref(K_END), ref(K_BEGIN)), num(kc - 1)), kc), step),)
        step = (Let(K_END, max_(end, min_(add(ref(K_BEGIN), num(granule)), num(depth))), step),)
        return (Let(K_BEGIN, first, step),)

    @property
    def _guarded(self) -> GuardedK:
        bounds = require(self.program.space.k_bounds, "bounds of k")
        return GuardedK(bounds, self.plan.depth, 1 if self.dot is None else self.dot.group)

    @property
    def _task_has_own_k(self) -> bool:
        """Whether a task packs only its part of k. Constants are packed once for all tasks."""
        return self.program.space.k_bounds is not None and not any(operand.constant for operand in self.operands)

    @property
    def _task_spans(self) -> tuple[IndexSpan, ...]:
        view, block = self.view, self.program.block
        return tuple(IndexSpan.of_tile(axis, block[axis.name], ref(f"{axis.role.value}.task")) for axis in (view.m, view.n))

    def _k_loop(self, height: int, width: int) -> KLoop:
        """Return the loop of a register tile: over the part of the block of k that a guard leaves to it.

        Where sign bits of A are flipped, all of the block counts, as in the compensation.
        """
        kc, run = self.plan.kc, self.plan.run
        if self.plan.runs > 1:
            begin = mul(ref(RUN), num(run))
            return KLoop(K_ROW, run, None if self._has_whole_runs else min_(num(run), sub(ref(K_COUNT), begin)), begin)
        if self.program.space.k_bounds is None or self._flips_sign_of_a:
            return KLoop(K_ROW, kc, ref(K_COUNT))
        view, guarded = self.view, self._guarded
        spans = tuple(
            IndexSpan(axis, ref(place), add(ref(place), num(extent - 1)))
            for axis, place, extent in ((view.m, "m.place", height), (view.n, "n.place", width))
        )
        first: Expr = num(0)
        if guarded.bounds.lowers:
            first = min_(max_(sub(guarded.first_word(spans), ref(K_FIRST)), num(0)), ref(K_COUNT))
        end = min_(sub(guarded.end_word(spans), ref(K_FIRST)), ref(K_COUNT)) if guarded.bounds.uppers else ref(K_COUNT)
        return KLoop(K_ROW, kc, max_(sub(end, first), num(0)), first if guarded.bounds.lowers else None)

    def _k_loops(self, height: int, width: int) -> tuple[KLoop, ...]:
        """Return the loops of a register tile, outermost first. Those of packed columns end at runs and words."""
        kc, run, packed = self.plan.kc, self.plan.column_run, self.packed_b
        if self.packed_words is not None:
            return self._loops_over_packed_words(self.packed_words.words)
        if packed is None:
            return (self._k_loop(height, width),)
        loops: tuple[KLoop, ...] = ()
        begin: Expr | None = None
        limit: Expr | None = ref(K_COUNT)
        if self.column_runs > 1:
            begin = mul(ref(RUN), num(run))
            loops = (KLoop(RUN, self.column_runs, div(add(ref(K_COUNT), num(run - 1)), run)),)
            limit = None if kc % run == 0 == self.plan.depth % run else min_(num(run), sub(ref(K_COUNT), begin))
        if packed.points == 1:
            return (*loops, KLoop(K_ROW, run, limit, begin))
        first = None if begin is None else mul(ref(RUN), num(run // packed.points))
        words = KLoop(K_WORD, run // packed.points, None if limit is None else div(limit, packed.points), first)
        fields = KLoop(K_ROW, packed.points, None, mul(ref(K_WORD), num(packed.points)), LoopKind.UNROLL)
        return (*loops, words, fields)

    def _loops_over_packed_words(self, words: int) -> tuple[KLoop, ...]:
        """Return the loops over words of a panel, and over the words of dot products in each."""
        run = self.plan.run // words
        first = mul(ref(RUN), num(run)) if self.plan.runs > 1 else None
        limit = None
        if not self._has_whole_runs:
            remaining = div(ref(K_COUNT), words)
            limit = remaining if first is None else min_(num(run), sub(remaining, first))
        if words == 1:
            return (KLoop(K_ROW, run, limit, first),)
        each = KLoop(K_ROW, words, None, mul(ref(K_WORD), num(words)), LoopKind.UNROLL)
        return KLoop(K_WORD, run, limit, first), each

    def _allocate(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        rows, columns = self.rows, self.columns
        panels_of_b, dtype, packed = 1 if columns.shared_buffer else columns.count, self.view.dtype, self.packed_dtype
        stored, depth = self._stored_dtype, self.plan.kc // self._stored_points
        buffers: list[tuple[str, DType, tuple[int, ...]]] = [(PACKED_B, stored, (panels_of_b, depth, columns.size))]
        if self.packed_b is not None:
            values = columns.count, self.column_runs, columns.size
            buffers += [(f"{COLUMN_VALUE}{i}", value.dtype, values) for i, value in enumerate(self.packed_b.values)]
        if self._flips_sign_of_a:
            runs = (self.plan.runs,) if self.plan.runs > 1 else ()
            buffers.insert(0, (COMPENSATION, dtype, (columns.count, *runs, columns.size)))
        if self.packed_words is not None:
            buffers.append((ROW_SUMS, dtype, (rows.count, self.plan.runs, rows.size, self.lanes)))
            if not self.packed_words.is_shared:
                buffers.append((COLUMN_OFFSET, DType.INT8, (columns.count, self.plan.runs, columns.size)))
        if self.plan.packs_a:
            buffers.append((PACKED_A, packed, (rows.count, self.plan.kc + self._panel_padding, rows.size)))
        if self.scales is not None:
            buffers += self.scales.buffers(rows, columns)
        if not self.accumulates_in_output:
            panels = (self.blocks * rows.count, columns.count) if self.plan.steps > 1 else (1, 1)
            buffers.append((TILE_C, self.total_dtype, (*panels, rows.size, columns.size)))
        elif columns.tail % self.lanes:
            buffers.append((EDGE_C, self.total_dtype, (rows.size, columns.fill)))
        for name, of_type, shape in buffers:
            nodes = (Storage(name, of_type, shape, Scope.STACK, nodes),)
        return nodes

    @property
    def _panel_padding(self) -> int:
        """Return the padding rows behind each packed panel of A, one cache line or more.

        Panels are filled in parallel. Without padding, panels a multiple of a page apart would evict each other's
        partly filled lines from L1.
        """
        return ceil_div(LINE_BYTES, self.rows.size * self.view.dtype.bytes) if self.rows.count > 1 else 0

    @property
    def _stored_dtype(self) -> DType:
        """Return the type of an element of a panel of B."""
        return self.packed_dtype if self.packed_b is None else self.packed_b.dtype

    @property
    def _stored_points(self) -> int:
        """Return the points of `k.row` in an element of a panel of B."""
        if self.packed_words is not None:
            return self.packed_words.words
        return 1 if self.packed_b is None else self.packed_b.points

    def _pack_b(self) -> tuple[Node, ...]:
        if self.packed_b is not None:
            return self._pack_columns(self.packed_b)
        if self.packed_words is not None:
            packed = self._pack_words(self.packed_words)
        else:
            packed = () if self.plan.packs_b_on_first_use else self._packing_of_b.nodes(self.columns)
        if self.scales is not None:
            packed = (*packed, *self.scales.pack_columns(self.columns))
        return (*packed, *self._compute_compensation()) if self._flips_sign_of_a else packed

    def _pack_columns(self, packed: PackedColumns) -> tuple[Node, ...]:
        """Pack integers of few bits, and what else columns are computed from."""
        k, kc, lanes, run = self.view.k, self.plan.kc, self.lanes, self.plan.column_run
        points = packed.points
        first = add(ref(K_FIRST), mul(ref(K_ROW), num(points)))
        source = packed.source([member_values(k, add(first, num(i))) for i in range(points)])
        nodes = RunPacking(PACKED_B, source, COMPUTED, k, packed.words(kc), lanes, packed.dtype, points).nodes(self.columns)
        for i, value in enumerate(packed.values):
            packing = RunPacking(f"{COLUMN_VALUE}{i}", value, COMPUTED, k, self.column_runs, lanes, value.dtype, run)
            nodes = (*nodes, *packing.nodes(self.columns))
        return nodes

    def _pack_words(self, packed: PackedWords) -> tuple[Node, ...]:
        """Pack unsigned integers, as many as a word of a panel has, and numbers of runs."""
        k, group, words = self.view.k, packed.dot.group, packed.words
        first = mul(add(ref(K_FIRST), mul(ref(K_ROW), num(words))), num(group))
        source, count = packed.source(k, first), self.plan.kc // words
        nodes = RunPacking(PACKED_B, source, COMPUTED, k, count, self.lanes, WORD, words, group).nodes(self.columns)
        if packed.is_shared:
            return nodes
        runs, run, dtype = self.plan.runs, self.plan.run, DType.INT8
        offsets = RunPacking(COLUMN_OFFSET, packed.offset, COMPUTED, k, runs, self.lanes, dtype, run, group)
        return (*nodes, *offsets.nodes(self.columns))

    def _sum_rows(self) -> tuple[Node, ...]:
        """Sum the elements of each run of a row of A, with one sum for all lanes."""
        rows = self.rows
        tile = CTile(ROW_SUMS, lambda row, lane: (rows.panel, self._run, row, lane))

        def summed(height: int) -> tuple[Node, ...]:
            kernel = self._micro_kernel(height, self.lanes)
            kernel = replace(kernel, b=lambda _: ONES, initial=None, prefetches=(), scaled=None)
            return self._over_runs(kernel.nodes(tile))

        return (rows.loop(rows.dispatch_edge(summed)),)

    @property
    def _run(self) -> Expr:
        return ref(RUN) if self.plan.runs > 1 else num(0)

    @property
    def packed_b(self) -> PackedColumns | None:
        """Return how the micro-kernel computes B, if panels have integers of few bits."""
        return self.workload.facts.packed_b if self.plan.column_run else None

    @property
    def column_runs(self) -> int:
        """Runs of a block of k with one value of packed columns each."""
        return ceil_div(self.plan.kc, self.plan.column_run)

    @property
    def _packing_of_b(self) -> Packing:
        return self._packing(PACKED_B, self.view.operands.b, self.operands[1])

    @property
    def _flips_sign_of_a(self) -> bool:
        return self.dot is not None and self.dot.flips_sign_of_a

    def _compute_compensation(self) -> tuple[Node, ...]:
        """Compute what flipped sign bits of A add to each column (zero-point compensation of int8 GEMM).

        It is the product of B with a row of A whose words are the sign mask.
        """
        columns = self.columns
        tile = CTile(COMPENSATION, lambda _, column: self._compensation(column))

        def summed(width: int) -> tuple[Node, ...]:
            kernel = replace(self._micro_kernel(1, width), a=self._flip, initial=None, prefetches=(), scaled=None)
            return self._over_runs(kernel.nodes(tile))

        return (columns.loop(columns.dispatch_edge(summed)),)

    def _flip(self, _: Expr) -> Expr:
        return Const(0 if self.dot is None else self.dot.sign_mask, WORD)

    def _compensation(self, column: Expr) -> tuple[Expr, ...]:
        run = (ref(RUN),) if self.plan.runs > 1 else ()
        return (self.columns.panel, *run, column)

    def _initial_compensation(self, _: Expr, column: Expr) -> Expr:
        flipped = Load(COMPENSATION, self._compensation(column), self.view.dtype)
        return Op(OpKind.NEG, (flipped,), self.view.dtype)

    def _over_blocks(self) -> tuple[Node, ...]:
        """Loop over the row blocks of A: pack a block, then multiply it by all panels of B."""
        nodes, rows = self._multiply(), self.rows
        if self.plan.packs_a:
            sums = () if self.packed_words is None else self._sum_rows()
            nodes = (*self._packing(PACKED_A, self.view.operands.a, self.operands[0]).nodes(rows), *sums, *nodes)
        if self.scales is not None:
            nodes = (*self.scales.pack_rows(rows), *nodes)
        of_task = self.blocks * rows.count
        task, block = mul(ref("m.task"), num(of_task)), mul(ref(BLOCK), num(rows.count))
        nodes = rows.bind_first(add(task, block), sub(ref("m.all"), block), nodes)
        blocks = div(add(ref("m.all"), num(rows.count - 1)), rows.count)
        nodes = (Loop(BLOCK, self.blocks, LoopKind.SERIAL, nodes, None if self.blocks == 1 else blocks),)
        remaining = sub(num(ceil_div(self.view.m.extent, rows.size)), task)
        return (Let("m.all", min_(num(of_task), remaining), nodes),)

    def _packing(self, buffer: str, source: Expr, operand: CpuOperand) -> Packing:
        k, kc, lanes = self.view.k, self.plan.kc, self.lanes
        if self.scales is not None:
            source = cast_element(source, self.view.dtype)  # scales move no conversion out of an operand
        if self.dot is None:
            return Packing(buffer, source, operand, k, kc, lanes, self.view.dtype)
        of_type, flip = (self.dot.a, self.dot.sign_mask) if buffer == PACKED_A else (self.dot.b, 0)
        return VnniPacking(buffer, source, operand, k, kc, lanes, WORD, of_type, self.dot.group, flip)

    # the micro-kernel -----------------------------------------------------------------------------------------------
    def _multiply(self) -> tuple[Node, ...]:
        rows, columns = self.rows, self.columns

        def over_columns(height: int) -> tuple[Node, ...]:
            def tile(width: int) -> tuple[Node, ...]:
                nodes = self._tile(height, width)
                if width < columns.size and self.plan.packs_b_on_first_use and self._first_panel_may_have(height):
                    return (Branch(self._is_first_panel, self._packing_of_b.pack_edge(columns)), *nodes)
                return nodes

            return columns.dispatch_edge(tile)

        nodes = rows.dispatch_edge(over_columns)
        inner, outer = (columns, rows) if self.plan.rows_outer else (rows, columns)
        return (outer.loop((inner.loop(nodes),)),)

    @property
    def _is_first_panel(self) -> Expr:
        """Return the condition that this is the task's first panel of A."""
        return eq(add(ref(BLOCK), ref("m.panel")), num(0))

    def _first_panel_may_have(self, height: int) -> bool:
        """Return whether a task's first panel may have `height` rows."""
        of_task, whole = self.blocks * self.rows.count, self.view.m.extent // self.rows.size
        return whole > 0 if height == self.rows.size else whole % of_task == 0

    def _tile(self, height: int, width: int) -> tuple[Node, ...]:
        """Compute height x width of C at (m.place, n.place)."""
        fresh = eq(ref(STEP), num(0))
        if not self.accumulates_in_output:
            tile = CTile(TILE_C, lambda row, column: (*self._tile_panel(), row, column))
            finish = (Routine("store", self._run_epilogue(height, width)),)
            if self.plan.steps == 1:
                return (*self._multiply_tile(height, width, tile), *finish)
            nodes = self._multiply_tile(height, width, tile, fresh)
            last = sub(ref(K_STEPS), num(1)) if self._task_has_own_k else num(self.plan.steps - 1)
            return (*nodes, Branch(eq(ref(STEP), last), finish))
        if width % self.lanes == 0:
            tile = CTile(self.view.group.statements[0].output, self._output)
            return self._multiply_tile(height, width, tile, fresh if self.plan.steps > 1 else None)
        edge = CTile(EDGE_C, lambda row, column: (row, column))
        return (*self._multiply_tile(height, width, edge), *self._store_edge(height, width, fresh))

    def _tile_panel(self) -> tuple[Expr, Expr]:
        if self.plan.steps == 1:
            return num(0), num(0)
        return add(mul(ref(BLOCK), num(self.rows.count)), ref("m.panel")), ref("n.panel")

    def _output(self, row: Expr, column: Expr) -> tuple[Expr, ...]:
        m, n = self.view.m.members[0].name, self.view.n.members[0].name
        at = {m: add(ref("m.place"), row), n: add(ref("n.place"), column)}
        return tuple(substitute(i, at) for i in self.view.group.statements[0].index)

    def _store_edge(self, height: int, width: int, fresh: Expr) -> tuple[Node, ...]:
        statement, row = self.view.group.statements[0], ref("m.row")
        total = Load(EDGE_C, (row, ref(LANE)), self.total_dtype)

        def stored(combine: Combine | None) -> tuple[Node, ...]:
            store = Compute(statement.output, self._output(row, ref(LANE)), total, combine)
            return (Loop(row.name, height, LoopKind.SERIAL, (Loop(LANE, width, LoopKind.VECTOR, (store,)),)),)

        return stored(None) if self.plan.steps == 1 else (Branch(fresh, stored(None), stored(Combine.SUM)),)

    def _multiply_tile(self, height: int, width: int, tile: CTile, fresh: Expr | None = None) -> tuple[Node, ...]:
        """Run the micro-kernel, which packs B on its first use; panels at the edge are packed before."""
        kernel = self._micro_kernel(height, width)
        output_prefetch = OutputPrefetch(self.view, height if self.accumulates_in_output or self.plan.steps == 1 else 0, width)
        prefetches = output_prefetch.in_step(self.plan.kc)
        if not self.plan.packs_a:
            prefetches = (*prefetches, *OperandPrefetch(self.view, self.operands[0], height, self.hw).nodes())
        nodes = self._over_runs(replace(kernel, prefetches=(*kernel.prefetches, *prefetches)).nodes(tile, self._first_run(fresh)))
        if self.plan.packs_b_on_first_use and width == self.columns.size and self._first_panel_may_have(height):
            packing_prefetches = (*self._prefetch_rows_of_b(), *prefetches)
            packs = replace(kernel, b=self._element_of_b, packs_b=self._packed_element_of_b, prefetches=packing_prefetches)
            nodes = (Branch(self._is_first_panel, packs.nodes(tile, fresh), nodes),)
        return bind_members(self.view.n, ref("n.place"), (*output_prefetch.before_loop(), *nodes))

    @property
    def _has_whole_runs(self) -> bool:
        return self.plan.kc % self.plan.run == 0 == self.plan.depth % self.plan.run

    def _over_runs(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the runs of a block of k that have one scale each."""
        run, runs = self.plan.run, self.plan.runs
        if runs == 1:
            return nodes
        return (Loop(RUN, runs, LoopKind.SERIAL, nodes, div(add(ref(K_COUNT), num(run - 1)), run)),)

    def _first_run(self, fresh: Expr | None) -> Expr | None:
        """Return whether a sum is the first of its tile of C, given whether its block of k is; None: always."""
        if self.plan.runs == 1:
            return fresh
        return conjunction([eq(ref(RUN), num(0)), *([] if fresh is None else [fresh])])

    def _element_of_b(self, column: Expr) -> Load:
        view = self.view
        at = {
            view.n.members[0].name: add(ref("n.place"), column),
            view.k.members[0].name: add(ref(K_FIRST), ref(K_ROW)),
        }
        source = view.operands.b
        while isinstance(source, Cast):  # exact: memory has the packed type
            source = source.arg
        source = substitute(source, at)
        if not isinstance(source, Load):
            raise InvariantError(f"operand B packed on first use must be a plain load, got {source}")
        return source

    def _packed_element_of_b(self, column: Expr) -> Load:
        return Load(PACKED_B, (self.columns.buffer_index, ref(K_ROW), column), self.packed_dtype)

    def _computed_element_of_b(self, packed: PackedColumns, fields: KLoop) -> Callable[[Expr], Expr]:
        """Return what computes an element of B from its integer, and from the values of its run."""
        row = ref(K_ROW if packed.points == 1 else K_WORD)
        run = ref(RUN) if self.column_runs > 1 else num(0)

        def element(column: Expr) -> Expr:
            stored = Load(PACKED_B, (self.columns.buffer_index, row, column), packed.dtype)
            values = [
                Load(f"{COLUMN_VALUE}{i}", (self.columns.panel, run, column), value.dtype) for i, value in enumerate(packed.values)
            ]
            return packed.computed(stored, fields.number, values)

        return element

    def _prefetch_rows_of_b(self) -> tuple[Node, ...]:
        """Prefetch a later row of B; hardware prefetchers do not follow short rows that are far apart."""
        first, later = self._element_of_b(num(0)), PREFETCH_ROWS * self.operands[1].k_stride
        lines = range(0, self.columns.size, LINE_BYTES // self.view.dtype.bytes)
        return tuple(Prefetch(first.tensor, first.index, later + column) for column in lines)

    def _micro_kernel(self, height: int, width: int) -> MicroKernel:
        dtype, k_loops = self.view.dtype, self._k_loops(height, width)
        return MicroKernel(
            height,
            _padded(width, self.lanes),
            self.lanes,
            dtype,
            k_loops,
            a=self._element_of_a,
            b=self._read_b(k_loops[-1]),
            registers=self.hw.limits.max_registers_per_thread,
            prefetches=(*self._prefetch_columns(), *self._prefetch_rows()),
            dot=self.dot,
            initial=self._initial,
            scaled=None if self.scales is None else self.scales.scaled,
        )

    def _read_b(self, innermost: KLoop) -> Callable[[Expr], Expr]:
        """Return what reads or computes an element of B in a step of the innermost loop."""
        packed = self.packed_words
        if self.packed_b is not None:
            return self._computed_element_of_b(self.packed_b, innermost)
        if packed is None:
            return self._packed_element_of_b

        def word(column: Expr) -> Expr:
            place = ref(K_ROW if packed.words == 1 else K_WORD)
            return packed.word(Load(PACKED_B, (self.columns.buffer_index, place, column), WORD), innermost.number)

        return word

    @property
    def _initial(self) -> Callable[[Expr, Expr], Expr] | None:
        """Return what sums at a row and a column begin with; None: zero."""
        packed = self.packed_words
        if packed is None:
            return self._initial_compensation if self._flips_sign_of_a else None

        def first_sum(row: Expr, column: Expr) -> Expr:
            offset = packed.offset
            if not packed.is_shared:
                offset = Load(COLUMN_OFFSET, (self.columns.panel, self._run, column), DType.INT8)
            return packed.first_sum(Load(ROW_SUMS, (self.rows.panel, self._run, row, ref(LANE)), self.view.dtype), offset)

        return first_sum

    def _element_of_a(self, row: Expr) -> Expr:
        view = self.view
        if self.plan.packs_a:
            return Load(PACKED_A, (ref("m.panel"), ref(K_ROW), row), self.packed_dtype)
        m, k = view.m.members[0].name, view.k.members[0].name
        return substitute(view.operands.a, {m: add(ref("m.place"), row), k: add(ref(K_FIRST), ref(K_ROW))})

    def _prefetch_columns(self) -> tuple[Node, ...]:
        """Prefetch a part of the next panel of B with each panel of A."""
        rows, columns = self.rows, self.columns
        if self.plan.streams_b:
            return self._prefetch_stream_of_b()
        if columns.count == 1 or columns.shared_buffer or self.plan.rows_outer:
            return ()
        elems_per_step = ceil_div(columns.size, rows.count)
        element = mul(add(mul(ref("m.panel"), num(self.plan.kc)), ref(K_ROW)), num(elems_per_step))
        return (Prefetch(PACKED_B, (add(ref("n.panel"), num(1)), num(0), element), 0),)

    def _prefetch_stream_of_b(self) -> tuple[Node, ...]:
        """Prefetch a later row of prepacked B if L2 cannot hold B: the only panel of A reads each panel once.

        Panels follow each other in memory. Within L2, prefetches cost more than they hide.
        """
        size, points = self._stored_dtype.bytes, self._stored_points
        b_bytes = self.columns.axis.extent * (self.plan.depth // points) * size
        if b_bytes <= self.l2_bytes or not prefetch_is_profitable(self.view.group, self.program, self.hw):
            return ()
        lines = range(0, self.columns.size, LINE_BYTES // size)
        row = (ref("n.panel"), ref(K_ROW if points == 1 else K_WORD))
        prefetches = tuple(Prefetch(PACKED_B, (*row, num(line)), PREFETCH_DISTANCE_BYTES // size) for line in lines)
        if points == 1:
            return prefetches
        return (Branch(eq(mod(ref(K_ROW), points), num(0)), prefetches),)

    def _prefetch_rows(self) -> tuple[Node, ...]:
        """Prefetch a part of the next prepacked panel of A with each of a few panels of B.

        A packed constant comes from L3, where other panels have just been written to L2.
        """
        rows, columns = self.rows, self.columns
        if not self.operands[0].constant or rows.count == 1 or columns.count > rows.size:
            return ()
        elems_per_step = ceil_div(rows.size, columns.count)
        element = mul(add(mul(ref("n.panel"), num(self.plan.kc)), ref(K_ROW)), num(elems_per_step))
        return (Prefetch(PACKED_A, (add(ref("m.panel"), num(1)), num(0), element), 0),)

    def _run_epilogue(self, height: int, width: int) -> tuple[Node, ...]:
        """Store a finished tile of C through the epilogue."""
        row = ref("m.row")

        def columns(at: dict[str, Expr], count: int) -> tuple[Node, ...]:
            total = Load(TILE_C, (*self._tile_panel(), row, ref(LANE)), self.total_dtype)
            stores = Loop(LANE, count, LoopKind.VECTOR, self.view.epilogue(total, at))
            nodes = bind_members(self.view.m, add(ref("m.place"), row), (stores,))
            return (Loop(row.name, height, LoopKind.SERIAL, nodes),)

        return for_panel(self.columns, columns, width)
