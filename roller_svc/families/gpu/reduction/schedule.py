"""Reducing group and its rProgram → schedule tree for a GPU: rows shared by lanes, read once where they fit.

The rProgram's tiles on the inner axis: a thread's is a run of neighbours that it takes at once, the block's is what all
lanes have in flight together. Where that is the whole row, what several statements read of it stays in registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roller_svc.analysis.online_reduction import OnlineReductionKind, online_reductions
from roller_svc.families.gpu.reduction import REDUCTION
from roller_svc.families.gpu.reduction.block_reduce import joined_lanes, lane_rooms
from roller_svc.families.gpu.reduction.online_reduction import JointPass
from roller_svc.families.gpu.reduction.thread_mapping import (
    LANE,
    PLACE,
    ROUND,
    RowWalk,
    ThreadRows,
    Walked,
    alike,
    row_walk,
)
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, eq, num, ref
from roller_svc.ir.program import Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node, ScheduleTree, Storage
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.schedule.nest_statements import (
    acc_name,
    convert_to_type,
    is_reduction,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrap_in_storages,
)

# A compiler takes more registers than what lives through a loop: addresses, what it computes ahead of its use.
REGISTERS_SPARE = 1.25


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """One tree: every lane reduces its part of a row, the lanes join theirs, statement by statement."""
    rows = ThreadRows(group, program, hw.limits.warp_size)
    walks = {s.output: row_walk(s, group.outer, program) for s in group.statements}
    reduction = _Reduction(group, rows, walks, row_tensors(group), _held(group, rows, walks)).with_pairs()
    return (ScheduleTree(group.name, rows.around(reduction.nodes()), resident=_resident(group, program, hw)),)


def _resident(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> int:
    """Blocks that a core shall hold: as many as the model counts on, where there are so many."""
    needs = REDUCTION.predict_resources(group, program, hw)
    if needs is None:
        return 1
    needs = replace(needs, registers_per_thread=round(needs.registers_per_thread * REGISTERS_SPARE))
    return min(blocks_per_core(needs, hw), ceil_div(program.grid, hw.num_cores))


def _walked(statement: TensorExpr, rows: ThreadRows, walk: RowWalk | None, outer: dict[str, Expr]) -> Walked:
    """Where the statement's axes stand, its outer ones as given."""
    if walk is None:
        return Walked(statement.extents, outer, rows.places)
    return Walked(statement.extents, outer | walk.at, rows.places | {PLACE: walk.run})


def _held(group: KernelGroup, rows: ThreadRows, walks: dict[str, RowWalk | None]) -> dict[Load, str]:
    """Loads, over loop variables, that several statements make of whole rows in flight → where they are kept."""
    walking = [(s, walk) for s in group.statements if (walk := walks[s.output]) is not None]
    if not all(walk.is_whole and walk.steps_like == walking[0][1].steps_like for _, walk in walking):
        return {}
    kept = row_tensors(group)
    elements = {element.name for element in rows.elements}
    seen: dict[Load, int] = {}
    for statement, walk in walking:
        body = _walked(statement, rows, walk, rows.read_at).apply(statement.body)
        for load in dict.fromkeys(_unconditional(body)):
            used = axes_of(load)
            moves = any(name.startswith(".k") for name in used) and elements <= used
            if moves and not any(inner.tensor in kept for inner in loads_of(load)):
                seen[load] = seen.get(load, 0) + 1
    often = [load for load, count in seen.items() if count > 1]
    return {load: f"{load.tensor}.held{i}" for i, load in enumerate(often)}


def _unconditional(expr: Expr) -> Iterator[Load]:
    """Loads that are made whatever the values are."""
    match expr:
        case Load():
            yield expr
            return
        case Select(cond=cond):
            yield from _unconditional(cond)
            return
        case Op(kind=OpKind.LAND | OpKind.LOR, args=(first, _)):
            yield from _unconditional(first)
            return
        case _:
            for child in children(expr):
                yield from _unconditional(child)


@dataclass(frozen=True, slots=True)
class _Reduction:
    group: KernelGroup
    rows: ThreadRows
    walks: dict[str, RowWalk | None]
    kept: frozenset[str]  # tensors of one value a row that later statements read
    held: dict[Load, str]
    pairs: tuple[JointPass, ...] = ()

    def nodes(self) -> tuple[Node, ...]:
        """All statements, one after the other, in the storages that pass values between them."""
        storages: list[Storage] = []
        nodes: list[Node] = []
        if self.held:
            walk = next(walk for walk in self.walks.values() if walk is not None)
            shape = (*self.rows.shape, walk.rounds, walk.run)
            storages += [register(name, load.dtype.compute, *shape) for load, name in self.held.items()]
            fill = [Compute(name, self._held_index(walk), load) for load, name in self.held.items()]
            nodes += walk.visited(lambda: tuple(node for one in fill for node in self._over_run(walk, one)))
        for statement in self.group.statements:
            if is_reduction(statement):
                storages.append(register(acc_name(statement.output), statement.accumulator, *self.rows.shape))
                storages += self._part_rooms(statement)
                storages += [s for pair in self.pairs if pair.joint.first is statement for s in pair.storages()]
                storages += lane_rooms(self.rows, statement)
            if statement.output in self.kept:
                storages.append(register(local_name(statement.output), row_dtype(statement), *self.rows.shape))
            nodes += self._statement(statement, self.walks[statement.output])
        return wrap_in_storages(storages, tuple(nodes))

    def _statement(self, statement: TensorExpr, walk: RowWalk | None) -> list[Node]:
        if walk is not None and not is_reduction(statement):
            return self._mapped(statement, walk)
        nodes: list[Node] = []
        if walk is not None:
            nodes += self._reduced(statement, walk)
            value: Expr = Load(acc_name(statement.output), self.rows.elements, statement.accumulator)
        else:
            value = self._placed(statement, None)
        value = convert_to_type(value, statement)
        if statement.output in self.kept:
            row = Compute(local_name(statement.output), self.rows.elements, value)
            nodes += self.rows.each((row,), vector=False)
            value = Load(local_name(statement.output), self.rows.elements, statement.type.dtype)
        if statement.output not in self.group.register_tensors:
            stored = self.rows.each((Compute(statement.output, self._index(statement, None), value),), guarded=True)
            nodes += [Branch(eq(ref(LANE), num(0)), stored)] if self.rows.lanes > 1 else stored
        return nodes

    def _reduced(self, statement: TensorExpr, walk: RowWalk) -> list[Node]:
        """Places of a run are summed up apart from each other: lanes of a vector do not wait for one another."""
        for pair in self.pairs:
            if pair.joint.first is statement:
                return [*self._pass_of_both(pair, walk), *pair.first_of_lane(), *joined_lanes(self.rows, statement)]
            if pair.joint.second is statement:
                return [*pair.second_of_lane(), *joined_lanes(self.rows, statement), *pair.correction()]
        combine, acc = statement.combine or Combine.SUM, acc_name(statement.output)
        rows, parted = self.rows, self._is_parted(walk)
        target = _part_name(statement) if parted else acc
        index = (*rows.elements, ref(PLACE)) if parted else rows.elements
        start: tuple[Node, ...] = (Compute(target, index, identity(combine, statement.accumulator)),)
        guard, body = self._lifted(statement, self._placed(statement, walk), walk)
        join = Compute(target, index, body, combine)
        parts: tuple[Node, ...] = ()
        if parted:
            start = (Loop(PLACE, walk.run, LoopKind.UNROLL, start),)
            first = Compute(acc, rows.elements, Load(target, (*rows.elements, num(0)), statement.accumulator))
            after = Load(target, (*rows.elements, add(ref(PLACE), num(1))), statement.accumulator)
            others = Loop(PLACE, walk.run - 1, LoopKind.UNROLL, (Compute(acc, rows.elements, after, combine),))
            parts = rows.each((first, others), vector=False)
        return [
            *rows.each(start, vector=False),
            *walk.visited(lambda: self._over_run(walk, join, cond=guard)),
            *parts,
            *joined_lanes(rows, statement),
        ]

    def _pass_of_both(self, pair: JointPass, walk: RowWalk) -> tuple[Node, ...]:
        visited = walk.visited(lambda: (*pair.before_chunk(), *self._over_run(walk, *pair.update())))
        return (*pair.start(), *visited)

    def with_pairs(self) -> _Reduction:
        """The same, rows that do not fit read once for two reductions where one pass can do both."""
        pairs: list[JointPass] = []
        for joint in online_reductions(self.group.statements):
            walk, other = self.walks[joint.first.output], self.walks[joint.second.output]
            if walk is None or other is None or walk.is_whole or walk.steps_like != other.steps_like:
                continue
            places = walk.run if self._is_parted(walk) else 1
            if joint.kind is OnlineReductionKind.VARIANCE and places != walk.run:
                continue  # how many values a pair has seen is counted in rounds
            value, place = (
                None if expr is None else self._expression(joint.first, expr, walk)
                for expr in (joint.value, joint.index)
            )
            centre, idle = (
                None if expr is None else self._expression(joint.second, expr, None)
                for expr in (joint.mean, joint.neutral_index)
            )
            pairs.append(JointPass(joint, self.rows, walk, places, value or joint.value, centre, place, idle))
        return replace(self, pairs=tuple(pairs))

    def _lifted(self, statement: TensorExpr, body: Expr, walk: RowWalk) -> tuple[Expr | None, Expr]:
        """(condition under which a chunk is reduced, what is), where all that neighbours have is behind one guard."""
        match body:
            case Select(cond=cond, then=then, otherwise=Const() as otherwise):
                idle = otherwise == identity(statement.combine or Combine.SUM, otherwise.dtype)
                same = not {e.name for e in self.rows.elements} & axes_of(cond) and not loads_of(cond)
                if idle and same and alike(cond, PLACE, walk.run):
                    return cond if self.rows.vector else substitute(cond, {PLACE: num(0)}), then
            case _:
                pass
        return None, body

    def _is_parted(self, walk: RowWalk | None) -> bool:
        return walk is not None and walk.run > 1 and self.rows.vector is None

    def _part_rooms(self, statement: TensorExpr) -> list[Storage]:
        walk = self.walks[statement.output]
        if (
            walk is None
            or not self._is_parted(walk)
            or any(statement in (pair.joint.first, pair.joint.second) for pair in self.pairs)
        ):
            return []
        return [register(_part_name(statement), statement.accumulator, *self.rows.shape, walk.run)]

    def _mapped(self, statement: TensorExpr, walk: RowWalk) -> list[Node]:
        value = convert_to_type(self._placed(statement, walk), statement)
        store = Compute(statement.output, self._index(statement, walk), value)
        return list(walk.visited(lambda: self._over_run(walk, store, guarded=True)))

    def _placed(self, statement: TensorExpr, walk: RowWalk | None) -> Expr:
        return self._expression(statement, statement.body, walk)

    def _expression(self, statement: TensorExpr, expr: Expr, walk: RowWalk | None) -> Expr:
        """Over loop variables; rows of tensors, and of inputs that are held, in registers."""

        def change(node: Expr) -> Expr:
            if isinstance(node, Load) and node.tensor in self.kept:
                return Load(local_name(node.tensor), self.rows.elements, node.dtype)
            if isinstance(node, Load) and node in self.held and walk is not None:
                return Load(self.held[node], self._held_index(walk), node.dtype)
            return node

        return rewrite(_walked(statement, self.rows, walk, self.rows.read_at).apply(expr), change)

    def _index(self, statement: TensorExpr, walk: RowWalk | None) -> tuple[Expr, ...]:
        walked = _walked(statement, self.rows, walk, self.rows.write_at)
        return tuple(walked.apply(i) for i in statement.index)

    def _held_index(self, walk: RowWalk) -> tuple[Expr, ...]:
        return (*self.rows.elements, ref(ROUND), ref(PLACE) if walk.run > 1 else num(0))

    def _over_run(
        self, walk: RowWalk, *nodes: Node, guarded: bool = False, cond: Expr | None = None
    ) -> tuple[Node, ...]:
        """A chunk's points for each of the thread's rows, what memory has as neighbours innermost. `guarded`: only of
        rows that exist; `cond`: only where it holds."""

        def where(inside: tuple[Node, ...]) -> tuple[Node, ...]:
            return inside if cond is None else (Branch(cond, inside),)

        if walk.run == 1:
            return where(self.rows.each(nodes, guarded=guarded))
        if self.rows.vector is None:
            return where(self.rows.each((Loop(PLACE, walk.run, LoopKind.VECTOR, nodes),), guarded=guarded))
        return (Loop(PLACE, walk.run, LoopKind.UNROLL, where(self.rows.each(nodes, guarded=guarded))),)


def _part_name(statement: TensorExpr) -> str:
    """Registers that hold what the places of runs add up to."""
    return f"{statement.output}.parts"
