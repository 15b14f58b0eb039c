"""ONNX nodes → expression text, without the onnx package: attributes are Python values, NodeProto is duck-typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roller_svc.errors import ArgumentError, ShapeError, UnknownOpError
from roller_svc.frontend.lang.equation import einsum_statement, output_name
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.lang.names import did_you_mean
from roller_svc.frontend.onnx.table import EINSUM, NODES
from roller_svc.frontend.onnx.use import Node, Use
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.ops.table import operator_named
from roller_svc.ir.program import TensorType

OPSET = 21
Converted = tuple[str, dict[str, TensorType]]

# AttributeProto.AttributeType → the field that holds the value.
_FIELDS = {1: "f", 2: "i", 3: "s", 6: "floats", 7: "ints", 8: "strings"}


def from_node(
    op_type: str,
    attributes: Mapping[str, object],
    inputs: Mapping[str, object],
    *,
    opset: int = OPSET,
    constants: Mapping[str, object] | None = None,
) -> Converted:
    """Return the expression text of a node, and the inputs that it reads.

    Args:
        op_type: the ONNX operator.
        attributes: attributes by name.
        inputs: the node's inputs by name, in order: a TensorType or (dtype, shape); None for an omitted input, or one
            whose value is in `constants`.
        opset: version of the operator set.
        constants: values of inputs. Inputs that determine shapes (axes, pads, shape, ...) must be here.
    """
    values = constants or {}
    listed = [(name, _type(name, kind, is_constant=name in values)) for name, kind in inputs.items()]
    return _convert(op_type, attributes, listed, opset, values)


def from_proto(
    node: Any, types: Mapping[str, object], *, opset: int = OPSET, constants: Mapping[str, object] | None = None
) -> Converted:
    """Convert an onnx.NodeProto. `types` and `constants` have its tensors and known values by their ONNX names.

    Names are changed to identifiers: `/block.0/conv` becomes `_block_0_conv`.
    """
    if getattr(node, "domain", "") not in ("", "ai.onnx"):
        raise UnknownOpError(f"nodes of domain {node.domain!r} are not supported")
    values = constants or {}
    names = _identifiers([name for name in node.input if name])
    listed = [(names.get(name, ""), _type(name, types.get(name), is_constant=name in values)) for name in node.input]
    values = {names[name]: value for name, value in values.items() if name in names}
    attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
    return _convert(node.op_type, attributes, listed, opset, values)


def _type(name: str, value: object, *, is_constant: bool) -> TensorType | None:
    """Return the type of an input; None if it is omitted, or an empty list with a known value."""
    if value is None:
        return None
    try:
        return dict(tensor_types({name: value}))[name]
    except ShapeError:
        if is_constant:
            return None
        raise


def _convert(
    op_type: str,
    attributes: Mapping[str, object],
    listed: Sequence[tuple[str, TensorType | None]],
    opset: int,
    constants: Mapping[str, object],
) -> Converted:
    read = NODES.get(op_type)
    if read is None:
        hint = did_you_mean(op_type[:60], NODES)
        raise UnknownOpError(f"ONNX operator `{op_type[:60]}` is not supported", hint=hint)
    operands = tuple(None if kind is None else Operand(name, kind) for name, kind in listed)
    values = tuple(constants.get(name) for name, _ in listed)
    node = Node(op_type, opset, attributes, operands, values)
    use = read(node)
    node.check_all_used()
    inputs = {operand.name: operand.type for operand in use.operands}
    return _text(use, inputs), inputs


def _text(use: Use, inputs: Mapping[str, TensorType]) -> str:
    output = output_name(inputs)
    if use.operator == EINSUM:
        pairs = [(operand.name, operand.type) for operand in use.operands]
        return einsum_statement(str(use.parameters["equation"]), pairs, output, frozenset(inputs))
    operator = operator_named(use.operator)
    parameters = {name: operator.parameter(name).check(value) for name, value in use.parameters.items()}
    return operator.source(use.operands, output, parameters, inputs)


def _identifiers(names: Sequence[str]) -> dict[str, str]:
    """Return a distinct identifier for every name, the name itself if it is one."""
    identifiers: dict[str, str] = {}
    for name in names:
        if name in identifiers:
            continue
        stem = re.sub(r"\W", "_", name, flags=re.ASCII)
        stem = f"t{stem}" if stem[0].isdigit() else stem
        number, free = 1, stem
        while free in identifiers.values() or (free != name and free in names):
            number += 1
            free = f"{stem}_{number}"
        identifiers[name] = free
    return identifiers


def _value(attribute: Any) -> object:
    """Return the value of an AttributeProto."""
    field = _FIELDS.get(int(attribute.type))
    if field is None:
        message = f"attribute {attribute.name} is a tensor or a graph; only numbers and strings are supported"
        raise ArgumentError(message, code="unsupported-attribute")
    value = getattr(attribute, field)
    return list(value) if field.endswith("s") and field != "s" else value
