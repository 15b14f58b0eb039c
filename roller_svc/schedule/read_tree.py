"""Schedule tree of a launch → the steps that make it of the default schedule. What no step says raises UnsaidError.

Nodes that have no step and do not change what is computed are left out: prefetches, and routines around nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from roller_svc.ir.program import StatementKind, TensorExpr
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
    iter_nodes,
)
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.read_nest import read_nest
from roller_svc.schedule.read_panels import read_panels
from roller_svc.schedule.schedule import UPDATE, Schedule
from roller_svc.schedule.stage_plan import (
    Chain,
    StagePlan,
    Term,
    UnsaidError,
    axes_of_function,
    reduced_chains,
    spatial_loops,
    tile_axis,
)
from roller_svc.schedule.steps import Step
from roller_svc.schedule.tree_visits import Visit, visit_tree

# Nodes that no step makes, in words; the first one that a tree has is named.
LACKING = {
    "WarpgroupMma": "matrix units",
    "Mma": "matrix units",
    "TmaLoad": "copies by TMA",
    "CpAsync": "asynchronous copies",
    "WarpReduce": "sums over the threads of a warp",
    "WarpScan": "scans over the threads of a warp",
    "Transpose": "transposes in vector registers",
}
_SAID = (Loop, Let, Storage, Compute, Branch, Barrier, HorizontalReduce, Prefetch, Routine)


def read_tree(tree: ScheduleTree, statements: Sequence[TensorExpr], schedule: Schedule, *, on_gpu: bool) -> tuple[Step, ...]:
    """Return the steps of a launch. Raises UnsaidError.

    Args:
        tree: the launch.
        statements: what it computes, perhaps with fused axes, the last one last.
        schedule: the default one.
        on_gpu: a launch needs a block loop.
    """
    _reject_lacking(tree.body, {name for name, _ in schedule.program.inputs} | schedule.outputs)
    visits = visit_tree(tree)
    storages, statement = visits.storages, statements[-1]
    writes = [(visit, compute) for visit, compute in visits.computes if compute.tensor == statement.output]
    others = [(visit, compute) for visit, compute in visits.computes if compute.tensor != statement.output]
    if statement.kind is StatementKind.SCATTER or not writes:
        raise UnsaidError("data select the places of the result")
    if len(statements) == 1 and any(isinstance(node, Routine) for node in iter_nodes(tree.body)):
        return read_panels(visits, statement, schedule)
    if len(statements) > 1 or len(storages) > 1:
        return read_nest(visits, statements, schedule)
    visit, write = writes[0]
    chains, members = spatial_loops(statement, visit, write, axes_of_function(schedule, statement.output))
    if on_gpu and all(term.loop.kind is not LoopKind.BLOCK for chain in chains.values() for term in chain):
        chains = _with_one_block(statement, chains)
    plan = StagePlan(statement.output, visit.loops, chains, members)
    if statement.kind is StatementKind.MAP:
        if others or storages:
            raise UnsaidError("several points share values in a tile")
        return plan.steps()
    if not storages or any(compute.tensor != storages[0].tensor for _, compute in others) or len(others) < 2:
        raise UnsaidError("a reduction has more than one accumulator, or parts of one")
    return (*plan.steps(), *_accumulation(statement, plan, visit, others, storages[0].scope))


def _reject_lacking(nodes: tuple[Node, ...], memory: Collection[str]) -> None:
    """Raise UnsaidError for nodes that no step makes. Transposes into tiles of routines are a way to pack."""
    packs = any(isinstance(node, Routine) for node in iter_nodes(nodes))
    kinds = {
        type(node).__name__
        for node in iter_nodes(nodes)
        if not isinstance(node, _SAID) and not (packs and isinstance(node, Transpose) and node.tensor not in memory)
    }
    for kind in (*LACKING, *sorted(kinds)):
        if kind in kinds:
            raise UnsaidError(f"no step makes {LACKING.get(kind, kind)}")
    for node in iter_nodes(nodes):
        if isinstance(node, Compute) and node.nontemporal:
            raise UnsaidError("no step makes stores that bypass the caches")
        if isinstance(node, Storage) and node.scope is Scope.SHARED:
            raise UnsaidError("shared tiles have a layout and copies that no step makes")


def _with_one_block(statement: TensorExpr, chains: Mapping[str, Chain]) -> dict[str, Chain]:
    """Return the chains with a block loop of one iteration around the first axis."""
    if not chains:
        raise UnsaidError("the result has one element")
    first, chain = next(iter(chains.items()))
    extent = statement.extents.get(first, 1)
    whole = min(extent, chain[0].span) if chain else extent
    block = Term(Loop(f"{first}.block", 1, LoopKind.BLOCK, ()), whole, 1)
    return {**chains, first: (block, *chain)}


def _accumulation(
    statement: TensorExpr, plan: StagePlan, write: Visit, others: Sequence[tuple[Visit, Compute]], scope: Scope
) -> tuple[Step, ...]:
    """Return the steps of the nest that sets, updates and writes the accumulator of a reduction."""
    start = next((visit for visit, compute in others if compute.combine is None), None)
    update, compute = next(((visit, each) for visit, each in others if each.combine is not None), (None, None))
    if start is None or update is None or compute is None:
        raise UnsaidError("an accumulator is not set, updated and written")
    own = {loop.var for loop in write.loops} - {loop.var for loop in update.loops}
    own |= {loop.var for loop in write.loops if loop not in update.loops}
    places = [loop.var for loop in write.loops]
    around = [t for chain in plan.chains.values() for t in chain if t.loop.var not in own]
    if not around:
        raise UnsaidError("an accumulator is the whole result: accumulate_at needs a loop around a part of it")
    site = plan.site(max(around, key=lambda t: places.index(t.loop.var) if t.loop.var in places else -1))
    inside = {axis: tuple(t for t in chain if t not in around) for axis, chain in plan.chains.items()}
    if any(inside[axis] and len(plan.members[axis]) > 1 for axis in inside):
        raise UnsaidError("a tile has an axis that is several axes of the program")
    tiles = {axis: (tile_axis(plan.members[axis], inside[axis]),) for axis in inside if len(plan.members[axis]) == 1}
    chains = {axis: inside[axis] for axis in tiles}
    tile, reduced = acc_name(statement.output), reduced_chains(statement, plan.chains, update, compute)
    members = tiles | {axis.name: plan.members[axis.name] for axis in statement.axes if axis.name in reduced}
    steps = [Step("accumulate_at", statement.output, (("loop", site),))]
    if scope is Scope.REGISTER:
        steps.append(Step("store_in", tile, (("scope", "registers"),)))
    steps += StagePlan(tile, start.loops, chains, tiles).steps()
    steps += StagePlan(tile + UPDATE, update.loops, chains | reduced, members).steps()
    return tuple(steps)
