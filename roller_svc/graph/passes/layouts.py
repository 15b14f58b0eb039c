"""Layouts of images: each tensor between nodes has its channels first or last, by the performance model.

A program says where each element is, so a node may read one layout and write the other. There are no conversion nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TypeVar

from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.costs import CostTable
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.expr import AxisRef, Expr, Load, rewrite
from roller_svc.ir.graph import FUSED, Graph, Node, OpNode
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram, TensorType

T = TypeVar("T")
IMAGE_RANKS = range(3, 6)  # batch, channels, then one to three dimensions of pixels
MAX_STATES = 64  # of the search
# The layouts change if the estimate of the nodes falls below this fraction.
PROFITABLE = 0.98


def choose_layouts(graph: Graph, costs: CostTable) -> Graph:
    """Store images between nodes with channels last where the estimate of the graph falls by that.

    Bodies of loops stay as they are.
    """
    images = _find_images(graph)
    chosen, seconds, before = _choose(graph, costs, images)
    return store_channels_last(graph, chosen) if seconds < PROFITABLE * before else graph


def store_channels_last(graph: Graph, tensors: frozenset[str]) -> Graph:
    """Return the graph with the second dimension of the tensors moved to the end.

    Args:
        graph: any graph.
        tensors: results of operators, of rank 3 or more, that only operators read.
    """
    nodes: list[Node] = [_store_channels_last(node, tensors) if isinstance(node, OpNode) else node for node in graph.nodes]
    return replace(graph, nodes=tuple(nodes))


def _find_images(graph: Graph) -> frozenset[str]:
    """Return the tensors whose layout is free: no view, loop, scatter, copy-free concatenation or caller has them."""
    types, fixed = graph.types, {tensor for _, tensor in graph.outputs}
    for node in graph.nodes:
        if not isinstance(node, OpNode) or not _takes_any_layout(node):
            fixed.update((*node.inputs, *node.outputs))
    written = (tensor for node in graph.nodes for tensor in node.outputs)
    return frozenset(tensor for tensor in written if tensor not in fixed and _is_image(types[tensor]))


def _takes_any_layout(node: OpNode) -> bool:
    scatters = any(statement.kind is StatementKind.SCATTER for statement in node.program.statements)
    return not scatters and view_offset_elements(node) is None and not is_contiguous_concat(node)


def _is_image(type_: TensorType) -> bool:
    return len(type_.shape) in IMAGE_RANKS and type_.shape[1] > 1 and prod(type_.shape[2:]) > 1


@dataclass(frozen=True, slots=True)
class _Choice:
    seconds: float
    missing: int  # nodes without an estimate, whose bounds are in the seconds
    chosen: frozenset[str]  # all tensors with channels last so far

    @property
    def rank(self) -> tuple[float, int]:
        """Return what the cheapest choice has least of: a bound is not preferred to an estimate that equals it."""
        return self.seconds, self.missing


def _choose(graph: Graph, costs: CostTable, images: frozenset[str]) -> tuple[frozenset[str], float, float]:
    """Return the tensors with channels last, the estimate of the nodes around images, and that without any.

    A node is estimated with all its images in one layout, and with mixed layouts only where the search needs that: it
    ends when the cheapest choice by the bounds has no node without an estimate, or is not profitable.
    """
    nodes = [node for node in graph.nodes if isinstance(node, OpNode) and not images.isdisjoint((*node.inputs, *node.outputs))]
    table = _LayoutCosts(graph, costs, images)
    before = sum(table.estimate(node, frozenset()) for node in nodes)
    while True:
        best = _find_cheapest(nodes, images, table)
        missing = [node for node in nodes if not table.is_known(node, best.chosen)]
        if not missing or best.seconds >= PROFITABLE * before:
            return best.chosen, best.seconds, before
        for node in missing:
            table.estimate(node, best.chosen)


class _LayoutCosts:
    """Seconds of nodes by the layouts of their images. Nodes of equal programs share them."""

    def __init__(self, graph: Graph, costs: CostTable, images: frozenset[str]) -> None:
        self._graph, self._costs, self._images = graph, costs, images
        self._kinds: dict[tuple[TensorProgram, tuple[bool, ...]], int] = {}
        self._kind_of: dict[str, int] = {}
        self._seconds: dict[tuple[int, tuple[bool, ...]], float] = {}

    def estimate(self, node: OpNode, tensors: frozenset[str]) -> float:
        """Return the estimate of a node that has these tensors with channels last."""
        key = self._key(node, tensors)
        if key not in self._seconds:
            cost = self._costs.cost(_store_channels_last(node, tensors), self._graph.constants)
            self._seconds[key] = float("inf") if cost is None else cost.seconds
        return self._seconds[key]

    def is_known(self, node: OpNode, tensors: frozenset[str]) -> bool:
        """Return whether the node has been estimated with these tensors."""
        return self._key(node, tensors) in self._seconds

    def bound(self, node: OpNode, tensors: frozenset[str]) -> float:
        """Return the estimate if it is known, else a lower bound.

        A node whose images have different layouts is expected to take no less than with all of them in the better one.
        """
        if self.is_known(node, tensors):
            return self.estimate(node, tensors)
        return min(self.estimate(node, frozenset()), self.estimate(node, self._images))

    def _key(self, node: OpNode, tensors: frozenset[str]) -> tuple[int, tuple[bool, ...]]:
        if node.name not in self._kind_of:
            kind = (node.program, tuple(tensor in self._graph.constants for tensor in node.inputs))
            self._kind_of[node.name] = self._kinds.setdefault(kind, len(self._kinds))
        return self._kind_of[node.name], tuple([tensor in tensors for tensor in (*node.inputs, *node.outputs)])


def _find_cheapest(nodes: Sequence[OpNode], images: frozenset[str], table: _LayoutCosts) -> _Choice:
    """Return the cheapest layouts by the bounds of nodes.

    It eliminates variables along the graph: for each assignment of layouts to the tensors that later nodes read, it
    knows the cheapest choice for the others. A beam bounds the assignments.
    """
    last_reader = {tensor: i for i, node in enumerate(nodes) for tensor in node.inputs}
    choices = {frozenset[str](): _Choice(0.0, 0, frozenset())}
    for i, node in enumerate(nodes):
        written = [tensor for tensor in node.outputs if tensor in images]
        cheapest: dict[frozenset[str], _Choice] = {}
        costs: dict[frozenset[str], tuple[float, int]] = {}
        for state, choice in choices.items():
            for flags in product((False, True), repeat=len(written)):
                new = frozenset(tensor for tensor, is_last in zip(written, flags, strict=True) if is_last)
                around = new | state.intersection(node.inputs)
                if around not in costs:
                    costs[around] = table.bound(node, around), int(not table.is_known(node, around))
                seconds, missing = costs[around]
                live = frozenset(tensor for tensor in state | new if last_reader.get(tensor, i) > i)
                extended = _Choice(choice.seconds + seconds, choice.missing + missing, choice.chosen | new)
                if live not in cheapest or extended.rank < cheapest[live].rank:
                    cheapest[live] = extended
        choices = dict(sorted(cheapest.items(), key=lambda item: item[1].rank)[:MAX_STATES])
    return min(choices.values(), key=lambda choice: choice.rank)


def _store_channels_last(node: OpNode, tensors: frozenset[str]) -> OpNode:
    """Return the node with the tensors in the other layout, and with its inner tensors as its results."""
    program = node.program
    read = {name for (name, _), tensor in zip(program.inputs, node.inputs, strict=True) if tensor in tensors}
    results = {o.tensor: tensor in tensors for o, tensor in zip(program.outputs, node.outputs, strict=True)}
    moved = {name for name, is_moved in results.items() if is_moved}
    shapes = {program.types[name].shape for name in moved}
    inner = {s.output for s in program.statements if s.output not in results and s.type.shape in shapes}
    if not read | moved:
        return node
    return replace(node, operator=FUSED, program=_permute(program, read | moved | inner), parameters=())


def _permute(program: TensorProgram, tensors: set[str]) -> TensorProgram:
    inputs = tuple((name, _permute_type(type_) if name in tensors else type_) for name, type_ in program.inputs)
    statements = tuple(_permute_statement(statement, tensors) for statement in program.statements)
    return replace(program, inputs=inputs, statements=statements)


def _permute_statement(statement: TensorExpr, tensors: set[str]) -> TensorExpr:
    def permute(expr: Expr) -> Expr:
        if isinstance(expr, Load) and expr.tensor in tensors:
            return replace(expr, index=_move_last(expr.index), bounds_checked=_move_last(expr.bounds_checked))
        return expr

    permuted = replace(statement, body=rewrite(statement.body, permute))
    if statement.output not in tensors:
        return permuted
    index = _move_last(statement.index)
    order = [i.name for i in index if isinstance(i, AxisRef)]
    spatial = sorted(statement.spatial, key=lambda axis: order.index(axis.name))
    return replace(permuted, type=_permute_type(statement.type), axes=(*spatial, *statement.reduced), index=index)


def _permute_type(type_: TensorType) -> TensorType:
    return replace(type_, shape=_move_last(type_.shape))


def _move_last(dims: tuple[T, ...]) -> tuple[T, ...]:
    """Return the dimensions with the second one, the channels, at the end."""
    return (*dims[:1], *dims[2:], *dims[1:2])
