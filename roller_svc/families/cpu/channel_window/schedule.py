"""Windows over channels → schedule tree for a CPU: output positions in registers, vectors of channels.

A task owns lines of outputs and a block of channels. For each line and vector of channels it visits tiles of adjacent
positions. A loaded vector is used for every output of the tile whose window covers it. The tiles at both ends of a
line have code of their own, where columns beyond the input are the margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce

from roller_svc.families.common.cpu.parallel_loops import SimdRows, loop_over_points, task_loops, whole_or_tail
from roller_svc.families.common.cpu.window_reduction import Plane, PlaneWindowDim
from roller_svc.families.cpu.channel_window.workload import ChannelSpace
from roller_svc.ir.expr import Cast, Const, Expr, Load, Select, axes_of, iter_subexpressions, loads_of, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, le, linearize, logical_and, min_, mul, num, ref, sub
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import (
    RowReads,
    acc_name,
    is_reduction,
    nest_loops,
    register,
    row_storages,
    row_tensors,
    wrap_in_storages,
)

LANE = ".lane"
START = ".start"  # first output position of a tile
MAX_END_TILES = 4  # of a line; each has code of its own
# Of a tile in a line that reads the margin: few lines do, and their tiles are code of their own. With four outputs most
# columns are still used more than once.
MAX_MARGIN_POSITIONS = 4


def lower(group: KernelGroup, program: RProgram, workload: Workload[ChannelSpace]) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks over lines and blocks of channels."""
    return (ScheduleTree(group.name, _Tasks(group, program, workload.facts).tasks()),)


@dataclass(frozen=True, slots=True)
class _Tasks:
    group: KernelGroup
    program: RProgram
    space: ChannelSpace

    def tasks(self) -> tuple[Node, ...]:
        channels, columns = self.space.channels, self.space.columns
        width = self.program.thread[channels.name]
        rows = SimdRows(channels, width, ref(LANE))
        nodes = whole_or_tail(ref(f"{channels.name}.first"), width, channels.extent, self._channel_group)
        nodes = loop_over_points(channels, self.program.block[channels.name], rows, nodes)
        outer = [a for a in self.group.outer if a.name not in (channels.name, columns.axis)]
        for axis in reversed(outer):
            nodes = loop_over_points(axis, self.program.block[axis.name], None, nodes)
        nodes = wrap_in_storages(self._packed_weights(), (*self._pack_weights(), *nodes))
        first = mul(ref(f"{channels.name}.task"), num(self.program.block[channels.name]))
        nodes = (Let(f"{channels.name}.block", first, nodes),)
        return task_loops((*outer, channels), self.program, nodes)

    # weights --------------------------------------------------------------------------------------------------------
    def _packed_weights(self) -> list[Storage]:
        block = min(self.program.block[self.space.channels.name], self.space.channels.extent)
        taps = self.space.line_taps * self.space.columns.taps
        return [
            Storage(_packed(number), load.dtype.compute, (taps, block), Scope.STACK, ())
            for number, load in enumerate(self.space.weights)
        ]

    def _pack_weights(self) -> tuple[Node, ...]:
        """Copy the weights of the task's channels, tap by tap, in the type that is computed."""
        channels = self.space.channels
        block = self.program.block[channels.name]
        start = ref(f"{channels.name}.block")
        nodes: tuple[Node, ...] = tuple(
            Compute(_packed(number), (self.tap_number(_tap(self.space.columns)), ref(".channel")),
                    Cast(substitute(load, {channels.name: add(start, ref(".channel"))}), load.dtype.compute, implicit=True))
            for number, load in enumerate(self.space.weights)
        )  # fmt: skip
        if not nodes:
            return ()
        limit = min_(num(block), sub(num(channels.extent), start)) if channels.extent % block else None
        nodes = (Loop(".channel", min(block, channels.extent), LoopKind.SERIAL, nodes, limit),)
        return _loop_over_taps((*self.space.lines, self.space.columns), nodes)

    def tap_number(self, column: Expr) -> Expr:
        """Return the number of a tap in packed weights; `column` is that along the columns."""
        lines = [(_tap(dim), dim.taps) for dim in self.space.lines]
        return linearize([*lines, (column, self.space.columns.taps)])

    # tiles ----------------------------------------------------------------------------------------------------------
    def _channel_group(self, width: int) -> tuple[Node, ...]:
        """Return the tiles of a line for `width` channels, other ones where separated lines read the margin."""
        positions, guards = self.program.thread[self.space.columns.axis], self.line_guards()
        still = {dim.position_name for dim in self.space.lines if dim.inner is None}
        if not guards or not all(axes_of(guard) <= still for guard in guards):
            return self._line_tiles(width, positions, None)
        inside = reduce(logical_and, (substitute(guard, self.lines()) for guard in guards))
        plain = self._line_tiles(width, positions, guards)
        return (Branch(inside, plain, self._line_tiles(width, min(positions, MAX_MARGIN_POSITIONS), ())),)

    def line_guards(self) -> tuple[Expr, ...]:
        """Return the conditions in the planes' values that depend on lines alone.

        They are tested before those around them. One that loads may do so beyond the tensor there: it stays in place.
        """
        lines = {d.position_name for d in self.space.lines}
        parts = (part for plane in self.space.reduction.planes for part in iter_subexpressions(plane.value))
        conditions = (part.cond for part in parts if isinstance(part, Select))
        return tuple(dict.fromkeys(each for each in conditions if axes_of(each) <= lines and not loads_of(each)))

    def lines(self) -> dict[str, Expr]:
        """Return the position of each line under the current taps."""
        return {d.position_name: _position(d, ref(d.axis)) for d in self.space.lines}

    def _line_tiles(self, width: int, positions: int, guards: tuple[Expr, ...] | None) -> tuple[Node, ...]:
        """Return the tiles of a line; `guards` hold in it, or are tested by each tile."""
        columns = self.space.columns
        positions = min(positions, columns.extent)
        starts = [min(t * positions, columns.extent - positions) for t in range(ceil_div(columns.extent, positions))]
        inside = [s for s in starts if s % positions == 0 and self._is_inside(s, positions)]
        ends = [s for s in starts if s not in inside]

        def tile(start: Expr) -> tuple[Node, ...]:
            return _Tile(self, start, positions, width, guards).nodes()

        if len(inside) < 2 or len(ends) > MAX_END_TILES:
            inside, ends = [], starts
        nodes: list[Node] = [Let(START, num(s), tile(num(s))) for s in ends if not inside or s < inside[0]]
        if inside:
            start = add(num(inside[0]), mul(ref(".tile"), num(positions)))
            nodes.append(Loop(".tile", len(inside), LoopKind.SERIAL, (Let(START, start, tile(ref(START))),)))
            nodes += [Let(START, num(s), tile(num(s))) for s in ends if s > inside[-1]]
        return tuple(nodes)

    def _is_inside(self, start: int, positions: int) -> bool:
        """Return whether the windows of a tile read no margin columns."""
        slide = self.space.columns
        first = slide.stride * start
        last = first + slide.stride * (positions - 1) + slide.span
        return all(low <= first and last < high for low, high in (p.inside[-1] for p in self.space.reduction.planes))


@dataclass(frozen=True, slots=True)
class _Tile:
    """`positions` adjacent outputs of a line from `start` on, for `width` channels."""

    tasks: _Tasks
    start: Expr  # constant where columns may be the margin
    positions: int
    width: int
    guards: tuple[Expr, ...] | None  # of lines, that hold; None: the tile tests them under each tap

    @property
    def space(self) -> ChannelSpace:
        return self.tasks.space

    def nodes(self) -> tuple[Node, ...]:
        statement = self.space.reduction.statement
        acc, accumulator = acc_name(statement.output), statement.accumulator
        start = Compute(acc, (ref(".position"), ref(LANE)), identity(statement.combine or Combine.SUM, accumulator))
        zeros = Loop(".position", self.positions, LoopKind.UNROLL, (self._vector(start),))
        results = Loop(".position", self.positions, LoopKind.UNROLL, tuple(self._results()))
        storages = [register(acc, accumulator, self.positions, self.width)]
        vectors = [register(_vector_of(p.name), p.dtype, self.width) for p in self.space.reduction.planes]
        taps = self.space.columns.taps
        vectors += [register(_vector_of(_packed(n)), w.dtype.compute, taps, self.width) for n, w in self._weights]
        storages += [replace(v, no_rematerialize=True) for v in vectors]
        return wrap_in_storages(storages, (zeros, *self._line_taps(), results))

    @property
    def _weights(self) -> list[tuple[int, Load]]:
        return list(enumerate(self.space.weights))

    def _vector(self, *nodes: Node) -> Node:
        return Loop(LANE, self.width, LoopKind.VECTOR, nodes)

    def _line_taps(self) -> tuple[Node, ...]:
        """Loop over the taps of all dimensions but the columns'; lines beyond the input are the margin."""
        inside: Expr | None = None
        for plane in self.space.reduction.planes:
            for dim, bounds in zip(self.space.lines, plane.inside, strict=False):
                inside = logical_and(inside, _bounds(dim, bounds))
        nodes = tuple(self._columns(is_inside=True, guards=frozenset(self.guards or ())))
        tested = self.tasks.line_guards() if self.guards is None else ()
        if tested:
            plain = tuple(self._columns(is_inside=True, guards=frozenset(tested)))
            test = reduce(logical_and, (substitute(guard, self.tasks.lines()) for guard in tested))
            nodes = (Branch(test, plain, nodes),)
        if inside is not None:
            nodes = (Branch(inside, nodes, tuple(self._columns(is_inside=False, guards=frozenset()))),)
        return _loop_over_taps(self.space.lines, (*self._load_weights(), *nodes))

    def _load_weights(self) -> Iterator[Node]:
        """Load the weights of the current line of taps."""
        slide, channels = self.space.columns, self.space.channels
        first = sub(ref(f"{channels.name}.first"), ref(f"{channels.name}.block"))
        for tap in range(slide.taps):
            for number, load in self._weights:
                index = (self.tasks.tap_number(num(tap)), add(first, ref(LANE)))
                value = Load(_packed(number), index, load.dtype.compute)
                yield self._vector(Compute(_vector_of(_packed(number)), (num(tap), ref(LANE)), value))

    def _columns(self, *, is_inside: bool, guards: frozenset[Expr]) -> Iterator[Node]:
        """Load each column once and accumulate it into the outputs whose windows cover it."""
        slide = self.space.columns
        users: dict[int, list[tuple[int, int]]] = {}
        for output in range(self.positions):
            for tap in range(slide.taps):
                at = slide.stride * output + slide.dilation * tap + slide.offset
                users.setdefault(at, []).append((output, tap))
        margins = [Compute(_vector_of(p.name), (ref(LANE),), p.margin) for p in self.space.reduction.planes]
        if not is_inside:
            yield from map(self._vector, margins)
        for at, outputs in sorted(users.items()):
            for plane in self.space.reduction.planes if is_inside else ():
                yield self._vector(Compute(_vector_of(plane.name), (ref(LANE),), self._value(plane, at, guards)))
            for output, tap in outputs:
                accumulate = self._accumulate(num(output), num(tap))
                yield accumulate if slide.inner is None else Let(slide.inner, num(tap), (accumulate,))

    def _value(self, plane: Plane, at: int, guards: frozenset[Expr]) -> Expr:
        """Return the plane's value at a column, counted from the tile's first one; `guards` hold."""
        slide, channels = self.space.columns, self.space.channels
        position = add(mul(self.start, num(slide.stride)), num(at))
        low, high = plane.inside[-1]
        if isinstance(position, Const) and not low <= position.value < high:
            return plane.margin
        value = rewrite(plane.value, lambda e: e.then if isinstance(e, Select) and e.cond in guards else e)
        channel = add(ref(f"{channels.name}.first"), ref(LANE))
        return substitute(value, {**self.tasks.lines(), slide.position_name: position, channels.name: channel})

    def _accumulate(self, output: Expr, tap: Expr) -> Node:
        reduction, channels = self.space.reduction, self.space.channels
        planes = {p.name for p in reduction.planes}

        def read(node: Expr) -> Expr:
            if isinstance(node, Load) and node.tensor in planes:
                return Load(_vector_of(node.tensor), (ref(LANE),), node.dtype)
            if isinstance(node, Load) and node in self.space.weights:
                return Load(_vector_of(_packed(self.space.weights.index(node))), (tap, ref(LANE)), node.dtype.compute)
            return node

        statement = reduction.statement
        channel = add(ref(f"{channels.name}.first"), ref(LANE))
        value = substitute(rewrite(reduction.body, read), {channels.name: channel})
        combine = statement.combine or Combine.SUM
        return self._vector(Compute(acc_name(statement.output), (output, ref(LANE)), value, combine))

    def _results(self) -> Iterator[Node]:
        """Execute the statements at one output position."""
        group, space = self.tasks.group, self.space
        rows, at = row_tensors(group), {space.channels.name: add(ref(f"{space.channels.name}.first"), ref(LANE))}
        at[space.columns.axis] = add(ref(START), ref(".position"))
        reads = RowReads(rows, (ref(LANE),), at)
        nodes: list[Node] = []
        for statement in group.statements:
            acc = Load(acc_name(statement.output), (ref(".position"), ref(LANE)), space.reduction.statement.accumulator)
            value = acc if is_reduction(statement) else reads.apply(statement.body)
            nodes += map(self._vector, reads.store(group, statement, value))
        yield from wrap_in_storages(row_storages(group.statements, rows, self.width), tuple(nodes))


def _packed(number: int) -> str:
    """Return the name of the packed weights."""
    return f".weights{number}"


def _vector_of(name: str) -> str:
    """Return the name of the registers that hold a part of a buffer."""
    return f"{name}.vector"


def _position(dim: PlaneWindowDim, output: Expr) -> Expr:
    """Return the position under the current tap of an output."""
    return add(mul(output, num(dim.stride)), dim.tap_position(_tap(dim)))


def _tap(dim: PlaneWindowDim) -> Expr:
    """Return the current tap."""
    return ref(dim.inner) if dim.inner is not None else num(0)


def _loop_over_taps(dims: Iterable[PlaneWindowDim], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    taps = [(dim.inner, dim.taps) for dim in dims if dim.inner is not None]
    return nest_loops(LoopKind.SERIAL, taps, nodes)


def _bounds(dim: PlaneWindowDim, bounds: tuple[int, int]) -> Expr | None:
    """Return the condition that the current line is inside; None where it always is."""
    (low, high), inside = bounds, None
    position = _position(dim, ref(dim.axis))
    if low > 0:
        inside = logical_and(inside, le(num(low), position))
    if high < dim.input_extent(dim.extent):
        inside = logical_and(inside, le(add(position, num(1)), num(high)))
    return inside
