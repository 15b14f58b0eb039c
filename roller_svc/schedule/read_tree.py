"""Schedule tree of one statement → the steps that make it of the default schedule.

The loops of a tree say where each axis is: an index is a sum of loop variables, the axis a chain of splits whose
factors are the coefficients. Loops of one iteration are left out. What cannot be told in steps raises UnsaidError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.analysis.linear import Linear, linear
from roller_svc.ir.expr import AxisRef, loads_of
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage, iter_nodes
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import UPDATE
from roller_svc.schedule.steps import Step, Value
from roller_svc.schedule.tree_visits import Visit, visit_tree

MARKS = {
    LoopKind.BLOCK: "block",
    LoopKind.THREAD: "thread",
    LoopKind.PARALLEL: "parallel",
    LoopKind.VECTOR: "vectorise",
    LoopKind.UNROLL: "unroll",
}
# Nodes that no step makes, in words; the first one that a tree has is named.
LACKING = {
    "WarpgroupMma": "matrix units",
    "Mma": "matrix units",
    "TmaLoad": "copies by TMA",
    "CpAsync": "asynchronous copies",
    "Routine": "packed panels",
    "HorizontalReduce": "sums over the lanes of a vector",
    "WarpReduce": "sums over the threads of a warp",
    "WarpScan": "scans over the threads of a warp",
    "Transpose": "transposes in vector registers",
    "Prefetch": "prefetches",
}
_SAID = (Loop, Let, Storage, Compute, Branch, Barrier)


class UnsaidError(Exception):
    """No step says a part of a tree; the text says which."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A loop, or the outer or inner part of one, as a part of an axis: axis = sum of coefficient * loop."""

    loop: Loop
    coefficient: int
    extent: int

    @property
    def span(self) -> int:
        return self.coefficient * self.extent


Chain = tuple[_Term, ...]  # of one axis, the outermost first


def read_tree(tree: ScheduleTree, statement: TensorExpr, axes: Sequence[Axis], *, on_gpu: bool) -> tuple[Step, ...]:
    """Return the steps of a launch that computes one statement. Raises UnsaidError.

    Args:
        tree: the launch.
        statement: what it computes, perhaps with fused axes.
        axes: of the statement in the default schedule.
        on_gpu: a launch needs a block loop.
    """
    _reject_lacking(tree.body)
    visits = visit_tree(tree)
    storages, name = visits.storages, statement.output
    writes = [(visit, compute) for visit, compute in visits.computes if compute.tensor == name]
    others = [(visit, compute) for visit, compute in visits.computes if compute.tensor != name]
    members = _match_axes(statement, axes)
    if statement.kind is StatementKind.SCATTER or not writes:
        raise UnsaidError("data select the places of the result")
    visit, write = writes[0]
    chains = _chains_of_write(statement, visit, write)
    if on_gpu and all(term.loop.kind is not LoopKind.BLOCK for chain in chains.values() for term in chain):
        chains = _with_one_block(statement, chains)
    plan = _StagePlan(name, visit.loops, chains, members)
    if statement.kind is StatementKind.MAP:
        if others or storages:
            raise UnsaidError("several points share values in a tile")
        return plan.steps()
    if len(storages) != 1 or any(compute.tensor != storages[0].tensor for _, compute in others) or len(others) < 2:
        raise UnsaidError("a reduction has more than one accumulator, or parts of one")
    return (*plan.steps(), *_accumulation(statement, plan, visit, others, storages[0].scope))


def _reject_lacking(nodes: tuple[Node, ...]) -> None:
    kinds = {type(node).__name__ for node in iter_nodes(nodes) if not isinstance(node, _SAID)}
    for kind in (*LACKING, *sorted(kinds)):
        if kind in kinds:
            raise UnsaidError(f"no step makes {LACKING.get(kind, kind)}")
    for node in iter_nodes(nodes):
        if isinstance(node, Compute) and node.nontemporal:
            raise UnsaidError("no step makes stores that bypass the caches")
        if isinstance(node, Storage) and node.scope is Scope.SHARED:
            raise UnsaidError("shared tiles have a layout and copies that no step makes")


def _match_axes(statement: TensorExpr, axes: Sequence[Axis]) -> Mapping[str, tuple[Axis, ...]]:
    """Return the axes of the default schedule that each axis of the statement was fused from."""
    found: dict[str, tuple[Axis, ...]] = {}
    by_name = {axis.name: axis for axis in axes}
    for axis in statement.axes:
        names = [axis.name] if axis.name in by_name else axis.name.split("_")
        parts = tuple(by_name[name] for name in names if name in by_name)
        if len(parts) != len(names) or math.prod(part.extent for part in parts) != axis.extent:
            raise UnsaidError(f"the axis {axis.name} is several axes of the program in another form")
        found[axis.name] = parts
    return found


def _chains_of_write(statement: TensorExpr, visit: Visit, write: Compute) -> dict[str, Chain]:
    """Return how the loops around the write make up each spatial axis."""
    chains: dict[str, Chain] = {}
    for index, place in zip(statement.index, write.index, strict=True):
        if not isinstance(index, AxisRef):
            raise UnsaidError("an index of the result is not an axis")
        chains[index.name] = _chain(linear(visit.over_loops(place)), visit.loops)
    return chains


def _chain(form: Linear, loops: Sequence[Loop]) -> Chain:
    by_var = {loop.var: loop for loop in loops}
    terms = []
    for term, coefficient in form.items():
        if not (isinstance(term, AxisRef) and term.name in by_var and coefficient > 0):
            raise UnsaidError("an axis is not a sum of loops")
        if by_var[term.name].extent > 1:
            terms.append(_Term(by_var[term.name], coefficient, by_var[term.name].extent))
    return tuple(sorted(terms, key=lambda term: -term.coefficient))


def _with_one_block(statement: TensorExpr, chains: Mapping[str, Chain]) -> dict[str, Chain]:
    """Return the chains with a block loop of one iteration around the first axis."""
    first = statement.spatial[0] if statement.spatial else None
    if first is None:
        raise UnsaidError("the result has one element")
    whole = min(first.extent, chains[first.name][0].span) if chains[first.name] else first.extent
    block = _Term(Loop(f"{first.name}.block", 1, LoopKind.BLOCK, ()), whole, 1)
    return {**chains, first.name: (block, *chains[first.name])}


@dataclass(frozen=True, slots=True)
class _StagePlan:
    """The loops of a stage, and the axes that they make up."""

    stage: str
    loops: tuple[Loop, ...]  # of the tree, outermost first
    chains: Mapping[str, Chain]
    members: Mapping[str, tuple[Axis, ...]]

    def steps(self) -> tuple[Step, ...]:
        """Return fusions and splits, one reorder, and the marks."""
        steps: list[Step] = []
        names: dict[str, list[str]] = {}  # loop of the tree → its loops in the stage
        untouched: list[str] = []
        for axis, chain in self.chains.items():
            parts = self.members[axis]
            for each, own in (_distribute(chain, parts) or {parts: chain}).items():
                if not own:
                    untouched += [part.name for part in each]
                    continue
                current = each[0].name
                for part in each[1:]:
                    steps.append(self._step("fuse", outer=current, inner=part.name))
                    current = f"{current}.{part.name}.fused"
                steps += self._splits("_".join(part.name for part in each), own, current, _extent(each), names)
        here = {loop.var for loop in self.loops}
        added = [t.loop for chain in self.chains.values() for t in chain if t.loop.var not in here]
        loops = [(loop, name) for loop in (*added, *self.loops) for name in names.get(loop.var, ())]
        order = (*untouched, *(name for _, name in loops))
        if len(order) > 1:
            steps.append(self._step("reorder", loops=order))
        steps += [self._step(MARKS[loop.kind], loop=name) for loop, name in loops if loop.kind in MARKS]
        return tuple(steps)

    def site(self, innermost: _Term) -> str:
        """Return the name of the stage's loop that has a part of an axis."""
        axis, chain = next((axis, chain) for axis, chain in self.chains.items() if innermost in chain)
        for each, own in (_distribute(chain, self.members[axis]) or {self.members[axis]: chain}).items():
            if own and own[-1].loop.var == innermost.loop.var and len(own) == 1:
                return each[0].name if len(each) == 1 else _fused_name(each)
            if any(term.loop.var == innermost.loop.var for term in reversed(own)):
                name = "_".join(part.name for part in each)
        return _loop_name(name, innermost.loop)

    def _splits(self, axis: str, chain: Chain, current: str, extent: int, names: dict[str, list[str]]) -> list[Step]:
        steps = []
        for outer, inner in pairwise(chain):
            if outer.coefficient != inner.span and not (outer is chain[0] and outer.coefficient == extent):
                raise UnsaidError("tiles overlap, or leave gaps")
        if chain[-1].coefficient != 1 or -(-extent // chain[0].coefficient) > chain[0].extent:
            raise UnsaidError("loops do not cover their axis")
        for place, term in enumerate(chain[:-1]):
            is_last = place == len(chain) - 2
            rest = _loop_name(axis, chain[-1].loop) if is_last else f"{axis}_rest{place or ''}"
            name = _loop_name(axis, term.loop)
            names.setdefault(term.loop.var, []).append(name)
            steps.append(self._step("split", loop=current, factor=term.coefficient, names=(name, rest)))
            current = rest
        names.setdefault(chain[-1].loop.var, []).append(current)
        return steps

    def _step(self, op: str, **values: Value) -> Step:
        return Step(op, self.stage, tuple(values.items()))


def _loop_name(axis: str, loop: Loop) -> str:
    """Return the name that a loop of the tree gets in the stage."""
    return f"{axis}_{loop.var.rpartition('.')[2]}"


def _fused_name(parts: Sequence[Axis]) -> str:
    name = parts[0].name
    for part in parts[1:]:
        name = f"{name}.{part.name}.fused"
    return name


def _extent(parts: Sequence[Axis]) -> int:
    return math.prod(part.extent for part in parts)


def _distribute(chain: Chain, parts: tuple[Axis, ...]) -> dict[tuple[Axis, ...], Chain] | None:
    """Return the loops of each axis that a chain over several fused axes consists of; None where a loop is cut unevenly."""
    if len(parts) == 1:
        return None
    found: dict[tuple[Axis, ...], Chain] = {}
    left = list(chain)
    for part in reversed(parts[1:]):
        own: list[_Term] = []
        rest: list[_Term] = []
        for term in left:
            if term.span <= part.extent:
                own.append(term)
            elif term.coefficient % part.extent == 0:
                rest.append(_Term(term.loop, term.coefficient // part.extent, term.extent))
            elif part.extent % term.coefficient or term.span % part.extent or term.loop.kind is LoopKind.VECTOR:
                return None
            else:
                own.append(_Term(term.loop, term.coefficient, part.extent // term.coefficient))
                rest.append(_Term(term.loop, 1, term.span // part.extent))
        if math.prod(term.extent for term in own) != part.extent:
            return None
        found[(part,)], left = tuple(own), rest
    return {parts[:1]: tuple(left)} | dict(reversed(found.items()))


def _accumulation(
    statement: TensorExpr, plan: _StagePlan, write: Visit, others: Sequence[tuple[Visit, Compute]], scope: Scope
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
    tiles = {axis: (_tile_axis(plan.members[axis], inside[axis]),) for axis in inside if len(plan.members[axis]) == 1}
    chains = {axis: inside[axis] for axis in tiles}
    tile, reduced = acc_name(statement.output), _reduced_chains(statement, plan.chains, update, compute)
    members = tiles | {axis.name: plan.members[axis.name] for axis in statement.axes if axis.name in reduced}
    steps = [Step("accumulate_at", statement.output, (("loop", site),))]
    if scope is Scope.REGISTER:
        steps.append(Step("store_in", tile, (("scope", "registers"),)))
    steps += _StagePlan(tile, start.loops, chains, tiles).steps()
    steps += _StagePlan(tile + UPDATE, update.loops, chains | reduced, members).steps()
    return tuple(steps)


def _tile_axis(parts: tuple[Axis, ...], chain: Chain) -> Axis:
    return Axis(parts[0].name, chain[0].span if chain else 1, AxisKind.SPATIAL)


def _reduced_chains(statement: TensorExpr, spatial: Mapping[str, Chain], visit: Visit, compute: Compute) -> dict[str, Chain]:
    """Return how the loops of an update make up each reduced axis: by the indices of its loads."""
    wanted, loads = loads_of(statement.body), loads_of(compute.value)
    if [load.tensor for load in wanted] != [load.tensor for load in loads]:
        raise UnsaidError("a statement joins several points of a reduction")
    forms: dict[str, Linear] = {
        axis: {AxisRef(term.loop.var): term.coefficient for term in chain} for axis, chain in spatial.items()
    }
    pairs = [
        (linear(index), linear(visit.over_loops(place)))
        for expected, load in zip(wanted, loads, strict=True)
        for index, place in zip(expected.index, load.index, strict=True)
    ]
    axes = {axis.name for axis in statement.reduced if axis.extent > 1}  # of the others no loop is in the tree
    for _ in range(len(axes)):
        for index, place in pairs:
            _solve(index, place, forms, axes)
    if not axes <= forms.keys():
        raise UnsaidError("a reduced axis is not a sum of loops")
    return {axis.name: _chain(forms.get(axis.name, {}), visit.loops) for axis in statement.reduced}


def _solve(index: Linear, place: Linear, forms: dict[str, Linear], axes: set[str]) -> None:
    """Find the form of the only axis of an index that has none yet."""
    unknown = [term for term in index if isinstance(term, AxisRef) and term.name in axes and term.name not in forms]
    if len(unknown) != 1 or any(term is not None and not isinstance(term, AxisRef) for term in index):
        return
    rest = dict(place)
    for term, coefficient in index.items():
        known: Linear = {None: 1} if term is None else forms.get(term.name, {}) if isinstance(term, AxisRef) else {}
        for loop, step in known.items():
            rest[loop] = rest.get(loop, 0) - coefficient * step
    step = index[unknown[0]]
    if all(coefficient % step == 0 for coefficient in rest.values()):
        axis = unknown[0]
        if isinstance(axis, AxisRef):
            forms[axis.name] = {term: c // step for term, c in rest.items() if c}
