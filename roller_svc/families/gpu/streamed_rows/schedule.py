"""Product of few rows and its rProgram → schedule tree: a block streams pages of the matrix through shared memory.

A lane has a chunk of two rows of the matrix, and the same points of one row of x. Fragments take the points of k in an
order of their own, the same for both operands, so that each lane loads whole chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from roller_svc.analysis.index_map import IndexMap
from roller_svc.families.gpu.streamed_rows.cost import ring_resources
from roller_svc.families.gpu.streamed_rows.page_copies import PageCopies
from roller_svc.families.gpu.streamed_rows.product import LANES_OF_ROW, StreamedProduct, order_statements
from roller_svc.families.gpu.streamed_rows.workload import (
    FRAGMENT_ROWS,
    MIN_BULK_ARCH,
    PARTIAL,
    RING,
    ROWS_OF_MATRIX,
    RingTile,
    StreamedRows,
    ring_tile,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, rewrite
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, div, lt, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Mma, Node, PageStream, RingPage, ScheduleTree
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import (
    RowReads,
    convert_to_type,
    register,
    row_storages,
    row_tensors,
    wrap_in_storages,
)

BLOCK, WARP, LANE, THREAD = ".block", ".warp", ".lane", ".thread"
ROUND, TILE, PAGE, SLOT, STEP = ".round", ".tile", ".page", ".slot", ".step"
SUMS, STEP_SUMS, WEIGHTS, X, TOTAL = ".sums", ".step_sums", ".weights", ".x", ".total"
ELEMENT, POINT, ROW = ".element", ".point", ".row"
PAIR = 2  # adjacent columns of a lane's sums (PTX ISA, "Matrix Fragments for mma.m16n8k16")
FRAGMENT_POINTS = 4  # of k of a lane in one mma.sync


def lower(group: KernelGroup, program: RProgram, workload: Workload[StreamedRows]) -> tuple[ScheduleTree, ...]:
    """Return one tree, whose blocks take tiles of results in turn."""
    way, footprint = program.pipeline, workload.footprint
    block = footprint.tile(program.block)
    tile = ring_tile(workload.facts, block, program.reduce_threads, way.stages, way.persistent_blocks)
    resident = ceil_div(tile.blocks, workload.machine.cores)
    own, paged = (_Stream(group, tile, workload.facts.warp, is_paged=is_paged) for is_paged in (False, True))
    has_bulk_copies = workload.machine.hw.arch >= MIN_BULK_ARCH
    stream = PageStream(
        tuple(each.streamed.tensor for each in tile.product.all),
        paged.blocks(),
        paged.fill(has_bulk_copies=has_bulk_copies),
        tile.tiles,
        tile.pages,
        tile.page.bytes,
        tile.tiles * tile.pages * tile.page_bytes,
        tile.stages - 1,
        ring_resources(workload, tile).registers_per_thread,
    )
    return (ScheduleTree(group.name, own.blocks(), resident=resident, stream=stream),)


@dataclass(frozen=True)
class _Stream:
    group: KernelGroup
    tile: RingTile
    warp: int
    is_paged: bool  # whether the block's pages are those of a persistent kernel's ring

    @property
    def product(self) -> StreamedProduct:
        return self.tile.product

    @cached_property
    def copies(self) -> PageCopies:
        return PageCopies(self.tile, dict(self.group.inputs), ref(THREAD), self.tile.threads)

    # loops ----------------------------------------------------------------------------------------------------------
    def blocks(self) -> tuple[Node, ...]:
        """Return the loops over blocks and threads around the rounds of a block."""
        tile, warps = self.tile, self.tile.warps_n * self.tile.warps_k
        if self.is_paged:
            nodes = wrap_in_storages((tile.partial,), self._rounds(self._round()))
        else:
            nodes = wrap_in_storages((tile.ring, tile.partial), (*self._prologue(), *self._rounds(self._round())))
        nodes = (Let(THREAD, add(mul(ref(WARP), num(self.warp)), ref(LANE)), nodes),)
        nodes = (Loop(WARP, warps, LoopKind.THREAD, (Loop(LANE, self.warp, LoopKind.THREAD, nodes),)),)
        return (Loop(BLOCK, tile.blocks, LoopKind.BLOCK, nodes),)

    def fill(self, *, has_bulk_copies: bool) -> tuple[Node, ...]:
        """Return the loops of the warp that fills the pages of an rTask."""
        copies = PageCopies(self.tile, dict(self.group.inputs), ref(LANE), self.warp)
        rows = copies.request_rows(ref(TILE), ref(PAGE)) if has_bulk_copies else copies.request(ref(TILE), ref(PAGE), ())
        page = RingPage(self.tile.page, self._page_number, rows, fills=True)
        pages = Loop(PAGE, self.tile.pages, LoopKind.SERIAL, (page,))
        tiles = Let(TILE, self._tile_of_round, (pages,))
        lanes = Loop(LANE, self.warp, LoopKind.THREAD, self._rounds((tiles,)))
        return (Loop(BLOCK, self.tile.blocks, LoopKind.BLOCK, (lanes,)),)

    def _rounds(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the loop over the tiles of a block."""
        tile, stop = self.tile, None
        if tile.tiles % tile.blocks:
            stop = div(add(sub(num(tile.tiles - 1), ref(BLOCK)), num(tile.blocks)), tile.blocks)
        return (Loop(ROUND, tile.rounds, LoopKind.SERIAL, nodes, stop),)

    @property
    def _page_number(self) -> Expr:
        """Return the page's number, counted from the block's first."""
        return add(mul(ref(ROUND), num(self.tile.pages)), ref(PAGE))

    @property
    def _tile_of_round(self) -> Expr:
        return add(ref(BLOCK), mul(ref(ROUND), num(self.tile.blocks)))

    def _prologue(self) -> tuple[Node, ...]:
        """Request the first pages of the block."""
        return tuple(node for page in range(self.tile.stages - 1) for node in self._request(num(page)))

    def _request(self, number: Expr) -> tuple[Node, ...]:
        """Request the page of that number, counted from the block's first, if there is one."""
        tile = self.tile
        place = add(ref(BLOCK), mul(div(number, tile.pages), num(tile.blocks)))
        nodes = self.copies.request(ref(".coming"), mod(number, tile.pages), (mod(number, tile.stages),))
        is_there = Branch(lt(ref(".coming"), num(tile.tiles)), nodes)
        return (Let(".coming", place, (is_there,)), self.copies.commit)

    def _round(self) -> tuple[Node, ...]:
        """Compute a tile of results: all pages of its rows, then the sums over warps and the statements."""
        tile, number = self.tile, self._page_number
        page: tuple[Node, ...]
        before: tuple[Node, ...] = ()
        if self.is_paged:
            page = (RingPage(tile.page, number, self._page(), fills=False),)
            before = (Barrier(),) if tile.rounds > 1 else ()  # sums of the tile before have been read
        else:
            page = (
                self.copies.wait(number),
                Barrier(),
                *self._request(add(number, num(tile.stages - 1))),
                Let(SLOT, mod(number, tile.stages), self._page()),
            )
        zero = self._for_sums(lambda at: Compute(SUMS, at, Const(0.0, DType.FLOAT32)))
        pages = Loop(PAGE, tile.pages, LoopKind.SERIAL, page)
        nodes = (zero, pages, *before, *self._store_sums(), Barrier(), *self._results())
        nodes = wrap_in_storages((register(SUMS, DType.FLOAT32, 4),), nodes)
        return (Let(TILE, self._tile_of_round, nodes),)

    # products -------------------------------------------------------------------------------------------------------
    def _page(self) -> tuple[Node, ...]:
        """Multiply the warp's points of a page, step by step."""
        tile, product = self.tile, self.product
        first = mul(add(mul(self._warp_k, num(tile.steps)), ref(STEP)), num(product.step))
        nodes: tuple[Node, ...] = (*self._load_weights(), *self._load_x(), *self._multiply())
        if product.scales:
            zero = self._for_sums(lambda at: Compute(STEP_SUMS, at, Const(0.0, DType.FLOAT32)))
            nodes = wrap_in_storages((register(STEP_SUMS, DType.FLOAT32, 4),), (zero, *nodes, *self._add_scaled()))
        if product.k.extent % tile.depth:
            nodes = (Branch(lt(ref(".k"), num(product.k.extent)), nodes),)
        nodes = (Let(".k", add(mul(ref(PAGE), num(tile.depth)), ref(".in_page")), nodes),)
        storages = (
            register(WEIGHTS, product.dtype, 2, product.chunk),
            register(X, product.dtype, product.chunk),
        )
        return (Loop(STEP, tile.steps, LoopKind.SERIAL, (Let(".in_page", first, wrap_in_storages(storages, nodes)),)),)

    def _load_weights(self) -> tuple[Node, ...]:
        """Load and unpack the lane's chunks of two rows of the matrix."""
        nodes: tuple[Node, ...] = ()
        for half in range(2):
            product, row = self._product_of(half), add(self._first_row, num(8 * half))
            place = self._index_map({product.k.name: add(self._chunk_of(ref(".in_page")), ref(ELEMENT))})
            slot = () if self.is_paged else (ref(SLOT),)
            ring = Load(RING, (*slot, row, place.apply(product.streamed.index[-1])), product.streamed.dtype)
            at = self._index_map({product.n.name: self._row_in_matrix(half)} | self._at_k(ref(ELEMENT)))
            value = _replace_load(product.weight, product.streamed, ring, at)
            load = Compute(WEIGHTS, (num(half), ref(ELEMENT)), value)
            nodes += (Loop(ELEMENT, self.product.chunk, LoopKind.VECTOR, (load,)),)
        return nodes

    def _load_x(self) -> tuple[Node, ...]:
        """Load the lane's chunk of x; lanes of columns beyond the rows of x take the last row, whose sums are unused."""
        row = min_(div(ref(LANE), LANES_OF_ROW), num(self.product.rows - 1))
        value = self._index_map(self._rows_at(row) | self._at_k(ref(ELEMENT))).apply(self.product.x)
        return (Loop(ELEMENT, self.product.chunk, LoopKind.VECTOR, (Compute(X, (ref(ELEMENT),), value),)),)

    def _multiply(self) -> tuple[Node, ...]:
        first, target = mul(ref(POINT), num(FRAGMENT_POINTS)), STEP_SUMS if self.product.scales else SUMS
        dtype = self.product.dtype
        product = Mma(target, (), WEIGHTS, (num(0), first), dtype, X, (first,), dtype, a_below=(num(1), first))
        return (Loop(POINT, self.product.chunk // FRAGMENT_POINTS, LoopKind.UNROLL, (product,)),)

    def _add_scaled(self) -> tuple[Node, ...]:
        """Add the sums of a step times the scales of their rows."""
        nodes: tuple[Node, ...] = ()
        for number in range(4):
            product, row = self._product_of(number // PAIR), self._row_in_matrix(number // PAIR)
            at = self._index_map(
                self._rows_at(min_(self._column(number), num(self.product.rows - 1)))
                | {product.n.name: row, product.k.name: ref(".k")}
            )
            value: Expr = Load(STEP_SUMS, (num(number),), DType.FLOAT32)
            for scale in product.scales:
                value = Op(OpKind.MUL, (value, at.apply(scale)), DType.FLOAT32)
            nodes += (Compute(SUMS, (num(number),), value, Combine.SUM),)
        return nodes

    # results --------------------------------------------------------------------------------------------------------
    def _store_sums(self) -> tuple[Node, ...]:
        """Store the lane's sums to shared memory, where those of all warps meet."""
        nodes: tuple[Node, ...] = ()
        for number in range(4):
            row = add(self._first_row, num(8 * (number // PAIR)))
            index = (self._warp_k, row, self._column(number))
            nodes += (Compute(PARTIAL, index, Load(SUMS, (num(number),), DType.FLOAT32)),)
        return nodes

    def _results(self) -> tuple[Node, ...]:
        """Compute the statements at the tile's points, adjacent threads along n."""
        tile, rows = self.tile, self.product.rows
        count = tile.results * rows
        point = add(mul(ref(".pass"), num(tile.threads)), ref(THREAD))
        row, column = mod(ref(POINT), tile.results), div(ref(POINT), tile.results)
        guards = []
        if count % tile.threads:
            guards.append(lt(ref(POINT), num(count)))
        nodes = self._statements()
        if self.product.n.extent % tile.results:
            nodes = (Branch(lt(ref(ROW), num(self.product.n.extent)), nodes),)
        nodes = (Let(ROW, add(mul(ref(TILE), num(tile.results)), ref(".in_tile")), nodes),)
        nodes = (Let(".in_tile", row, (Let(".column", column, nodes),)),)
        for guard in guards:
            nodes = (Branch(guard, nodes),)
        return (Loop(".pass", ceil_div(count, tile.threads), LoopKind.SERIAL, (Let(POINT, point, nodes),)),)

    def _statements(self) -> tuple[Node, ...]:
        """Compute one point: its sums over warps, scaled, then the statements after them."""
        sums, others = order_statements(self.group)
        at = self._rows_at(ref(".column")) | {self.product.n.name: ref(ROW)}
        reads = RowReads(row_tensors(self.group), (), at)
        nodes: tuple[Node, ...] = ()
        for number, statement in enumerate(sums):
            value = convert_to_type(Load(TOTAL, (), DType.FLOAT32), statement)
            nodes += (*self._total(number, at), *reads.store(self.group, statement, value))
        for other in others:
            nodes += tuple(reads.store(self.group, other, reads.apply(other.body)))
        storages = [register(TOTAL, DType.FLOAT32), *row_storages(self.group.statements, reads.rows)]
        return wrap_in_storages(storages, nodes)

    def _total(self, number: int, at: dict[str, Expr]) -> tuple[Node, ...]:
        """Add a product's sums over warps, and scale them."""
        product = self.product.all[number]
        row: Expr = ref(".in_tile")
        if self.product.second is not None:
            row = add(mul(div(row, ROWS_OF_MATRIX), num(FRAGMENT_ROWS)), mod(row, ROWS_OF_MATRIX))
            row = add(row, num(number * ROWS_OF_MATRIX))
        partial = Load(PARTIAL, (ref(".other"), row, ref(".column")), DType.FLOAT32)
        add_up = Loop(".other", self.tile.warps_k, LoopKind.UNROLL, (Compute(TOTAL, (), partial, Combine.SUM),))
        nodes: list[Node] = [Compute(TOTAL, (), Const(0.0, DType.FLOAT32)), add_up]
        for scale in product.row_scales:
            scaled = (Load(TOTAL, (), DType.FLOAT32), self._index_map(at).apply(scale))
            nodes.append(Compute(TOTAL, (), Op(OpKind.MUL, scaled, DType.FLOAT32)))
        if product.scales or product.row_scales:
            nodes.append(self._compute_again(number, at))
        return tuple(nodes)

    def _compute_again(self, number: int, at: dict[str, Expr]) -> Node:
        """Return the sum of a statement's own products, for a result that is infinite or NaN.

        An infinite scale, or products that exceed float32 before a small scale, then have the program's result.
        """
        size = Op(OpKind.ABS, (Load(TOTAL, (), DType.FLOAT32),), DType.FLOAT32)
        is_finite = Op(OpKind.LT, (size, Const(math.inf, DType.FLOAT32)), DType.INT8)
        k = self.product.k
        sums, _ = order_statements(self.group)
        body = self._index_map(at | {k.name: ref(".again")}).apply(sums[number].body)
        products = Loop(".again", k.extent, LoopKind.SERIAL, (Compute(TOTAL, (), body, Combine.SUM),))
        zero = Compute(TOTAL, (), Const(0.0, DType.FLOAT32))
        return Branch(Op(OpKind.LNOT, (is_finite,), DType.INT8), (zero, products), unlikely=True)

    # positions ------------------------------------------------------------------------------------------------------
    @property
    def _warp_k(self) -> Expr:
        return mod(ref(WARP), self.tile.warps_k)

    @property
    def _first_row(self) -> Expr:
        """Return the lane's first row of the matrix in the page; the other one is eight rows later."""
        return add(mul(div(ref(WARP), self.tile.warps_k), num(FRAGMENT_ROWS)), div(ref(LANE), LANES_OF_ROW))

    def _column(self, number: int) -> Expr:
        """Return the row of x of one of the lane's sums."""
        return add(mul(mod(ref(LANE), LANES_OF_ROW), num(PAIR)), num(number % PAIR))

    def _product_of(self, half: int) -> StreamedProduct:
        """Return the product of one of the lane's rows in a page."""
        return self.product.all[half if self.product.second is not None else 0]

    def _row_in_matrix(self, half: int) -> Expr:
        """Return one of the lane's rows in its matrix; beyond the edge the last one, whose sums are unused."""
        warps, lane = div(ref(WARP), self.tile.warps_k), div(ref(LANE), LANES_OF_ROW)
        row = add(self._first_row, num(8 * half))
        if self.product.second is not None:
            row = add(mul(warps, num(ROWS_OF_MATRIX)), lane)
        place = add(mul(ref(TILE), num(self.tile.results)), row)
        last = self.product.n.extent - 1
        return min_(place, num(last)) if self.product.n.extent % self.tile.results else place

    def _chunk_of(self, first: Expr) -> Expr:
        """Return the first point of the lane's chunk in a step that begins at `first`."""
        return add(first, mul(mod(ref(LANE), LANES_OF_ROW), num(self.product.chunk)))

    def _at_k(self, element: Expr) -> dict[str, Expr]:
        return {self.product.k.name: add(self._chunk_of(ref(".k")), element)}

    def _rows_at(self, number: Expr) -> dict[str, Expr]:
        """Return the values of the axes of x's rows at the row of that number."""
        values: dict[str, Expr] = {}
        stride = 1
        for axis in reversed(self.product.m):
            place = div(number, stride)
            stride *= axis.extent
            values[axis.name] = place if stride >= self.product.rows else mod(place, axis.extent)
        return values

    def _index_map(self, at: dict[str, Expr]) -> IndexMap:
        return IndexMap(self.group.statements[0].extents, at, {ELEMENT: self.product.chunk})

    @staticmethod
    def _for_sums(compute: Callable[[tuple[Expr, ...]], Compute]) -> Node:
        return Loop(ELEMENT, 4, LoopKind.UNROLL, (compute((ref(ELEMENT),)),))


def _replace_load(expr: Expr, streamed: Load, ring: Load, at: IndexMap) -> Expr:
    """Return the expression over loop variables, with the streamed elements in the ring."""
    mapped = at.apply(streamed)
    return rewrite(at.apply(expr), lambda node: ring if node == mapped else node)
