"""Where the lanes of a warp find their fragments in staged tiles: ldmatrix rows, plain words, or runs of elements.

Layouts are those of PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix", and of MFMA (`perf/fragment.py`).
"""

from __future__ import annotations

from roller_svc.ir.build import add, div, mod, mul, num, ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.schedule import Compute, LoadMatrix, Loop, LoopKind, Node, RoundFragment
from roller_svc.perf.fragment import MMA_SYNC, Fragment
from roller_svc.perf.mma_tile import StagedOperand

SHARED_A, SHARED_B = ".a_shared", ".b_shared"  # staged tiles
A, B = ".a", ".b"  # fragments, in registers
LANE, LANES = ".lane_id", MMA_SYNC.lanes
SLOT = ".slot"  # of the step that is multiplied


def a_fragment(room: StagedOperand, row: Expr, k_step: Expr, index: tuple[Expr, ...]) -> tuple[Node, ...]:
    """Four matrices: rows 0 to 7 and 8 to 15 of the first 16 bytes of k, then of the second."""
    lane, chunk = ref(LANE), room.chunk
    k = mul(k_step, num(2 * chunk))
    if room.along_k:
        at = (ref(SLOT), add(row, mod(lane, 16)), add(k, mul(div(lane, 16), num(chunk))))
        return _rounded(room, index, 4, (LoadMatrix(A, index, 4, SHARED_A, at),))
    if room.dtype.bytes == 2:
        k_row = add(k, add(mod(lane, 8), mul(div(lane, 16), num(8))))
        at = (ref(SLOT), k_row, add(row, mul(mod(div(lane, 8), 2), num(8))))
        return (LoadMatrix(A, index, 4, SHARED_A, at, transposed=True),)
    words: tuple[Node, ...] = ()
    for word in range(4):
        k_row, along = add(mod(lane, 4), num(word // 2 * 4)), add(div(lane, 4), num(word % 2 * 8))
        at = (ref(SLOT), add(k, k_row), add(row, along))
        words += (LoadMatrix(A, (*index, num(word)), 1, SHARED_A, at, transposed=True),)
    return _rounded(room, index, 4, words)


def b_fragments(
    room: StagedOperand, column: Expr, k_step: Expr, index: tuple[Expr, ...], count: int
) -> tuple[Node, ...]:
    """One or two fragments of 8 columns: the first 16 bytes of k, then the second, of one and then of the other."""
    lane, chunk = ref(LANE), room.chunk
    k = mul(k_step, num(2 * chunk))
    if room.along_k:
        at = (ref(SLOT), add(column, _pair_row(lane, count)), add(k, mul(mod(div(lane, 8), 2), num(chunk))))
        return _rounded(room, index, 2 * count, (LoadMatrix(B, index, 2 * count, SHARED_B, at),))
    if room.dtype.bytes == 2:
        k_row = add(k, add(mod(lane, 8), mul(mod(div(lane, 8), 2), num(8))))
        at = (ref(SLOT), k_row, add(column, mul(div(lane, 16), num(8))) if count == 2 else column)
        return (LoadMatrix(B, index, 2 * count, SHARED_B, at, transposed=True),)
    words: tuple[Node, ...] = ()
    for word in range(2 * count):
        k_row, along = add(mod(lane, 4), num(word % 2 * 4)), add(div(lane, 4), num(word // 2 * 8))
        at = (ref(SLOT), add(k, k_row), add(column, along))
        words += (LoadMatrix(B, (*index, num(word)), 1, SHARED_B, at, transposed=True),)
    return _rounded(room, index, 2 * count, words)


def lane_elements(
    room: StagedOperand, fragment: Fragment, source: tuple[str, Expr, Expr], to: tuple[str, tuple[Expr, ...]]
) -> Node:
    """A lane's elements of MFMA's fragment at a staged row and step along k (`source`): one quarter of its row."""
    shared, row, k_step = source
    tensor, index = to
    along_k = fragment.step_bytes // room.dtype.bytes
    quarter = along_k * fragment.rows // fragment.lanes
    lane, element = ref(LANE), ref(".k_element")
    k = add(mul(k_step, num(along_k)), mul(div(lane, fragment.rows), num(quarter)))
    at = (ref(SLOT), add(row, mod(lane, fragment.rows)), add(k, element))
    load = Compute(tensor, (*index, element), Load(shared, at, room.dtype))
    return Loop(".k_element", quarter, LoopKind.VECTOR, (load,))


def _pair_row(lane: Expr, count: int) -> Expr:
    return add(mod(lane, 8), mul(div(lane, 16), num(8))) if count == 2 else mod(lane, 8)


def _rounded(room: StagedOperand, index: tuple[Expr, ...], count: int, loads: tuple[Node, ...]) -> tuple[Node, ...]:
    if room.dtype is not DType.FLOAT32:
        return loads
    tensor = loads[0].tensor if isinstance(loads[0], LoadMatrix) else A
    return (*loads, RoundFragment(tensor, index, count))
