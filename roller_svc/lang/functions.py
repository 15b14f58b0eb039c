"""Function of typed arguments → typed expression, by the rules of the function table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NoReturn, Protocol, assert_never

from roller_svc.errors import ExprTypeError, InputError, existing
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.lang.convert import Typed, Weak, common_type, converted
from roller_svc.lang.names import Function, Rule, function_named
from roller_svc.lang.source import Spanned
from roller_svc.lang.syntax import Apply, Node

_DIVIDING = frozenset({OpKind.TRUNC_DIV, OpKind.FMOD})


class Conversions(Protocol):
    """What the rules need of the expression checker."""

    def in_type(self, value: Typed, dtype: DType, node: Spanned) -> Expr: ...

    def refuse_zero(self, divisor: Expr, node: Spanned) -> None: ...

    def refuse(
        self, kind: type[InputError], code: str, message: str, node: Spanned, hint: str | None = None
    ) -> NoReturn: ...


def apply_function(node: Apply, values: Sequence[Typed], to: Conversions) -> Expr:
    """The function named in `node` of these arguments."""
    function = existing(function_named(node.function), f"function {node.function}, whose name calls.py has checked")
    match function.rule:
        case Rule.FLOATING:
            return _floating(function, values, node.args, to)
        case Rule.NUMERIC:
            return _numeric(function, values, node.args, to)
        case Rule.TO_INT32:
            return _to_int32(function, values[0], node.args[0], to)
        case Rule.PREDICATE:
            return Op(function.kind, (_as_float(values[0], node.args[0], to),), DType.INT8)
        case Rule.BITS:
            return _bits(node, function, values, to)
        case Rule.REMAINDER:
            if len(values) == 2:
                return _numeric(function, values, node.args, to)
            arg = _as_float(values[0], node.args[0], to)
            return Op(OpKind.SUB, (arg, Op(OpKind.RFLOOR, (arg,), arg.dtype)), arg.dtype)
        case _ as other:
            assert_never(other)


def _as_float(value: Typed, node: Node, to: Conversions) -> Expr:
    """A floating function computes an integer in float32."""
    if isinstance(value, Weak):
        return to.in_type(Weak(float(value.value)), DType.FLOAT32, node)
    return value if value.dtype.is_float else converted(value, DType.FLOAT32)


def _floating(function: Function, values: Sequence[Typed], nodes: Sequence[Node], to: Conversions) -> Expr:
    if len(values) == 1:
        arg = _as_float(values[0], nodes[0], to)
        return Op(function.kind, (arg,), arg.dtype)
    dtype = common_type(values)
    dtype = dtype if dtype.is_float else DType.FLOAT32
    return Op(function.kind, _in_type(values, dtype, nodes, to), dtype)


def _numeric(function: Function, values: Sequence[Typed], nodes: Sequence[Node], to: Conversions) -> Expr:
    dtype = common_type(values)
    args = _in_type(values, dtype, nodes, to)
    if function.kind in _DIVIDING:
        to.refuse_zero(args[1], nodes[1])
    if len(args) > 2 and function.kind in (OpKind.MAX, OpKind.MIN):
        return reduce(lambda a, b: Op(function.kind, (a, b), dtype), args)
    return Op(function.kind, args, dtype)


def _in_type(values: Sequence[Typed], dtype: DType, nodes: Sequence[Node], to: Conversions) -> tuple[Expr, ...]:
    return tuple(to.in_type(value, dtype, node) for value, node in zip(values, nodes, strict=True))


def _to_int32(function: Function, value: Typed, node: Node, to: Conversions) -> Expr:
    arg = to.in_type(value, common_type((value,)), node)
    if arg.dtype.is_float:
        return Op(function.kind, (arg,), DType.INT32)
    low, high = arg.dtype.integer_range
    least, most = DType.INT32.integer_range
    if least <= low and high <= most:
        return converted(arg, DType.INT32)
    # floor and ceil saturate, where the integer conversion would wrap.
    return Op(function.kind, (converted(arg, DType.FLOAT64),), DType.INT32)


def _bits(node: Apply, function: Function, values: Sequence[Typed], to: Conversions) -> Expr:
    dtype = common_type(values)
    if dtype.is_float:
        message = f"`{node.function}` is of integers, not {dtype.value}"
        to.refuse(ExprTypeError, "type-error", message, node, "cast to an integer type first")
    args = _in_type(values, dtype, node.args, to)
    if function.kind in _DIVIDING:
        to.refuse_zero(args[1], node.args[1])
    return Op(function.kind, args, dtype)
