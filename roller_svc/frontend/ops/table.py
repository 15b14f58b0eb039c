"""Named operators, in the table OPS. A call expands to statements of the language."""

from __future__ import annotations

from collections.abc import Mapping

from roller_svc.errors import UnknownOpError
from roller_svc.frontend.lang.equation import output_name
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.lang.names import find_right_form
from roller_svc.frontend.ops import (
    attention,
    blocks,
    conv_transpose,
    convolution,
    elementwise,
    gather,
    layout,
    matmul,
    normalization,
    ordering,
    pooling,
    quantization,
    reduction,
    resample,
    rope,
    sampling,
    scatter,
)
from roller_svc.frontend.ops.operator import Operand, Operator

_FAMILIES = (
    matmul.OPERATORS,
    convolution.OPERATORS,
    conv_transpose.OPERATORS,
    pooling.OPERATORS,
    normalization.OPERATORS,
    attention.OPERATORS,
    rope.OPERATORS,
    reduction.OPERATORS,
    elementwise.OPERATORS,
    layout.OPERATORS,
    gather.OPERATORS,
    scatter.OPERATORS,
    ordering.OPERATORS,
    blocks.OPERATORS,
    quantization.OPERATORS,
    resample.OPERATORS,
    sampling.OPERATORS,
)

OPS: dict[str, Operator] = {operator.name: operator for family in _FAMILIES for operator in family}


def operator_named(name: str) -> Operator:
    """Return the operator of that name. Raises UnknownOpError with the nearest name."""
    operator = OPS.get(name)
    if operator is None:
        raise UnknownOpError(f"there is no operator `{name[:60]}`", hint=find_right_form(name[:60], OPS))
    return operator


def expression(name: str, inputs: Mapping[str, object], /, *, output: str | None = None, **parameters: object) -> str:
    """Return the expression text of an operator over the inputs in order. Omitted parameters have their defaults.

    expression("conv2d", {"X": ("float32", (1, 3, 8, 8)), "W": ("float32", (4, 3, 3, 3))}, stride=2, padding=1)
    """
    operator = operator_named(name)
    types = dict(tensor_types(inputs))
    checked_parameters = {key: operator.parameter(key).check(value) for key, value in parameters.items()}
    operands = [Operand(key, kind) for key, kind in types.items()]
    return operator.source(operands, output or output_name(types), checked_parameters, types)
