"""Windowed reductions over planes → schedule tree for a CPU: staged planes and vectors along their lines.

A task owns a block of planes and a row block of each. It stages the input plane with its padding, reduces the window
for segments of outputs in registers, and computes the results plane by plane.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from roller_svc.errors import require
from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.micro_kernel import SCARCE_REGISTERS
from roller_svc.families.common.cpu.parallel_loops import task_loops
from roller_svc.families.common.cpu.window_reduction import Plane, WindowedSum
from roller_svc.families.cpu.window.deinterleave import (
    Deinterleave,
    contiguous_load,
    deinterleave,
    is_sorted_by_vectors,
)
from roller_svc.families.cpu.window.workload import (
    LINE,
    Dimension,
    PlaneLayout,
    PlaneSpace,
    Tile,
    layout,
    staged_bytes,
)
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Const, Expr, Load, loads_of, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, div, le, linearize, logical_and, max_, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine, TensorType, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.guards import unswitch_guards
from roller_svc.schedule.nest_statements import RowReads, acc_name, is_reduction, row_storages, row_tensors, wrap_in_storages

LANE, STEP = ".lane", ".step"
PLANE = ".plane"  # number of a plane among those that are staged at once
# Planes that are staged before the first of them is read: a vector that several recent stores fill must wait until they
# are in L1 (failed store forwarding).
PLANES_AT_ONCE = (4, 3, 2)
L1_PLANES_FRACTION = 0.2  # of L1 for these planes and their results
MAX_UNROLLED_OPERATIONS = 200  # vector operations; more compile slowly and run no faster
MAX_PREFETCHES = 16  # lines of a row of a plane; hardware prefetchers follow longer rows
MAX_UNROLLED_ELEMENTS = 256  # elements copied by unrolled statements
MAX_LINES_BYTES = 8 << 10  # of computed lines that are sorted together: a quarter of L1

StageLine = Callable[[Plane, Expr, int], Iterator[Node]]  # of a plane, the first position and the number of positions


@dataclass(frozen=True, slots=True)
class PlanePrefetch:
    """Loads of a line and the distance in elements to the same line of the plane staged `at_once` planes later."""

    sources: tuple[Load, ...]
    elements: int


def plane_prefetch(sources: tuple[Load, ...], type_: TensorType, axis: str, at_once: int) -> PlanePrefetch | None:
    elements = 0
    for d, index in enumerate(sources[0].index):
        form = affine(index)
        if form is None:
            return None
        elements += form.coeff(axis) * math.prod(type_.shape[d + 1 :])
    return PlanePrefetch(sources, at_once * elements) if elements > 0 else None


@dataclass(frozen=True, slots=True)
class StagedReduction:
    """One windowed reduction of a task."""

    window: WindowedSum
    layout: PlaneLayout
    lanes: int
    registers: int  # vector registers of the CPU
    at_once: int = 1  # planes that are staged at once

    @property
    def _results(self) -> str:
        return f"{self.window.statement.output}.totals"

    def buffers(self) -> list[Storage]:
        elements = -(-self.layout.rows * self.layout.run_steps * self.layout.width // LINE) * LINE
        storages = [Storage(self._results, self.window.statement.accumulator, (self.at_once, elements), Scope.STACK, ())]
        for plane in self.window.planes:
            storages.append(Storage(plane.name, plane.dtype, (self.at_once, self.layout.elements), Scope.STACK, ()))
            if self._has_line_buffer(plane):
                lines = math.prod(d.places for d in self.layout.dims[:-1]) if self._lines_at_once(plane) else 1
                shape = (lines, self.layout.dims[-1].places)
                storages.append(Storage(line_name(plane), plane.dtype, shape, Scope.STACK, ()))
        return storages

    def _has_line_buffer(self, plane: Plane) -> bool:
        """Return whether a line is computed into a buffer before vectors sort it."""
        low, count, _ = _staged_range(self.layout.dims[-1], plane.inside[-1])
        return self._contiguous_load(plane) is None and self._deinterleave(plane, _constant(low), count) is not None

    def _lines_at_once(self, plane: Plane) -> bool:
        """Return whether all lines are computed before the first is sorted.

        A vector that two recent stores of a short line fill would wait until both are in L1.
        """
        dims = self.layout.dims
        lines_bytes = math.prod(d.places for d in dims) * plane.dtype.bytes
        is_whole = dims[-1].block >= dims[-1].window_dim.extent
        return self._has_line_buffer(plane) and is_whole and lines_bytes <= MAX_LINES_BYTES

    def _in_line(self, plane: Plane, position: Expr) -> tuple[Expr, ...]:
        """Return the index of an element of the current line in the buffer of lines."""
        line: Expr = num(0)
        if self._lines_at_once(plane):
            line = linearize(zip(self._outer_coordinates(), (dim.places for dim in self.layout.dims[:-1]), strict=True))
        return (line, position)

    def _contiguous_load(self, plane: Plane) -> Load | None:
        return contiguous_load(plane, self.layout.dims[-1].window_dim.position_name)

    def _element(self, at: Expr) -> tuple[Expr, Expr]:
        """Return the index of an element in a buffer of the current plane."""
        return (ref(PLANE) if self.at_once > 1 else num(0), at)

    def bind_line(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the offset of the current line's first result around the nodes."""
        offset: Expr = num(0)
        if len(self.layout.dims) > 1:
            line, rows = ref(f"{self.layout.dims[-2].window_dim.axis}.line"), self.layout.rows
            line_elements = self.layout.run_steps * self.layout.width
            offset = add(mul(mod(line, rows), num(line_elements)), mul(div(line, rows), num(self.layout.pitch)))
        return (Let(f"{self._results}.first", offset, nodes),)

    def result(self, lane: Expr) -> Load:
        """Return the result of an output of the current line."""
        at = add(ref(f"{self._results}.first"), lane)
        return Load(self._results, self._element(at), self.window.statement.accumulator)

    # staging --------------------------------------------------------------------------------------------------------
    def fill_margins(self) -> Iterator[Node]:
        """Fill the buffer of every plane with its margin value; staging leaves the margin unchanged."""
        for plane in self.window.planes:
            at = add(mul(ref(".line"), num(LINE)), ref(LANE))
            vectors = Loop(LANE, LINE, LoopKind.VECTOR, (Compute(plane.name, self._element(at), plane.margin),))
            lines = Loop(".line", self.layout.elements // LINE, LoopKind.SERIAL, (vectors,))
            yield lines if self.at_once == 1 else Loop(PLANE, self.at_once, LoopKind.SERIAL, (lines,))

    def stage(self, following: tuple[PlanePrefetch | None, ...]) -> Iterator[Node]:
        """Stage all planes and prefetch the next ones."""
        for plane, prefetch in zip(self.window.planes, following, strict=True):
            yield from self._stage_plane(plane, prefetch)

    def _stage_plane(self, plane: Plane, prefetch: PlanePrefetch | None) -> tuple[Node, ...]:
        if any(low == high for low, high in plane.inside):
            return ()
        prefetches = () if prefetch is None else tuple(self._prefetch_line(plane, prefetch))
        if not self._lines_at_once(plane):
            return self._for_lines(plane, (*prefetches, *self._stage_line(plane, self._stage_phases)))
        computed = self._for_lines(plane, (*prefetches, *self._stage_line(plane, self._compute_line)))
        return (*computed, *self._for_lines(plane, self._stage_line(plane, self._sort_line)))

    def _for_lines(self, plane: Plane, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Execute the nodes for every staged line."""
        for dim, inside in list(zip(self.layout.dims, plane.inside, strict=True))[-2::-1]:
            low, count, limit = _staged_range(dim, inside)
            position = f"{dim.window_dim.axis}.here"
            nodes = (Let(position, add(low, ref(f"{position}.count")), nodes),)
            nodes = (Loop(f"{position}.count", count, LoopKind.SERIAL, nodes, limit),)
        return nodes

    def _stage_line(self, plane: Plane, stage: StageLine) -> tuple[Node, ...]:
        """Stage one line by `stage`, or element by element where it extends beyond the plane."""
        dim, inside = self.layout.dims[-1], plane.inside[-1]
        low, count, limit = _staged_range(dim, inside)
        position = f"{dim.window_dim.axis}.here"
        element = Let(position, add(low, ref(f"{position}.count")), (self._store(plane, ref(position)),))
        element_loop = (Loop(f"{position}.count", count, LoopKind.SERIAL, (element,), limit),)
        if limit is None:
            return tuple(stage(plane, low, count))
        start = mul(ref(f"{dim.window_dim.axis}.first"), num(dim.window_dim.stride))
        is_inside = logical_and(le(num(inside[0]), start), le(add(start, num(dim.places)), num(inside[1])))
        if is_inside is None or inside[1] - inside[0] < dim.places:
            return element_loop
        return (Branch(is_inside, tuple(stage(plane, num(0), dim.places)), element_loop),)

    def _stage_phases(self, plane: Plane, low: Expr, count: int) -> Iterator[Node]:
        """Stage `count` positions from the constant `low` on, in vectors."""
        if self._deinterleave(plane, _constant(low), count) is None:
            yield from self._stage_each_phase(_constant(low), count, lambda position: self._store(plane, position))
            return
        yield from self._compute_line(plane, low, count)
        yield from self._sort_line(plane, low, count)

    def _compute_line(self, plane: Plane, low: Expr, count: int) -> Iterator[Node]:
        """Compute the line into its buffer, unless it is read from memory."""
        if self._contiguous_load(plane) is None:
            value = self._value(plane, add(low, ref(LANE)))
            yield from for_lanes(count, Compute(line_name(plane), self._in_line(plane, ref(LANE)), value))

    def _sort_line(self, plane: Plane, low: Expr, count: int) -> Iterator[Node]:
        """Sort the line into its phases by vectors, and copy the elements that fill none."""
        first, source = _constant(low), self._contiguous_load(plane)
        sorting = require(self._deinterleave(plane, first, count), "order of vectors")

        def load(position: Expr) -> Load:
            if source is None:
                return Load(line_name(plane), self._in_line(plane, sub(position, num(first))), plane.dtype)
            return replace(source, index=tuple(substitute(i, self._input_coordinates(position)) for i in source.index))

        def index(row: Expr) -> tuple[Expr, ...]:
            return self._element(add(self._place(num(sorting.first)), row))

        yield from sorting.nodes(load, (plane.name, index), self.layout.phase_elements)
        for position in (*range(first, sorting.first), *range(sorting.end, first + count)):
            yield Compute(plane.name, self._element(self._place(num(position))), load(num(position)))

    def _stage_each_phase(self, first: int, count: int, store: Callable[[Expr], Compute]) -> Iterator[Node]:
        """Stage the positions of one phase after the other, in vectors of strided elements."""
        dim = self.layout.dims[-1]
        for phase in range(dim.phases):
            start = first + (phase - first) % dim.phases
            if (elements := ceil_div(first + count - start, dim.phases)) > 0:
                position = add(mul(ref(LANE), num(dim.phases)), num(start))
                element = add(self._place(num(phase)), num(start // dim.phases))
                at = self._element(add(ref(".element"), ref(LANE)))
                yield Let(".element", element, tuple(for_lanes(elements, replace(store(position), index=at))))

    def _deinterleave(self, plane: Plane, first: int, count: int) -> Deinterleave | None:
        """Return how vectors sort a line of the plane; None where they do not."""
        phases = self.layout.dims[-1].phases
        return deinterleave(phases, first, count, self.lanes) if is_sorted_by_vectors(plane) else None

    def _prefetch_line(self, plane: Plane, prefetch: PlanePrefetch) -> Iterator[Node]:
        """Prefetch the same line of the next plane."""
        low, count, _ = _staged_range(self.layout.dims[-1], plane.inside[-1])
        for source in prefetch.sources:
            step = LINE_BYTES // source.dtype.bytes
            index = tuple(substitute(i, self._input_coordinates(low)) for i in source.index)
            for first in range(0, min(count, MAX_PREFETCHES * step), step):
                yield Prefetch(source.tensor, index, prefetch.elements + first)

    def _store(self, plane: Plane, position: Expr) -> Compute:
        return Compute(plane.name, self._element(self._place(position)), self._value(plane, position))

    def _place(self, position: Expr) -> Expr:
        """Return the offset in the buffer of a position of the current line."""
        return self.layout.element((*self._outer_coordinates(), position))

    def _outer_coordinates(self) -> tuple[Expr, ...]:
        return tuple(ref(f"{d.window_dim.axis}.here") for d in self.layout.dims[:-1])

    def _value(self, plane: Plane, position: Expr) -> Expr:
        """Return the input value at a position of the current row block."""
        return substitute(plane.value, self._input_coordinates(position))

    def _input_coordinates(self, position: Expr) -> dict[str, Expr]:
        coordinates = {}
        for dim, here in zip(self.layout.dims, (*self._outer_coordinates(), position), strict=True):
            start = mul(ref(f"{dim.window_dim.axis}.first"), num(dim.window_dim.stride))
            coordinates[dim.window_dim.position_name] = add(start, here)
        return coordinates

    # reduction ------------------------------------------------------------------------------------------------------
    def reduce(self) -> tuple[Node, ...]:
        """Reduce the windows of a segment of outputs, several vectors of several lines at a time."""
        statement, width, rows = self.window.statement, self.layout.width, self.layout.rows
        acc, combine = acc_name(statement.output), statement.combine or Combine.SUM
        start = Compute(acc, (ref(".row"), ref(LANE)), identity(combine, statement.accumulator))
        done = Load(acc, (ref(".row"), ref(LANE)), statement.accumulator)
        row = mul(ref(".row"), num(self.layout.run_steps * width))
        at = add(add(row, mul(ref(STEP), num(width))), ref(LANE))
        nodes = (self._for_rows(start), *self._taps(), self._for_rows(Compute(self._results, self._element(at), done)))
        buffers = [Storage(acc, statement.accumulator, (rows, width), Scope.REGISTER, ())]
        for plane in self.window.planes:
            buffers.append(
                Storage(
                    f"{plane.name}.vectors",
                    plane.dtype,
                    (width,),
                    Scope.REGISTER,
                    (),
                    no_rematerialize=self._pins_loads(),
                )
            )
        return (Loop(STEP, self.layout.run_steps, LoopKind.SERIAL, wrap_in_storages(buffers, nodes)),)

    def _pins_loads(self) -> bool:
        """Return whether to pin the loads of staged vectors in registers.

        gcc otherwise folds them into each use, and most of these loads cross a cache line.
        """
        vectors = ceil_div(self.layout.width, self.lanes)
        live = (self.layout.rows + len(self.window.planes)) * vectors + 1
        return self.layout.rows > 1 and live <= self.registers

    def _for_rows(self, node: Node) -> Node:
        vectors = Loop(LANE, self.layout.width, LoopKind.VECTOR, (node,))
        return Loop(".row", self.layout.rows, LoopKind.UNROLL, (vectors,))

    def _taps(self) -> tuple[Node, ...]:
        """Loop over the taps; taps along lines of staged elements are innermost and share loads.

        Loops beyond the unroll limit stay loops, from the outside in.
        """
        slides = self.window.window_dims
        vectors = ceil_div(self.layout.width, self.lanes)
        inside = vectors * (self.layout.rows * slides[-2].taps if len(slides) > 1 else 1)
        nodes = self._line_taps() if inside <= MAX_UNROLLED_OPERATIONS else self._looped_line_taps()
        unrolled = inside if inside <= MAX_UNROLLED_OPERATIONS else vectors * self.layout.rows
        for slide in (slides[-1], *reversed(slides[:-2])):
            if slide.inner is not None:
                unrolled *= slide.taps
                kind = LoopKind.UNROLL if unrolled <= MAX_UNROLLED_OPERATIONS else LoopKind.SERIAL
                nodes = (Loop(slide.inner, slide.taps, kind, nodes),)
        return nodes

    def _line_taps(self) -> tuple[Node, ...]:
        """Load each staged line once and accumulate it into the outputs whose taps cover it."""
        dims = self.layout.dims
        if len(dims) == 1:
            return (*self._loads(()), self._accumulate(num(0)))
        dim, slide = dims[-2], dims[-2].window_dim
        taps = [(r, i) for r in range(dim.rows) for i in range(slide.taps)]

        def position(row_tap: tuple[int, int]) -> int:
            return slide.stride * row_tap[0] + slide.dilation * row_tap[1] + slide.offset

        nodes: list[Node] = []
        for at, users in itertools.groupby(sorted(taps, key=position), key=position):
            nodes += self._loads((num(at),))
            for row, tap in users:
                accumulate: Node = self._accumulate(num(row))
                nodes.append(accumulate if slide.inner is None else Let(slide.inner, num(tap), (accumulate,)))
        return tuple(nodes)

    def _looped_line_taps(self) -> tuple[Node, ...]:
        """Loop over the taps of a line one after the other."""
        dim = self.layout.dims[-2]
        nodes: list[Node] = []
        for row in range(dim.rows):
            tap = ref(dim.window_dim.inner) if dim.window_dim.inner is not None else num(0)
            nodes += [
                *self._loads((add(dim.window_dim.tap_position(tap), num(row * dim.window_dim.stride)),)),
                self._accumulate(num(row)),
            ]
        return (Loop(dim.window_dim.inner or ".line", dim.window_dim.taps, LoopKind.SERIAL, tuple(nodes)),)

    def _loads(self, line: tuple[Expr, ...]) -> Iterator[Node]:
        """Load the vectors of every plane under a tap; `line` is the position along the last dimension but one."""
        coordinates: list[Expr] = []
        for dim in self.layout.dims[:-2]:
            tap = ref(dim.window_dim.inner) if dim.window_dim.inner is not None else num(0)
            start = mul(ref(f"{dim.window_dim.axis}.line"), num(dim.window_dim.stride))
            coordinates.append(add(start, dim.window_dim.tap_position(tap)))
        last = self.layout.dims[-1].window_dim
        coordinates += [*line, last.tap_position(ref(last.inner) if last.inner is not None else num(0))]
        at = add(add(ref(".tap"), mul(ref(STEP), num(self.layout.width))), ref(LANE))
        for plane in self.window.planes:
            load = Compute(f"{plane.name}.vectors", (ref(LANE),), Load(plane.name, self._element(at), plane.dtype))
            vectors = Loop(LANE, self.layout.width, LoopKind.VECTOR, (load,))
            yield Let(".tap", self.layout.element(tuple(coordinates)), (vectors,))

    def _accumulate(self, row: Expr) -> Node:
        names = {p.name for p in self.window.planes}

        def from_vectors(node: Expr) -> Expr:
            if isinstance(node, Load) and node.tensor in names:
                return Load(f"{node.tensor}.vectors", (ref(LANE),), node.dtype)
            return node

        statement = self.window.statement
        value = rewrite(self.window.body, from_vectors)
        accumulate = Compute(acc_name(statement.output), (row, ref(LANE)), value, statement.combine or Combine.SUM)
        return Loop(LANE, self.layout.width, LoopKind.VECTOR, (accumulate,))


def line_name(plane: Plane) -> str:
    """Return the name of the buffer of a line in the order of positions."""
    return f"{plane.name}.line"


def _constant(low: Expr) -> int:
    """Return the first position of a whole line; row blocks begin at 0."""
    return int(low.value) if isinstance(low, Const) else 0


def _staged_range(dim: Dimension, inside: tuple[int, int]) -> tuple[Expr, int, Expr | None]:
    """Return (first position inside the plane, maximal count, exact count if it differs by row block)."""
    slide, places = dim.window_dim, dim.places
    if dim.block >= slide.extent:
        return num(inside[0]), inside[1] - inside[0], None
    start = mul(ref(f"{slide.axis}.first"), num(slide.stride))
    low = max_(num(0), sub(num(inside[0]), start)) if inside[0] > 0 else num(0)
    high = min_(num(places), sub(num(inside[1]), start))
    return low, places, sub(high, low)


def loop_over_outputs(dim: Dimension, var: str, nodes: tuple[Node, ...]) -> Node:
    """Loop over the outputs of a row block."""
    extent, has_tail = dim.window_dim.extent, dim.window_dim.extent % dim.block
    limit = sub(num(extent), ref(f"{dim.window_dim.axis}.first")) if has_tail else None
    return Loop(var, min(dim.block, extent), LoopKind.SERIAL, nodes, limit)


def for_lanes(count: int, node: Compute) -> Iterator[Node]:
    """Yield the node for `count` lanes: a loop over chunks, then the tail. Guards are tested once for all lanes."""
    chunks = count // MAX_UNROLLED_ELEMENTS if count > MAX_UNROLLED_ELEMENTS else 0
    if chunks:
        lane = {LANE: add(mul(ref(".piece"), num(MAX_UNROLLED_ELEMENTS)), ref(LANE))}
        chunk = Loop(LANE, MAX_UNROLLED_ELEMENTS, LoopKind.VECTOR, (_at(node, lane),))
        yield Loop(".piece", chunks, LoopKind.SERIAL, (unswitch_guards(chunk),))
    if tail := count - chunks * MAX_UNROLLED_ELEMENTS:
        lane = {LANE: add(num(chunks * MAX_UNROLLED_ELEMENTS), ref(LANE))}
        yield unswitch_guards(Loop(LANE, tail, LoopKind.VECTOR, (_at(node, lane),)))


def _at(node: Compute, values: dict[str, Expr]) -> Compute:
    return Compute(node.tensor, tuple(substitute(i, values) for i in node.index), substitute(node.value, values))


# Outputs of a line below which it is a scalar loop. Longer lines use vectors, although a vector load across two
# recent vector stores waits until both are in L1 (failed store forwarding); other work overlaps.
MIN_VECTOR_OUTPUTS = 4


def lower(group: KernelGroup, program: RProgram, workload: Workload[PlaneSpace]) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks over blocks of planes and row blocks of each."""
    return (ScheduleTree(group.name, _Windows(group, program, workload.facts, workload.machine.hw).tasks()),)


@dataclass(frozen=True, slots=True)
class _Windows:
    group: KernelGroup
    program: RProgram
    space: PlaneSpace
    hw: HardwareSpec

    def tasks(self) -> tuple[Node, ...]:
        lanes, registers = self.program.unit.shape[-1], self.hw.limits.max_registers_per_thread
        sums = [
            StagedReduction(s, layout(self.space, s, *self._tiles), lanes, registers, self._planes_at_once)
            for s in self.space.reductions
        ]
        nodes = tuple(node for s in sums for node in s.fill_margins())
        nodes += self._each_plane(sums)
        nodes = wrap_in_storages([buffer for s in sums for buffer in s.buffers()] + self._row_buffers(), nodes)
        for axis in self.space.axes:
            first = mul(ref(f"{axis.name}.task"), num(self.program.block[axis.name]))
            nodes = (Let(f"{axis.name}.first", first, nodes),)
        return task_loops(self.group.outer, self.program, nodes)

    @property
    def _tiles(self) -> tuple[Tile, Tile]:
        """Return the tiles of a task and of the registers, in the order of the outer axes."""
        block, thread = (tuple(t[a.name] for a in self.group.outer) for t in (self.program.block, self.program.thread))
        return block, thread

    @property
    def _planes_at_once(self) -> int:
        """Return how many small planes to stage before the first of them is reduced."""
        if not self.space.leading or len(self.space.axes) > 2:
            return 1
        plane_bytes = staged_bytes(self.space, *self._tiles)
        l1_bytes = min(level.capacity_bytes for level in self.hw.levels if level is not self.hw.thread_level)
        tile, limit = self.program.block[self.space.leading[-1].name], L1_PLANES_FRACTION * l1_bytes
        return next((n for n in PLANES_AT_ONCE if tile % n == 0 and n * plane_bytes <= limit), 1)

    def _each_plane(self, sums: list[StagedReduction]) -> tuple[Node, ...]:
        stage = tuple(node for s in sums for node in s.stage(self._plane_prefetches(s)))
        nodes = (*stage, *self._each_run(sums)) if self._planes_at_once == 1 else self._several_planes(sums, stage)
        # with 16 registers an outlined function is slower
        if self.hw.limits.max_registers_per_thread > SCARCE_REGISTERS:
            nodes = (Routine("plane", nodes),)
        for axis in reversed(self.space.leading):
            tile = self.program.block[axis.name]
            start = mul(ref(f"{axis.name}.task"), num(tile))
            count = sub(num(axis.extent), start)
            step, limit = ref(f"{axis.name}.step"), count if axis.extent % tile else None
            if axis is self.space.leading[-1] and self._planes_at_once > 1:
                at_once = self._planes_at_once
                limit = None if limit is None else div(add(count, num(at_once - 1)), at_once)
                nodes = (Let(f"{axis.name}.first", add(start, mul(step, num(at_once))), nodes),)
                nodes = (Loop(step.name, tile // at_once, LoopKind.SERIAL, nodes, limit),)
            else:
                nodes = (Let(axis.name, add(start, step), nodes),)
                nodes = (Loop(step.name, tile, LoopKind.SERIAL, nodes, limit),)
        return nodes

    def _several_planes(self, sums: list[StagedReduction], stage: tuple[Node, ...]) -> tuple[Node, ...]:
        """Stage several planes, then reduce them, then store their results."""
        axis, at_once = self.space.leading[-1], self._planes_at_once
        remaining = sub(num(axis.extent), ref(f"{axis.name}.first"))
        limit = min_(num(at_once), remaining) if axis.extent % at_once else None

        def for_planes(*nodes: Node) -> Node:
            nodes = (Let(axis.name, add(ref(f"{axis.name}.first"), ref(PLANE)), nodes),)
            return Loop(PLANE, at_once, LoopKind.SERIAL, nodes, limit)

        reduced = (node for s in sums for node in s.reduce())
        return (
            for_planes(*stage, *self._prefetch_results(sums)),
            for_planes(*reduced),
            for_planes(*self._store_lines(sums)),
        )

    def _each_run(self, sums: list[StagedReduction]) -> tuple[Node, ...]:
        nodes = (*self._prefetch_results(sums), *(node for s in sums for node in s.reduce()), *self._store_lines(sums))
        for dim in reversed(sums[0].layout.dims[:-2]):
            nodes = (loop_over_outputs(dim, f"{dim.window_dim.axis}.line", nodes),)
        return nodes

    # memory ---------------------------------------------------------------------------------------------------------
    def _exceeds_private_caches(self, type_: TensorType) -> bool:
        """Return whether a tensor exceeds the private caches."""
        return type_.bytes > self.hw.block_level.capacity_bytes

    def _plane_prefetches(self, reduction: StagedReduction) -> tuple[PlanePrefetch | None, ...]:
        """Return for each plane of a reduction the prefetch of the task's next planes, if it gains."""
        types, varying = dict(self.group.inputs), [a for a in self.space.leading if self.program.block[a.name] > 1]
        plane_prefetches: list[PlanePrefetch | None] = []
        for plane in reduction.window.planes:
            loads = [x for x in loads_of(plane.value) if x.tensor in types and self._exceeds_private_caches(types[x.tensor])]
            if not loads or not varying:
                plane_prefetches.append(None)
                continue
            sources = tuple(load for load in loads if load.tensor == loads[0].tensor)[-plane.lines :]
            plane_prefetches.append(plane_prefetch(sources, types[sources[0].tensor], varying[-1].name, self._planes_at_once))
        return tuple(plane_prefetches)

    def _prefetch_results(self, sums: list[StagedReduction]) -> Iterator[Node]:
        """Prefetch for write the lines of a segment's results."""
        dims, stored = sums[0].layout.dims, dict(self.group.stored)
        at: dict[str, Expr] = {a.name: ref(f"{a.name}.first") for a in self.space.axes}
        for dim in dims[:-1]:
            at[dim.window_dim.axis] = add(at[dim.window_dim.axis], ref(f"{dim.window_dim.axis}.line"))
        for statement in self.group.statements:
            if statement.output not in stored or not self._exceeds_private_caches(stored[statement.output]):
                continue
            step = LINE_BYTES // statement.type.dtype.bytes
            index = tuple(substitute(i, at) for i in statement.index)
            prefetches = tuple(
                Prefetch(statement.output, index, distance, for_write=True)
                for distance in range(0, min(dims[-1].block, MAX_PREFETCHES * step), step)
            )
            yield from (
                (loop_over_outputs(dims[-2], f"{dims[-2].window_dim.axis}.line", prefetches),) if len(dims) > 1 else prefetches
            )

    # results --------------------------------------------------------------------------------------------------------
    def _store_lines(self, sums: list[StagedReduction]) -> tuple[Node, ...]:
        """Execute the statements for every output of the segment, line by line."""
        width = sums[0].layout.dims[-1]
        tail = width.window_dim.extent % width.block
        nodes = self._store_line(sums, width.block)
        if tail:
            start = ref(f"{width.window_dim.axis}.first")
            is_full = le(add(start, num(width.block)), num(width.window_dim.extent))
            nodes = (Branch(is_full, nodes, self._store_line(sums, tail)),)
        for reduction in sums:
            nodes = reduction.bind_line(nodes)
        if len(sums[0].layout.dims) > 1:
            rows = sums[0].layout.dims[-2]
            nodes = (loop_over_outputs(rows, f"{rows.window_dim.axis}.line", nodes),)
        return nodes

    def _store_line(self, sums: list[StagedReduction], width: int) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for node in self._statements(sums):
            if width < MIN_VECTOR_OUTPUTS:
                nodes.append(Loop(LANE, width, LoopKind.SERIAL, (node,)))
            else:
                nodes += for_lanes(width, node)
        return tuple(nodes)

    def _statements(self, sums: list[StagedReduction]) -> Iterator[Compute]:
        results = {s.window.statement.output: s.result(ref(LANE)) for s in sums}
        buffered = self._row_tensors()
        unbuffered = {name: total for name, total in results.items() if name not in buffered}
        at: dict[str, Expr] = {}
        for axis in self.space.axes:
            inside = ref(LANE) if axis is self.space.axes[-1] else ref(f"{axis.name}.line")
            at[axis.name] = add(ref(f"{axis.name}.first"), inside)
        reads = RowReads(buffered, (ref(LANE),), at)
        for statement in self.group.statements:
            value = (
                results[statement.output] if is_reduction(statement) else reads.apply(_replace_loads(statement.body, unbuffered))
            )
            yield from reads.store(self.group, statement, value)

    def _row_tensors(self) -> frozenset[str]:
        """Return the tensors that later statements read from a buffer.

        Reduction results that need no conversion are read from the reduction's own buffer. A load across two recent
        vector stores would stall (failed store forwarding).
        """
        statements = (window.statement for window in self.space.reductions)
        return row_tensors(self.group) - {s.output for s in statements if s.accumulator is s.type.dtype}

    def _row_buffers(self) -> list[Storage]:
        width = self.space.axes[-1]
        count = min(width.extent, self.program.block[width.name])
        return row_storages(self.group.statements, self._row_tensors(), count, scope=Scope.STACK)


def _replace_loads(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace loads of the tensors in `values` by their values."""
    return rewrite(expr, lambda node: values.get(node.tensor, node) if isinstance(node, Load) else node)
