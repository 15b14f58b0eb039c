"""Whether a model may run on padded inputs: whether elements of the results depend on the padding.

A graph is compared with the graph of another extent n of the same dimension. A tensor whose shape differs has one padded
axis, of outer * n * unit elements. Element p of it has index p // unit % n in the dimension. Inputs and results have outer
= 1: their padding is at the end. A reshape may put the dimension inside of another one, where outer > 1.

Each statement is written with these three positions in place of the padded axis, for both extents. The claim for each
tensor is that elements of an index below n depend on such elements alone, and are the same for all extents above it. It
holds for the graph if each statement reads elements of its own index alone, and is the same for both extents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from roller_svc.analysis.index_map import IndexMap
from roller_svc.analysis.intervals import bounds
from roller_svc.analysis.linear import divide, linear
from roller_svc.graph.weights import Weights
from roller_svc.ir.expr import AxisRef, Expr, Load, OpKind, rewrite
from roller_svc.ir.graph import Graph, LoopNode, OpNode
from roller_svc.ir.index import linearize, ref
from roller_svc.ir.program import TensorExpr, TensorProgram, TensorType

PaddedAxes = Mapping[str, int]  # tensor → its padded axis, for those that have one


class PaddingError(Exception):
    """Results depend on the padding. The text has the node and the reason."""


@dataclass(frozen=True, slots=True)
class _Extents:
    """The extents of a dimension in two graphs."""

    here: int
    there: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """A place of the dimension in a tensor: element p of the axis has index p // unit % n in it."""

    axis: int
    unit: int
    outer: int = 1


_Layouts = Mapping[str, _Layout]  # of tensors that have the dimension

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
    layouts = checker.graph(graph, other)
    named = [(name, name) for name, _ in graph.inputs] + list(graph.outputs)
    return {name: layouts[tensor].axis for name, tensor in named if tensor in layouts}


class _Checker:
    def __init__(self, extents: _Extents, weights: Weights) -> None:
        self._extents = extents
        self._weights = weights

    def graph(self, graph: Graph, other: Graph) -> _Layouts:
        """Return where each tensor of a graph has the dimension."""
        if len(graph.nodes) != len(other.nodes) or len(graph.inputs) != len(other.inputs):
            raise _refusal(graph.name, "other extents make another graph")
        first, second = graph.types, other.types
        if first.keys() != second.keys() or graph.outputs != other.outputs:
            raise _refusal(graph.name, "other extents make another graph")
        whole = self._layouts(graph.name, first, second)
        given = {*graph.constants, *(name for name, _ in graph.inputs)}
        layouts = {name: layout for name, layout in whole.items() if name in given}
        for name in graph.constants:
            self._check_constant(graph, other, name, layouts.get(name))
        for node, counterpart in zip(graph.nodes, other.nodes, strict=True):
            if (
                isinstance(node, OpNode)
                and isinstance(counterpart, OpNode)
                and (node.inputs, node.outputs) == (counterpart.inputs, counterpart.outputs)
            ):
                read = {
                    inner: layouts[name]
                    for (inner, _), name in zip(node.program.inputs, node.inputs, strict=True)
                    if name in layouts
                }
                found = self._program(node.name, node.program, counterpart.program, read)
                written = zip(node.outputs, (found.get(each.tensor) for each in node.program.outputs), strict=True)
                layouts |= {name: layout for name, layout in written if layout is not None}
            elif isinstance(node, LoopNode) and isinstance(counterpart, LoopNode) and _is_same_loop(node, counterpart):
                _check_whole(node.name, node.inputs, layouts)
                self.graph(node.body, counterpart.body)
                layouts |= {name: whole[name] for name in node.outputs if name in whole}
            else:
                raise _refusal(node.name, "its number of steps or its operator depends on the dimension")
        for _, tensor in graph.outputs:
            producer = graph.producers.get(tensor)
            _check_whole(tensor if producer is None else producer.name, [tensor], layouts)
        return layouts

    def _layouts(self, node: str, types: Mapping[str, TensorType], others: Mapping[str, TensorType]) -> dict[str, _Layout]:
        """Return the axis in which each tensor differs, as if its padding were at the end."""
        layouts: dict[str, _Layout] = {}
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
            layouts[name] = _Layout(axis, unit)
        return layouts

    def _check_constant(self, graph: Graph, other: Graph, name: str, layout: _Layout | None) -> None:
        """Check that a constant has the same elements for both extents, as far as both have them."""
        arrays = [self._weights.array(each.constants[name]) for each in (graph, other)]
        if layout is not None:
            least = min(array.shape[layout.axis] for array in arrays)
            arrays = [array.take(range(least), layout.axis) for array in arrays]
        if graph.constants[name] != other.constants[name] and not np.array_equal(arrays[0], arrays[1]):
            raise _refusal(name, "a number in the model depends on the dimension")

    def _program(self, node: str, program: TensorProgram, other: TensorProgram, inputs: _Layouts) -> _Layouts:
        """Return where each tensor of a program has the dimension."""
        if program.types.keys() != other.types.keys():
            raise _refusal(node, "other extents make another program")
        whole = self._layouts(node, program.types, other.types)
        layouts = dict(inputs)
        for statement, counterpart in zip(program.statements, other.statements, strict=True):
            end = whole.get(statement.output)
            refusals: list[PaddingError] = []
            for layout in [None] if end is None else _candidates(end):
                try:
                    self._statement(node, statement, counterpart, layouts, layout)
                except PaddingError as error:
                    refusals.append(error)
                    continue
                if layout is not None:
                    layouts[statement.output] = layout
                break
            else:
                raise refusals[0]
        return layouts

    def _statement(
        self, node: str, statement: TensorExpr, counterpart: TensorExpr, layouts: _Layouts, written: _Layout | None
    ) -> None:
        """Check that elements of an index in the dimension read such elements alone.

        Args:
            node: its node.
            statement: for the extent here.
            counterpart: for the extent there.
            layouts: of the tensors that it reads.
            written: of the tensor that it writes.
        """
        place = None if written is None else statement.index[written.axis]
        pairs = list(zip(statement.axes, counterpart.axes, strict=True))
        if any(place != AxisRef(a.name) for a, b in pairs if a.extent != b.extent):
            raise _refusal(node, "it reduces over the dimension")
        if statement.target is not None and layouts.get(statement.target) != written:
            raise _refusal(node, "it writes to another dimension")
        padded = None
        if written is not None and isinstance(place, AxisRef):
            if statement.extents[place.name] != written.outer * self._extents.here * written.unit:
                raise _refusal(node, "it writes part of the dimension")
            padded = place.name
        here, there = (
            _Positions(each, extent, padded, written, layouts)
            for each, extent in ((statement, self._extents.here), (counterpart, self._extents.there))
        )
        by_position = here.statement()
        if not _differs_in_extents_alone(by_position, there.statement()):
            raise _refusal(node, "it computes something else for other extents")
        for load in by_position.reads:
            if load.tensor in layouts:
                index = load.index[layouts[load.tensor].axis + 1]
                if bounds(index, here.ranges).inside(1):
                    continue  # it reads what is never padding
                if padded is None:
                    raise _refusal(node, "a result of one size depends on all of the dimension")
                if index != ref(_IN_DIMENSION.format(padded)):
                    raise _refusal(node, "it moves or joins elements of the dimension")


_BEFORE, _IN_DIMENSION, _WITHIN = "{}.before", "{}.dimension", "{}.within"  # the positions of an axis


class _Positions:
    """Writes a statement with three positions in place of each padded axis."""

    def __init__(self, statement: TensorExpr, extent: int, padded: str | None, written: _Layout | None, layouts: _Layouts) -> None:
        """Take a statement.

        Args:
            statement: to be written so.
            extent: of the dimension.
            padded: the axis along which it writes the dimension; None if there is none.
            written: of the tensor that it writes.
            layouts: of the tensors that it reads.
        """
        self._statement = statement
        self._extent = extent
        self._padded = padded
        self._layouts = dict(layouts) if written is None else {**layouts, statement.output: written}
        ranges, at = statement.extents, {}
        if padded is not None and written is not None:
            del ranges[padded]
            parts = {_BEFORE: written.outer, _IN_DIMENSION: extent, _WITHIN: written.unit}
            named = {part.format(padded): size for part, size in parts.items() if size > 1}
            at[padded] = linearize((ref(name), size) for name, size in named.items())
            ranges |= named
        self.ranges: Mapping[str, int] = ranges
        self._map = IndexMap(statement.extents, at, ranges)

    def statement(self) -> TensorExpr:
        """Return the statement, whose indices of padded tensors have two dimensions more."""
        given = self._statement
        return replace(
            given,
            index=self._index(given.output, tuple(map(self._expression, given.index))),
            body=self._expression(given.body),
            predicate=None if given.predicate is None else self._expression(given.predicate),
        )

    def _expression(self, expr: Expr) -> Expr:
        return rewrite(self._map.apply(expr), self._load)

    def _load(self, expr: Expr) -> Expr:
        return replace(expr, index=self._index(expr.tensor, expr.index)) if isinstance(expr, Load) else expr

    def _index(self, tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        layout = self._layouts.get(tensor)
        if layout is None:
            return index
        place, ranges = linear(index[layout.axis]), self.ranges
        in_units = linear(divide(OpKind.FLOORDIV, place, layout.unit, ranges))
        positions = (
            divide(OpKind.FLOORDIV, in_units, self._extent, ranges),
            divide(OpKind.MOD, in_units, self._extent, ranges),
            divide(OpKind.MOD, place, layout.unit, ranges),
        )
        return (*index[: layout.axis], *positions, *index[layout.axis + 1 :])


def _candidates(end: _Layout) -> Iterable[_Layout]:
    """Yield each place that the dimension may have in an axis: at its end first."""
    for unit in range(end.unit, 0, -1):
        if end.unit % unit == 0:
            yield _Layout(end.axis, unit, end.unit // unit)


def _check_whole(node: str, names: Iterable[str], layouts: _Layouts) -> None:
    """Raise PaddingError for a tensor that has padding between its elements."""
    if any(name in layouts and layouts[name].outer > 1 for name in names):
        raise _refusal(node, "a result or a loop has the dimension inside of another one")


def _differs_in_extents_alone(statement: TensorExpr, counterpart: TensorExpr) -> bool:
    """Return whether two statements are equal but for extents."""
    parts = ("output", "kind", "index", "body", "combine", "target", "predicate", "bounds_checked", "in_place", "writes_once")
    names = [[(axis.name, axis.kind) for axis in each.axes] for each in (statement, counterpart)]
    return names[0] == names[1] and all(getattr(statement, part) == getattr(counterpart, part) for part in parts)


def _is_same_loop(node: LoopNode, counterpart: LoopNode) -> bool:
    parts = ("steps", "carried", "scanned", "stacked", "inputs", "outputs")
    return all(getattr(node, part) == getattr(counterpart, part) for part in parts)


def _refusal(node: str, reason: str) -> PaddingError:
    return PaddingError(f"node {node!r}: {reason}")
