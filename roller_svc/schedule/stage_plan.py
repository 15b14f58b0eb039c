"""Loops of a schedule tree → the steps that give them to a stage of the default schedule.

The loops of a tree say where each axis is: an index is a sum of loop variables, the axis a chain of splits whose
factors are the coefficients. Loops of one iteration are left out. What cannot be told in steps raises UnsaidError.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.analysis.linear import Linear, linear
from roller_svc.ir.expr import AxisRef, loads_of
from roller_svc.ir.index import num
from roller_svc.ir.program import Axis, AxisKind, TensorExpr
from roller_svc.ir.schedule import Compute, Loop, LoopKind
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.steps import Step, Value
from roller_svc.schedule.tree_visits import Visit

MARKS = {
    LoopKind.BLOCK: "block",
    LoopKind.THREAD: "thread",
    LoopKind.PARALLEL: "parallel",
    LoopKind.VECTOR: "vectorise",
    LoopKind.UNROLL: "unroll",
}


class UnsaidError(Exception):
    """No step says a part of a tree; the text says which."""


@dataclass(frozen=True, slots=True)
class Term:
    """A loop, or the outer or inner part of one, as a part of an axis: axis = sum of coefficient * loop."""

    loop: Loop
    coefficient: int
    extent: int

    @property
    def span(self) -> int:
        return self.coefficient * self.extent


Chain = tuple[Term, ...]  # of one axis, the outermost first


def chain_of(form: Linear, loops: Sequence[Loop]) -> Chain:
    """Return the loops of more than one iteration that an axis is a sum of."""
    by_var = {loop.var: loop for loop in loops}
    terms = []
    for term, coefficient in form.items():
        if not (isinstance(term, AxisRef) and term.name in by_var and coefficient > 0):
            raise UnsaidError("an axis is not a sum of loops")
        if by_var[term.name].extent > 1:
            terms.append(Term(by_var[term.name], coefficient, by_var[term.name].extent))
    return tuple(sorted(terms, key=lambda term: -term.coefficient))


def match_axes(statement: TensorExpr, axes: Sequence[Axis]) -> Mapping[str, tuple[Axis, ...]]:
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


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The loops of a stage, and the axes that they make up."""

    stage: str
    loops: tuple[Loop, ...]  # of the tree, outermost first
    chains: Mapping[str, Chain]
    members: Mapping[str, tuple[Axis, ...]]
    is_partial: bool = False  # the loops leave out a rest of an axis, which other loops of the tree compute

    def steps(self) -> tuple[Step, ...]:
        """Return fusions and splits, one reorder, and the marks."""
        cuts, arranged = self.parts()
        return (*cuts, *arranged)

    def parts(self) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
        """Return the fusions and splits, and the reorder with the marks."""
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
        arranged = [self._step("reorder", loops=order)] if len(order) > 1 else []
        arranged += [self._step(MARKS[loop.kind], loop=name) for loop, name in loops if loop.kind in MARKS]
        return tuple(steps), tuple(arranged)

    def site(self, innermost: Term) -> str:
        """Return the name of the stage's loop that has a part of an axis."""
        axis, chain = next((axis, chain) for axis, chain in self.chains.items() if innermost in chain)
        for each, own in (_distribute(chain, self.members[axis]) or {self.members[axis]: chain}).items():
            if own and own[-1].loop.var == innermost.loop.var and len(own) == 1:
                return each[0].name if len(each) == 1 else _fused_name(each)
            if any(term.loop.var == innermost.loop.var for term in reversed(own)):
                name = "_".join(part.name for part in each)
        return loop_name(name, innermost.loop)

    def _splits(self, axis: str, chain: Chain, current: str, extent: int, names: dict[str, list[str]]) -> list[Step]:
        steps = []
        for outer, inner in pairwise(chain):
            if outer.coefficient != inner.span and not (outer is chain[0] and outer.coefficient == extent):
                raise UnsaidError("tiles overlap, or leave gaps")
        covered = self.is_partial or -(-extent // chain[0].coefficient) <= chain[0].extent
        if chain[-1].coefficient != 1 or not covered:
            raise UnsaidError("loops do not cover their axis")
        for place, term in enumerate(chain[:-1]):
            is_last = place == len(chain) - 2
            rest = loop_name(axis, chain[-1].loop) if is_last else f"{axis}_rest{place or ''}"
            name = loop_name(axis, term.loop)
            names.setdefault(term.loop.var, []).append(name)
            steps.append(self._step("split", loop=current, factor=term.coefficient, names=(name, rest)))
            current = rest
        names.setdefault(chain[-1].loop.var, []).append(current)
        return steps

    def _step(self, op: str, **values: Value) -> Step:
        return Step(op, self.stage, tuple(values.items()))


def loop_name(axis: str, loop: Loop) -> str:
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
        own: list[Term] = []
        rest: list[Term] = []
        for term in left:
            if term.span <= part.extent:
                own.append(term)
            elif term.coefficient % part.extent == 0:
                rest.append(Term(term.loop, term.coefficient // part.extent, term.extent))
            elif part.extent % term.coefficient or term.span % part.extent or term.loop.kind is LoopKind.VECTOR:
                return None
            else:
                own.append(Term(term.loop, term.coefficient, part.extent // term.coefficient))
                rest.append(Term(term.loop, 1, term.span // part.extent))
        if math.prod(term.extent for term in own) != part.extent:
            return None
        found[(part,)], left = tuple(own), rest
    return {parts[:1]: tuple(left)} | dict(reversed(found.items()))


def axes_of_function(schedule: Schedule, tensor: str) -> tuple[Axis, ...]:
    """Return the axes of a function in a default schedule; of an accumulated one, those of its accumulator."""
    functions = {function.name: function for function in schedule.functions}
    found = functions.get(acc_name(tensor)) or functions.get(tensor)
    if found is None:
        raise UnsaidError(f"the program does not name {tensor}")
    return found.statement.axes


def spatial_loops(
    statement: TensorExpr, visit: Visit, write: Compute, axes: Sequence[Axis]
) -> tuple[dict[str, Chain], dict[str, tuple[Axis, ...]]]:
    """Return how the loops around a write make up each spatial axis, and the axes of the program that each axis is.

    Args:
        statement: what is written, perhaps with fused axes, and without axes of one point.
        visit: the write.
        write: the same.
        axes: of the statement in the default schedule.
    """
    members = dict(match_axes(statement, axes))
    chains: dict[str, Chain] = {}
    for index, place in zip(statement.index, write.index, strict=True):
        if index == num(0):
            continue
        if not isinstance(index, AxisRef):
            raise UnsaidError("an index of the result is not an axis")
        chains[index.name] = chain_of(linear(visit.over_loops(place)), visit.loops)
    known = {part.name for parts in members.values() for part in parts}
    left = [axis for axis in axes if axis.name not in known and axis.kind is AxisKind.SPATIAL]
    if any(axis.extent > 1 for axis in left):
        raise UnsaidError("an index of the result is not an axis")
    single: dict[str, Chain] = {axis.name: () for axis in left}
    return {**single, **chains}, members | {axis.name: (axis,) for axis in left}


def tile_axis(parts: tuple[Axis, ...], chain: Chain) -> Axis:
    """Return an axis of the part of a dimension that a tile has."""
    return Axis(parts[0].name, chain[0].span if chain else 1, AxisKind.SPATIAL)


def reduced_chains(
    statement: TensorExpr, spatial: Mapping[str, Chain], visit: Visit, compute: Compute, rows: Collection[str] = ()
) -> dict[str, Chain]:
    """Return how the loops of an update make up each reduced axis: by the indices of its loads.

    Args:
        statement: the reduction.
        spatial: the loops of its spatial axes.
        visit: the update.
        compute: the same.
        rows: tensors that the nest keeps, whose loads have other indices.
    """
    wanted, loads = ([load for load in loads_of(value) if load.tensor not in rows] for value in (statement.body, compute.value))
    if [load.tensor for load in wanted] != [load.tensor for load in loads]:
        raise UnsaidError("a statement joins several points of a reduction")
    forms: dict[str, Linear] = {
        axis.name: {AxisRef(term.loop.var): term.coefficient for term in spatial[axis.name]} for axis in statement.spatial
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
    return {axis.name: chain_of(forms.get(axis.name, {}), visit.loops) for axis in statement.reduced}


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
