"""ONNX models → graphs. Shapes are static: what determines them is evaluated while the graph is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from roller_svc.errors import ArgumentError, InputError, UnknownOpError, UnsupportedModelError, UnsupportedNode
from roller_svc.frontend.graph_builder import Evaluate, GraphBuilder, WeightStore
from roller_svc.frontend.onnx.expansions import EXPANSIONS
from roller_svc.frontend.onnx.expansions.empty import convert_empty
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.inputs import bound_value, declared_types, dtype_of
from roller_svc.frontend.onnx.microsoft import DOMAIN as MICROSOFT_DOMAIN
from roller_svc.frontend.onnx.microsoft import MICROSOFT, SAME
from roller_svc.frontend.onnx.microsoft.functions import FUNCTIONS, function_named
from roller_svc.frontend.onnx.scope import Scope
from roller_svc.frontend.onnx.subgraphs import SUBGRAPHS
from roller_svc.frontend.onnx.table import DATA_TYPES, FOUR_BITS, INTEGER_REDUCTIONS, NODES, RESULT_TYPES
from roller_svc.frontend.onnx.tensors import Tensor, array_of, attributes_of, constant_of
from roller_svc.frontend.onnx.use import Node
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Graph
from roller_svc.ir.program import TensorType

DOMAINS = ("", "ai.onnx")
FUNCTION_HINT = "add a function with its name to the model, in operators of ai.onnx"
# Operators that read elements of 4 bits as the numbers that they are, and those whose results have 4 bits too.
READ_FOUR_BITS = ("DequantizeLinear", "Cast", "Shape", "Size")
MOVE_FOUR_BITS = ("Identity", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
DEVICE_KEY = "roller.device"  # in the metadata of a node: its label
MAX_DEPTH = 32  # functions and subgraphs within each other


def import_model(
    model: ModelProto,
    weights: WeightStore,
    evaluate: Evaluate,
    *,
    inputs: Mapping[str, TensorType] | None = None,
    dims: Mapping[str, int] | None = None,
    constants: Mapping[str, object] | None = None,
    byte_group: int = 0,
) -> Graph:
    """Return the graph of a model.

    Args:
        weights: takes the arrays of constants.
        evaluate: runs a program on arrays.
        inputs: types of inputs whose extents the model leaves open. They must agree with what it declares.
        dims: extents of symbolic dimensions.
        constants: values of inputs, which are then constants of the graph.
        byte_group: bytes along a sum that an instruction of the device multiplies, 0 if none does. A model may allow factors that
            are rounded to them.

    Raises:
        UnsupportedModelError: nodes are not supported; it lists all of them.
        ArgumentError: an input has an open shape or an unsupported type, a given type or value contradicts the declared
            one, or the graph is not well-formed.
    """
    graph = model.graph
    builder = GraphBuilder(graph.name or "model", weights, evaluate, byte_group=byte_group)
    importer = Importer(model, builder)
    scope = Scope(builder)
    initializers = {tensor.name for tensor in graph.initializer}
    importer.bind_initializers(graph, scope)
    declared = [info for info in graph.input if info.name not in initializers]
    bound, extents = dict(constants or {}), dict(dims or {})
    types = declared_types(declared, dict(inputs or {}), extents, bound)
    for info in declared:
        if info.name in bound:
            array, dtype = bound_value(info, bound[info.name], extents)
            scope.define(info.name, constant_of(array, dtype, builder))
        else:
            scope.define(info.name, importer.add_input(info.name, types[info.name], scope))
    importer.convert_nodes(graph.node, scope)
    if importer.unsupported:
        raise UnsupportedModelError(tuple(importer.unsupported))
    return builder.finish([(info.name, importer.result(info.name, scope)) for info in graph.output])


class Importer:
    """Converts the nodes of one model."""

    def __init__(self, model: ModelProto, builder: GraphBuilder) -> None:
        self.opset = max((o.version for o in model.opset_import if o.domain in DOMAINS), default=1)
        self.functions = {(f.domain, f.name): f for f in model.functions}
        self.builder = builder
        self.unsupported: list[UnsupportedNode] = []
        self.depth = 0

    def add_input(self, name: str, type_: TensorType, scope: Scope) -> Tensor:
        """Add an input of the model. Nodes read one without elements as a known value."""
        operand = scope.builder.add_input(type_, name)
        return Tensor(operand) if type_.elements else Tensor(value=np.empty(type_.shape, type_.dtype.value))

    def bind_initializers(self, graph: GraphProto, scope: Scope) -> None:
        for tensor in graph.initializer:
            scope.define(tensor.name, self._constant(tensor, scope))
        for sparse in graph.sparse_initializer:
            raise ArgumentError(
                f"initializer {sparse.values.name!r} is sparse; only dense tensors are supported", code="unsupported-type"
            )

    def convert_nodes(self, nodes: Iterable[NodeProto], scope: Scope) -> None:
        """Convert nodes in order. Nodes that fail are recorded; what depends on them is skipped."""
        for node in nodes:
            results = self.convert(node, scope)
            for name, tensor in zip(node.output, results, strict=False):
                if name:
                    scope.define(name, tensor)
            for name in node.output[len(results) :]:
                if name:
                    scope.define(name, Tensor(failed=True))

    def convert(self, node: NodeProto, scope: Scope) -> Sequence[Tensor]:
        """Return the results of a node. A failure is recorded, and gives failed tensors."""
        failed = [Tensor(failed=True)] * len(node.output)
        tensors: list[Tensor] = []
        for name in node.input:
            tensor = scope.find(name) if name else Tensor()
            if tensor is None:
                raise ArgumentError(
                    f"node {_label(node)!r} reads {name[:80]!r}, which nothing before it writes", code="invalid-graph"
                )
            tensors.append(tensor)
        if any(tensor.failed for tensor in tensors):
            self._note_unknown(node)
            return failed
        has_four_bits = any(tensor.has_four_bits for tensor in tensors)
        if has_four_bits and not self.is_standard(node, *READ_FOUR_BITS, *MOVE_FOUR_BITS):
            self._note(node, f"elements of 4 bits are only read by {', '.join(READ_FOUR_BITS + MOVE_FOUR_BITS)}")
            return failed
        before = self.builder.at
        self.builder.at = before or _label(node)
        if not before:
            self.builder.device = next((each.value for each in node.metadata_props if each.key == DEVICE_KEY), "")
        try:
            results = self._convert(node, tensors, scope)
            moved = has_four_bits and node.op_type in MOVE_FOUR_BITS
            return [replace(result, has_four_bits=True) for result in results] if moved else results
        except SubgraphError:
            return failed
        except InputError as error:
            self._note(node, error.reason)
            return failed
        finally:
            self.builder.at = before
            if not before:
                self.builder.device = ""

    def result(self, name: str, scope: Scope) -> Any:
        """Return an output of the graph as an operand."""
        tensor = scope.find(name)
        if tensor is None:
            raise ArgumentError(f"output {name[:80]!r} is written by no node", code="invalid-graph")
        if tensor.has_four_bits:
            raise ArgumentError(f"output {name[:80]!r} has elements of 4 bits, expected 8 or more", code="unsupported-type")
        return scope.operand(tensor, f"output {name[:80]!r}")

    def is_standard(self, node: NodeProto, *op_types: str) -> bool:
        """Return whether a node is one of these operators of ONNX, which no function of the model replaces."""
        return node.op_type in op_types and node.domain in DOMAINS and (node.domain, node.op_type) not in self.functions

    def _convert(self, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
        function = self.functions.get((node.domain, node.op_type))
        if function is not None:
            return self._expand(function, node, tensors, scope)
        if node.domain == MICROSOFT_DOMAIN and node.op_type not in SAME:
            return self._convert_microsoft(node, tensors, scope)
        if node.domain not in (*DOMAINS, MICROSOFT_DOMAIN):
            raise UnknownOpError(f"domain {node.domain[:60]!r} is not supported", hint=FUNCTION_HINT)
        _check_inputs(node, self.opset)
        if node.op_type == "Constant" and (few_bits := _four_bit_value(node)) is not None:
            return [self._constant(few_bits, scope)]
        if node.op_type in SUBGRAPHS:
            return SUBGRAPHS[node.op_type](self, node, tensors, scope)
        try:
            return self._convert_by_table(node, tensors, scope)
        except InputError:
            body = _schema_function(node, tensors, self.opset)
            if body is None:
                raise
            return self._expand(body, node, tensors, scope)

    def _convert_microsoft(self, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
        """Convert a node of onnxruntime's own domain."""
        if node.op_type in FUNCTIONS:
            function = function_named(node.op_type)
            known = {*function.attribute, *(attribute.name for attribute in function.attribute_proto)}
            ignored = [attribute.name for attribute in node.attribute if attribute.name not in known]
            if ignored or len(node.input) > len(function.input):
                shown = f"attribute {ignored[0]}" if ignored else f"input {len(function.input)}"
                raise ArgumentError(f"{node.op_type}: {shown} is not supported", code="unsupported-attribute")
            return self._expand(function, node, tensors, scope)
        expansion = MICROSOFT.get(node.op_type)
        if expansion is None:
            raise UnknownOpError(f"the operator of {MICROSOFT_DOMAIN} is not supported", hint=FUNCTION_HINT)
        return _expanded(expansion, self._read(node, tensors, scope), scope.builder)

    def _read(self, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Node:
        """Return a node as its converter reads it."""
        builder = scope.builder
        return Node(
            node.op_type,
            self.opset,
            attributes_of(node),
            tuple(tensor.operand for tensor in tensors),
            tuple(tensor.known(builder) for tensor in tensors),
            tuple(bool(name) for name in node.output),
            scope.inputs_of,
        )

    def _convert_by_table(self, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
        builder, read = scope.builder, self._read(node, tensors, scope)
        evaluated = convert_empty(read, builder)
        if evaluated is not None:
            read.check_all_used()
            return evaluated
        expansion = EXPANSIONS.get(node.op_type)
        if expansion is not None:
            return _expanded(expansion, read, builder)
        converter = NODES.get(node.op_type)
        if converter is None:
            raise UnknownOpError("the operator is not supported")
        use = converter(read)
        read.check_all_used()
        if any(node.output[1:]):
            raise read.unsupported("a result after the first")
        operands, dtype = use.operands, RESULT_TYPES.get(node.op_type)
        if node.op_type in INTEGER_REDUCTIONS and not operands[0].dtype.is_float:
            operands, dtype = (builder.cast(operands[0], DType.FLOAT64),), operands[0].dtype
        result = builder.call(use.operator, operands, **use.parameters)
        return [Tensor(builder.cast(result, dtype or result.dtype))]

    def _expand(self, function: FunctionProto, node: NodeProto, tensors: Sequence[Tensor], scope: Scope) -> Sequence[Tensor]:
        """Convert the nodes of a function's body in its place."""
        if self.depth >= MAX_DEPTH:
            raise ArgumentError(f"functions are nested more than {MAX_DEPTH} deep", code="invalid-graph")
        given = _default_attributes(node, self.opset)
        given |= {attribute.name: attribute for attribute in function.attribute_proto}
        given |= {attribute.name: attribute for attribute in node.attribute}
        inner = Scope(scope.builder, caller=scope)
        for name, tensor in zip(function.input, [*tensors, *[Tensor()] * len(function.input)], strict=False):
            inner.define(name, tensor)
        opset, failures = self.opset, len(self.unsupported)
        self.opset = max((o.version for o in function.opset_import if o.domain in DOMAINS), default=opset)
        self.depth += 1
        try:
            self.convert_nodes((_with_attributes(each, given) for each in function.node), inner)
        finally:
            self.opset = opset
            self.depth -= 1
        if len(self.unsupported) > failures:
            reasons = [f"{each.operator}: {each.reason}" for each in self.unsupported[failures:]]
            del self.unsupported[failures:]
            raise ArgumentError(
                f"its function body has nodes that are not supported: {'; '.join(reasons[:3])}", code="unsupported-attribute"
            )
        return [inner.tensors.get(name, Tensor(failed=True)) for name in function.output]

    def convert_subgraph(self, graph: GraphProto, inputs: Sequence[Tensor], scope: Scope) -> list[Tensor]:
        """Convert a subgraph whose inputs are these tensors; return its outputs."""
        if self.depth >= MAX_DEPTH:
            raise ArgumentError(f"subgraphs are nested more than {MAX_DEPTH} deep", code="invalid-graph")
        if len(inputs) != len(graph.input):
            raise ArgumentError(f"the subgraph takes {len(graph.input)} inputs, not {len(inputs)}", code="invalid-node")
        self.bind_initializers(graph, scope)
        for info, tensor in zip(graph.input, inputs, strict=True):
            scope.define(info.name, tensor)
        failures = len(self.unsupported)
        self.depth += 1
        builder, self.builder = self.builder, scope.builder
        try:
            self.convert_nodes(graph.node, scope)
        finally:
            self.depth -= 1
            self.builder = builder
        if len(self.unsupported) > failures:
            raise SubgraphError("nodes of the subgraph failed")
        outputs = [scope.find(info.name) for info in graph.output]
        if any(tensor is None or tensor.failed for tensor in outputs):
            raise ArgumentError("an output of the subgraph is written by no node", code="invalid-graph")
        return [tensor for tensor in outputs if tensor is not None]

    def _constant(self, tensor: TensorProto, scope: Scope) -> Tensor:
        if (dtype := FOUR_BITS.get(tensor.data_type)) is not None:
            return replace(constant_of(array_of(tensor).astype(dtype.value), dtype, scope.builder), has_four_bits=True)
        return constant_of(array_of(tensor), dtype_of(tensor.data_type, tensor.name), scope.builder)

    def _note(self, node: NodeProto, reason: str) -> None:
        self.unsupported.append(UnsupportedNode(node.op_type[:60], _label(node), reason))

    def _note_unknown(self, node: NodeProto) -> None:
        """Record an operator that no table has, although its inputs are unknown."""
        known = node.op_type in NODES or node.op_type in EXPANSIONS or node.op_type in SUBGRAPHS
        if node.domain in DOMAINS and not known and not onnx.defs.has(node.op_type):
            self._note(node, "the operator is not supported")


def _four_bit_value(node: NodeProto) -> TensorProto | None:
    """Return the tensor of a constant whose elements have 4 bits."""
    values = [attribute.t for attribute in node.attribute if attribute.name == "value"]
    return next((each for each in values if each.data_type in FOUR_BITS), None)


def _expanded(expansion: Expansion, node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the results of an expansion. Raises ArgumentError for what it does not read or give."""
    results = expansion(node, builder)
    node.check_all_used()
    if len(results) < len(node.results):
        raise node.unsupported(f"result {len(results)}")
    return results


def _check_inputs(node: NodeProto, opset: int) -> None:
    """Raise ArgumentError if a node has fewer inputs than the operator's schema states."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return
    if len(node.input) < schema.min_input:
        raise ArgumentError(
            f"{node.op_type}: {len(node.input)} inputs; at least {schema.min_input} are expected", code="invalid-node"
        )


class SubgraphError(InputError):
    """Nodes of a subgraph failed, which are recorded."""


def _label(node: NodeProto) -> str:
    """Return the node's name, or one made of its first result."""
    return (node.name or next((name for name in node.output if name), node.op_type))[:120]


def _default_attributes(node: NodeProto, opset: int) -> dict[str, AttributeProto]:
    """Return the defaults of attributes that the operator's schema states."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return {}
    stated = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    return {name: value for name, value in stated.items() if value.type != AttributeProto.UNDEFINED}


def _with_attributes(node: NodeProto, given: Mapping[str, AttributeProto]) -> NodeProto:
    """Return a node of a function's body with the attributes of the call in place of references to them."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    bound = NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            bound.attribute.add().CopyFrom(attribute)
        elif attribute.ref_attr_name in given:
            value = bound.attribute.add()
            value.CopyFrom(given[attribute.ref_attr_name])
            value.name = attribute.name
    return bound


def _schema_function(node: NodeProto, tensors: Sequence[Tensor], opset: int) -> FunctionProto | None:
    """Return the function body that the operator's schema has for this node; None if it has none."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_context_dependent_function:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        types = [_type_proto(tensor).SerializeToString() for tensor in tensors]
        try:
            text = (
                schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), types)
                if versions
                else b""
            )
        except (ValueError, RuntimeError):  # the library's checks of the node's types
            return None
    elif schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        text = schema.get_function_with_opset_version(max(versions)) if versions else b""
    else:
        return None
    if not text:
        return None
    function = FunctionProto()
    function.ParseFromString(text)
    return function


def _type_proto(tensor: Tensor) -> onnx.TypeProto:
    if tensor.operand is None:
        return onnx.TypeProto()
    data_type = next(number for number, dtype in DATA_TYPES.items() if dtype is tensor.operand.dtype)
    return onnx.helper.make_tensor_type_proto(data_type, tensor.operand.shape)
