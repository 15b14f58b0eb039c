"""Product in register tiles over packed panels → its steps. What no step says raises UnsaidError.

The tile of accumulators and the loops around it are those of the update that runs most often; the loops of narrower
tiles at the edges follow from the steps. A panel of an input whose rows are vectors is a cache of the input. Panels of
the other input only keep its elements closer together, and are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from roller_svc.ir.expr import AxisRef, Load, axes_of, loads_of
from roller_svc.ir.program import StatementKind, TensorExpr
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Scope
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import UPDATE, Schedule
from roller_svc.schedule.stage_plan import (
    Chain,
    StagePlan,
    Term,
    UnsaidError,
    axes_of_function,
    spatial_loops,
    tile_axis,
)
from roller_svc.schedule.steps import Step
from roller_svc.schedule.tree_visits import TreeVisits, Visit

UNSAID = "no step makes packed panels"


def read_panels(visits: TreeVisits, statement: TensorExpr, schedule: Schedule) -> tuple[Step, ...]:
    """Return the steps of a launch that computes one product. Raises UnsaidError."""
    reduced = [axis for axis in statement.reduced if axis.extent > 1]
    if statement.kind is not StatementKind.REDUCE or len(reduced) != 1:
        raise UnsaidError(UNSAID)
    registers = {storage.tensor for storage in visits.storages if storage.scope is Scope.REGISTER}
    updates = [(v, c) for v, c in visits.computes if c.tensor in registers and c.combine is not None]
    writes = [(v, c) for v, c in visits.computes if c.tensor == statement.output]
    if not updates:
        raise UnsaidError(UNSAID)
    if any(compute.combine is not None for _, compute in writes):
        raise UnsaidError("blocks of a reduction are added up in memory")
    update, _ = max(updates, key=lambda each: each[0].times)
    nearest = [each for each in writes if _common(each[0], update) == max(_common(v, update) for v, _ in writes)]
    write_visit, write = max(nearest, key=lambda each: each[0].times)
    count = _common(write_visit, update)
    around, inside = write_visit.loops[:count], write_visit.loops[count:]
    chains, members = spatial_loops(statement, write_visit, write, axes_of_function(schedule, statement.output))
    plan = StagePlan(statement.output, write_visit.loops, chains, members, is_partial=True)
    places = [loop.var for loop in around]
    outer = [term for chain in chains.values() for term in chain if term.loop.var in places]
    if not outer:
        raise UnsaidError("an accumulator is the whole result: accumulate_at needs a loop around a part of it")
    site = plan.site(max(outer, key=lambda term: places.index(term.loop.var)))
    tiles = {axis: tuple(term for term in chain if term not in outer) for axis, chain in chains.items()}
    if any(chain and len(members[axis]) > 1 for axis, chain in tiles.items()):
        raise UnsaidError("a tile has an axis that is several axes of the program")
    single = {axis: (tile_axis(members[axis], chain),) for axis, chain in tiles.items() if len(members[axis]) == 1}
    own = {axis: tiles[axis] for axis in single}
    steps = [*plan.steps(), Step("accumulate_at", statement.output, (("loop", site),))]
    tile = acc_name(statement.output)
    steps.append(Step("store_in", tile, (("scope", "registers"),)))
    steps += StagePlan(tile, inside, own, single).steps()
    k = reduced[0].name
    loop = _reduced_loop(update, count, inside, reduced[0].extent)
    everything = own | {axis.name: () for axis in statement.reduced} | {k: (Term(loop, 1, loop.extent),)}
    parts = single | {axis.name: members[axis.name] for axis in statement.reduced}
    steps += StagePlan(tile + UPDATE, update.loops[count:], everything, parts).steps()
    return (*steps, *_caches(visits, statement, plan, around, tiles))


def _common(visit: Visit, other: Visit) -> int:
    """Return how many outer loops two nodes share."""
    pairs = zip(visit.loops, other.loops, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a is not b), min(len(visit.loops), len(other.loops)))


def _reduced_loop(update: Visit, count: int, inside: Sequence[Loop], extent: int) -> Loop:
    """Return the loop of an update that is the reduced axis. Raises UnsaidError for blocks of it."""
    spatial = {loop.var for loop in inside}
    loops = [loop for loop in update.loops[count:] if loop.var not in spatial and loop.extent > 1]
    if len(loops) != 1 or loops[0].extent != extent:
        raise UnsaidError("blocks of a reduction are in packed panels of their own")
    return loops[0]


def _caches(
    visits: TreeVisits, statement: TensorExpr, plan: StagePlan, around: Sequence[Loop], tiles: Mapping[str, Chain]
) -> list[Step]:
    """Return the steps that copy the panels whose rows are vectors, where the tree copies them."""
    lanes = {axis: term.extent for axis, chain in tiles.items() for term in chain if term.loop.kind is LoopKind.VECTOR}
    steps: list[Step] = []
    update, reduced = acc_name(statement.output) + UPDATE, next(axis.name for axis in statement.reduced if axis.extent > 1)
    for load in dict.fromkeys(loads_of(statement.body)):
        used = frozenset().union(*map(axes_of, load.index))
        if not used & lanes.keys():
            continue
        last = load.index[-1]
        if not (isinstance(last, AxisRef) and last.name in lanes):
            raise UnsaidError("panels of an input are transposed")
        site = _packing_site(visits, load.tensor, plan, around, used)
        if site is None or any(len(plan.members[axis]) > 1 for axis in used if axis in plan.members):
            continue
        copy, dim = f"{load.tensor}.cache", f"d{len(load.index) - 1}"
        steps += [
            Step("cache", load.tensor, (("stage", update), ("loop", reduced), ("scope", "stack"))),
            Step("compute_at", copy, (("stage", statement.output), ("loop", plan.site(site)))),
            Step("split", copy, (("loop", dim), ("factor", lanes[last.name]), ("names", (f"{dim}_vector", f"{dim}_lane")))),
            Step("vectorise", copy, (("loop", f"{dim}_lane"),)),
        ]
    return steps


def _packing_site(visits: TreeVisits, tensor: str, plan: StagePlan, around: Sequence[Loop], axes: Collection[str]) -> Term | None:
    """Return the loop in which panels of an input are packed: the innermost one that selects a part of it, if there is one."""
    packed = {storage.tensor for storage in visits.storages if storage.scope is Scope.STACK}
    copies = [
        visit
        for visit, compute in visits.computes
        if compute.tensor in packed and any(load.tensor == tensor for load in _sources(visits, compute))
    ]
    terms = [(axis, term) for axis, chain in plan.chains.items() for term in chain]
    for visit in copies:
        shared = [loop.var for loop, own in zip(around, visit.loops, strict=False) if loop is own]
        there = [(axis, term) for var in shared for axis, term in terms if term.loop.var == var]
        selecting = [term for axis, term in there if axis in axes]
        if there:
            return selecting[-1] if selecting else there[-1][1]
    return None


def _sources(visits: TreeVisits, compute: Compute) -> list[Load]:
    """Return the loads of tensors in memory that a copy has its value from, also by way of a tile."""
    tiles = {storage.tensor for storage in visits.storages}
    found: list[Load] = []
    for load in loads_of(compute.value):
        if load.tensor not in tiles:
            found.append(load)
            continue
        writers = [each for _, each in visits.computes if each.tensor == load.tensor and each is not compute]
        found += [source for writer in writers for source in loads_of(writer.value) if source.tensor not in tiles]
    return found
