"""Schedule tree → how often each statement, loop and barrier runs: the counts that a price is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roller_svc.analysis.wide_values import Array
from roller_svc.errors import InvariantError
from roller_svc.frontend.lang.point_grid import OpaqueValueError, evaluate
from roller_svc.ir.expr import Expr, axes_of, loads_of, substitute
from roller_svc.ir.index import eq, lt, num, ref
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
    Storage,
    Transpose,
    iter_nodes,
)

MAX_SAMPLES = 4096  # points of the loops of a condition at which it is evaluated: evenly spaced ones, where there are more


@dataclass(frozen=True, slots=True)
class Visit:
    """A node below its loops, outermost first."""

    node: Compute | Barrier | Branch | Loop
    loops: tuple[Loop, ...]
    bindings: Mapping[str, Expr]  # of variables that no loop has, over those of the loops
    fraction: float  # of the iterations, in which the node runs

    @property
    def times(self) -> float:
        """Runs of the node, in all threads together."""
        return self.fraction * self.iterations()

    def iterations(self, *but: LoopKind) -> int:
        """Return the iterations of the loops of other kinds than these."""
        return math.prod(loop.extent for loop in self.loops if loop.kind not in but)

    def extent(self, kind: LoopKind) -> int:
        """Return the iterations of the loops of one kind."""
        return math.prod(loop.extent for loop in self.loops if loop.kind is kind)

    def over_loops(self, expr: Expr) -> Expr:
        """Return an expression of the node over the variables of its loops."""
        return substitute(expr, self.bindings)


@dataclass(frozen=True, slots=True)
class TreeVisits:
    """Nodes that a tree runs, and storage that it allocates."""

    computes: tuple[tuple[Visit, Compute], ...]
    loops: tuple[tuple[Visit, Loop], ...]
    barriers: tuple[Visit, ...]
    branches: tuple[Visit, ...]  # around computations
    storages: tuple[Storage, ...]


def visit_tree(tree: ScheduleTree) -> TreeVisits:
    """Visit a tree of loops, storage, conditions, computations, prefetches and barriers.

    A reduction over the lanes of a vector counts as a serial one with a step for each halving. Prefetches, and
    transposes into tiles, count as nothing. Raises InvariantError for other nodes.
    """
    visitor = _Visitor()
    visitor.visit(tree.body, (), {}, ())
    return TreeVisits(
        tuple(visitor.computes),
        tuple(visitor.loops),
        tuple(visitor.barriers),
        tuple(visitor.branches),
        tuple(visitor.storages),
    )


@dataclass(slots=True)
class _Visitor:
    computes: list[tuple[Visit, Compute]] = field(default_factory=list)
    loops: list[tuple[Visit, Loop]] = field(default_factory=list)
    barriers: list[Visit] = field(default_factory=list)
    branches: list[Visit] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)

    def visit(
        self, nodes: tuple[Node, ...], loops: tuple[Loop, ...], bindings: Mapping[str, Expr], conditions: tuple[Expr, ...]
    ) -> None:
        for node in nodes:
            match node:
                case Loop():
                    stop = () if node.stop is None else (lt(ref(node.var), substitute(node.stop, bindings)),)
                    fraction = _fraction((*conditions, *stop), (*loops, node))  # also of the iterations that an end leaves
                    self.loops.append((Visit(node, loops, bindings, fraction), node))
                    self.visit(node.body, (*loops, node), bindings, (*conditions, *stop))
                case Let():
                    self.visit(node.body, loops, {**bindings, node.var: substitute(node.value, bindings)}, conditions)
                case Storage():
                    self.storages.append(node)
                    self.visit(node.body, loops, bindings, conditions)
                case Branch():
                    if any(isinstance(inside, Compute | HorizontalReduce) for inside in iter_nodes((node,))):
                        self.branches.append(_visit(node, loops, bindings, conditions))
                    condition = substitute(node.cond, bindings)
                    self.visit(node.then, loops, bindings, (*conditions, condition))
                    if not loads_of(condition):  # conditions on data count as true
                        self.visit(node.otherwise, loops, bindings, (*conditions, eq(condition, num(0))))
                case Compute():
                    self.computes.append((_visit(node, loops, bindings, conditions), node))
                case HorizontalReduce():
                    halvings = Loop(f"{node.tensor}.halving", node.lanes.bit_length() - 1, LoopKind.SERIAL, ())
                    step = Compute(node.tensor, node.index, node.first, node.combine)
                    self.computes.append((_visit(step, (*loops, halvings), bindings, conditions), step))
                case Routine():
                    self.visit(node.body, loops, bindings, conditions)
                case Prefetch() | Transpose():
                    pass
                case Barrier():
                    self.barriers.append(_visit(node, loops, bindings, conditions))
                case _:
                    raise InvariantError(f"a {type(node).__name__} has no price")


def _visit(
    node: Compute | Barrier | Branch | Loop, loops: tuple[Loop, ...], bindings: Mapping[str, Expr], conditions: tuple[Expr, ...]
) -> Visit:
    return Visit(node, loops, bindings, _fraction(conditions, loops))


def _fraction(conditions: Sequence[Expr], loops: Sequence[Loop]) -> float:
    """Return the fraction of iterations in which all conditions hold. Conditions on data count as true."""
    extents = {loop.var: loop.extent for loop in loops}
    known = [condition for condition in conditions if axes_of(condition) <= extents.keys()]
    points = _sample({var: extents[var] for var in sorted(set().union(*map(axes_of, known)), key=lambda var: extents[var])})
    holds: Array = np.ones((), bool)
    for condition in known:
        try:
            holds = holds & (evaluate(condition, points) != 0)
        except OpaqueValueError:
            continue
    return float(np.mean(np.broadcast_to(holds, np.broadcast_shapes(holds.shape, *(p.shape for p in points.values())))))


def _sample(extents: Mapping[str, int]) -> dict[str, Array]:
    """Return points of loops, the shortest first, as arrays that broadcast with each other."""
    points: dict[str, Array] = {}
    left, rank = MAX_SAMPLES, len(extents)
    for place, (var, extent) in enumerate(extents.items()):
        count = max(1, min(extent, int(left ** (1 / (rank - place)) + 1e-9)))
        left //= count
        shape = [-1 if d == place else 1 for d in range(rank)]
        points[var] = ((np.arange(count, dtype=np.int64) * 2 + 1) * extent // (2 * count)).reshape(shape)
    return points
