"""Staged tiles and fragments of a matrix contraction → its pipeline over the steps of k, sums left in registers.

Where the lanes of a warp find their fragments in staged tiles: ldmatrix rows, plain words, or runs of elements.

Layouts are those of PTX ISA, "Matrix Fragments for mma.m16n8k16" and "ldmatrix", and of MFMA (`tile.py`).

Stagings of a block → slots that are filled in turns, some steps ahead of the work on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.staging import THREAD, Staging
from roller_svc.families.common.gpu.matrix.tile import MMA_SYNC, Fragment, MmaTile, StagedTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load
from roller_svc.ir.index import add, div, lt, mod, mul, num, ref
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Let,
    LoadMatrix,
    Loop,
    LoopKind,
    Mma,
    Node,
    RoundFragment,
    Scope,
    Storage,
)

SHARED_A, SHARED_B = ".a_shared", ".b_shared"  # staged tiles
A, B = ".a", ".b"  # fragments, in registers
LANE, LANES = ".lane_id", MMA_SYNC.lanes
SLOT = ".slot"  # of the step that is multiplied


def a_fragment(room: StagedTile, row: Expr, k_step: Expr, index: tuple[Expr, ...]) -> tuple[Node, ...]:
    """Four matrices: rows 0 to 7 and 8 to 15 of the first 16 bytes of k, then of the second."""
    lane, chunk = ref(LANE), room.chunk
    k = mul(k_step, num(2 * chunk))
    if room.k_major:
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
    room: StagedTile, column: Expr, k_step: Expr, index: tuple[Expr, ...], count: int
) -> tuple[Node, ...]:
    """One or two fragments of 8 columns: the first 16 bytes of k, then the second, of one and then of the other."""
    lane, chunk = ref(LANE), room.chunk
    k = mul(k_step, num(2 * chunk))
    if room.k_major:
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
    room: StagedTile, fragment: Fragment, source: tuple[str, Expr, Expr], to: tuple[str, tuple[Expr, ...]]
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


def _rounded(room: StagedTile, index: tuple[Expr, ...], count: int, loads: tuple[Node, ...]) -> tuple[Node, ...]:
    if room.dtype is not DType.FLOAT32:
        return loads
    tensor = loads[0].tensor if isinstance(loads[0], LoadMatrix) else A
    return (*loads, RoundFragment(tensor, index, count))


STEP = AxisRef("k.step")


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps that one pass takes: `count` of them from `first` on, never more than `most`."""

    first: Expr
    count: Expr
    most: int

    @property
    def number(self) -> Expr:
        """Of the step that is worked on."""
        return add(self.first, STEP)


@dataclass(frozen=True, slots=True)
class Ring:
    """Each slot has a step's tile of every staging."""

    stages: int
    stagings: tuple[Staging, ...]

    def rooms(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Shared memory around the nodes."""
        for staging in reversed(self.stagings):
            room = staging.staged
            shape = (self.stages, room.rows, room.row)
            nodes = (Storage(staging.room, room.dtype, shape, Scope.SHARED, nodes, room.pad, room.swizzled),)
        return nodes

    @property
    def ahead(self) -> int:
        """Steps that are requested before they are used."""
        return self.stages - 1

    def begun(self, steps: Steps) -> tuple[Node, ...]:
        """The first slots, before the steps begin."""
        nodes: tuple[Node, ...] = ()
        for step in range(self.ahead):
            fill: tuple[Node, ...] = ()
            for staging in self.stagings:
                source, slot = add(steps.first, num(step)), num(step)
                fill += staging.copies(source, slot) if staging.is_async else staging.moves(source, slot)
            nodes += (*_if_any(num(step), steps, fill), *self._committed)
        return nodes

    def stepped(self, steps: Steps, work: tuple[Node, ...]) -> Node:
        """The work on every step: waits for its own tiles, begins those of a later step in the slot that the step
        before has left, works.

        What goes through registers is loaded before the work, if there is room for it, and stored behind.
        """
        later = add(STEP, num(self.ahead))
        source, slot = add(steps.first, later), mod(later, self.stages)
        begin: tuple[Node, ...] = ()
        end: tuple[Node, ...] = ()
        for staging in self.stagings:
            if staging.is_async:
                begin += staging.copies(source, slot)
            elif staging.is_prefetched:
                begin += staging.fetches(source)
                end += staging.stores(slot)
            else:
                end += staging.moves(source, slot)
        wait = (CpAsyncWaitGroup(self.ahead - 1),) if self._committed else ()
        nodes: tuple[Node, ...] = (*wait, Barrier(), *_if_any(later, steps, begin), *self._committed,
                                   Let(SLOT, mod(STEP, self.stages), work), *_if_any(later, steps, end))  # fmt: skip
        for staging in reversed(self.stagings):
            nodes = staging.registers(nodes)
        limit = None if isinstance(steps.count, Const) else steps.count
        return Loop(STEP.name, steps.most, LoopKind.SERIAL, nodes, limit)

    @property
    def is_async(self) -> bool:
        """Whether each step has a group of copies, perhaps an empty one."""
        return any(staging.is_async for staging in self.stagings)

    @property
    def _committed(self) -> tuple[Node, ...]:
        return (CpAsyncCommitGroup(),) if self.is_async else ()


def _if_any(step: Expr, steps: Steps, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes where there is such a step, counted from the first."""
    return (Branch(lt(step, steps.count), nodes),) if nodes else ()


ACC = ".acc"
FRAGMENT: tuple[AxisRef, AxisRef] = (AxisRef("m.fragment"), AxisRef("n.fragment"))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`dtype`: of the sums. Copies of both operands stay `tile.stages - 1` steps ahead of the multiplications."""

    dtype: DType
    tile: MmaTile
    a: Staging
    b: Staging

    def accumulators(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Room for a warp's sums around the nodes that use them."""
        return (Storage(ACC, self.dtype, (*self.tile.fragments, 4), Scope.REGISTER, body),)

    def threads(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """The warps and lanes of a block."""
        rows, columns = self.tile.warps
        warp = add(mul(ref("m.warp"), num(columns)), ref("n.warp"))
        body = (Let(THREAD, add(mul(warp, num(self.tile.fragment.lanes)), ref(LANE)), body),)
        for var, extent in ((LANE, self.tile.fragment.lanes), ("n.warp", columns), ("m.warp", rows)):
            body = (Loop(var, extent, LoopKind.THREAD, body),)
        return body

    def over_fragments(self, nodes: tuple[Node, ...]) -> Node:
        columns = Loop(FRAGMENT[1].name, self.tile.fragments[1], LoopKind.UNROLL, nodes)
        return Loop(FRAGMENT[0].name, self.tile.fragments[0], LoopKind.UNROLL, (columns,))

    def run(self, steps: Steps) -> tuple[Node, ...]:
        """The sums over those steps, from zero. No copy is under way when it ends, but shared memory is still read."""
        zero = Const(0.0 if self.dtype.is_float else 0, self.dtype)
        clear = Loop(".word", 4, LoopKind.UNROLL, (Compute(ACC, (*FRAGMENT, ref(".word")), zero),))
        ring = Ring(self.tile.stages, (self.a, self.b))
        return ring.rooms((self.over_fragments((clear,)), *ring.begun(steps), ring.stepped(steps, self._multiply())))

    def _multiply(self) -> tuple[Node, ...]:
        """Fragments of a step along k are loaded while those of the one before are multiplied."""
        tile = self.tile
        nodes = self._fragments(num(0), num(0))
        for step in range(tile.k_steps):
            if step + 1 < tile.k_steps:
                nodes += self._fragments(num(step + 1), num((step + 1) % 2))
            half = num(step % 2)
            product = Mma(ACC, FRAGMENT, A, (half, FRAGMENT[0]), tile.a.dtype, B, (half, FRAGMENT[1]), tile.b.dtype)
            nodes += (self.over_fragments((product,)),)
        buffers = min(2, tile.k_steps)
        for name, count, staged, words in (
            (B, tile.fragments[1], tile.b, tile.fragment.b_words), (A, tile.fragments[0], tile.a, tile.fragment.a_words)
        ):  # fmt: skip
            if tile.fragment.is_square:
                dtype, held = staged.dtype, words * DType.UINT32.bytes // staged.dtype.bytes
            else:
                dtype, held = DType.UINT32, words
            nodes = (Storage(name, dtype, (buffers, count, held), Scope.REGISTER, nodes),)
        return nodes

    def _fragments(self, k_step: Expr, half: Expr) -> tuple[Node, ...]:
        tile, granule = self.tile, num(self.tile.fragment.columns)
        rows = add(mul(ref("m.warp"), num(tile.warp_m)), mul(FRAGMENT[0], num(tile.fragment.rows)))
        if tile.fragment.is_square:
            columns = add(mul(ref("n.warp"), num(tile.warp_n)), mul(FRAGMENT[1], granule))
            sides = ((FRAGMENT[0], A, SHARED_A, tile.a, rows), (FRAGMENT[1], B, SHARED_B, tile.b, columns))
            return tuple(
                Loop(which.name, count, LoopKind.UNROLL,
                     (lane_elements(room, tile.fragment, (shared, row, k_step), (tensor, (half, which))),))
                for (which, tensor, shared, room, row), count in zip(sides, tile.fragments, strict=True)
            )  # fmt: skip
        a = a_fragment(tile.a, rows, k_step, (half, FRAGMENT[0]))
        nodes: tuple[Node, ...] = (Loop("m.fragment", tile.fragments[0], LoopKind.UNROLL, a),)
        first = mul(ref("n.warp"), num(tile.warp_n))
        pairs, rest = divmod(tile.fragments[1], 2)
        pair = mul(ref(".pair"), num(2))
        columns = add(first, mul(pair, granule))
        if pairs:
            two = b_fragments(tile.b, columns, k_step, (half, pair), 2)
            nodes += (Loop(".pair", pairs, LoopKind.UNROLL, two),)
        if rest:
            last = num(tile.fragments[1] - 1)
            nodes += b_fragments(tile.b, add(first, mul(last, granule)), k_step, (half, last), 1)
        return nodes
