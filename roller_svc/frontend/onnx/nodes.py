"""ONNX nodes → expression text, without the onnx package: attributes are plain values, a NodeProto is duck-typed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from roller_svc.errors import ArgumentError, ShapeError, UnknownOpError
from roller_svc.frontend.lang.equation import einsum_statement
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.lang.names import did_you_mean
from roller_svc.frontend.onnx.table import EINSUM, NODES
from roller_svc.frontend.onnx.use import Node, Use
from roller_svc.frontend.ops import operator_named, output_name
from roller_svc.frontend.ops.operator import Operand
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
    """The expression text of a node, and the inputs that it reads.

    `inputs` has the node's inputs in order, by name: a TensorType or (dtype, shape); None where one is left out, or
    where `constants` has its value. What decides shapes (axes, pads, shape, ...) must be among the constants.
    """
    values = constants or {}
    listed = [(name, _type(name, kind, is_constant=name in values)) for name, kind in inputs.items()]
    return _converted(op_type, attributes, listed, opset, values)


def from_proto(
    node: Any, types: Mapping[str, object], *, opset: int = OPSET, constants: Mapping[str, object] | None = None
) -> Converted:
    """The same for an onnx.NodeProto: `types` has its tensors by their ONNX names, `constants` the values of some.

    Names that are no identifiers are changed: `/block.0/conv` becomes `_block_0_conv`.
    """
    if getattr(node, "domain", "") not in ("", "ai.onnx"):
        raise UnknownOpError(f"nodes of domain {node.domain!r} are not known")
    given = constants or {}
    names = _identifiers([name for name in node.input if name])
    listed = [(names.get(name, ""), _type(name, types.get(name), is_constant=name in given)) for name in node.input]
    values = {names[name]: value for name, value in given.items() if name in names}
    attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
    return _converted(node.op_type, attributes, listed, opset, values)


def _type(name: str, value: object, *, is_constant: bool) -> TensorType | None:
    """The type of an input; None where it is left out, or an empty list whose value is known."""
    if value is None:
        return None
    try:
        return dict(tensor_types({name: value}))[name]
    except ShapeError:
        if is_constant:
            return None
        raise


def _converted(
    op_type: str,
    attributes: Mapping[str, object],
    listed: Sequence[tuple[str, TensorType | None]],
    opset: int,
    constants: Mapping[str, object],
) -> Converted:
    read = NODES.get(op_type)
    if read is None:
        hint = did_you_mean(op_type[:60], NODES)
        raise UnknownOpError(f"there is no ONNX operator `{op_type[:60]}` here", hint=hint)
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
    given = {name: operator.parameter(name).checked(value) for name, value in use.parameters.items()}
    return operator.text(use.operands, output, given, inputs)


def _identifiers(names: Sequence[str]) -> dict[str, str]:
    """A different identifier for every name, itself where it is one."""
    found: dict[str, str] = {}
    for name in names:
        if name in found:
            continue
        wanted = re.sub(r"\W", "_", name, flags=re.ASCII)
        wanted = f"t{wanted}" if wanted[0].isdigit() else wanted
        number, free = 1, wanted
        while free in found.values() or (free != name and free in names):
            number += 1
            free = f"{wanted}_{number}"
        found[name] = free
    return found


def _value(attribute: Any) -> object:
    """The value of an AttributeProto."""
    field = _FIELDS.get(int(attribute.type))
    if field is None:
        message = f"attribute {attribute.name} is a tensor or a graph; only numbers and texts are known"
        raise ArgumentError(message, code="unsupported-attribute")
    value = getattr(attribute, field)
    return list(value) if field.endswith("s") and field != "s" else value
