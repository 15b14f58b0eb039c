"""Map group and its rProgram → schedule tree for a GPU: vector accesses in flight, transposed tiles in shared memory.

A tensor along another axis than the result is read along its own axis to shared memory and used along the result's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from roller_svc.analysis.columns import Columns, find_columns
from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.families.common.gpu.elementwise_space import MapAccess, MapSpace, lanes_along, map_space
from roller_svc.families.common.gpu.launch_bounds import min_resident_blocks
from roller_svc.families.gpu.elementwise import ELEMENTWISE
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, loads_of, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, div, le, linearize, lt, mod, mul, num, ref
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import RowReads, nest_loops, row_storages, row_tensors, wrap_in_storages

THREAD, ITEM = ".thread", ".item"


def lower(group: KernelGroup, program: RProgram, workload: Workload[MapSpace]) -> tuple[ScheduleTree, ...]:
    """Return one tree: a thread processes vectors along the row, each one round of threads further."""
    resident = min_resident_blocks(ELEMENTWISE.model(workload), program)
    return (ScheduleTree(group.name, _Map(group, program).blocks(), resident=resident),)


@dataclass(frozen=True)
class _Map:
    group: KernelGroup
    program: RProgram

    @cached_property
    def map(self) -> MapSpace:
        return map_space(self.program.space)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.program.space.axes)

    @cached_property
    def block(self) -> dict[str, int]:
        return self.program.block.as_dict()

    @cached_property
    def staged(self) -> tuple[MapAccess, ...]:
        loads = [load for s in self.group.statements for load in s.reads]
        staged = self.map.staged_accesses(self._tile(self.program.block))
        return tuple(a for a in staged if any(self._is_access(load, a) for load in loads))

    def _tile(self, tile: RTile) -> tuple[int, ...]:
        return tuple(tile[name] for name in self.names)

    @cached_property
    def row(self) -> str:
        return self.names[self.map.row]

    @cached_property
    def width(self) -> int:
        return self.map.thread_vector_width(self._tile(self.program.thread))

    def threads(self, axis: str) -> int:
        return self.block[axis] // self.program.thread[axis]

    def blocks(self) -> tuple[Node, ...]:
        nodes = self._points()
        if self.staged:
            staging = [node for access in self.staged for node in self._stage(access)]
            nodes = wrap_in_storages([self._buffer(a) for a in self.staged], (*staging, Barrier(), *nodes))
        order = [self.names[i] for i in self.map.thread_order(self._tile(self.program.block))]
        threads = [(f"{axis}.thread", self.threads(axis)) for axis in order]
        thread = linearize((ref(name), count) for name, count in threads)
        nodes = nest_loops(LoopKind.THREAD, threads, (Let(THREAD, thread, nodes),))
        blocks = [(f"{axis.name}.block", ceil_div(axis.extent, self.block[axis.name])) for axis in self.group.outer]
        return nest_loops(LoopKind.BLOCK, blocks, nodes)

    # points ---------------------------------------------------------------------------------------------------------
    def _points(self) -> tuple[Node, ...]:
        """Return all points of a thread: vectors along the row, and elements of the other axes."""
        row, width = self.row, self.width
        first = ref(f"{row}.first")
        at = {a.name: ref(f"{a.name}.at") for a in self.group.outer}
        in_tile = {a.name: ref(f"{a.name}.here") for a in self.group.outer}

        def point(lane: Expr | None, columns: Mapping[Expr, Expr] = MappingProxyType({})) -> tuple[Node, ...]:
            position = first if lane is None else add(first, lane)
            local = ref(f"{row}.here") if lane is None else add(ref(f"{row}.here"), lane)
            return self._statements({**at, row: position}, {**in_tile, row: local}, lane, columns)

        def whole(lane: Expr | None) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
            return self._load_columns({**at, row: first}), point(lane, self._columns_at(num(0) if lane is None else lane))

        nodes = wrap_in_storages(self._column_buffers(), self._adjacent(row, first, width, point, whole))
        buffers = row_storages(self.group.statements, row_tensors(self.group), *((width,) if width > 1 else ()))
        nodes = wrap_in_storages(buffers, nodes)
        for axis in reversed(self.group.outer):
            if axis.name != row and axis.extent % self.block[axis.name]:
                nodes = (Branch(lt(ref(f"{axis.name}.at"), num(axis.extent)), nodes),)
        for axis in sorted(self.group.outer, key=lambda a: a.name != row):
            step = width if axis.name == row else 1
            nodes = self._elements(axis.name, step, "first" if axis.name == row else "at", nodes)
        return nodes

    def _elements(self, axis: str, step: int, name: str, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over a thread's elements of an axis, `step` at a time, each one round of threads further."""
        threads, count = self.threads(axis), self.program.thread[axis] // step
        offset = mul(ref(f"{axis}.thread"), num(step))
        if count > 1:
            offset = add(mul(ref(f"{axis}.element"), num(threads * step)), offset)
        block = mul(ref(f"{axis}.block"), num(self.block[axis]))
        if self.staged:
            nodes = (Let(f"{axis}.{name}", add(block, ref(f"{axis}.here")), nodes),)
            nodes = (Let(f"{axis}.here", offset, nodes),)
        else:
            nodes = (Let(f"{axis}.{name}", add(block, offset), nodes),)
        return (Loop(f"{axis}.element", count, LoopKind.UNROLL, nodes),) if count > 1 else nodes

    def _adjacent(
        self,
        axis: str,
        first: Expr,
        width: int,
        body: Callable[[Expr | None], tuple[Node, ...]],
        whole: Callable[[Expr | None], tuple[tuple[Node, ...], tuple[Node, ...]]] | None = None,
    ) -> tuple[Node, ...]:
        """Execute the body for `width` adjacent elements from `first`, without those beyond the axis.

        `whole` returns what precedes a vector of elements that all exist, and their body, where it differs.
        """
        extent = self._extent(axis)
        lane = ref(f"{axis}.lane")
        given = None if width == 1 else lane
        before, vector = ((), body(given)) if whole is None else whole(given)
        if width == 1:
            nodes = (*before, *vector)
            return nodes if extent % self.block[axis] == 0 else (Branch(lt(first, num(extent)), nodes),)
        full = (*before, Loop(lane.name, width, LoopKind.VECTOR, vector))
        if extent % self.block[axis] == 0:
            return full
        if extent % width == 0:
            return (Branch(lt(first, num(extent)), full),)
        guarded = (Branch(lt(add(first, lane), num(extent)), body(lane)),)
        tail = (Loop(lane.name, width, LoopKind.UNROLL, guarded),)
        return (Branch(le(add(first, num(width)), num(extent)), full, tail),)

    def _extent(self, axis: str) -> int:
        return next(a.extent for a in self.group.outer if a.name == axis)

    # columns --------------------------------------------------------------------------------------------------------
    @cached_property
    def columns(self) -> dict[str, Columns]:
        """Return the columns that are read whatever the conditions are, by the names of their registers.

        They are loaded before the statements, so no index is what a statement computes.
        """
        written = {s.output for s in self.group.statements}
        loads = (load for s in self.group.statements for load in unconditional_loads(s.body))
        found = find_columns(load for load in loads if written.isdisjoint(x.tensor for x in loads_of(load)))
        return {f"{columns.first.tensor}.columns{number}": columns for number, columns in enumerate(found)}

    def _column_buffers(self) -> list[Storage]:
        """Return the registers of the columns of a thread's vector."""
        return [Storage(name, c.first.dtype, (self.width * c.count,), Scope.REGISTER, ()) for name, c in self.columns.items()]

    def _load_columns(self, at: Mapping[str, Expr]) -> tuple[Node, ...]:
        """Load the columns of the vector at these positions: together where points have no elements between them."""
        nodes: list[Node] = []
        for name, columns in self.columns.items():
            form = affine(columns.first.index[-1])
            is_dense = form is not None and form.coeff(self.row) == columns.count
            together = self.width if is_dense else 1
            column = ref(f"{name}.column")
            for point in range(0, self.width, together):
                *outer, last = (substitute(i, {**at, self.row: add(at[self.row], num(point))}) for i in columns.first.index)
                value = replace(columns.first, index=(*outer, add(last, column)))
                fill = Compute(name, (add(column, num(point * columns.count)),), value)
                nodes.append(Loop(column.name, columns.count * together, LoopKind.VECTOR, (fill,)))
        return tuple(nodes)

    def _columns_at(self, lane: Expr) -> dict[Expr, Expr]:
        """Return the registers that replace the loads of columns at a lane."""
        return {
            load: Load(name, (add(mul(lane, num(columns.count)), num(place)),), load.dtype)
            for name, columns in self.columns.items()
            for load, place in columns.places
        }

    def _statements(
        self, at: dict[str, Expr], in_tile: dict[str, Expr], lane: Expr | None, columns: Mapping[Expr, Expr]
    ) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        reads = RowReads(rows, () if lane is None else (lane,), at)
        nodes: list[Node] = []
        for statement in self.group.statements:
            body = rewrite(statement.body, lambda node: columns.get(node, node))
            value = reads.apply(self._load_from_buffers(body, in_tile))
            nodes += reads.store(self.group, statement, value)
        return tuple(nodes)

    def _load_from_buffers(self, body: Expr, in_tile: dict[str, Expr]) -> Expr:
        """Replace loads of staged tensors by loads of their tiles."""

        def change(node: Expr) -> Expr:
            if not isinstance(node, Load):
                return node
            staged = next((a for a in self.staged if self._is_access(node, a)), None)
            return node if staged is None else Load(self._buffer_name(staged), self._tile_index(staged, in_tile), node.dtype)

        return rewrite(body, change)

    # staging --------------------------------------------------------------------------------------------------------
    def _buffer(self, staged: MapAccess) -> Storage:
        shape = tuple(self.block[axis] for axis in self._axes(staged))
        pad = self.map.padded_layout(staged, self._tile(self.program.block), self._tile(self.program.thread)).pad
        return Storage(self._buffer_name(staged), staged.access.dtype, shape, Scope.SHARED, (), pad)

    def _stage(self, staged: MapAccess) -> tuple[Node, ...]:
        """Load the tile by all threads, in vectors along its own axis, some lanes along each line."""
        *others, axis = self._axes(staged)
        width = math.gcd(staged.vector_width, self.block[axis])
        vectors = self.block[axis] // width
        along = lanes_along(vectors, width * staged.bytes)
        in_tile: dict[str, Expr] = {name: ref(f"{name}.staged") for name in (*others, axis)}
        at = {name: add(mul(ref(f"{name}.block"), num(self.block[name])), position) for name, position in in_tile.items()}

        def element(lane: Expr | None) -> tuple[Node, ...]:
            step = num(0) if lane is None else lane
            load = self._load(staged, {**at, axis: add(at[axis], step)})
            return (
                Compute(
                    self._buffer_name(staged),
                    self._tile_index(staged, {**in_tile, axis: add(in_tile[axis], step)}),
                    load,
                ),
            )

        nodes = self._adjacent(axis, at[axis], width, element)
        for name in others:
            if self._extent(name) % self.block[name]:
                nodes = (Branch(lt(at[name], num(self._extent(name))), nodes),)
        line = div(ref(ITEM), along)
        for name in reversed(others):
            nodes = (Let(f"{name}.staged", mod(line, self.block[name]), nodes),)
            line = div(line, self.block[name])
        vector = add(mul(line, num(along)), mod(ref(ITEM), along))
        nodes = (Let(f"{axis}.staged", mul(vector, num(width)), nodes),)
        return self._split_over_threads(math.prod(self.block[name] for name in others) * vectors, nodes)

    def _split_over_threads(self, items: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Split the items cyclically over the threads."""
        threads = self.program.threads
        if items % threads:
            nodes = (Branch(lt(ref(ITEM), num(items)), nodes),)
        nodes = (Let(ITEM, add(mul(ref(".round"), num(threads)), ref(THREAD)), nodes),)
        return (Loop(".round", ceil_div(items, threads), LoopKind.UNROLL, nodes),)

    def _axes(self, staged: MapAccess) -> tuple[str, ...]:
        """Return the axes of a staged tile, the tensor's own last."""
        return tuple(self.names[i] for i in staged.tile_axes(self.map.row))

    def _tile_index(self, staged: MapAccess, in_tile: dict[str, Expr]) -> tuple[Expr, ...]:
        """Return the index in the tile at these positions of its axes."""
        return tuple(in_tile[axis] for axis in self._axes(staged))

    def _load(self, staged: MapAccess, at: dict[str, Expr]) -> Load:
        """Return the element in memory at these positions of its axes."""
        load = next(x for s in self.group.statements for x in s.reads if self._is_access(x, staged))
        return replace(load, index=tuple(substitute(i, at) for i in load.index))

    def _is_access(self, load: Load, staged: MapAccess) -> bool:
        """Return whether the load is the staged access."""
        if load.tensor != staged.access.tensor or any(load.bounds_checked):
            return False
        if not all(isinstance(i, AxisRef | Const) for i in load.index):
            return False
        names = [i.name for i in load.index if isinstance(i, AxisRef) and self._extent(i.name) > 1]
        return names == [self.names[i] for i in staged.index or ()]

    def _buffer_name(self, staged: MapAccess) -> str:
        """Return the name of the shared tile of one access pattern of a tensor."""
        return ".".join((staged.access.tensor, "shared", *(self.names[i] for i in staged.index or ())))
