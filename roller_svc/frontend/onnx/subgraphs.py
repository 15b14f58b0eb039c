"""SUBGRAPHS: If, Loop and Scan, whose bodies are graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
from onnx import GraphProto, NodeProto

from roller_svc.errors import ArgumentError
from roller_svc.frontend.onnx.scope import Scope
from roller_svc.frontend.onnx.tensors import Tensor, attributes_of
from roller_svc.frontend.onnx.trip_counts import count_steps, find_deciding_inputs
from roller_svc.frontend.onnx.use import not_constant
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

MAX_STEPS = 1 << 20


class Importer(Protocol):
    """Converter of the nodes of a body."""

    opset: int

    def convert_subgraph(self, graph: GraphProto, inputs: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Convert a subgraph whose inputs are these tensors; return its outputs."""

    def is_standard(self, node: NodeProto, *op_types: str) -> bool:
        """Return whether a node is an operator of ONNX, which no function of the model replaces."""


Converter = Callable[[Importer, NodeProto, Sequence[Tensor], Scope], Sequence[Tensor]]


def _if(importer: Importer, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
    """Convert the branch that the constant condition selects."""
    condition = _constant(tensors[0], scope, "the condition")
    body = _graph(node, "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch")
    return importer.convert_subgraph(body, (), Scope(scope.builder, scope))


def _loop(importer: Importer, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
    """Convert a loop whose number of steps is known, by a trip count or a condition on known values."""
    body = _graph(node, "body")
    count = len(tensors) - 2
    if count < 0 or len(body.input) != len(tensors) or len(body.output) <= count:
        raise ArgumentError(
            f"the body has {len(body.input)} inputs and {len(body.output)} outputs; the loop has {len(tensors)} inputs",
            code="invalid-node",
        )
    most = _most_steps(tensors, scope)
    fixed = _fixed_states(body, importer)
    changing = [i for i in range(count) if i not in fixed]
    states = [_operand(tensors[2 + i]) for i in changing]
    builder, inner = _body_of(scope, "body")
    counter = builder.add_input(TensorType(DType.INT64, ()))
    always = builder.add_constant(np.ones((), np.bool_), DType.BOOL)
    carried = [builder.add_input(state.type) for state in states]
    entering = dict(zip(changing, map(Tensor, carried), strict=True))
    inside = [entering[i] if i in entering else inner.take(tensors[2 + i]) for i in range(count)]
    results = importer.convert_subgraph(body, [Tensor(counter), Tensor(always), *inside], inner)
    after, stacked = [results[1 + i] for i in changing], results[1 + count :]
    steps = 0
    if most != 0:
        first = {x.name: state for x, state in zip(carried, states, strict=True)}
        following = {x.name: _operand(tensor) for x, tensor in zip(carried, after, strict=True)}
        steps = _count_steps(scope, inner, _operand(results[0]), counter.name, following, first, most)
    if steps:
        counts = scope.builder.add_constant(np.arange(steps, dtype=np.int64), DType.INT64)
        # The language's loop takes states before slices: the counter is a slice.
        found = _add_loop(
            scope, inner, steps, states, carried, [(counts, counter, False)], [*after, *stacked], [False] * len(stacked)
        )
    else:
        found = [*map(Tensor, states), *map(_no_slices, stacked)]
    last = dict(zip(changing, found, strict=False))
    return [*(last.get(i, tensors[2 + i]) for i in range(count)), *found[len(changing) :]]


def _most_steps(tensors: Sequence[Tensor], scope: Scope) -> int | None:
    """Return the greatest number of steps, by the trip count and the first condition; None if there is no limit."""
    if tensors[1].operand is not None and not _constant(tensors[1], scope, "the condition of the loop").all():
        return 0
    if tensors[0].operand is None:
        return None
    trips = _constant(tensors[0], scope, "the trip count")
    if trips.dtype.kind not in "iu":
        raise ArgumentError(f"the trip count is {trips.dtype}; int64 is expected", code="invalid-node")
    most = max(0, int(trips.reshape(-1)[0]))
    if most > MAX_STEPS:
        message = f"a loop of {most} steps is not supported; at most {MAX_STEPS} are"
        raise ArgumentError(message, code="unsupported-attribute")
    return most


def _fixed_states(body: GraphProto, importer: Importer) -> set[int]:
    """Return the positions of states that every step returns as it gets them."""
    copies = {
        node.output[0]: node.input[0] for node in body.node if importer.is_standard(node, "Identity") and node.input and node.output
    }
    fixed = set()
    for position, (before, after) in enumerate(zip(body.input[2:], body.output[1:], strict=False)):
        name = after.name
        for _ in copies:
            name = copies.get(name, name)
        if name == before.name:
            fixed.add(position)
    return fixed


def _count_steps(
    scope: Scope,
    inner: Scope,
    condition: Operand,
    counter: str,
    after: Mapping[str, Operand],
    first: Mapping[str, Operand],
    most: int | None,
) -> int:
    """Return the number of steps. Raises ArgumentError that names the inputs of the model that decide it, if any do."""
    deciding = find_deciding_inputs(inner.builder, condition, after)
    values = {name: scope.builder.value(first[name]) for name in deciding if name in first}
    known = {name: value for name, value in values.items() if value is not None}
    if unknown := [name for name in deciding if name not in known and name != counter]:
        outside = {**inner.captured, **first}
        inputs = (scope.inputs_of(outside[name]) for name in unknown if name in outside)
        raise not_constant("the condition of the loop", list(dict.fromkeys(chain.from_iterable(inputs))))
    return count_steps(inner.builder, condition, counter, after, known, most)


def _no_slices(tensor: Tensor) -> Tensor:
    """Return the stacked output of a loop that runs no step."""
    kind = _operand(tensor).type
    return Tensor(value=np.empty((0, *kind.shape), kind.dtype.value))


def _scan(importer: Importer, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
    """Convert a scan (operator sets 9 and later)."""
    if importer.opset < 9:
        raise ArgumentError("Scan before operator set 9 is not supported", code="unsupported-attribute")
    attributes, body = attributes_of(node), _graph(node, "body")
    count = attributes.get("num_scan_inputs", 0)
    if not isinstance(count, int) or not 0 < count <= len(tensors):
        raise ArgumentError(f"num_scan_inputs is {count}, with {len(tensors)} inputs", code="invalid-node")
    operands = [_operand(tensor) for tensor in tensors]
    states, scanned = operands[:-count], operands[-count:]
    if any(not x.rank for x in scanned):
        raise ArgumentError("a scanned input has no dimensions, and so no slices", code="invalid-node")
    axes = _listed(attributes, "scan_input_axes", count)
    scanned = [_to_front(scope, x, axis) for x, axis in zip(scanned, axes, strict=True)]
    steps = scanned[0].shape[0]
    if any(x.shape[0] != steps for x in scanned):
        raise ArgumentError(f"scanned inputs have {sorted({x.shape[0] for x in scanned})} slices", code="invalid-node")
    builder, inner = _body_of(scope, "body")
    carried = [builder.add_input(state.type) for state in states]
    slices = [builder.add_input(TensorType(x.dtype, x.shape[1:])) for x in scanned]
    results = importer.convert_subgraph(body, [Tensor(x) for x in (*carried, *slices)], inner)
    stacked = len(results) - len(states)
    backward = _listed(attributes, "scan_input_directions", count)
    entries = [(x, piece, bool(back)) for x, piece, back in zip(scanned, slices, backward, strict=True)]
    reversed_outputs = [bool(back) for back in _listed(attributes, "scan_output_directions", stacked)]
    outputs = list(_add_loop(scope, inner, steps, states, carried, entries, results, reversed_outputs))
    for i, axis in enumerate(_listed(attributes, "scan_output_axes", stacked), len(states)):
        outputs[i] = Tensor(_from_front(scope, _operand(outputs[i]), axis))
    return outputs


def _add_loop(
    scope: Scope,
    inner: Scope,
    steps: int,
    states: Sequence[Operand],
    carried: Sequence[Operand],
    scanned: Sequence[tuple[Operand, Operand, bool]],
    results: Sequence[Tensor],
    stacked: Sequence[bool],
) -> Sequence[Tensor]:
    """Add a loop node. `scanned`: whole tensor, slice in the body, whether it is reversed."""
    outputs = [_operand(tensor) for tensor in results]
    for state, output in zip(states, outputs, strict=False):
        if state.type != output.type:
            raise ArgumentError(
                f"a state of the loop changes from {_shown(state)} to {_shown(output)}; states of a constant type are supported",
                code="unsupported-attribute",
            )
    body = inner.builder.finish([(f"result_{i}", output) for i, output in enumerate(outputs)])
    captured = list(inner.captured.values())
    order = [*(x.name for x in carried), *(piece.name for _, piece, _ in scanned)]
    fixed = [name for name in inner.builder.inputs if name not in order]
    body = type(body)(
        body.name, tuple((n, inner.builder.inputs[n]) for n in (*order, *fixed)), body.constants, body.nodes, body.outputs
    )
    operands = [*states, *(whole for whole, _, _ in scanned), *captured]
    backward = [back for _, _, back in scanned]
    found = scope.builder.add_loop(body, steps, len(states), backward, list(stacked), operands)
    return [Tensor(operand) for operand in found]


def _body_of(scope: Scope, name: str) -> tuple[Any, Scope]:
    builder = scope.builder.subgraph(name)
    return builder, Scope(builder, scope)


def _graph(node: NodeProto, name: str) -> GraphProto:
    for attribute in node.attribute:
        if attribute.name == name and attribute.HasField("g"):
            graph: GraphProto = attribute.g
            return graph
    raise ArgumentError(f"attribute {name} is missing", code="invalid-node")


def _constant(tensor: Tensor, scope: Scope, what: str) -> Any:
    value = tensor.known(scope.builder)
    if value is None or not value.size:
        raise not_constant(what, [] if tensor.operand is None else scope.inputs_of(tensor.operand))
    return value


def _operand(tensor: Tensor) -> Operand:
    if tensor.operand is None:
        raise ArgumentError("an empty or omitted tensor is not supported here", code="unsupported-type")
    return tensor.operand


def _listed(attributes: dict[str, Any], name: str, count: int) -> list[int]:
    values = attributes.get(name) or [0] * count
    if not isinstance(values, list) or len(values) != count or not all(isinstance(value, int) for value in values):
        raise ArgumentError(f"{name} must be {count} whole numbers, got {values!r:.60}", code="invalid-node")
    return values


def _to_front(scope: Scope, x: Operand, axis: int) -> Operand:
    _check_axis(axis, x.rank)
    order = [axis % x.rank, *(d for d in range(x.rank) if d != axis % x.rank)]
    return x if order[0] == 0 else scope.builder.call("transpose", [x], permutation=order)


def _from_front(scope: Scope, x: Operand, axis: int) -> Operand:
    _check_axis(axis, x.rank)
    order = list(range(1, x.rank))
    order.insert(axis % x.rank, 0)
    return x if order[0] == 0 else scope.builder.call("transpose", [x], permutation=order)


def _check_axis(axis: int, rank: int) -> None:
    if not -rank <= axis < rank:
        raise ArgumentError(f"axis {axis} of a scan is not one of {rank} dimensions", code="invalid-node")


def _shown(operand: Operand) -> str:
    return f"{operand.dtype.value}{list(operand.shape)}"


SUBGRAPHS: dict[str, Converter] = {"If": _if, "Loop": _loop, "Scan": _scan}
