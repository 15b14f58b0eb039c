"""Nest group and its rProgram → schedule tree for a CPU: tasks, rows, vector lanes.

Schedule tree of a nest on a CPU → the same with results stored past the caches, and no prefetches of their lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from roller_svc.analysis.online_reduction import Joint
from roller_svc.families.common.cpu.column_reduction import walks_columns
from roller_svc.families.common.cpu.parallel_loops import Together, outer_loops
from roller_svc.families.common.cpu.prefetch import Stream, hints_pay, streams
from roller_svc.families.common.scatter import lower_scatter
from roller_svc.families.cpu.loops.argreduce import Placing, placed_joints
from roller_svc.families.cpu.loops.cached_intermediates import Kept, kept_values
from roller_svc.families.cpu.loops.column_reduction import column_walk
from roller_svc.families.cpu.loops.gather_prefetch import gathered_rows
from roller_svc.families.cpu.loops.reciprocal_division import row_quotient
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, loads_of, rewrite, substitute
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    ScheduleTree,
    Storage,
    iter_nodes,
)
from roller_svc.schedule.guards import without_guards_inside
from roller_svc.schedule.nest_statements import (
    RowReads,
    acc_name,
    converted,
    inner_axes,
    is_reduction,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrapped,
)

Visit = Callable[[dict[str, Expr]], tuple[Node, ...]]

LANE = ".lane"
ROW = ".row"


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """A scatter is lowered in order; stores of other loop nests may be non-temporal."""
    if group.kind is GroupKind.SCATTER:
        return lower_scatter(group, hw.family)
    trees = lower_nest(group, program, hw)
    return tuple(past_caches(tree, group) for tree in trees) if program.nontemporal else trees


def lower_nest(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """One tree: parallel tasks over block tiles of the outer axes, rows inside, lanes innermost."""
    side_by_side = _side_by_side(group, program)
    is_vector = side_by_side is not None and program.reduce_threads == 1
    if is_vector and side_by_side is not None and walks_columns(group.space):
        return (ScheduleTree(group.name, column_walk(group, program, side_by_side)),)
    native = min(program.reduce_threads, program.unit.shape[-1])
    along_memory = not is_vector or side_by_side == _last_wide(group)
    walked = streams(group, program, hw) if along_memory else {}
    kept = kept_values(group) if along_memory else {}
    placed = placed_joints(group)

    def rows(at: dict[str, Expr], width: int) -> tuple[Node, ...]:
        if not is_vector and width == 1:  # one row alone, in no loop over rows
            at = {name: substitute(place, {ROW: num(0)}) for name, place in at.items()}
        hint_bytes = hw.dram.transaction_bytes if hints_pay(group, program, hw) else None
        return _Rows(
            group, at, is_vector, width, program.reduce_threads, native, walked, kept, placed, hint_bytes
        ).nodes()

    together = None
    if side_by_side is not None:
        together = Together(side_by_side, program.thread[side_by_side.name], ref(LANE if is_vector else ROW))
    tree = ScheduleTree(group.name, outer_loops(group, program, together, rows))
    return (gathered_rows(tree, group, program, hw),)


def _side_by_side(group: KernelGroup, program: RProgram) -> Axis | None:
    """The outer axis several points of which are computed at once, if one is: as the lanes of a vector or, where lanes
    share a reduction, as rows that are walked together."""
    for axis in group.outer:
        if program.thread[axis.name] > 1:
            return axis
    return None


def _last_wide(group: KernelGroup) -> Axis | None:
    return next((a for a in reversed(group.outer) if a.extent > 1), None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The statements of a group at `width` neighbouring outer points: lanes of a vector (`is_vector`), or rows whose
    inner axes are cut into `lanes`."""

    group: KernelGroup
    at: dict[str, Expr]
    is_vector: bool
    width: int
    lanes: int
    native: int  # lanes of one vector register
    walked: dict[str, tuple[Stream, ...]]  # what each statement streams through, by its output
    kept: dict[str, Kept]  # what waits of each reduction, by its output
    placed: dict[str, Joint]  # pairs of an extreme and its place, by the outputs of both
    hint_bytes: int | None  # what one hint asks for; None: hints do not pay

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        reads = RowReads(rows, self._row_index, self.at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            storages += self._storages(statement, in_row=statement.output in rows)
            nodes += self._statement(statement, reads, in_row=statement.output in rows)
        return wrapped(storages, tuple(nodes))

    @property
    def _row_index(self) -> tuple[Expr, ...]:
        """Where a row tensor's value of one outer point lies."""
        if self.is_vector:
            return (ref(LANE),)
        return (ref(ROW),) if self.width > 1 else ()

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.width,) if self._row_index else ()

    def _storages(self, statement: TensorExpr, *, in_row: bool) -> list[Storage]:
        found = []
        if is_reduction(statement):
            lanes = self._lanes_of(statement)
            shape = self._shape if lanes == 1 else (*self._shape, lanes)
            dtype = self._accumulator(statement)
            acc = register(acc_name(statement.output), dtype, *shape)
            found.append(replace(acc, ordered=self.width > 1 and self._in_turn(statement)))
            if lanes > 1:
                found.append(register(f"{acc_name(statement.output)}.total", dtype, *self._shape))
        if in_row:
            found.append(register(local_name(statement.output), row_dtype(statement), *self._shape))
        return found

    def _placing(self, statement: TensorExpr) -> Placing | None:
        """The pass in which lanes find an extreme and its place, where the statement asks for one of them."""
        joint = self.placed.get(statement.output)
        return Placing(joint) if joint is not None and self._lanes_of(statement) > 1 else None

    def _accumulator(self, statement: TensorExpr) -> DType:
        placing = self._placing(statement)
        return placing.dtype if placing is not None and statement is placing.joint.second else statement.accumulator

    def _lanes_of(self, statement: TensorExpr) -> int:
        """Lanes that share this statement's inner axis: none where it is shorter than they are."""
        inner = inner_axes(statement, self.group.outer)
        if self.is_vector or not inner or inner[-1].extent < self.lanes:
            return 1
        return self.lanes

    def _across(self, *nodes: Node) -> tuple[Node, ...]:
        """The nodes for every outer point at hand."""
        if self.is_vector:
            return (without_guards_inside(Loop(LANE, self.width, LoopKind.VECTOR, nodes)),)
        return (Loop(ROW, self.width, LoopKind.UNROLL, nodes),) if self.width > 1 else nodes

    def _statement(self, statement: TensorExpr, reads: RowReads, *, in_row: bool) -> list[Node]:
        nodes: list[Node] = []
        inner = inner_axes(statement, self.group.outer)
        if is_reduction(statement):
            placing = self._placing(statement)
            if placing is None:
                nodes += self._reduction(statement, inner, reads)
            elif statement is placing.joint.first:
                nodes += self._search(placing, inner, reads)
            name = acc_name(statement.output) + (".total" if self._lanes_of(statement) > 1 else "")
            value: Expr = Load(name, self._row_index, self._accumulator(statement))
        elif inner:
            return self._map(statement, inner, reads)
        else:
            value = reads.apply(statement.body)
        value = converted(value, statement)
        if in_row:
            nodes += self._across(Compute(local_name(statement.output), self._row_index, value))
            value = Load(local_name(statement.output), self._row_index, statement.type.dtype)
        if statement.output not in self.group.register_tensors:
            index = tuple(reads.apply(i) for i in statement.index)
            nodes += self._across(Compute(statement.output, index, value))
            if self.is_vector:
                mine = self.walked.get(statement.output, ())
                here = [s for s in mine if s.for_write or not is_reduction(statement)]
                nodes += self._ahead(here, self.width, self.at)
        return nodes

    def _map(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        """A map over inner axes: of rows, one after the other."""
        kept = next((k for k in self.kept.values() if k.map_ is statement), None)
        body = statement.body if kept is None else kept.body
        if self.is_vector:
            return self._stores(statement, body, reads)
        reciprocal = f"{statement.output}.reciprocal"
        quotient = row_quotient(body, frozenset(a.name for a in inner), reciprocal)
        if quotient is None:
            return list(self._across(*self._stores(statement, body, reads)))
        products = (
            Compute(reciprocal, (), reads.apply(quotient.inverse)),
            *self._stores(statement, quotient.body, reads),
        )
        inverted = replace(register(reciprocal, quotient.dtype), body=products)
        quotients = tuple(self._stores(statement, body, reads))
        return list(self._across(Branch(reads.apply(quotient.is_safe), (inverted,), quotients)))

    def _stores(self, statement: TensorExpr, body: Expr, reads: RowReads) -> list[Node]:
        """Loops over the inner axes that put what `body` says in place."""
        inner = inner_axes(statement, self.group.outer)

        def store(at: dict[str, Expr]) -> tuple[Node, ...]:
            place = reads.with_axes(at)
            index = tuple(place.apply(i) for i in statement.index)
            return (Compute(statement.output, index, converted(place.apply(body), statement)),)

        if self._lanes_of(statement) == 1:
            here = store({a.name: ref(a.name) for a in inner})
            return self._around(inner, list(self._across(*here) if self.is_vector else here))
        return [*self._pieces(statement, inner, store), *self._remainder(statement, inner, store)]

    def _reduction(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        combine = statement.combine or Combine.SUM
        acc, lanes = acc_name(statement.output), self._lanes_of(statement)
        start = identity(combine, statement.accumulator)
        if lanes == 1:
            here = reads.with_axes({a.name: ref(a.name) for a in inner})
            join = self._join(statement, here, acc, self._row_index)
            first = Compute(acc, self._row_index, start)
            return [*self._across(first), *self._around(inner, list(self._across(*join)))]
        place = (*self._row_index, ref(LANE))

        def join_lane(at: dict[str, Expr]) -> tuple[Node, ...]:
            return self._join(statement, reads.with_axes(at), acc, place)

        def join_total(at: dict[str, Expr]) -> tuple[Node, ...]:
            return self._join(statement, reads.with_axes(at), f"{acc}.total", self._row_index)

        return [
            *self._across(Loop(LANE, lanes, LoopKind.VECTOR, (Compute(acc, place, start),))),
            *self._pieces(statement, inner, join_lane),
            *self._across(*self._fold_lanes(acc, lanes, combine, statement.accumulator)),
            *self._remainder(statement, inner, join_total),
        ]

    def _join(self, statement: TensorExpr, here: RowReads, to: str, index: tuple[Expr, ...]) -> tuple[Node, ...]:
        """A point's value joined to an accumulator, and the part of it that waits put where it does."""
        combine = statement.combine or Combine.SUM
        kept = self.kept.get(statement.output)
        if kept is None:
            return (Compute(to, index, here.apply(statement.body), combine),)
        body = rewrite(statement.body, lambda node: kept.waiting if node == kept.value else node)
        waiting = tuple(here.apply(i) for i in kept.index)
        return (
            Compute(kept.map_.output, waiting, here.apply(kept.value)),
            Compute(to, index, here.apply(body), combine),
        )

    def _search(self, placing: Placing, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        """Both reductions of a joint, in one pass."""
        first, row = placing.joint.first, self._row_index
        lane = (*row, ref(LANE))

        def update(index: tuple[Expr, ...], at: dict[str, Expr], part: str) -> tuple[Node, ...]:
            here = reads.with_axes(at)
            value, place = here.apply(placing.joint.value), here.apply(placing.place)
            return placing.update(index, value, place, part, in_order=placing.is_in_order(inner))

        return [
            *self._across(Loop(LANE, self.lanes, LoopKind.VECTOR, placing.start(lane))),
            *self._pieces(first, inner, lambda at: update(lane, at, "")),
            *self._across(*placing.fold(row, ref(LANE), self.lanes, self.native)),
            *self._remainder(first, inner, lambda at: update(row, at, ".total")),
            *self._across(*placing.end(row)),
        ]

    def _fold_lanes(self, acc: str, lanes: int, combine: Combine, dtype: DType) -> list[Node]:
        """Vectors onto each other until one is left, then its lanes."""
        nodes: list[Node] = []
        row = self._row_index
        while lanes > self.native:
            lanes //= 2
            other = Load(acc, (*row, add(ref(LANE), num(lanes))), dtype)
            nodes.append(Loop(LANE, lanes, LoopKind.VECTOR, (Compute(acc, (*row, ref(LANE)), other, combine),)))
        first = Load(acc, (*row, num(0)), dtype)
        return [*nodes, HorizontalReduce(f"{acc}.total", row, first, lanes, combine)]

    def _pieces(self, statement: TensorExpr, inner: tuple[Axis, ...], visit: Visit) -> list[Node]:
        """Loops over the inner axes, the innermost in pieces of `lanes`, then whole vectors of what is left: of a
        reduction for all rows at hand, each with its own accumulators. Rows that come from beyond a core's own caches
        are read one after the other: a walk in the order of memory is what prefetchers follow best, and a row's sums
        do not wait for those of the row before."""
        lanes, last, rest = self._lanes_of(statement), inner[-1], inner[:-1]
        at: dict[str, Expr] = {a.name: ref(a.name) for a in rest}
        walked = self._in_pieces(statement)
        in_turn = self._in_turn(statement)
        across = self._across if is_reduction(statement) and not in_turn else _alone
        nodes: list[Node] = []
        if full := last.extent // lanes:
            piece = ref(f"{last.name}.piece")
            here = {**at, last.name: add(mul(piece, num(lanes)), ref(LANE))}
            vector = without_guards_inside(Loop(LANE, lanes, LoopKind.VECTOR, visit(here)))
            hints = self._ahead(walked, lanes, {**self.at, **here})
            nodes.append(Loop(piece.name, full, LoopKind.SERIAL, across(vector, *hints)))
        done = full * lanes
        if vectors := (last.extent - done) // self.native * self.native:
            here = {**at, last.name: add(num(done), ref(LANE))}
            hints = self._ahead(walked, vectors, {**self.at, **here})
            nodes += across(Loop(LANE, vectors, LoopKind.VECTOR, visit(here)), *hints)
        around = self._around(rest, nodes)
        return list(self._across(*around)) if in_turn and around else around

    def _in_turn(self, statement: TensorExpr) -> bool:
        """Whether rows at hand are read one after the other."""
        return is_reduction(statement) and bool(self._in_pieces(statement))

    def _ahead(self, walked: Iterable[Stream], lanes: int, at: dict[str, Expr]) -> list[Node]:
        """Hints for what is streamed through, as much of it as `lanes` neighbours take."""
        if self.hint_bytes is None:
            return []
        return [hint for stream in walked for hint in stream.ahead(LANE, lanes, self.hint_bytes, at)]

    def _in_pieces(self, statement: TensorExpr) -> list[Stream]:
        """What the pieces of a statement are the first to touch: of a reduction what it reads, and what waits."""
        mine = self.walked.get(statement.output, ())
        if not is_reduction(statement):
            waits = any(kept.map_ is statement for kept in self.kept.values())
            return [s for s in mine if not (s.for_write and waits)]
        found = [s for s in mine if not s.for_write]
        if (kept := self.kept.get(statement.output)) is not None:
            places = self.walked.get(kept.map_.output, ())
            found += [replace(s, index=kept.index) for s in places if s.for_write]
        return found

    def _remainder(self, statement: TensorExpr, inner: tuple[Axis, ...], visit: Visit) -> list[Node]:
        """Loops over what is less than a vector at the end of the innermost axis."""
        last, rest = inner[-1], inner[:-1]
        count = last.extent % self.native
        if not count:
            return []
        at: dict[str, Expr] = {a.name: ref(a.name) for a in rest}
        rest_of_row = visit({**at, last.name: add(num(last.extent - count), ref(LANE))})
        across = self._across if is_reduction(statement) else _alone
        return self._around(rest, [Loop(LANE, count, LoopKind.SERIAL, across(*rest_of_row))])

    @staticmethod
    def _around(axes: tuple[Axis, ...], nodes: list[Node]) -> list[Node]:
        for axis in reversed(axes):
            nodes = [Loop(axis.name, axis.extent, LoopKind.SERIAL, tuple(nodes))]
        return nodes


def _alone(*nodes: Node) -> tuple[Node, ...]:
    return nodes


def past_caches(tree: ScheduleTree, group: KernelGroup) -> ScheduleTree:
    """For results that nobody reads soon: those of the group that no node reads, be it what waits there of a row."""
    read = {t for s in group.statements for t in s.reads_tensors}
    read |= {x.tensor for n in iter_nodes(tree.body) if isinstance(n, Compute) for x in loads_of(n.value)}
    results = frozenset(name for name, _ in group.stored) - read
    return replace(tree, body=_streamed(tree.body, results))


def _streamed(nodes: tuple[Node, ...], results: frozenset[str]) -> tuple[Node, ...]:
    found: list[Node] = []
    for node in nodes:
        match node:
            case Loop(kind=LoopKind.VECTOR, body=body):
                found.append(replace(node, body=tuple(_stored(n, results) for n in body)))
            case Loop(body=body) | Let(body=body) | Storage(body=body):
                found.append(replace(node, body=_streamed(body, results)))
            case Branch(then=then, otherwise=otherwise):
                found.append(replace(node, then=_streamed(then, results), otherwise=_streamed(otherwise, results)))
            case Prefetch(tensor=tensor, for_write=True) if tensor in results:
                pass
            case _:
                found.append(node)
    return tuple(found)


def _stored(node: Node, results: frozenset[str]) -> Node:
    is_result = isinstance(node, Compute) and node.tensor in results and node.combine is None
    return replace(node, nontemporal=True) if is_result and isinstance(node, Compute) else node
