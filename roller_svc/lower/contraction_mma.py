"""Contraction group and its rProgram → schedule tree for matrix units that a warp drives (`mma.sync`).

A block stages tiles of both operands in shared memory, several steps ahead; its warps load fragments from there and
multiply; the sums go through shared memory once more so that the epilogue reads and writes memory in wide rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, both, ceil_div, div, less, mod, mul, num, ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load
from roller_svc.ir.group import KernelGroup, TileAxis
from roller_svc.ir.hardware import Arch
from roller_svc.ir.operand import contiguous_run, operands
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    AwaitCopies,
    Barrier,
    Branch,
    CommitCopies,
    Compute,
    Let,
    LoadMatrix,
    Loop,
    LoopKind,
    Mma,
    Node,
    RoundFragment,
    ScheduleTree,
    Scope,
    Storage,
)
from roller_svc.lower.contraction import View
from roller_svc.lower.fused_axis import decoded
from roller_svc.lower.staging import THREAD, Staging
from roller_svc.perf.mma_tile import CHUNK_BYTES, COLUMNS, ROWS, MmaTile, StagedOperand, load_class, mma_tile

SHARED_A, SHARED_B, SUMS = ".a_shared", ".b_shared", ".sums"
ACC, A, B = ".acc", ".a", ".b"
LANE, LANES = ".lane_id", 32
UNROLLED_ROUNDS = 8  # of the epilogue: its loads are under way together


def lower_contraction_mma(group: KernelGroup, program: RProgram, arch: Arch) -> tuple[ScheduleTree, ...]:
    """One tree: a block computes block.m x block.n of the output, a warp thread.m x thread.n of that."""
    view = View.of(group, program)
    a, b = operands(group)
    tile = mma_tile(program, a, b)
    stagings = (
        Staging(SHARED_A, a, tile.a, load_class(a, tile.a.dtype, arch), view.m, view.k, (tile.m, tile.k), tile.threads),
        Staging(SHARED_B, b, tile.b, load_class(b, tile.b.dtype, arch), view.n, view.k, (tile.n, tile.k), tile.threads),
    )
    return (ScheduleTree(group.name, _Kernel(view, tile, *stagings).blocks(), raster=program.raster),)


@dataclass(frozen=True, slots=True)
class _Kernel:
    view: View
    tile: MmaTile
    a: Staging
    b: Staging

    @property
    def _steps(self) -> int:
        return ceil_div(self.view.k.extent, self.tile.k)

    def blocks(self) -> tuple[Node, ...]:
        view, tile = self.view, self.tile
        nodes: tuple[Node, ...] = (*self._pipeline(), Barrier(), *self._epilogue())
        nodes = (Storage(ACC, view.dtype, (*tile.fragments, 4), Scope.REGISTER, nodes),)
        warp = add(mul(ref("m.warp"), num(tile.warps[1])), ref("n.warp"))
        nodes = (Let(THREAD, add(mul(warp, num(LANES)), ref(LANE)), nodes),)
        for var, extent in ((LANE, LANES), ("n.warp", tile.warps[1]), ("m.warp", tile.warps[0])):
            nodes = (Loop(var, extent, LoopKind.THREAD, nodes),)
        for axis, extent in ((view.n, tile.n), (view.m, tile.m)):
            nodes = (Loop(f"{axis.role.value}.block", ceil_div(axis.extent, extent), LoopKind.BLOCK, nodes),)
        for batch in reversed(view.batch):
            nodes = (Loop(batch.name, batch.extent, LoopKind.BLOCK, nodes),)
        return nodes

    # main loop ------------------------------------------------------------------------------------------------------
    def _pipeline(self) -> tuple[Node, ...]:
        tile, ahead = self.tile, self.tile.stages - 1
        zero = Const(0.0 if self.view.dtype.is_float else 0, self.view.dtype)
        nodes: tuple[Node, ...] = (
            self._over_fragments((Loop(".e", 4, LoopKind.UNROLL, (Compute(ACC, (*_FRAGMENT, ref(".e")), zero),)),)),
        )
        for step in range(ahead):
            nodes += self._filled(num(step), num(step)) if step < self._steps else ()
            nodes += self._committed()
        nodes += (Loop("k.step", self._steps, LoopKind.SERIAL, self._step()),)
        for staging in (self.b, self.a):
            room = staging.staged
            shape = (tile.stages, room.rows, room.row)
            storage = Storage(staging.room, room.dtype, shape, Scope.SHARED, nodes, room.pad, room.swizzled)
            nodes = (storage,)
        return nodes

    def _filled(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """A slot filled before the loop begins."""
        nodes: tuple[Node, ...] = ()
        for staging in (self.a, self.b):
            nodes += staging.copies(step, slot) if staging.is_async else staging.moves(step, slot)
        return nodes

    def _committed(self) -> tuple[Node, ...]:
        return (CommitCopies(),) if self.a.is_async or self.b.is_async else ()

    def _step(self) -> tuple[Node, ...]:
        """Waits for its own tiles, begins those of a later step in the slot that the step before has left, multiplies.

        What goes through registers is loaded before the multiplications, if there is room for it, and stored behind.
        """
        ahead = self.tile.stages - 1
        later = add(ref("k.step"), num(ahead))
        slot = mod(later, self.tile.stages)
        begin: tuple[Node, ...] = ()
        end: tuple[Node, ...] = ()
        for staging in (self.a, self.b):
            if staging.is_async:
                begin += staging.copies(later, slot)
            elif staging.is_prefetched:
                begin += staging.fetches(later)
                end += staging.stores(slot)
            else:
                end += staging.moves(later, slot)
        wait = (AwaitCopies(ahead - 1),) if self._committed() else ()
        nodes: tuple[Node, ...] = (*wait, Barrier(), *self._if_any(later, begin), *self._committed(), self._multiply())
        nodes += self._if_any(later, end)
        for staging in (self.b, self.a):
            nodes = staging.registers(nodes)
        return nodes

    def _if_any(self, step: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return (Branch(less(step, num(self._steps)), nodes),) if nodes else ()

    def _multiply(self) -> Node:
        """Fragments of a step along k are loaded while those of the one before are multiplied."""
        tile = self.tile
        words = tile.fragments[0], tile.fragments[1]
        nodes = self._fragments(num(0), num(0))
        for step in range(tile.k_steps):
            if step + 1 < tile.k_steps:
                nodes += self._fragments(num(step + 1), num((step + 1) % 2))
            half = num(step % 2)
            product = Mma(
                ACC, _FRAGMENT, A, (half, _FRAGMENT[0]), tile.a.dtype, B, (half, _FRAGMENT[1]), tile.b.dtype
            )
            nodes += (self._over_fragments((product,)),)
        buffers = min(2, tile.k_steps)
        nodes = (Storage(B, DType.UINT32, (buffers, words[1], 2), Scope.REGISTER, nodes),)
        nodes = (Storage(A, DType.UINT32, (buffers, words[0], 4), Scope.REGISTER, nodes),)
        return Let(".slot", mod(ref("k.step"), tile.stages), nodes)

    def _fragments(self, k_step: Expr, half: Expr) -> tuple[Node, ...]:
        tile = self.tile
        rows = add(mul(ref("m.warp"), num(tile.warp_m)), mul(_FRAGMENT[0], num(ROWS)))
        a = _a_fragment(tile.a, rows, k_step, half)
        nodes: tuple[Node, ...] = (Loop("m.fragment", tile.fragments[0], LoopKind.UNROLL, a),)
        first = mul(ref("n.warp"), num(tile.warp_n))
        pairs, rest = divmod(tile.fragments[1], 2)
        pair = mul(ref(".pair"), num(2))
        columns = add(first, mul(pair, num(COLUMNS)))
        if pairs:
            nodes += (Loop(".pair", pairs, LoopKind.UNROLL, _b_fragments(tile.b, columns, k_step, (half, pair), 2)),)
        if rest:
            last = num(tile.fragments[1] - 1)
            nodes += _b_fragments(tile.b, add(first, mul(last, num(COLUMNS))), k_step, (half, last), 1)
        return nodes

    def _over_fragments(self, nodes: tuple[Node, ...]) -> Node:
        columns = Loop("n.fragment", self.tile.fragments[1], LoopKind.UNROLL, nodes)
        return Loop("m.fragment", self.tile.fragments[0], LoopKind.UNROLL, (columns,))

    # epilogue -------------------------------------------------------------------------------------------------------
    def _epilogue(self) -> tuple[Node, ...]:
        """Some rows of every warp at a time: sums to shared memory, then outputs in rows of it."""
        tile, dtype = self.tile, self.view.dtype
        together = tile.epilogue_fragments
        rounds = tile.fragments[0] // together
        nodes: tuple[Node, ...] = ()
        for number in range(rounds):
            nodes += (Barrier(),) if number else ()
            nodes += (self._to_shared(number * together, together), Barrier(), *self._to_memory(number, together))
        shape = (tile.warps[0] * together * ROWS, tile.n)
        pad = tile.epilogue_row_words - tile.n
        return (Storage(SUMS, dtype, shape, Scope.SHARED, nodes, pad, over=(SHARED_A, SHARED_B)),)

    def _to_shared(self, first: int, count: int) -> Node:
        """Lane l holds elements 2 (l % 4) and the next of rows l / 4 and 8 below (PTX ISA, fragment of D)."""
        row = add(mul(add(mul(ref("m.warp"), num(count)), ref(".i")), num(ROWS)), div(ref(LANE), 4))
        row = add(row, mul(ref(".half"), num(ROWS // 2)))
        column = add(mul(ref("n.warp"), num(self.tile.warp_n)), mul(ref("n.fragment"), num(COLUMNS)))
        column = add(add(column, mul(mod(ref(LANE), 4), num(2))), ref(".pair"))
        value = Load(ACC, (add(num(first), ref(".i")), ref("n.fragment"), _element()), self.view.dtype)
        nodes: tuple[Node, ...] = (Compute(SUMS, (row, column), value),)
        for var, extent, kind in (
            (".pair", 2, LoopKind.VECTOR), (".half", 2, LoopKind.UNROLL),
            ("n.fragment", self.tile.fragments[1], LoopKind.UNROLL), (".i", count, LoopKind.UNROLL),
        ):  # fmt: skip
            nodes = (Loop(var, extent, kind, nodes),)
        return nodes[0]

    def _to_memory(self, number: int, count: int) -> tuple[Node, ...]:
        """Every thread takes `width` neighbours of a row, threads along the row."""
        tile, view = self.tile, self.view
        width = self._store_width()
        rows, per_row = tile.warps[0] * count * ROWS, tile.n // width
        total = Load(SUMS, (ref(".row"), add(ref(".element"), ref(".lane"))), view.dtype)
        lead = view.n.members[-1].name
        lanes = Loop(".lane", width, LoopKind.VECTOR, ())
        nodes = view.epilogue_over(total, lanes, {lead: add(ref(lead), ref(".lane"))})
        nodes = decoded(view.m, ref("m.place"), decoded(view.n, ref("n.place"), nodes))
        if inside := both(_inside(view.m, tile.m, "m.place"), _inside(view.n, tile.n, "n.place")):
            nodes = (Branch(inside, nodes),)
        of_warp = count * ROWS
        place = add(mul(ref("m.block"), num(tile.m)), mul(div(ref(".row"), of_warp), num(tile.warp_m)))
        place = add(add(place, num(number * of_warp)), mod(ref(".row"), of_warp))
        nodes = (Let("m.place", place, nodes),)
        nodes = (Let("n.place", add(mul(ref("n.block"), num(tile.n)), ref(".element")), nodes),)
        nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
        nodes = (Let(".row", div(ref(".item"), per_row), nodes),)
        items = rows * per_row
        if items % tile.threads:
            nodes = (Branch(less(ref(".item"), num(items)), nodes),)
        nodes = (Let(".item", add(mul(ref(".round"), num(tile.threads)), ref(THREAD)), nodes),)
        rounds = ceil_div(items, tile.threads)
        kind = LoopKind.UNROLL if rounds <= UNROLLED_ROUNDS else LoopKind.SERIAL
        return (Loop(".round", rounds, kind, nodes),)

    def _store_width(self) -> int:
        """Neighbours along n that every store of the epilogue can take at once, up to 16 bytes of the widest."""
        types = dict(self.view.group.stored)
        width = CHUNK_BYTES
        for statement in self.view.group.statements:
            if statement.output in types:
                type_ = types[statement.output]
                store = Load(statement.output, statement.index, type_.dtype)
                width = min(width, contiguous_run(store, None, self.view.n, type_), CHUNK_BYTES // type_.dtype.bytes)
        while self.tile.n % width:
            width //= 2
        return width


_FRAGMENT: tuple[AxisRef, AxisRef] = (AxisRef("m.fragment"), AxisRef("n.fragment"))


def _inside(axis: TileAxis, tile: int, place: str) -> Expr | None:
    return less(ref(place), num(axis.extent)) if axis.extent % tile else None


def _element() -> Expr:
    """Word of an accumulator: two neighbours of a row, then two of the row 8 below."""
    return add(mul(ref(".half"), num(2)), ref(".pair"))


def _a_fragment(room: StagedOperand, row: Expr, k_step: Expr, half: Expr) -> tuple[Node, ...]:
    """Four matrices: rows 0 to 7 and 8 to 15 of the first 16 bytes of k, then of the second."""
    lane, chunk = ref(LANE), room.chunk
    k = mul(k_step, num(2 * chunk))
    index: tuple[Expr, ...] = (half, _FRAGMENT[0])
    if room.along_k:
        at = (ref(".slot"), add(row, mod(lane, 16)), add(k, mul(div(lane, 16), num(chunk))))
        return _rounded(room, index, 4, (LoadMatrix(A, index, 4, SHARED_A, at),))
    if room.dtype.bytes == 2:
        k_row = add(k, add(mod(lane, 8), mul(div(lane, 16), num(8))))
        at = (ref(".slot"), k_row, add(row, mul(mod(div(lane, 8), 2), num(8))))
        return (LoadMatrix(A, index, 4, SHARED_A, at, transposed=True),)
    words: tuple[Node, ...] = ()
    for word in range(4):
        k_row, along = add(mod(lane, 4), num(word // 2 * 4)), add(div(lane, 4), num(word % 2 * 8))
        at = (ref(".slot"), add(k, k_row), add(row, along))
        words += (LoadMatrix(A, (*index, num(word)), 1, SHARED_A, at, transposed=True),)
    return _rounded(room, index, 4, words)


def _b_fragments(
    room: StagedOperand, column: Expr, k_step: Expr, index: tuple[Expr, ...], count: int
) -> tuple[Node, ...]:
    """One or two fragments of 8 columns: the first 16 bytes of k, then the second, of one and then of the other."""
    lane, chunk = ref(LANE), room.chunk
    k = mul(k_step, num(2 * chunk))
    if room.along_k:
        at = (ref(".slot"), add(column, _pair_row(lane, count)), add(k, mul(mod(div(lane, 8), 2), num(chunk))))
        return _rounded(room, index, 2 * count, (LoadMatrix(B, index, 2 * count, SHARED_B, at),))
    if room.dtype.bytes == 2:
        k_row = add(k, add(mod(lane, 8), mul(mod(div(lane, 8), 2), num(8))))
        at = (ref(".slot"), k_row, add(column, mul(div(lane, 16), num(8))) if count == 2 else column)
        return (LoadMatrix(B, index, 2 * count, SHARED_B, at, transposed=True),)
    words: tuple[Node, ...] = ()
    for word in range(2 * count):
        k_row, along = add(mod(lane, 4), num(word % 2 * 4)), add(div(lane, 4), num(word // 2 * 8))
        at = (ref(".slot"), add(k, k_row), add(column, along))
        words += (LoadMatrix(B, (*index, num(word)), 1, SHARED_B, at, transposed=True),)
    return _rounded(room, index, 2 * count, words)


def _pair_row(lane: Expr, count: int) -> Expr:
    return add(mod(lane, 8), mul(div(lane, 16), num(8))) if count == 2 else mod(lane, 8)


def _rounded(room: StagedOperand, index: tuple[Expr, ...], count: int, loads: tuple[Node, ...]) -> tuple[Node, ...]:
    if room.dtype is not DType.FLOAT32:
        return loads
    tensor = loads[0].tensor if isinstance(loads[0], LoadMatrix) else A
    return (*loads, RoundFragment(tensor, index, count))
