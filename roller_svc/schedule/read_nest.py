"""Nest of several statements, or of accumulators in lanes → its steps. What no step says raises UnsaidError.

The last statement has the loops. Reductions, and maps with a value for each of its points, are functions that are
computed in the innermost loop around all statements. Accumulators in the lanes of a vector are those of `rfactor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.linear import linear
from roller_svc.ir.expr import AxisRef, axes_of, loads_of
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr
from roller_svc.ir.schedule import Compute, Loop, LoopKind
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import UPDATE, Fixed, Function, Schedule
from roller_svc.schedule.stage_plan import (
    Chain,
    StagePlan,
    Term,
    UnsaidError,
    axes_of_function,
    chain_of,
    loop_name,
    match_axes,
    reduced_chains,
    spatial_loops,
    tile_axis,
)
from roller_svc.schedule.steps import Step
from roller_svc.schedule.tree_visits import TreeVisits, Visit

Writes = list[tuple[Visit, Compute]]


def read_nest(visits: TreeVisits, statements: Sequence[TensorExpr], schedule: Schedule) -> tuple[Step, ...]:
    """Return the steps of a launch of statements that share its outer loops. Raises UnsaidError.

    Args:
        visits: of the launch.
        statements: what it computes; the last one is the function at root.
        schedule: the default one.
    """
    final = statements[-1]
    inner = {statement.output for statement in statements[:-1]}
    if any(compute.tensor in inner for _, compute in visits.computes):
        raise UnsaidError("a nest has several results")
    common = _common_loops(visits)
    writes = [(visit, compute) for visit, compute in visits.computes if compute.tensor == final.output]
    visit, write = max(reversed(writes), key=lambda each: each[0].times)
    written, members = spatial_loops(final, visit, write, axes_of_function(schedule, final.output))
    chains, site_term = _with_site(final, written, common)
    plan = StagePlan(final.output, visit.loops, chains, members, is_partial=len(writes) > 1)
    nest = _Nest(visits, statements, schedule, plan, plan.site(site_term), {loop.var for loop in common} | {site_term.loop.var})
    steps = [*plan.steps()]
    if final.kind is StatementKind.REDUCE:
        steps.append(Step("accumulate_at", final.output, (("loop", nest.site),)))
        steps += nest.reduction(final, acc_name(final.output))
    for function in reversed(nest.placed()):
        steps += nest.place(function)
    return tuple(steps)


def _common_loops(visits: TreeVisits) -> tuple[Loop, ...]:
    """Return the loops around all computations, without those that are copies of one iteration."""
    first, *others = [visit.loops for visit, _ in visits.computes]
    count = 0
    while count < len(first) and all(len(loops) > count and loops[count] is first[count] for loops in others):
        count += 1
    while count and first[count - 1].kind in (LoopKind.UNROLL, LoopKind.VECTOR):
        count -= 1
    return first[:count]


def _with_site(final: TensorExpr, chains: Mapping[str, Chain], common: Sequence[Loop]) -> tuple[dict[str, Chain], Term]:
    """Return the chains, and the term of the innermost loop around all statements: one of one iteration if there is none."""
    places = [loop.var for loop in common]
    around = [term for chain in chains.values() for term in chain if term.loop.var in places]
    if around:
        return dict(chains), max(around, key=lambda term: places.index(term.loop.var))
    if not chains:
        raise UnsaidError("the result has one element")
    axis, chain = next(iter(chains.items()))
    site = Term(Loop(f"{axis}.nest", 1, LoopKind.SERIAL, ()), final.extents.get(axis, 1), 1)
    return {**chains, axis: (site, *chain)}, site


@dataclass(frozen=True, slots=True)
class _Nest:
    """A nest, and the loop in which its functions are computed."""

    visits: TreeVisits
    statements: Sequence[TensorExpr]
    schedule: Schedule
    plan: StagePlan  # of the last statement
    site: str  # its loop in which the others are computed
    around: set[str]  # variables of this loop, and of those around it

    @property
    def final(self) -> TensorExpr:
        return self.statements[-1]

    def inside(self, axis: str) -> Chain:
        """Return the loops of an axis in the site."""
        if axis not in self.plan.chains:
            raise UnsaidError("statements of a nest have other outer axes")
        return tuple(term for term in self.plan.chains[axis] if term.loop.var not in self.around)

    def placed(self) -> list[Function]:
        """Return the functions to be computed at the site, in order: the others, and values that are not computed again."""
        reductions = {s.output: s for s in self.statements[:-1] if s.kind is StatementKind.REDUCE}
        shapes = {statement.type.shape for statement in reductions.values()}
        needed, found = {self.final.output, acc_name(self.final.output)}, list[Function]()
        for function in reversed(self.schedule.functions):
            if function.name not in needed:
                continue
            is_own = function.name.removesuffix(".acc") in reductions
            is_row = function.computed is Fixed.INLINE and function.statement.type.shape in shapes
            if is_own or is_row or self._is_stored(function):
                found.append(function)
            if is_own or function.computed is Fixed.INLINE or function.name.removesuffix(".acc") == self.final.output:
                needed |= {load.tensor for load in function.statement.reads}
        names = {function.name.removesuffix(".acc") for function in found}
        if missing := reductions.keys() - names:
            raise UnsaidError(f"the program does not name {sorted(missing)[0]}")
        return found[::-1]

    def _is_stored(self, function: Function) -> bool:
        """Return whether a map of the last statement's points is what the tree keeps in the result in the meantime."""
        if function.computed is not Fixed.INLINE or function.statement.type.shape != self.final.type.shape:
            return False
        readers = [f for f in self.schedule.functions if any(load.tensor == function.name for load in f.statement.reads)]
        return len(readers) > 1 and any(
            load.tensor == self.final.output for _, compute in self.visits.computes for load in loads_of(compute.value)
        )

    def place(self, function: Function) -> list[Step]:
        """Return the steps that compute a function at the site."""
        name, statement = function.name, function.statement
        steps = [Step("compute_root", name)] if function.computed is Fixed.INLINE else []
        steps.append(Step("compute_at", name, (("stage", self.final.output), ("loop", self.site))))
        own = next((s for s in self.statements[:-1] if s.output == name.removesuffix(".acc")), None)
        if statement.kind is StatementKind.REDUCE and own is not None:
            return [*steps, *self.reduction(own, name)]
        if statement.kind is StatementKind.REDUCE:
            raise UnsaidError("statements of a nest have other outer axes")
        if statement.type.shape != self.final.type.shape:
            steps.append(Step("store_in", name, (("scope", "registers"),)))
        axes = zip(statement.spatial, self.final.spatial, strict=False)
        tiles = {axis.name: self.inside(of_final.name) for axis, of_final in axes}
        return [*steps, *_tile_plan(name, self.plan.loops, tiles, statement.spatial).steps()]

    def reduction(self, statement: TensorExpr, name: str) -> list[Step]:
        """Return the steps that keep the accumulators of a reduction in registers, `rfactor` those in lanes."""
        visit, update = self._update(statement)
        spatial = {axis.name: self.inside(axis.name) for axis in statement.spatial}
        members = match_axes(statement, axes_of_function(self.schedule, statement.output))
        if any(chain and len(members[axis]) > 1 for axis, chain in spatial.items()):
            raise UnsaidError("a tile has an axis that is several axes of the program")
        tiles = {axis: (tile_axis(members[axis], chain),) for axis, chain in spatial.items() if len(members[axis]) == 1}
        chains = {axis: spatial[axis] for axis in tiles}
        start = StagePlan(name, visit.loops, chains, tiles)
        steps = [Step("store_in", name, (("scope", "registers"),)), *start.steps()]
        reduced = self._reduced(statement, visit, update)
        lanes = self._lanes(update, visit, reduced)
        if lanes is not None:
            axis, lane = lanes
            if len(reduced[axis]) == 1:
                reduced[axis] = (Term(Loop(f"{axis}.piece", 1, LoopKind.SERIAL, ()), lane.span, 1), lane)
        members = tiles | {axis.name: members[axis.name] for axis in statement.reduced}
        plan = StagePlan(name + UPDATE, visit.loops, chains | reduced, members)
        if lanes is None:
            return [*steps, *plan.steps()]
        cuts, arranged = plan.parts()
        part, lane_name = f"{name}.part", loop_name("_".join(m.name for m in members[axis]), lane.loop)
        steps += [*cuts, Step("rfactor", name + UPDATE, (("loop", lane_name),))]
        steps.append(Step("store_in", part, (("scope", "registers"),)))
        steps += [*replace(start, stage=part).parts()[1], Step("vectorise", part, (("loop", lane_name),))]
        steps += [replace(step, subject=part + UPDATE) for step in arranged]
        return [*steps, *(step for step in replace(start, stage=name + UPDATE).parts()[1] if step.op != "reorder")]

    def _update(self, statement: TensorExpr) -> tuple[Visit, Compute]:
        """Return the update of a reduction's accumulators that runs most often."""
        name = acc_name(statement.output)
        updates = [
            (visit, compute)
            for visit, compute in self.visits.computes
            if compute.tensor == name and compute.combine is not None and all(x.tensor != name for x in loads_of(compute.value))
        ]
        if not updates:
            raise UnsaidError("an accumulator is not set, updated and written")
        return max(updates, key=lambda each: each[0].times)

    def _reduced(self, statement: TensorExpr, visit: Visit, update: Compute) -> dict[str, Chain]:
        """Return the loops of a reduction's reduced axes."""
        totals = [load for load in loads_of(update.value) if load.tensor == self.final.output]
        reduced = [axis for axis in statement.reduced if axis.extent > 1]
        if not totals:
            tiles = {storage.tensor for storage in self.visits.storages}
            rows = tiles | {each.output for each in self.statements}
            return reduced_chains(statement, self.plan.chains, visit, update, rows)
        spatial = {axis.name for axis in statement.spatial}
        places = [
            place
            for axis, place in zip(self.final.index, totals[0].index, strict=True)
            if not (isinstance(axis, AxisRef) and axis.name in spatial)
        ]
        if len(reduced) != 1 or len(places) != 1:
            raise UnsaidError("a result also keeps values in the meantime")
        return {reduced[0].name: chain_of(linear(visit.over_loops(places[0])), visit.loops)}

    def _lanes(self, update: Compute, visit: Visit, reduced: Mapping[str, Chain]) -> tuple[str, Term] | None:
        """Return the axis and the loop whose iterations have accumulators of their own; None of a plain reduction."""
        used = frozenset().union(*(axes_of(visit.over_loops(index)) for index in update.index))
        found = [(axis, term) for axis, chain in reduced.items() for term in chain if term.loop.var in used]
        if len(found) > 1:
            raise UnsaidError("a reduction has lanes of several axes")
        return found[0] if found else None


def _tile_plan(name: str, loops: tuple[Loop, ...], chains: Mapping[str, Chain], axes: Sequence[Axis]) -> StagePlan:
    """Return the plan of a map's tile whose loops are these."""
    tiles = {a.name: (Axis(a.name, chains[a.name][0].span if chains[a.name] else 1, AxisKind.SPATIAL),) for a in axes}
    return StagePlan(name, loops, chains, tiles, is_partial=True)
