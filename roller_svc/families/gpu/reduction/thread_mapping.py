"""Reducing group and its rProgram → which rows a thread works on, and which part of each.

A row is one outer point with all inner points behind it. `lanes` threads share a row. Where memory runs along the row
they are neighbours; where it runs along an outer axis the neighbours are rows, and lanes stand a row of threads apart.

Index expressions over axes → over loop variables, divisions of what is walked in runs taken apart.

An axis walked as run * chunk + place has the same axis / 8 at eight places: taken apart, the load behind it is one.

How lanes walk a row: `run` neighbours of the last axis make up a chunk, chunks are dealt to the lanes in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roller_svc.analysis.intervals import bounds
from roller_svc.analysis.linear import Linear, expression, linear, span
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, axes_of, children, loads_of, with_children
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.index import add, ceil_div, div, logical_and, lt, min_, mod, mul, num, ref
from roller_svc.ir.program import Axis, TensorExpr
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node
from roller_svc.schedule.nest_statements import inner_axes


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Where axes stand: `at` over loop variables, of which those in `places` go from 0 to their extents."""

    extents: Mapping[str, int]  # of the axes
    at: Mapping[str, Expr]
    ranges: Mapping[str, int]

    def apply(self, expr: Expr) -> Expr:
        """The expression with every axis replaced."""
        match expr:
            case AxisRef(name=name):
                return self.at.get(name, expr)
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if by > 0:
                if self._is_exact(x):
                    return _cast_like(_divide(kind, linear(self.apply(x)), by, self.ranges), expr)
            case _:
                pass
        operands = children(expr)
        return with_children(expr, tuple(self.apply(x) for x in operands)) if operands else expr

    def _is_exact(self, expr: Expr) -> bool:
        """Whether it is arithmetic of axes alone that stays within its type."""
        if expr.dtype.is_float or not expr.dtype.is_signed or expr.dtype.bits < 32 or loads_of(expr):
            return False
        return not bounds(expr, self.extents).wraps


def is_uniform(cond: Expr, position: str, vector_elems: int) -> bool:
    """Whether a condition holds in all places of a run or in none, `place` going from 0 to `run` - 1."""
    if position not in axes_of(cond):
        return True
    if not (isinstance(cond, Op) and cond.kind is OpKind.LT and isinstance(cond.args[1], Const)):
        return False
    terms = linear(cond.args[0])
    own = terms.pop(AxisRef(position), 0)
    return (
        own == 1
        and all(c % vector_elems == 0 for c in (int(cond.args[1].value), *terms.values()))
        and not any(position in axes_of(term) for term in terms if term is not None)
    )


def _cast_like(value: Expr, like: Expr) -> Expr:
    return value if value.dtype is like.dtype else Cast(value, like.dtype, implicit=True)


def _divide(kind: OpKind, terms: Linear, by: int, ranges: Mapping[str, int]) -> Expr:
    """floor(x / by) or x mod by: multiples of `by` leave the division, and so does what is too small to matter."""
    quotient: Linear = {t: c // by for t, c in terms.items() if c // by * by == c or t is None}
    remainder: Linear = {t: c % by if t is None else c for t, c in terms.items() if c % by}
    low: Linear = {t: c for t, c in remainder.items() if t is None or (isinstance(t, AxisRef) and t.name in ranges)}
    high: Linear = {t: c for t, c in remainder.items() if t not in low}
    unit = math.gcd(by, *high.values())
    fits = _fits(low, unit, ranges)
    if not fits:
        low, high, unit = {}, remainder, 1
    scaled = expression({t: c // unit for t, c in high.items()})
    if kind is OpKind.FLOORDIV:
        return add(expression(quotient), div(scaled, by // unit))
    return add(mul(mod(scaled, by // unit), num(unit)), expression(low))


def _fits(low: Linear, unit: int, ranges: Mapping[str, int]) -> bool:
    first, last = span(low, ranges)
    return first >= 0 and last < unit


LANE, POINT = ".lane", ".point"


@dataclass(frozen=True, slots=True)
class ThreadRows:
    """`along`: whether lanes of a row are neighbouring threads. `warp`: threads that shuffles reach."""

    group: KernelGroup
    program: RProgram
    warp: int

    @property
    def lanes(self) -> int:
        return self.program.reduce_threads

    @property
    def points(self) -> int:
        """Threads of a block that work on the same part of different rows."""
        return self.program.threads // self.lanes

    @property
    def lanes_are_adjacent(self) -> bool:
        return self.program.space.vector_axis not in {a.name for a in self.group.outer}

    @property
    def vector(self) -> str | None:
        """The outer axis of which a thread has neighbouring points."""
        for axis in self.group.outer:
            width = self.program.thread[axis.name]
            if axis.name == self.program.space.vector_axis and width > 1 and axis.extent % width == 0:
                return axis.name
        return None

    @property
    def multi_point_axes(self) -> tuple[Axis, ...]:
        """Outer axes of which a thread has several points, the one of neighbours last."""
        wide = [a for a in self.group.outer if self.program.thread[a.name] > 1]
        return tuple(sorted(wide, key=lambda a: a.name == self.vector))

    @property
    def elements(self) -> tuple[AxisRef, ...]:
        """Which of the thread's rows this one is."""
        return tuple(ref(_element(a)) for a in self.multi_point_axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.program.thread[a.name] for a in self.multi_point_axes)

    @property
    def flat_element(self) -> Expr:
        flat: Expr = num(0)
        for var, extent in zip(self.elements, self.shape, strict=True):
            flat = add(mul(flat, num(extent)), var)
        return flat

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    # loops ----------------------------------------------------------------------------------------------------------
    def thread_loops(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of one thread in the loops over blocks and threads, below the Lets that say where it stands."""
        for axis in reversed(self.group.outer):
            nodes = (Let(_first(axis), self._first_of(axis), nodes),)
        threads = [(_thread(a), self._threads(a)) for a in self._by_adjacency()]
        point: Expr = num(0)
        for var, extent in threads:
            point = add(mul(point, num(extent)), ref(var))
        nodes = (Let(POINT, point, nodes),)
        order = [*threads, (LANE, self.lanes)] if self.lanes_are_adjacent else [(LANE, self.lanes), *threads]
        for var, extent in reversed(order):
            nodes = (Loop(var, extent, LoopKind.THREAD, nodes),)
        for axis in reversed(self.group.outer):
            blocks = ceil_div(axis.extent, self.program.block[axis.name])
            nodes = (Loop(f"{axis.name}.block", blocks, LoopKind.BLOCK, nodes),)
        return nodes

    def for_each_row(self, nodes: tuple[Node, ...], *, guarded: bool = False, vector: bool = True) -> tuple[Node, ...]:
        """The nodes for each of the thread's rows; `guarded`: only for those that exist. `vector`: neighbouring rows
        are lanes of a vector loop, for which the nodes are a straight line."""
        for axis in reversed(self.multi_point_axes):
            kind = LoopKind.VECTOR if vector and axis.name == self.vector else LoopKind.UNROLL
            if guarded and axis.name != self.vector:
                nodes = _branch(self._inside(axis), nodes)
            nodes = (Loop(_element(axis), self.program.thread[axis.name], kind, nodes),)
            if guarded and axis.name == self.vector:
                nodes = _branch(self._inside(axis), nodes)
        if guarded:
            inside: Expr | None = None
            for axis in self.group.outer:
                inside = logical_and(inside, None if axis in self.multi_point_axes else self._inside(axis))
            nodes = _branch(inside, nodes)
        return nodes

    # places ---------------------------------------------------------------------------------------------------------
    @property
    def read_at(self) -> dict[str, Expr]:
        """Where the outer axes stand. Beyond the edge the last row is read again: lanes must meet."""
        return {a.name: self._at(a, clamped=self._has_tail(a)) for a in self.group.outer}

    @property
    def write_at(self) -> dict[str, Expr]:
        return {a.name: self._at(a, clamped=False) for a in self.group.outer}

    @property
    def element_ranges(self) -> dict[str, int]:
        """Variables of loops over a thread's rows."""
        return {_element(a): self.program.thread[a.name] for a in self.multi_point_axes}

    def _at(self, axis: Axis, *, clamped: bool) -> Expr:
        first, unit = ref(_first(axis)), self._unit(axis)
        if unit > 1:
            chunk = min_(first, num(axis.extent // unit - 1)) if clamped else first
            return add(mul(chunk, num(unit)), ref(_element(axis)))
        position: Expr = first
        if axis in self.multi_point_axes:
            position = add(first, mul(ref(_element(axis)), num(self._threads(axis))))
        return min_(position, num(axis.extent - 1)) if clamped else position

    def _inside(self, axis: Axis) -> Expr | None:
        if not self._has_tail(axis):
            return None
        if (unit := self._unit(axis)) > 1:
            return lt(ref(_first(axis)), num(axis.extent // unit))
        return lt(self._at(axis, clamped=False), num(axis.extent))

    def _first_of(self, axis: Axis) -> Expr:
        """The thread's first place; of neighbours: the number of its run."""
        block = self.program.block[axis.name] // self._unit(axis)
        return add(mul(ref(f"{axis.name}.block"), num(block)), ref(_thread(axis)))

    def _unit(self, axis: Axis) -> int:
        return self.program.thread[axis.name] if axis.name == self.vector else 1

    def _has_tail(self, axis: Axis) -> bool:
        return axis.extent % self.program.block[axis.name] != 0

    def _threads(self, axis: Axis) -> int:
        return self.program.block[axis.name] // self.program.thread[axis.name]

    def _by_adjacency(self) -> list[Axis]:
        """Outer axes, the one that neighbouring threads walk last."""
        return sorted(self.group.outer, key=lambda a: a.name == self.program.space.vector_axis)


def _branch(cond: Expr | None, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    return nodes if cond is None else (Branch(cond, nodes),)


def _element(axis: Axis) -> str:
    return f"{axis.name}.element"


def _first(axis: Axis) -> str:
    return f"{axis.name}.first"


def _thread(axis: Axis) -> str:
    return f"{axis.name}.thread"


# Rounds that stand in a line: no row of more is held, for there are no registers for it.
MAX_CHUNKS_IN_FLIGHT = 128
CHUNK, VECTOR_ELEMENT, ROUND, STEP, IN_FLIGHT = ".chunk", ".place", ".round", ".step", ".turn"


@dataclass(frozen=True, slots=True)
class RowTiling:
    """`together`: rounds, one chunk a lane each, that are in flight at once."""

    axes: tuple[Axis, ...]
    vector_elems: int
    lanes: int
    chunks_in_flight: int

    @property
    def chunks(self) -> int:
        return math.prod(a.extent for a in self.axes) // self.vector_elems

    @property
    def iterations(self) -> int:
        return ceil_div(self.chunks, self.lanes)

    @property
    def holds_row(self) -> bool:
        """Whether all of the row is in flight at once."""
        return self.chunks_in_flight >= self.iterations

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Equal for walks that visit the same places of a row."""
        return (self.vector_elems, *(a.extent for a in self.axes))

    @property
    def at(self) -> dict[str, Expr]:
        """Where the axes stand in a chunk. The variables are named after positions: what one statement calls k another
        may call j, and both read the same row."""
        positions: dict[str, Expr] = {a.name: ref(_position(i)) for i, a in enumerate(self.axes)}
        if self.vector_elems > 1:
            last = self.axes[-1].name
            positions[last] = add(mul(positions[last], num(self.vector_elems)), ref(VECTOR_ELEMENT))
        return positions

    def for_each_chunk(self, body: Callable[[], tuple[Node, ...]]) -> tuple[Node, ...]:
        """All of a lane's chunks: steps of several rounds, then those left, the last of them perhaps not for all."""
        full = self.chunks // self.lanes
        steps = full // self.chunks_in_flight if full > self.chunks_in_flight else 0
        nodes: list[Node] = []
        if steps:
            first = mul(ref(STEP), num(self.chunks_in_flight))
            nodes.append(
                Loop(STEP, steps, LoopKind.SERIAL, self._unrolled_iterations(first, self.chunks_in_flight, body()))
            )
        done = steps * self.chunks_in_flight
        if full > done:
            nodes += self._unrolled_iterations(num(done), full - done, body())
        if self.iterations > full:
            chunk = add(num(full * self.lanes), ref(LANE))
            last = Branch(lt(ref(CHUNK), num(self.chunks)), self._positions(body()))
            nodes.append(Let(ROUND, num(full), (Let(CHUNK, chunk, (last,)),)))
        return tuple(nodes)

    def _unrolled_iterations(self, first: Expr, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        chunk = ref(ROUND) if self.lanes == 1 else add(mul(ref(ROUND), num(self.lanes)), ref(LANE))
        nodes = (Let(CHUNK, chunk, self._positions(nodes)),)
        return (Loop(IN_FLIGHT, count, LoopKind.UNROLL, (Let(ROUND, add(first, ref(IN_FLIGHT)), nodes),)),)

    def _positions(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        stride = 1
        for i in range(len(self.axes) - 1, -1, -1):
            extent = self.axes[i].extent // (self.vector_elems if i == len(self.axes) - 1 else 1)
            index = div(ref(CHUNK), stride)
            nodes = (Let(_position(i), index if i == 0 else mod(index, extent), nodes),)
            stride *= extent
        return nodes


def row_tiling(statement: TensorExpr, outer: tuple[Axis, ...], program: RProgram) -> RowTiling | None:
    """The walk of a statement's inner axes; None where it has none."""
    axes = inner_axes(statement, outer)
    if not axes:
        return None
    (inner,) = program.space.role(AxisRole.INNER)
    # the axis whose neighbours are neighbours in memory goes last
    axes = tuple(sorted(axes, key=lambda a: a.name == inner.members[-1].name))
    vector_elems = program.thread[inner.name]
    vector_elems = vector_elems if axes[-1].extent % vector_elems == 0 else 1
    chunks_in_flight = ceil_div(program.block[inner.name], program.reduce_threads * vector_elems)
    return RowTiling(axes, vector_elems, program.reduce_threads, max(1, min(chunks_in_flight, MAX_CHUNKS_IN_FLIGHT)))


def _position(axis: int) -> str:
    return f".k{axis}"
