"""Interval arithmetic of integer expressions over a box of axes, and whether they may wrap.

Bounds are never too narrow, for any program: where an operation may leave its type, they widen to the whole type and
`wraps` is set. `analysis/index_ranges.py` assumes instead that arithmetic of axes is exact, and knows fewer operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from roller_svc.analysis.constant_folding import constant_int
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select


class Bounds(NamedTuple):
    """Inclusive bounds, never too narrow."""

    low: int
    high: int
    wraps: bool = False  # an operation may leave its type

    def inside(self, size: int) -> bool:
        return self.low >= 0 and self.high < size


_NO_TENSORS: Mapping[str, Bounds] = {}


def bounds(expr: Expr, extents: Mapping[str, int], tensors: Mapping[str, Bounds] = _NO_TENSORS) -> Bounds:
    """Return the bounds of an integer expression, wrapping included; `tensors` has those of tensors' elements."""
    match expr:
        case Load(tensor=tensor) if tensor in tensors:
            return tensors[tensor]
        case Const(value=int(value)):
            return Bounds(value, value)
        case AxisRef(name=name):
            return Bounds(0, extents[name] - 1)
        case Cast(arg=arg, dtype=dtype) if not arg.dtype.is_float:
            return cast_bounds(bounds(arg, extents, tensors), dtype)
        case Select(cond=cond, then=then, otherwise=otherwise) if not expr.dtype.is_float:
            a, b = bounds(then, extents, tensors), bounds(otherwise, extents, tensors)
            wraps = a.wraps or b.wraps or bounds(cond, extents, tensors).wraps
            return Bounds(min(a.low, b.low), max(a.high, b.high), wraps)
        case Op(args=args) if not expr.dtype.is_float and not any(arg.dtype.is_float for arg in args):
            return operation_bounds(expr, [bounds(arg, extents, tensors) for arg in args])
        case Op(dtype=dtype) if dtype is DType.INT8:
            return Bounds(0, 1)  # comparisons and tests of floats
        case _:
            return Bounds(*_range(expr.dtype))


def operation_bounds(op: Op, args: list[Bounds]) -> Bounds:
    """Return the bounds of an operation on integers of those bounds."""
    low, high = _operation(op, args)
    return _clamp_to_type(Bounds(low, high, any(b.wraps for b in args)), op.dtype)


def leaves_type(op: Op, args: list[Bounds]) -> bool:
    """Return whether an operation on integers of those bounds may give more than its type holds."""
    low, high = _operation(op, args)
    least, greatest = op.dtype.integer_range
    return low < least or high > greatest


def cast_bounds(operand: Bounds, dtype: DType) -> Bounds:
    """Return the bounds of integers of those bounds in another type."""
    if dtype is DType.BOOL:
        return Bounds(0, 1, operand.wraps or not (operand.low >= 0 and operand.high <= 1))
    return _clamp_to_type(operand, dtype)


def _range(dtype: DType) -> tuple[int, int]:
    return DType.INT64.integer_range if dtype.is_float else dtype.integer_range


def _clamp_to_type(interval: Bounds, dtype: DType) -> Bounds:
    """Return the bounds if the type can represent them, else those of the whole type: the value may wrap."""
    low, high = dtype.integer_range
    if low <= interval.low and interval.high <= high:
        return interval
    return Bounds(low, high, wraps=True)


def _operation(expr: Op, v: list[Bounds]) -> tuple[int, int]:
    a, b = v[0], v[-1]
    match expr.kind:
        case OpKind.ADD:
            return a.low + b.low, a.high + b.high
        case OpKind.SUB:
            return a.low - b.high, a.high - b.low
        case OpKind.NEG:
            return -a.high, -a.low
        case OpKind.MUL:
            corners = (a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
            return min(corners), max(corners)
        case OpKind.MAX | OpKind.FMAX:
            return max(a.low, b.low), max(a.high, b.high)
        case OpKind.MIN | OpKind.FMIN:
            return min(a.low, b.low), min(a.high, b.high)
        case OpKind.CLIP:
            return min(max(a.low, v[1].low), b.low), min(max(a.high, v[1].high), b.high)
        case OpKind.ABS:
            least = 0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
            return least, max(abs(a.low), abs(a.high))
        case OpKind.FLOORDIV | OpKind.MOD:
            return _division(expr, a)
        case OpKind.BITAND if a.low >= 0 or b.low >= 0:
            return 0, min(x.high for x in (a, b) if x.low >= 0)
        case OpKind.SHR if b.low == b.high and 0 <= b.low < expr.dtype.bits:
            return a.low >> b.low, a.high >> b.low
        case _:
            return (0, 1) if expr.kind in _TRUTHS else expr.dtype.integer_range


_TRUTHS = frozenset({
    OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE, OpKind.EQ, OpKind.NE,
    OpKind.LAND, OpKind.LOR, OpKind.LNOT, OpKind.ISNAN, OpKind.ISINF,
})  # fmt: skip


def _division(expr: Op, dividend: Bounds) -> tuple[int, int]:
    """Return the bounds of // and % by a positive constant; of other divisions the whole type."""
    divisor = constant_int(expr.args[1])
    if divisor is None or divisor < 1:
        return expr.dtype.integer_range
    if expr.kind is OpKind.FLOORDIV:
        return dividend.low // divisor, dividend.high // divisor
    if dividend.low // divisor == dividend.high // divisor:
        return dividend.low % divisor, dividend.high % divisor
    return 0, divisor - 1


def widen_to_int64(expr: Expr) -> Expr:
    """Widen int32 arithmetic over axes to int64, so that no intermediate value of an index wraps."""
    if expr.dtype is not DType.INT32:
        return expr
    match expr:
        case Const(value=value):
            return Const(value, DType.INT64)
        case Op(kind=kind, args=args) if all(arg.dtype is DType.INT32 for arg in args):
            return Op(kind, tuple(widen_to_int64(arg) for arg in args), DType.INT64)
        case Select(cond=cond, then=then, otherwise=otherwise):
            return Select(cond, widen_to_int64(then), widen_to_int64(otherwise), DType.INT64)
        case _:
            return Cast(expr, DType.INT64, implicit=True)
