"""Mainloop of a matrix contraction: fragments of staged k-tiles, and MMAs with accumulators in registers.

Fragment layouts are those of PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix", and of MFMA (`tile.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.multistage_pipeline import (
    MAIN_LOOP,
    PROLOGUE,
    STAGE,
    KTileRange,
    MultistagePipeline,
)
from roller_svc.families.common.gpu.matrix.staging import THREAD, MmaOperandCopy
from roller_svc.families.common.gpu.matrix.tile import MMA_SYNC, ROW_LANES, SHARED_A, SHARED_B, Fragment, MmaTile, StagedTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load
from roller_svc.ir.index import add, div, mod, mul, num, ref
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.schedule import Compute, Let, LoadMatrix, Loop, LoopKind, Mma, Node, RoundFragment, Scope, Storage

A, B = ".a", ".b"  # fragments, in registers
LANE, LANES = ".lane_id", MMA_SYNC.lanes
OCTET = LANES // ROW_LANES  # rows of a fragment between two of a lane


def a_fragment(staged: StagedTile, row: Expr, k_step: Expr, index: tuple[Expr, ...]) -> tuple[Node, ...]:
    """Load a fragment of A: rows 0 to 7 and 8 to 15 of the first 16 bytes of k, then of the second."""
    lane, chunk = ref(LANE), staged.chunk
    k = mul(k_step, num(2 * chunk))
    if staged.k_major:
        at = (ref(STAGE), add(row, mod(lane, 16)), add(k, mul(div(lane, 16), num(chunk))))
        return _round_to_tf32(staged, index, 4, (LoadMatrix(A, index, 4, SHARED_A, at),))
    if staged.dtype.bytes == 2:
        k_row = add(k, add(mod(lane, 8), mul(div(lane, 16), num(8))))
        at = (ref(STAGE), k_row, add(row, mul(mod(div(lane, 8), 2), num(8))))
        return (LoadMatrix(A, index, 4, SHARED_A, at, transposed=True),)
    words: tuple[Node, ...] = ()
    for word in range(4):
        k_row, along = add(mod(lane, 4), num(word // 2 * 4)), add(div(lane, 4), num(word % 2 * 8))
        at = (ref(STAGE), add(k, k_row), add(row, along))
        words += (LoadMatrix(A, (*index, num(word)), 1, SHARED_A, at, transposed=True),)
    return _round_to_tf32(staged, index, 4, words)


def b_fragments(staged: StagedTile, column: Expr, k_step: Expr, index: tuple[Expr, ...], count: int) -> tuple[Node, ...]:
    """Load one or two fragments of 8 columns: for each the first 16 bytes of k, then the second."""
    lane, chunk = ref(LANE), staged.chunk
    k = mul(k_step, num(2 * chunk))
    if staged.k_major:
        at = (ref(STAGE), add(column, _ldmatrix_row(lane, count)), add(k, mul(mod(div(lane, 8), 2), num(chunk))))
        return _round_to_tf32(staged, index, 2 * count, (LoadMatrix(B, index, 2 * count, SHARED_B, at),))
    if staged.dtype.bytes == 2:
        k_row = add(k, add(mod(lane, 8), mul(mod(div(lane, 8), 2), num(8))))
        at = (ref(STAGE), k_row, add(column, mul(div(lane, 16), num(8))) if count == 2 else column)
        return (LoadMatrix(B, index, 2 * count, SHARED_B, at, transposed=True),)
    words: tuple[Node, ...] = ()
    for word in range(2 * count):
        k_row, along = add(mod(lane, 4), num(word % 2 * 4)), add(div(lane, 4), num(word // 2 * 8))
        at = (ref(STAGE), add(k, k_row), add(column, along))
        words += (LoadMatrix(B, (*index, num(word)), 1, SHARED_B, at, transposed=True),)
    return _round_to_tf32(staged, index, 2 * count, words)


def lane_elements(
    staged: StagedTile, fragment: Fragment, source: tuple[str, Expr, Expr], target: tuple[str, tuple[Expr, ...]]
) -> tuple[Node, ...]:
    """Load a lane's elements of an operand's fragment, at the row and k of `source`.

    They are a quarter of a row of MFMA, or float64 elements in the places of the words of tf32.
    """
    shared, row, k_step = source
    tensor, index = target
    along_k = fragment.step_bytes // staged.dtype.bytes
    if not fragment.is_square:
        return _float64_elements(staged, (shared, row, mul(k_step, num(along_k))), target, fragment)
    quarter = along_k * fragment.rows // fragment.lanes
    lane, element = ref(LANE), ref(".k_element")
    k = add(mul(k_step, num(along_k)), mul(div(lane, fragment.rows), num(quarter)))
    at = (ref(STAGE), add(row, mod(lane, fragment.rows)), add(k, element))
    load = Compute(tensor, (*index, element), Load(shared, at, staged.dtype))
    return (Loop(".k_element", quarter, LoopKind.VECTOR, (load,)),)


def _float64_elements(
    staged: StagedTile, source: tuple[str, Expr, Expr], target: tuple[str, tuple[Expr, ...]], fragment: Fragment
) -> tuple[Node, ...]:
    """Load a lane's elements of every eight rows of A, or columns of B, for four of k, then for the other four."""
    shared, row, k = source
    tensor, index = target
    lane, octets = ref(LANE), (fragment.rows if tensor == A else fragment.columns) // OCTET
    nodes: tuple[Node, ...] = ()
    for quad, octet in itertools.product(range(fragment.step_bytes // staged.dtype.bytes // ROW_LANES), range(octets)):
        along_k = add(k, add(mod(lane, ROW_LANES), num(ROW_LANES * quad)))
        along = add(row, add(div(lane, ROW_LANES), num(OCTET * octet)))
        at = (ref(STAGE), along, along_k) if staged.k_major else (ref(STAGE), along_k, along)
        nodes += (Compute(tensor, (*index, num(octets * quad + octet)), Load(shared, at, staged.dtype)),)
    return nodes


def _ldmatrix_row(lane: Expr, count: int) -> Expr:
    return add(mod(lane, 8), mul(div(lane, 16), num(8))) if count == 2 else mod(lane, 8)


def _round_to_tf32(staged: StagedTile, index: tuple[Expr, ...], count: int, loads: tuple[Node, ...]) -> tuple[Node, ...]:
    if staged.dtype is not DType.FLOAT32:
        return loads
    tensor = loads[0].tensor if isinstance(loads[0], LoadMatrix) else A
    return (*loads, RoundFragment(tensor, index, count))


ACC = ".acc"
STEP_ACC = ".step_sums"  # accumulators of one k-tile, which are scaled and added to others
FRAGMENT: tuple[AxisRef, AxisRef] = (AxisRef("m.fragment"), AxisRef("n.fragment"))


@dataclass(frozen=True, slots=True)
class MmaMainloop:
    """MMAs of a warp over the pipeline's k-tiles; `dtype` is the accumulators' type."""

    dtype: DType
    tile: MmaTile
    a: MmaOperandCopy
    b: MmaOperandCopy

    def accumulators(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate a warp's accumulators around the nodes that use them."""
        return (Storage(ACC, self.dtype, (*self.tile.fragments, 4), Scope.REGISTER, body),)

    def threads(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the warps and lanes of a block."""
        rows, columns = self.tile.warps
        warp = add(mul(ref("m.warp"), num(columns)), ref("n.warp"))
        body = (Let(THREAD, add(mul(warp, num(self.tile.fragment.lanes)), ref(LANE)), body),)
        for var, extent in ((LANE, self.tile.fragment.lanes), ("n.warp", columns), ("m.warp", rows)):
            body = (Loop(var, extent, LoopKind.THREAD, body),)
        return body

    def for_each_fragment(self, nodes: tuple[Node, ...]) -> Node:
        columns = Loop(FRAGMENT[1].name, self.tile.fragments[1], LoopKind.UNROLL, nodes)
        return Loop(FRAGMENT[0].name, self.tile.fragments[0], LoopKind.UNROLL, (columns,))

    def nodes(self, steps: KTileRange) -> tuple[Node, ...]:
        """Return the accumulation over the k-tiles, from zero.

        No copy is in flight at its end, but warps may still read shared memory.
        """
        pipeline = MultistagePipeline(self.tile.stages, (self.a, self.b))
        loop = pipeline.mainloop(steps, self.multiply_tile(steps))
        return pipeline.allocate((PROLOGUE, self.clear(ACC, self.dtype), *pipeline.prologue(steps), MAIN_LOOP, loop))

    def multiply_tile(self, steps: KTileRange) -> tuple[Node, ...]:
        """Return the work on the current k-tile, which is part of `steps`."""
        return self.multiply(ACC)

    def clear(self, accumulators: str, dtype: DType) -> Node:
        """Set the accumulators of a warp to zero."""
        zero = identity(Combine.SUM, dtype)
        return self.for_each_fragment(
            (Loop(".word", 4, LoopKind.UNROLL, (Compute(accumulators, (*FRAGMENT, ref(".word")), zero),)),)
        )

    def multiply(self, accumulators: str) -> tuple[Node, ...]:
        """Add the products of a k-tile to accumulators.

        Double-buffer fragments: load those of the next k-step during the MMAs of the current one.
        """
        tile = self.tile
        nodes = self._fragments(num(0), num(0))
        for step in range(tile.k_steps):
            if step + 1 < tile.k_steps:
                nodes += self._fragments(num(step + 1), num((step + 1) % 2))
            half = num(step % 2)
            product = Mma(accumulators, FRAGMENT, A, (half, FRAGMENT[0]), tile.a.dtype, B, (half, FRAGMENT[1]), tile.b.dtype)
            nodes += (self.for_each_fragment((product,)),)
        buffers = min(2, tile.k_steps)
        for name, count, staged, words in (
            (B, tile.fragments[1], tile.b, tile.fragment.b_words),
            (A, tile.fragments[0], tile.a, tile.fragment.a_words),
        ):
            if tile.fragment.holds_elements:
                dtype, elements = staged.dtype, words * DType.UINT32.bytes // staged.dtype.bytes
            else:
                dtype, elements = DType.UINT32, words
            nodes = (Storage(name, dtype, (buffers, count, elements), Scope.REGISTER, nodes),)
        return nodes

    def _fragments(self, k_step: Expr, half: Expr) -> tuple[Node, ...]:
        tile, granule = self.tile, num(self.tile.fragment.columns)
        rows = add(mul(ref("m.warp"), num(tile.warp_m)), mul(FRAGMENT[0], num(tile.fragment.rows)))
        if tile.fragment.holds_elements:
            columns = add(mul(ref("n.warp"), num(tile.warp_n)), mul(FRAGMENT[1], granule))
            operands = ((FRAGMENT[0], A, SHARED_A, tile.a, rows), (FRAGMENT[1], B, SHARED_B, tile.b, columns))
            return tuple(
                Loop(
                    which.name,
                    count,
                    LoopKind.UNROLL,
                    lane_elements(staged, tile.fragment, (shared, row, k_step), (tensor, (half, which))),
                )
                for (which, tensor, shared, staged, row), count in zip(operands, tile.fragments, strict=True)
            )
        a = a_fragment(tile.a, rows, k_step, (half, FRAGMENT[0]))
        nodes: tuple[Node, ...] = (Loop("m.fragment", tile.fragments[0], LoopKind.UNROLL, a),)
        first = mul(ref("n.warp"), num(tile.warp_n))
        pairs, tail = divmod(tile.fragments[1], 2)
        pair = mul(ref(".pair"), num(2))
        columns = add(first, mul(pair, granule))
        if pairs:
            two = b_fragments(tile.b, columns, k_step, (half, pair), 2)
            nodes += (Loop(".pair", pairs, LoopKind.UNROLL, two),)
        if tail:
            last = num(tile.fragments[1] - 1)
            nodes += b_fragments(tile.b, add(first, mul(last, granule)), k_step, (half, last), 1)
        return nodes
