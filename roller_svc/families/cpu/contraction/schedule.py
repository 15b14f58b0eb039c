"""Contraction group and its rProgram → schedule tree for a CPU: packed blocks around a register micro-kernel.

A task owns a tile of C. For every step along k it packs B into panels of NR columns; then A, in blocks of rows that
L2 has room for, into panels of MR rows, unless A is read where it lies; and runs the micro-kernel over all pairs of
panels. Where few panels of A meet a B that is near, the first of them packs each panel of B: the micro-kernel stores
the vectors that it has read, so that B arrives beside multiply-adds. Sums that are the output grow in the output;
others stay in a tile of their own, in the accumulator's type, until the last step.

A register tile of a contraction that reads A where it lies → hints for the rows that the next tile reads.

Rows of a tile are read side by side, a line of each at a time, which no prefetcher foresees that follows memory in its
order: where they come from beyond a core's own caches, a high tile waits for all of its rows at each line along k. One
line of the next tile's rows is asked for at each step, or each few; into the second cache, for in the first rows that
lie a page's multiple apart would push out those at hand. On Zen 4 768 products of 128 x 128 x 64 take, in tiles of
14 x 32, 19.3 ms without hints and 17.3 with them, 4096 x 16 x 4096 in tiles of 8 x 16 5.6 and 4.8 (into the first
cache 7.0).

A register tile of a contraction → hints for the lines of memory that its results will take, while it is summed.

Results of a tile are rows of a few lines each, far apart, which no prefetcher foresees: where they go to memory, each
store waits there for its line. Asked for all at once, lines of a high tile fill up what a core has under way, and
panels of B wait behind them: so a row is asked for every few steps along k. On Zen 4 64 x 401408 x 64 takes, in tiles
of 14 x 32, 44 ms without hints, 40 with all of them first, 36 with these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.errors import InvariantError
from roller_svc.families.common.cpu.dot import WORD, DotOperands, dot_operands
from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.micro_kernel import LANE, MicroKernel, Steps, Tile
from roller_svc.families.common.view import View, decoded
from roller_svc.families.cpu.contraction.packing import K_COUNT, K_FIRST, K_ROW, Packing, Panels, in_panel
from roller_svc.families.cpu.contraction.vnni_packing import WordPacking
from roller_svc.families.cpu.contraction.workload import (
    CpuOperand,
    Lie,
    cpu_operands,
    few_columns,
    packs_beside,
    reads_a_straight,
    rows_at_once,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, div, eq, min_, mod, mul, num, ref, sub
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

PREFETCH_ROW = "m.ahead"


@dataclass(frozen=True, slots=True)
class OperandAhead:
    """Of A, which lies as `lies` says and is read in tiles of `height` rows from (m.place, k.first) on."""

    view: View
    lies: CpuOperand
    height: int
    hw: HardwareSpec

    def beside(self) -> tuple[Node, ...]:
        """For one step along k."""
        is_far = self.hw.exceeds_caches(self.lies.tensor_bytes, self.view.group.space.compulsory_bytes)
        if not is_far or not self.height:
            return ()
        line = LINE_BYTES // self.view.dtype.bytes  # steps of k in which each row is asked for once
        every = 1 << max(1, line // self.height).bit_length() - 1  # a power of two: the test must cost little
        at_once = ceil_div(self.height, line)
        row = mul(div(mod(ref(K_ROW), line), every), num(at_once))
        hints = tuple(self._hint(min_(add(row, num(i)), num(self.height - 1)), line) for i in range(at_once))
        return hints if every == 1 else (Branch(eq(mod(ref(K_ROW), every), num(0)), hints),)

    def _hint(self, row: Expr, line: int) -> Node:
        """The line at hand of a row of the next tile."""
        m, k, a = self.view.m.members[0].name, self.view.k.members[0].name, self.view.factors.a
        along = add(ref(K_FIRST), sub(ref(K_ROW), mod(ref(K_ROW), line)))
        load = substitute(a, {m: add(ref("m.place"), ref(PREFETCH_ROW)), k: along})
        if not isinstance(load, Load):
            raise InvariantError("A is read where it lies, but is no plain load")
        hint = Prefetch(load.tensor, load.index, self.height * self.lies.panel_stride, to_l2=True)
        return Let(PREFETCH_ROW, row, (hint,))


ROW, LINE = "m.row", ".line"
AT_ONCE = 8  # lines that nothing waits behind


@dataclass(frozen=True, slots=True)
class ResultsAhead:
    """Of the tile of `height` rows at (m.place, n.place), the members of n being known: hints for all lines that its
    rows take, as if its columns were neighbours."""

    view: View
    height: int
    width: int

    def first(self) -> tuple[Node, ...]:
        """What is asked for before anything is summed: few lines, for a test at each k would hold up small tiles."""
        return (Loop(ROW, self.height, LoopKind.SERIAL, self._row()),) if self._is_small else ()

    def beside(self, steps: int) -> tuple[Node, ...]:
        """For one of `steps` along k: a row, or some, every few of them."""
        if self._is_small or not self._lines():
            return ()
        every = 1 << max(1, steps // self.height).bit_length() - 1  # a power of two: the test must cost little
        at_once = ceil_div(self.height, steps)
        row = mul(div(ref(K_ROW), every), num(at_once))
        rows = tuple(Let(ROW, min_(add(row, num(i)), num(self.height - 1)), self._row()) for i in range(at_once))
        return rows if every == 1 else (Branch(eq(mod(ref(K_ROW), every), num(0)), rows),)

    @property
    def _is_small(self) -> bool:
        lines = [node.extent for node in self._lines()]
        return 0 < self.height * sum(lines) <= AT_ONCE

    def _row(self) -> tuple[Node, ...]:
        return decoded(self.view.m, add(ref("m.place"), ref(ROW)), self._lines())

    def _lines(self) -> tuple[Loop, ...]:
        found = (_lines_of(self.view, statement, self.width) for statement in self.view.group.statements)
        return tuple(line for line in found if line is not None) if self.height else ()


def _lines_of(view: View, statement: TensorExpr, width: int) -> Loop | None:
    """Of rows that are neighbours in memory."""
    innermost = view.n.members[-1].name
    if statement.output in view.group.register_tensors or statement.index[-1] != AxisRef(innermost) or not width:
        return None
    each = LINE_BYTES // statement.type.dtype.bytes
    place = {innermost: add(ref(innermost), mul(ref(LINE), num(each)))}
    index = tuple(substitute(i, place) for i in statement.index)
    hint = Prefetch(statement.output, index, 0, for_write=True)
    return Loop(LINE, ceil_div(width, each), LoopKind.UNROLL, (hint,))


PACKED_A, PACKED_B, TILE_C, EDGE_C = ".a_packed", ".b_packed", ".c_tile", ".c_edge"
FLIPPED = ".b_flipped"
STEP, BLOCK = "k.step", "m.block"
ROWS_AHEAD = 8  # of B, fetched while one is multiplied: between 4 and 16 nothing changes


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """One tree: parallel tasks, each a blocked contraction."""
    group = replace(group, space=program.space)
    dot = dot_operands(program.unit, group)
    lies = cpu_operands(group, None if dot is None else (dot.a, dot.b))
    return (ScheduleTree(group.name, _Blocked(View.of(group, program), program, lies, hw, dot).tasks()),)


def _padded(extent: int, tile: int) -> int:
    return ceil_div(extent, tile) * tile


@dataclass(frozen=True, slots=True)
class _Blocked:
    view: View
    program: RProgram
    lies: tuple[CpuOperand, CpuOperand]
    hw: HardwareSpec
    dot: DotOperands | None  # what a unit of dot products is given: then k is counted in words of several elements

    # tile sizes -----------------------------------------------------------------------------------------------------
    @property
    def l2_bytes(self) -> int:
        return self.hw.block_level.capacity_bytes

    @property
    def lanes(self) -> int:
        return self.program.unit.shape[-1]

    @property
    def rows(self) -> Panels:
        """Of one block of A; of the whole task where A is not packed."""
        m, size = self.view.m, self.program.thread[self.view.m.name]
        task = self.program.block[m.name]
        if not self.a_is_straight:
            task = rows_at_once(task, size, self.kc, self.view.dtype.bytes, self.l2_bytes)
        return Panels(m, task // size, size, 0)

    @property
    def blocks(self) -> int:
        """Blocks of rows that a task works on one after the other: all of its tile, and less than a block more."""
        return ceil_div(self.program.block[self.view.m.name], self.rows.count * self.rows.size)

    @property
    def columns(self) -> Panels:
        n = self.view.n
        size = self.program.thread[n.name]
        fill = _padded(n.extent % size, self.lanes)
        return Panels(n, self.program.block[n.name] // size, size, fill, self.packs_beside)

    @property
    def depth(self) -> int:
        """All of k."""
        return self._in_words(self.view.k.extent)

    @property
    def kc(self) -> int:
        return min(self._in_words(self.program.block[self.view.k.name]), self.depth)

    def _in_words(self, elements: int) -> int:
        return elements if self.dot is None else ceil_div(elements, self.dot.group)

    @property
    def steps(self) -> int:
        return ceil_div(self.depth, self.kc)

    @property
    def packed_dtype(self) -> DType:
        return self.view.dtype if self.dot is None else WORD

    @property
    def a_is_straight(self) -> bool:
        a, nc = self.lies[0], self.program.block[self.view.n.name]
        if self.dot is not None or not a.plain or a.constant or a.lie is not Lie.ALONG_K:
            return False
        tile = (self.program.thread[self.view.m.name], self.program.thread[self.view.n.name], self.kc)
        size = self.view.dtype.bytes
        return reads_a_straight(nc, tile, a.panel_stride * size, size, self.l2_bytes)

    @property
    def packs_beside(self) -> bool:
        """Whether the first panel of A that meets a panel of B packs it; then all others meet it, one after another."""
        b = self.lies[1]
        if self.steps > 1 or b.constant or self._packing_of_b.along is None:
            return False
        block, thread = self.program.block, self.program.thread
        m, n, size = self.view.m.name, self.view.n.name, self.view.dtype.bytes
        return packs_beside(
            block[m] // thread[m], block[m] * self.kc * size, thread[n] * size, b.tensor_bytes, self.hw
        )  # fmt: skip

    @property
    def along_rows(self) -> bool:
        """Whether one panel of A meets all panels of B, which L2 holds, before the next one does: then C is written
        along its rows."""
        if self.packs_beside:
            return False
        return few_columns(self.columns.count * self.columns.size, self.kc, self.view.dtype.bytes, self.l2_bytes)

    @property
    def in_place(self) -> bool:
        """Whether the sums are the output, rows of it neighbours in memory: then they need no tile of their own."""
        group, view = self.view.group, self.view
        first = group.statements[0]
        if len(group.statements) > 1 or first.type.dtype is not view.dtype or first.output in group.register_tensors:
            return False
        n = view.n.members[-1].name
        return len(view.m.members) == len(view.n.members) == 1 and first.index[-1] == AxisRef(n)

    # the tree, from the outside in ----------------------------------------------------------------------------------
    def tasks(self) -> tuple[Node, ...]:
        view = self.view
        k_left = min_(num(self.kc), sub(num(self.depth), ref(K_FIRST)))
        step: tuple[Node, ...] = (*self._packed_b(), *self._over_blocks())
        step = (Let(K_COUNT, k_left if self.depth % self.kc else num(self.kc), step),)
        step = (Let(K_FIRST, mul(ref(STEP), num(self.kc)), step),)
        nodes: tuple[Node, ...] = (Loop(STEP, self.steps, LoopKind.SERIAL, step),)
        nodes = self._storages(nodes)
        columns = self.columns
        left = sub(num(ceil_div(columns.axis.extent, columns.size)), mul(ref("n.task"), num(columns.count)))
        nodes = columns.begun(mul(ref("n.task"), num(columns.count)), left, nodes)
        for panels, blocks in ((columns, 1), (self.rows, self.blocks)):
            tasks = ceil_div(panels.axis.extent, blocks * panels.count * panels.size)
            nodes = (Loop(f"{panels.role}.task", tasks, LoopKind.PARALLEL, nodes),)
        for batch in reversed(view.batch):
            nodes = (Loop(batch.name, batch.extent, LoopKind.PARALLEL, nodes),)
        return nodes

    def _storages(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        rows, columns = self.rows, self.columns
        held, dtype, packed = 1 if columns.one_room else columns.count, self.view.dtype, self.packed_dtype
        rooms: list[tuple[str, DType, tuple[int, ...]]] = [(PACKED_B, packed, (held, self.kc, columns.size))]
        if self._flips_a:
            rooms.insert(0, (FLIPPED, dtype, (columns.count, columns.size)))
        if not self.a_is_straight:
            rooms.append((PACKED_A, packed, (rows.count, self.kc + self._gap, rows.size)))
        if not self.in_place:
            panels = (self.blocks * rows.count, columns.count) if self.steps > 1 else (1, 1)
            rooms.append((TILE_C, dtype, (*panels, rows.size, columns.size)))
        elif columns.tail % self.lanes:
            rooms.append((EDGE_C, dtype, (rows.size, columns.fill)))
        for name, of_type, shape in rooms:
            nodes = (Storage(name, of_type, shape, Scope.STACK, nodes),)
        return nodes

    @property
    def _gap(self) -> int:
        """Rows left free behind each packed panel of A, a line or more: panels that are filled side by side, a page's
        multiple apart, would push each other's lines out of the first cache half filled."""
        return ceil_div(LINE_BYTES, self.rows.size * self.view.dtype.bytes) if self.rows.count > 1 else 0

    def _packed_b(self) -> tuple[Node, ...]:
        packed = () if self.packs_beside else self._packing_of_b.nodes(self.columns)
        return (*packed, *self._flipped_sums()) if self._flips_a else packed

    @property
    def _packing_of_b(self) -> Packing:
        return self._packed(PACKED_B, self.view.factors.b, self.lies[1])

    @property
    def _flips_a(self) -> bool:
        return self.dot is not None and self.dot.flips_a

    def _flipped_sums(self) -> tuple[Node, ...]:
        """What each column's sums become too large by where bytes of A are packed with their sign bits flipped: what a
        row of A gives whose words are nothing but those bits."""
        columns = self.columns
        tile = Tile(FLIPPED, lambda _, column: (columns.panel, column))

        def summed(width: int) -> tuple[Node, ...]:
            kernel = replace(self._micro_kernel(1, width), a=self._flip, begins=None, beside=())
            return kernel.nodes(tile)

        return (columns.loop(columns.cut(summed(columns.size), summed(columns.tail))),)

    def _flip(self, _: Expr) -> Expr:
        return Const(0 if self.dot is None else self.dot.flip, WORD)

    def _less_flipped(self, column: Expr) -> Expr:
        flipped = Load(FLIPPED, (self.columns.panel, column), self.view.dtype)
        return Op(OpKind.NEG, (flipped,), self.view.dtype)

    def _over_blocks(self) -> tuple[Node, ...]:
        """Block after block of A, packed and multiplied by all panels of B."""
        nodes, rows = self._multiply(), self.rows
        if not self.a_is_straight:
            nodes = (*self._packing_of_a.nodes(rows), *nodes)
        of_task = self.blocks * rows.count
        task, block = mul(ref("m.task"), num(of_task)), mul(ref(BLOCK), num(rows.count))
        nodes = rows.begun(add(task, block), sub(ref("m.all"), block), nodes)
        blocks = div(add(ref("m.all"), num(rows.count - 1)), rows.count)
        nodes = (Loop(BLOCK, self.blocks, LoopKind.SERIAL, nodes, None if self.blocks == 1 else blocks),)
        left = sub(num(ceil_div(self.view.m.extent, rows.size)), task)
        return (Let("m.all", min_(num(of_task), left), nodes),)

    @property
    def _packing_of_a(self) -> Packing:
        return self._packed(PACKED_A, self.view.factors.a, self.lies[0])

    def _packed(self, room: str, factor: Expr, operand: CpuOperand) -> Packing:
        k, kc, lanes = self.view.k, self.kc, self.lanes
        if self.dot is None:
            return Packing(room, factor, operand, k, kc, lanes, self.view.dtype)
        of_type, flip = (self.dot.a, self.dot.flip) if room == PACKED_A else (self.dot.b, 0)
        return WordPacking(room, factor, operand, k, kc, lanes, WORD, of_type, self.dot.group, flip)

    # the micro-kernel -----------------------------------------------------------------------------------------------
    def _multiply(self) -> tuple[Node, ...]:
        rows, columns = self.rows, self.columns

        def over_columns(height: int) -> tuple[Node, ...]:
            edge = self._tile(height, columns.tail)
            if columns.tail and self.packs_beside and self._begins_with(height):
                edge = (Branch(self._first, self._packing_of_b.edge(columns)), *edge)
            return columns.cut(self._tile(height, columns.size), edge)

        nodes = rows.cut(over_columns(rows.size), over_columns(rows.tail))
        inner, outer = (columns, rows) if self.along_rows else (rows, columns)
        return (outer.loop((inner.loop(nodes),)),)

    @property
    def _first(self) -> Expr:
        """Whether this is the task's first panel of A."""
        return eq(add(ref(BLOCK), ref("m.panel")), num(0))

    def _begins_with(self, height: int) -> bool:
        """Whether a task's first panel may have so many rows."""
        of_task, whole = self.blocks * self.rows.count, self.view.m.extent // self.rows.size
        return whole > 0 if height == self.rows.size else whole % of_task == 0

    def _tile(self, height: int, width: int) -> tuple[Node, ...]:
        """height x width of C at (m.place, n.place)."""
        fresh = eq(ref(STEP), num(0))
        if not self.in_place:
            tile = Tile(TILE_C, lambda row, column: (*self._tile_panel(), row, column))
            finish = (Routine("store", self._finish(height, width)),)
            if self.steps == 1:
                return (*self._sums(height, width, tile), *finish)
            nodes = self._sums(height, width, tile, fresh)
            return (*nodes, Branch(eq(ref(STEP), num(self.steps - 1)), finish))
        if width % self.lanes == 0:
            tile = Tile(self.view.group.statements[0].output, self._output)
            return self._sums(height, width, tile, fresh if self.steps > 1 else None)
        edge = Tile(EDGE_C, lambda row, column: (row, column))
        return (*self._sums(height, width, edge), *self._edge_stored(height, width, fresh))

    def _tile_panel(self) -> tuple[Expr, Expr]:
        if self.steps == 1:
            return num(0), num(0)
        return add(mul(ref(BLOCK), num(self.rows.count)), ref("m.panel")), ref("n.panel")

    def _output(self, row: Expr, column: Expr) -> tuple[Expr, ...]:
        m, n = self.view.m.members[0].name, self.view.n.members[0].name
        at = {m: add(ref("m.place"), row), n: add(ref("n.place"), column)}
        return tuple(substitute(i, at) for i in self.view.group.statements[0].index)

    def _edge_stored(self, height: int, width: int, fresh: Expr) -> tuple[Node, ...]:
        statement, row = self.view.group.statements[0], ref("m.row")
        total = Load(EDGE_C, (row, ref(LANE)), self.view.dtype)

        def stored(combine: Combine | None) -> tuple[Node, ...]:
            store = Compute(statement.output, self._output(row, ref(LANE)), total, combine)
            return (Loop(row.name, height, LoopKind.SERIAL, (Loop(LANE, width, LoopKind.VECTOR, (store,)),)),)

        return stored(None) if self.steps == 1 else (Branch(fresh, stored(None), stored(Combine.SUM)),)

    def _sums(self, height: int, width: int, tile: Tile, fresh: Expr | None = None) -> tuple[Node, ...]:
        """The micro-kernel, which packs what it reads where nobody has: panels at the edge are packed already."""
        kernel = self._micro_kernel(height, width)
        hints = ResultsAhead(self.view, height if self.in_place or self.steps == 1 else 0, width)
        ahead = hints.beside(self.kc)
        if self.a_is_straight:
            ahead = (*ahead, *OperandAhead(self.view, self.lies[0], height, self.hw).beside())
        nodes = replace(kernel, beside=(*kernel.beside, *ahead)).nodes(tile, fresh)
        if self.packs_beside and width == self.columns.size and self._begins_with(height):
            beside = (*self._rows_ahead(), *ahead)
            packs = replace(kernel, b=self._element_of_b, kept=self._packed_element_of_b, beside=beside)
            nodes = (Branch(self._first, packs.nodes(tile, fresh), nodes),)
        return decoded(self.view.n, ref("n.place"), (*hints.first(), *nodes))

    def _element_of_b(self, column: Expr) -> Load:
        view = self.view
        at = {
            view.n.members[0].name: add(ref("n.place"), column),
            view.k.members[0].name: add(ref(K_FIRST), ref(K_ROW)),
        }
        source = substitute(view.factors.b, at)
        if not isinstance(source, Load):
            raise InvariantError("rows are packed beside a product, but B is no plain load")
        return source

    def _packed_element_of_b(self, column: Expr) -> Load:
        return Load(PACKED_B, (self.columns.room, ref(K_ROW), column), self.packed_dtype)

    def _rows_ahead(self) -> tuple[Node, ...]:
        """A later row of B: a core's own prefetchers do not follow pieces of rows that lie far apart."""
        first, later = self._element_of_b(num(0)), ROWS_AHEAD * self.lies[1].k_stride
        lines = range(0, self.columns.size, LINE_BYTES // self.view.dtype.bytes)
        return tuple(Prefetch(first.tensor, first.index, later + column) for column in lines)

    def _micro_kernel(self, height: int, width: int) -> MicroKernel:
        dtype = self.view.dtype
        return MicroKernel(
            height, _padded(width, self.lanes), self.lanes, dtype, (Steps(K_ROW, self.kc, ref(K_COUNT)),),
            a=self._element_of_a,
            b=self._packed_element_of_b,
            registers=self.hw.limits.max_registers_per_thread,
            beside=self._panel_ahead(),
            dot=self.dot,
            begins=self._less_flipped if self._flips_a else None,
        )  # fmt: skip

    def _element_of_a(self, row: Expr) -> Expr:
        view = self.view
        if not self.a_is_straight:
            return Load(PACKED_A, (ref("m.panel"), ref(K_ROW), row), self.packed_dtype)
        m, k = view.m.members[0].name, view.k.members[0].name
        return substitute(view.factors.a, {m: add(ref("m.place"), row), k: add(ref(K_FIRST), ref(K_ROW))})

    def _panel_ahead(self) -> tuple[Node, ...]:
        """A piece of the next panel of B for each panel of A, so that it is near when its turn comes."""
        rows, columns = self.rows, self.columns
        if columns.count == 1 or columns.one_room or self.along_rows:
            return ()
        pace = ceil_div(columns.size, rows.count)
        ahead = mul(add(mul(ref("m.panel"), num(self.kc)), ref(K_ROW)), num(pace))
        return (Prefetch(PACKED_B, (add(ref("n.panel"), num(1)), num(0), ahead), 0),)

    def _finish(self, height: int, width: int) -> tuple[Node, ...]:
        """The finished tile of C through the epilogue to memory."""
        row = ref("m.row")

        def columns(at: dict[str, Expr], count: int) -> tuple[Node, ...]:
            total = Load(TILE_C, (*self._tile_panel(), row, ref(LANE)), self.view.dtype)
            stores = Loop(LANE, count, LoopKind.VECTOR, self.view.epilogue(total, at))
            nodes = decoded(self.view.m, add(ref("m.place"), row), (stores,))
            return (Loop(row.name, height, LoopKind.SERIAL, nodes),)

        return in_panel(self.columns, columns, width)
