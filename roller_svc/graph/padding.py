"""Whether a model may run on padded inputs: whether elements of the results depend on the padding.

A graph is compared with the graph of another extent of the same dimension. A tensor whose shape differs has one padded
axis, whose extent is a multiple of the dimension's: the unit. The claim for each tensor is that the elements before
unit * n along this axis depend on those before n of the dimension alone. It holds for the graph if it holds for each
statement, and no statement differs in more than its extents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from roller_svc.analysis.intervals import bounds
from roller_svc.analysis.linear import divide, linear
from roller_svc.graph.weights import Weights
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind
from roller_svc.ir.graph import Graph, LoopNode, OpNode
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType

PaddedAxes = Mapping[str, int]  # tensor → its padded axis, for those that have one


class PaddingError(Exception):
    """Results depend on the padding. The text has the node and the reason."""


@dataclass(frozen=True, slots=True)
class _Extents:
    """The extents of a dimension in two graphs."""

    here: int
    there: int


LEAST_COMPARED = 2  # an extent of 1 has other programs, without the axis


def padded_axes(graph: Graph, other: Graph, extents: tuple[int, int], weights: Weights) -> PaddedAxes:
    """Return the padded axes of the inputs and outputs of a graph, by name.

    Args:
        graph: the graph that runs on padded inputs.
        other: the graph of another extent of the dimension.
        extents: of the dimension in both, at least LEAST_COMPARED.
        weights: has the arrays of constants.

    Raises:
        PaddingError: results would depend on the padding.
    """
    checker = _Checker(_Extents(*extents), weights)
    tensors = checker.graph(graph, other)
    outputs = {name: tensors[tensor] for name, tensor in graph.outputs if tensor in tensors}
    return {name: tensors[name] for name, _ in graph.inputs if name in tensors} | outputs


class _Checker:
    def __init__(self, extents: _Extents, weights: Weights) -> None:
        self._extents = extents
        self._weights = weights

    def graph(self, graph: Graph, other: Graph) -> PaddedAxes:
        """Return the padded axis of each tensor of a graph."""
        if len(graph.nodes) != len(other.nodes) or len(graph.inputs) != len(other.inputs):
            raise _refusal(graph.name, "other extents make another graph")
        first, second = graph.types, other.types
        if first.keys() != second.keys() or graph.outputs != other.outputs:
            raise _refusal(graph.name, "other extents make another graph")
        axes = self._axes(graph.name, first, second)
        for name in graph.constants:
            self._check_constant(graph, other, name, axes.get(name))
        for node, counterpart in zip(graph.nodes, other.nodes, strict=True):
            if (
                isinstance(node, OpNode)
                and isinstance(counterpart, OpNode)
                and (node.inputs, node.outputs) == (counterpart.inputs, counterpart.outputs)
            ):
                self._program(node.name, node.program, counterpart.program)
            elif isinstance(node, LoopNode) and isinstance(counterpart, LoopNode) and _is_same_loop(node, counterpart):
                self.graph(node.body, counterpart.body)
            else:
                raise _refusal(node.name, "its number of steps or its operator depends on the dimension")
        return axes

    def _axes(self, node: str, types: Mapping[str, TensorType], others: Mapping[str, TensorType]) -> dict[str, int]:
        """Return the axis in which each tensor differs."""
        axes: dict[str, int] = {}
        for name, type_ in types.items():
            here, there = type_.shape, others[name].shape
            if type_.dtype is not others[name].dtype or len(here) != len(there):
                raise _refusal(node, f"the type of {name} depends on the dimension")
            differing = [d for d, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]]
            if not differing:
                continue
            axis, *more = differing
            unit = here[axis] // self._extents.here
            if more or (unit * self._extents.here, unit * self._extents.there) != (here[axis], there[axis]):
                raise _refusal(node, f"the shape of {name} is no multiple of the dimension")
            axes[name] = axis
        return axes

    def _check_constant(self, graph: Graph, other: Graph, name: str, axis: int | None) -> None:
        """Check that a constant has the same elements for both extents, as far as both have them."""
        arrays = [self._weights.array(each.constants[name]) for each in (graph, other)]
        if axis is not None:
            least = min(array.shape[axis] for array in arrays)
            arrays = [array.take(range(least), axis) for array in arrays]
        if graph.constants[name] != other.constants[name] and not np.array_equal(arrays[0], arrays[1]):
            raise _refusal(name, "a number in the model depends on the dimension")

    def _program(self, node: str, program: TensorProgram, other: TensorProgram) -> None:
        if program.types.keys() != other.types.keys():
            raise _refusal(node, "other extents make another program")
        types = program.types
        axes = self._axes(node, types, other.types)
        for statement, counterpart in zip(program.statements, other.statements, strict=True):
            if not _differs_in_extents_alone(statement, counterpart):
                raise _refusal(node, "it computes something else for other extents")
            self._statement(node, statement, counterpart, axes, types)

    def _statement(
        self, node: str, statement: TensorExpr, counterpart: TensorExpr, axes: PaddedAxes, types: Mapping[str, TensorType]
    ) -> None:
        """Check that elements before the padding read such elements alone."""
        written = axes.get(statement.output)
        place = None if written is None else statement.index[written]
        changed = [a.name for a, b in zip(statement.axes, counterpart.axes, strict=True) if a.extent != b.extent]
        if any(place != AxisRef(name) for name in changed):
            raise _refusal(node, "it reduces over the dimension")
        for load in statement.reads:
            if load.tensor in axes:
                self._load(node, statement, load, axes[load.tensor], place, types)
        if statement.target is not None and axes.get(statement.target) != written:
            raise _refusal(node, "it writes to another dimension")

    def _load(
        self, node: str, statement: TensorExpr, load: Load, axis: int, place: Expr | None, types: Mapping[str, TensorType]
    ) -> None:
        index, unit = load.index[axis], types[load.tensor].shape[axis] // self._extents.here
        if bounds(index, statement.extents).inside(unit):
            return  # it reads what is never padding
        if place is None or not isinstance(place, AxisRef):
            raise _refusal(node, "a result of one size depends on all of the dimension")
        written_unit = statement.extents[place.name] // self._extents.here
        others = {name: extent for name, extent in statement.extents.items() if name != place.name}
        if _quotient(index, unit, others) != _quotient(place, written_unit, others):
            raise _refusal(node, "it moves or joins elements of the dimension")


def _differs_in_extents_alone(statement: TensorExpr, counterpart: TensorExpr) -> bool:
    """Return whether two statements are equal but for extents."""
    parts = ("output", "kind", "index", "body", "combine", "target", "predicate", "bounds_checked", "in_place", "writes_once")
    names = [[(axis.name, axis.kind) for axis in each.axes] for each in (statement, counterpart)]
    return names[0] == names[1] and all(getattr(statement, part) == getattr(counterpart, part) for part in parts)


def _is_same_loop(node: LoopNode, counterpart: LoopNode) -> bool:
    parts = ("steps", "carried", "scanned", "stacked", "inputs", "outputs")
    return all(getattr(node, part) == getattr(counterpart, part) for part in parts)


def _quotient(index: Expr, by: int, others: Mapping[str, int]) -> Expr:
    """Return floor(index / by), without the terms of the other axes that it does not depend on."""
    while True:
        match index:
            case Cast(arg=arg) if index.is_exact:
                index = arg
            case Op(kind=OpKind.FLOORDIV, args=(arg, Const(value=int(value)))) if value > 0:
                index, by = arg, by * value
            case _:
                return divide(OpKind.FLOORDIV, linear(index), by, others)


def _refusal(node: str, reason: str) -> PaddingError:
    return PaddingError(f"node {node!r}: {reason}")
