"""Stream-K: an even split of all tiles' k-tiles over the blocks, and a fixup launch that reduces partial tiles.

Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU", PPoPP
2023. There, a block waits for the blocks that share its tile. Here, blocks store partial tiles and a second launch adds
them in a fixed order, so no block spins and results do not depend on timing.
"""

from __future__ import annotations

from roller_svc.families.common.gpu.matrix.epilogue import (
    EpilogueStore,
    MmaEpilogue,
    column_of_word,
    for_each_word,
    row_of_word,
    word,
)
from roller_svc.families.common.gpu.matrix.mainloop import ACC, FRAGMENT, MmaMainloop
from roller_svc.families.common.gpu.matrix.multistage_pipeline import KTileRange
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.matrix.stream_k import StreamKPartition, partial_tiles, stream_k_partition
from roller_svc.families.common.view import GemmView
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, ceil_div, div, eq, logical_and, lt, max_, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage

BLOCK, VISIT, TILE = ".stream", ".visit", ".tile"
FIRST, LAST = num(0), num(1)  # the two partial tiles of a block
FIXUP_THREADS = 256
TOTAL = ".total"


def stream_k_launches(
    name: str, program: RProgram, mainloop: MmaMainloop, epilogue: MmaEpilogue
) -> tuple[ScheduleTree, ScheduleTree]:
    """Return the mainloop launch and the fixup launch."""
    work = stream_k_partition(program)
    partial, _ = partial_tiles(name, program)
    multiply = _multiply(partial, work, mainloop, epilogue)
    fixup = fixup_tiles(partial, work, epilogue.outputs)
    return ScheduleTree(name, multiply), ScheduleTree(f"{name}_join", fixup)


def _multiply(partial: str, work: StreamKPartition, mainloop: MmaMainloop, epilogue: MmaEpilogue) -> tuple[Node, ...]:
    """Return the mainloop: a block computes its k-tiles tile by tile."""
    begin = mul(ref(BLOCK), num(work.k_tiles_per_block))
    end = min_(add(begin, num(work.k_tiles_per_block)), num(work.tiles * work.k_tiles))
    start = mul(ref(TILE), num(work.k_tiles))
    first = max_(sub(ref(".begin"), start), num(0))
    last = min_(sub(ref(".end"), start), num(work.k_tiles))
    is_complete = logical_and(eq(ref(".first"), num(0)), eq(ref(".last"), num(work.k_tiles)))
    nodes: tuple[Node, ...] = (
        Barrier(),  # other warps may still read the previous tile
        *mainloop.nodes(KTileRange(ref(".first"), sub(ref(".last"), ref(".first")), work.k_tiles)),
        Barrier(),
        Branch(is_complete, epilogue.nodes(), (_store_partial(partial, mainloop),)),
    )
    nodes = mainloop.accumulators(nodes)
    nodes = (Let(".first", first, (Let(".last", last, nodes),)),)
    nodes = bind_tile(epilogue.view, work, nodes)
    nodes = (Let(TILE, add(div(ref(".begin"), work.k_tiles), ref(VISIT)), nodes),)
    tiles = sub(add(div(sub(ref(".end"), num(1)), work.k_tiles), num(1)), div(ref(".begin"), work.k_tiles))
    nodes = (Loop(VISIT, work.max_tiles_per_block, LoopKind.SERIAL, nodes, stop=tiles),)
    nodes = (Let(".begin", begin, (Let(".end", end, nodes),)),)
    return (Loop(BLOCK, work.blocks, LoopKind.BLOCK, mainloop.threads(nodes)),)


def bind_tile(view: GemmView, work: StreamKPartition, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Bind batch axes and tile numbers along m and n to their values at the tile."""
    names = (*(axis.name for axis in view.batch), "m.block", "n.block")
    stride = 1
    for name, extent in reversed(list(zip(names, work.grid, strict=True))):
        value = div(ref(TILE), stride)
        stride *= extent
        nodes = (Let(name, value if stride == work.tiles else mod(value, extent), nodes),)
    return nodes


def _store_partial(partial: str, mainloop: MmaMainloop) -> Node:
    """Store a warp's accumulators: the block's first tile is in slot 0, any later one in slot 1."""
    tile, fragment = mainloop.tile, mainloop.tile.fragment
    row = add(add(mul(ref("m.warp"), num(tile.warp_m)), mul(FRAGMENT[0], num(fragment.rows))), row_of_word(fragment))
    column = add(mul(ref("n.warp"), num(tile.warp_n)), mul(FRAGMENT[1], num(fragment.columns)))
    column = add(column, column_of_word(fragment))
    slot = eq(ref(".first"), num(0))
    value = Load(ACC, (*FRAGMENT, word()), mainloop.dtype)
    return mainloop.for_each_fragment(for_each_word((Compute(partial, (ref(BLOCK), slot, row, column), value),)))


def fixup_tiles(partial: str, work: StreamKPartition, outputs: EpilogueStore) -> tuple[Node, ...]:
    """Add the partial tiles of every tile that several blocks share, in the order of blocks, then run the epilogue.

    The first of these blocks ended with the tile, the others began with it.
    """
    view, width = outputs.view, outputs.vector_width(outputs.n)
    dtype = view.dtype
    element = add(ref(".element"), ref(".lane"))
    lane = (ref(".lane"),)

    def partial_load(block: Expr, which: Expr) -> Load:
        return Load(partial, (block, which, ref(".row"), element), dtype)

    block = add(ref(".first_block"), add(ref(".part"), num(1)))
    accumulate = Loop(".lane", width, LoopKind.VECTOR, (Compute(TOTAL, lane, partial_load(block, FIRST), Combine.SUM),))
    nodes: tuple[Node, ...] = (
        Loop(".lane", width, LoopKind.VECTOR, (Compute(TOTAL, lane, partial_load(ref(".first_block"), LAST)),)),
        Loop(
            ".part",
            work.max_blocks_per_tile - 1,
            LoopKind.SERIAL,
            (accumulate,),
            stop=sub(ref(".last_block"), ref(".first_block")),
        ),
        *outputs.nodes(Load(TOTAL, lane, dtype), width),
    )
    nodes = (Storage(TOTAL, dtype, (width,), Scope.REGISTER, nodes),)
    nodes = (Let("n.place", add(mul(ref("n.block"), num(outputs.n)), ref(".element")), nodes),)
    nodes = (Let("m.place", add(mul(ref("m.block"), num(outputs.m)), ref(".row")), nodes),)
    per_row = outputs.n // width
    nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
    nodes = (Let(".row", div(ref(".item"), per_row), nodes),)
    items = outputs.m * per_row
    if items % FIXUP_THREADS:
        nodes = (Branch(lt(ref(".item"), num(items)), nodes),)
    nodes = (Let(".item", add(mul(ref(".round"), num(FIXUP_THREADS)), ref(THREAD)), nodes),)
    nodes = (Loop(".round", ceil_div(items, FIXUP_THREADS), LoopKind.SERIAL, nodes),)
    nodes = (Branch(lt(ref(".first_block"), ref(".last_block")), nodes),)
    start = mul(ref(TILE), num(work.k_tiles))
    nodes = (Let(".last_block", div(add(start, num(work.k_tiles - 1)), work.k_tiles_per_block), nodes),)
    nodes = (Let(".first_block", div(start, work.k_tiles_per_block), nodes),)
    nodes = bind_tile(view, work, nodes)
    nodes = (Loop(THREAD, FIXUP_THREADS, LoopKind.THREAD, nodes),)
    return (Loop(TILE, work.tiles, LoopKind.BLOCK, nodes),)
