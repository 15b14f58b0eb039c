"""Functions of one byte as tables of 256 elements, which are computed when the model is compiled.

Between DequantizeLinear and QuantizeLinear, what is done to each element of one tensor maps a byte to a byte. The table
is what the reference interpreter computes for every byte, so that looking it up has the results of the nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from roller_svc.analysis.lookup_tables import BYTE_ENTRIES
from roller_svc.graph.costs import CostTable
from roller_svc.graph.merge import can_merge, merge_nodes
from roller_svc.graph.weights import Array, Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, axes_of, loads_of, rewrite
from roller_svc.ir.graph import FUSED, Constant, Graph, LoopNode, Node, OpNode
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.program import Axis, AxisKind, Output, StatementKind, TensorExpr, TensorProgram, TensorType
from roller_svc.semantics.interpreter import reference

_BYTES = (DType.INT8, DType.UINT8)
_BYTE_AXIS = ".byte"  # no name of a program's axis


def tabulate_bytes(graph: Graph, weights: Weights, costs: CostTable) -> Graph:
    """Return the graph with functions of one byte as lookups where the model expects that to be faster."""
    if costs.hw.family is not TargetKind.CPU:
        return graph  # epilogues of products on GPUs do not price lookups
    tables = _Tables(graph, weights, costs)
    bodies = [
        replace(node, body=tabulate_bytes(node.body, weights, costs)) if isinstance(node, LoopNode) else node
        for node in graph.nodes
    ]
    for node in bodies:
        if isinstance(node, OpNode) and (function := tables.find_function(node)) is not None:
            tables.functions[node.outputs[0]] = function
    return tables.replace_nodes(bodies)


@dataclass(frozen=True, slots=True)
class _ByteFunction:
    """A tensor each of whose elements is a function of the byte at the same place of another tensor."""

    source: str  # the tensor of bytes
    source_type: TensorType
    type: TensorType
    values: Array  # of each byte, by its bits as an unsigned number
    nodes: tuple[OpNode, ...]  # that compute the tensor from the bytes


@dataclass(slots=True)
class _Tables:
    graph: Graph
    weights: Weights
    costs: CostTable
    functions: dict[str, _ByteFunction] = field(default_factory=dict)  # by the tensor

    def find_function(self, node: OpNode) -> _ByteFunction | None:
        """Return what a node computes as a function of one byte; None if it is anything else."""
        if len(node.outputs) != 1:
            return None
        inputs = dict(zip((name for name, _ in node.program.inputs), node.inputs, strict=True))
        arguments: dict[str, _ByteFunction] = {}
        arrays: dict[str, Array] = {}
        for (name, type_), tensor in zip(node.program.inputs, node.inputs, strict=True):
            if tensor in self.graph.constants and type_.elements == 1:
                arrays[name] = self.weights.array(self.graph.constants[tensor])
            elif type_.dtype in _BYTES and tensor not in self.graph.constants:
                every = np.arange(BYTE_ENTRIES, dtype=np.uint8).view(np.dtype(type_.dtype.value))
                arguments[name] = _ByteFunction(tensor, type_, type_, every, ())
            elif tensor in self.functions:
                arguments[name] = self.functions[tensor]
            else:
                return None
        output = node.output_types[0]
        sources = {argument.source for argument in arguments.values()}
        is_larger = output.elements > BYTE_ENTRIES and all(a.type.shape == output.shape for a in arguments.values())
        if len(sources) != 1 or not is_larger:
            return None
        program = _of_every_byte(node.program, output.shape, {name: a.type.dtype for name, a in arguments.items()})
        if program is None:
            return None
        arrays |= {name: argument.values for name, argument in arguments.items()}
        values = reference(program, {name: arrays[name] for name in inputs})[program.outputs[0].name]
        first = next(iter(arguments.values()))
        nodes = dict.fromkeys(each for argument in arguments.values() for each in argument.nodes)
        return _ByteFunction(first.source, first.source_type, output, values, (*nodes, node))

    def replace_nodes(self, nodes: list[Node]) -> Graph:
        """Return the graph with the nodes and the lookups that replace some of them, the last of a chain first."""
        constants, needed = dict(self.graph.constants), {tensor for _, tensor in self.graph.outputs}
        looked_up: dict[str, _ByteFunction] = {}
        for node in reversed(nodes):
            read = node.inputs
            function = self.functions.get(node.outputs[0]) if needed.intersection(node.outputs) else None
            if function is not None and self._is_faster(function):
                looked_up[node.outputs[0]] = function
                read = (function.source,)
            needed.update(read)
        found: list[Node] = []
        for node in nodes:
            function = looked_up.get(node.outputs[0])
            if function is None:
                found.append(node)
                continue
            if (earlier := looked_up.get(function.source)) is not None:  # a table of a table is a table
                values = function.values[earlier.values.view(np.uint8)]
                function = replace(earlier, type=function.type, values=values)
                looked_up[node.outputs[0]] = function
            lookup = _lookup(function, node.name, f"{node.outputs[0]}.table", node.outputs[0])
            constants[lookup.inputs[1]] = self.weights.add_typed(function.values, lookup.input_types[1])
            found.append(lookup)
        return replace(self.graph, constants=constants, nodes=tuple(found))

    def _is_faster(self, function: _ByteFunction) -> bool:
        """Return whether the model expects a lookup to be faster than the nodes, merged if they can be."""
        output = function.nodes[-1].outputs[0]
        if not can_merge(function.nodes):
            return False
        lookup = _lookup(function, output, "table", output)
        constants: Mapping[str, Constant] = self.graph.constants
        return self.costs.is_faster(lookup, [merge_nodes(function.nodes, {output})], constants)


def _lookup(function: _ByteFunction, name: str, table: str, output: str) -> OpNode:
    """Return the node that looks up the function's values."""
    axes = tuple(Axis(f"i{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(function.type.shape))
    index: tuple[Expr, ...] = tuple(AxisRef(axis.name) for axis in axes)
    byte: Expr = Load("x", index, function.source_type.dtype)
    if byte.dtype is DType.INT8:
        byte = Cast(byte, DType.UINT8)  # its bits
    body = Load("table", (byte,), function.type.dtype)
    statement = TensorExpr("y", "y", StatementKind.MAP, function.type, axes, index, body)
    inputs = (("x", function.source_type), ("table", TensorType(function.type.dtype, (BYTE_ENTRIES,))))
    program = TensorProgram(inputs, (statement,), (Output("y", "y"),))
    return OpNode(name, FUSED, program, (function.source, table), (output,))


def _of_every_byte(program: TensorProgram, shape: tuple[int, ...], arguments: Mapping[str, DType]) -> TensorProgram | None:
    """Return the program for one element of each byte; None unless it computes each element from those at its place."""
    shapes = {name: type_.shape for name, type_ in program.types.items()}
    axis, at = Axis(_BYTE_AXIS, BYTE_ENTRIES, AxisKind.SPATIAL), (AxisRef(_BYTE_AXIS),)
    statements = list[TensorExpr]()
    for statement in program.statements:
        is_map = statement.kind is StatementKind.MAP and statement.type.shape == shape
        if not is_map or not all(_is_own(load, shapes[load.tensor], statement) for load in statement.reads):
            return None

        def moved(expr: Expr) -> Expr:
            if not isinstance(expr, Load):
                return expr
            return replace(expr, index=at if shapes[expr.tensor] == shape else (Const(0, DType.INT32),) * len(expr.index))

        body = rewrite(statement.body, moved)
        if not axes_of(body) <= {_BYTE_AXIS}:
            return None
        type_ = TensorType(statement.type.dtype, (BYTE_ENTRIES,))
        statements.append(replace(statement, type=type_, axes=(axis,), index=at, body=body))
    inputs = tuple(
        (name, TensorType(arguments[name], (BYTE_ENTRIES,)) if name in arguments else type_) for name, type_ in program.inputs
    )
    return replace(program, inputs=inputs, statements=tuple(statements))


def _is_own(load: Load, shape: tuple[int, ...], statement: TensorExpr) -> bool:
    """Return whether a load reads the place that a statement writes, or the only element of a tensor."""
    if any(load.bounds_checked) or any(map(loads_of, load.index)):
        return False
    is_place = shape == statement.type.shape and all(
        extent == 1 or each == own for each, own, extent in zip(load.index, statement.index, shape, strict=True)
    )
    return is_place or all(extent == 1 for extent in shape)
