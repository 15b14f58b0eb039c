"""How lanes walk a row: `run` neighbours of the last axis make up a chunk, chunks are dealt to the lanes in turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.ir.build import add, ceil_div, div, less, mod, mul, num, ref
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import Axis, TensorExpr
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node
from roller_svc.lower.rows import inner_axes
from roller_svc.lower.thread_rows import LANE

# Rounds that stand in a line: no row of more is held, for there are no registers for it.
MAX_TOGETHER = 128
CHUNK, PLACE, ROUND, STEP, TURN = ".chunk", ".place", ".round", ".step", ".turn"


@dataclass(frozen=True, slots=True)
class RowWalk:
    """`together`: rounds, one chunk a lane each, that are in flight at once."""

    axes: tuple[Axis, ...]
    run: int
    lanes: int
    together: int

    @property
    def chunks(self) -> int:
        return math.prod(a.extent for a in self.axes) // self.run

    @property
    def rounds(self) -> int:
        return ceil_div(self.chunks, self.lanes)

    @property
    def is_whole(self) -> bool:
        """Whether all of the row is in flight at once."""
        return self.together >= self.rounds

    @property
    def steps_like(self) -> tuple[int, ...]:
        """Equal for walks that visit the same places of a row."""
        return (self.run, *(a.extent for a in self.axes))

    @property
    def at(self) -> dict[str, Expr]:
        """Where the axes stand in a chunk. The variables are named after positions: what one statement calls k another
        may call j, and both read the same row."""
        places: dict[str, Expr] = {a.name: ref(_position(i)) for i, a in enumerate(self.axes)}
        if self.run > 1:
            last = self.axes[-1].name
            places[last] = add(mul(places[last], num(self.run)), ref(PLACE))
        return places

    def visited(self, visit: Callable[[], tuple[Node, ...]]) -> tuple[Node, ...]:
        """All of a lane's chunks: steps of several rounds, then those left, the last of them perhaps not for all."""
        whole = self.chunks // self.lanes
        steps = whole // self.together if whole > self.together else 0
        nodes: list[Node] = []
        if steps:
            first = mul(ref(STEP), num(self.together))
            nodes.append(Loop(STEP, steps, LoopKind.SERIAL, self._rounds(first, self.together, visit())))
        done = steps * self.together
        if whole > done:
            nodes += self._rounds(num(done), whole - done, visit())
        if self.rounds > whole:
            chunk = add(num(whole * self.lanes), ref(LANE))
            last = Branch(less(ref(CHUNK), num(self.chunks)), self._positions(visit()))
            nodes.append(Let(ROUND, num(whole), (Let(CHUNK, chunk, (last,)),)))
        return tuple(nodes)

    def _rounds(self, first: Expr, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        chunk = ref(ROUND) if self.lanes == 1 else add(mul(ref(ROUND), num(self.lanes)), ref(LANE))
        nodes = (Let(CHUNK, chunk, self._positions(nodes)),)
        return (Loop(TURN, count, LoopKind.UNROLL, (Let(ROUND, add(first, ref(TURN)), nodes),)),)

    def _positions(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        stride = 1
        for i in range(len(self.axes) - 1, -1, -1):
            extent = self.axes[i].extent // (self.run if i == len(self.axes) - 1 else 1)
            place = div(ref(CHUNK), stride)
            nodes = (Let(_position(i), place if i == 0 else mod(place, extent), nodes),)
            stride *= extent
        return nodes


def row_walk(statement: TensorExpr, outer: tuple[Axis, ...], program: RProgram) -> RowWalk | None:
    """The walk of a statement's inner axes; None where it has none."""
    axes = inner_axes(statement, outer)
    if not axes:
        return None
    (inner,) = program.space.role(AxisRole.INNER)
    # the axis whose neighbours are neighbours in memory goes last
    axes = tuple(sorted(axes, key=lambda a: a.name == inner.members[-1].name))
    run = program.thread[inner.name]
    run = run if axes[-1].extent % run == 0 else 1
    together = ceil_div(program.block[inner.name], program.lanes * run)
    return RowWalk(axes, run, program.lanes, max(1, min(together, MAX_TOGETHER)))


def _position(axis: int) -> str:
    return f".k{axis}"
