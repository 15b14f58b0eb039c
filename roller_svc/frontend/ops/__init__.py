"""Named operators: OPS has them all. A call is written out as statements of the language, which lang then checks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from roller_svc.errors import UnknownOpError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.lang.names import did_you_mean
from roller_svc.frontend.ops import (
    attention,
    conv_transpose,
    convolution,
    elementwise,
    gather,
    layout,
    matmul,
    normalization,
    pooling,
    reduction,
)
from roller_svc.frontend.ops.operator import Operand, Operator
from roller_svc.ir.program import TensorType

_FAMILIES = (
    matmul.OPERATORS,
    convolution.OPERATORS,
    conv_transpose.OPERATORS,
    pooling.OPERATORS,
    normalization.OPERATORS,
    attention.OPERATORS,
    reduction.OPERATORS,
    elementwise.OPERATORS,
    layout.OPERATORS,
    gather.OPERATORS,
)

OPS: dict[str, Operator] = {operator.name: operator for family in _FAMILIES for operator in family}


def operator_named(name: str) -> Operator:
    """The operator of that name; an UnknownOpError that offers the nearest where there is none."""
    found = OPS.get(name)
    if found is None:
        raise UnknownOpError(f"there is no operator `{name[:60]}`", hint=did_you_mean(name[:60], OPS))
    return found


def output_name(inputs: Mapping[str, TensorType]) -> str:
    """What a result is called that the caller gave no name: output0, or the next number that no input has."""
    number = 0
    while f"output{number}" in inputs:
        number += 1
    return f"output{number}"


def expression(name: str, inputs: Mapping[str, object], /, *, output: str | None = None, **parameters: object) -> str:
    """The expression text of an operator over the inputs in order; parameters that are left out have their defaults.

    expression("conv2d", {"X": ("float32", (1, 3, 8, 8)), "W": ("float32", (4, 3, 3, 3))}, stride=2, padding=1)
    """
    operator = operator_named(name)
    types = dict(tensor_types(inputs))
    given = {key: operator.parameter(key).checked(value) for key, value in parameters.items()}
    operands = [Operand(key, kind) for key, kind in types.items()]
    return operator.text(operands, output or output_name(types), given, types)


def __getattr__(name: str) -> object:
    """Load `onnx_nodes` on first use: the public name of `roller_svc.frontend.onnx.nodes`."""
    if name != "onnx_nodes":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("roller_svc.frontend.onnx.nodes")
