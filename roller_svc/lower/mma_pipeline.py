"""Staged tiles and fragments of a matrix contraction → its pipeline over the steps of k, sums left in registers."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, mul, num, ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr
from roller_svc.ir.schedule import Compute, Let, Loop, LoopKind, Mma, Node, Scope, Storage
from roller_svc.lower.mma_fragments import LANE, SHARED_A, SHARED_B, A, B, a_fragment, b_fragments, lane_elements
from roller_svc.lower.ring import Ring, Steps
from roller_svc.lower.staging import THREAD, Staging
from roller_svc.perf.mma_tile import MmaTile

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
