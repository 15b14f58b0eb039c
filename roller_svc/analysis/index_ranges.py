"""Interval arithmetic and constant folding of index expressions in schedule trees.

Code generators use it to choose plain divisions and to drop guards. Unlike `analysis/intervals.py`, whose bounds hold
for any program and widen to the whole type where arithmetic may wrap, `range_of` returns None for an unknown or
wrapping value, and treats arithmetic of axes in int32 as exact: the frontend has proven that indices do not wrap.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_

from roller_svc.analysis.constant_folding import INTEGER_FUNCTIONS
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, iter_subexpressions, loads_of
from roller_svc.ir.index import add, num

Range = tuple[int, int]
# Types of the intermediate values that must fit in 32 bits: of compared indices, and of indices, which may be int64.
COMPARED = frozenset({DType.INT32})
INDEXED = frozenset({DType.INT32, DType.INT64})
_FOLDED = frozenset({OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.FLOORDIV, OpKind.MOD, OpKind.MIN, OpKind.MAX})


def range_of(expr: Expr, ranges: Mapping[str, Range]) -> Range | None:
    """Return the lowest and the highest value of an integer expression, or None if unknown."""
    match expr:
        case Const(value=int(value)):
            return value, value
        case AxisRef(name=name):
            return ranges.get(name)
        case Cast(arg=arg, dtype=dtype, implicit=implicit) if not dtype.is_float and not arg.dtype.is_float:
            inside = range_of(arg, ranges)
            # arithmetic below an explicit cast wraps; other index arithmetic is exact
            exact = implicit or all(_fits(part, ranges) for part in iter_subexpressions(arg) if isinstance(part, Op))
            return inside if inside and exact and _fits_dtype(dtype, inside) else None
        case Op(kind=OpKind.BITAND, args=(x, y)) if not expr.dtype.is_float:
            # a mask >= 0 bounds the result, whatever the other side is
            masks = [known for side in (x, y) if (known := range_of(side, ranges)) and known[0] >= 0]
            return (0, min(high for _, high in masks)) if masks else None
        case Op(kind=kind, args=(x, y)):
            a, b = range_of(x, ranges), range_of(y, ranges)
            return _unless_wrapped(expr, _binary(kind, a, b)) if a and b else None
        case Op(kind=OpKind.NEG, args=(x,)):
            a = range_of(x, ranges)
            return _unless_wrapped(expr, (-a[1], -a[0])) if a else None
        case _:
            return None


def exists(load: Load, shape: tuple[int, ...], ranges: Mapping[str, Range]) -> bool:
    """Return whether the indices of a load are within a tensor of a shape at all points, whatever guards it."""
    found = [range_of(index, ranges) for index in load.index]
    return all(at is not None and at[0] >= 0 and at[1] < extent for at, extent in zip(found, shape, strict=True))


def _unless_wrapped(op: Op, interval: Range | None) -> Range | None:
    """Return the interval, or None if the operation may wrap. Arithmetic of axes in int32 is exact."""
    if interval is None or _fits_dtype(op.dtype, interval) or (op.dtype is DType.INT32 and not loads_of(op)):
        return interval
    return None


def _fits(op: Op, ranges: Mapping[str, Range]) -> bool:
    known = range_of(op, ranges)
    return known is not None and _fits_dtype(op.dtype, known)


def _fits_dtype(dtype: DType, known: Range) -> bool:
    least, greatest = dtype.integer_range
    return least <= known[0] and known[1] <= greatest


def _binary(kind: OpKind, a: Range, b: Range) -> Range | None:
    match kind:
        case OpKind.ADD:
            return a[0] + b[0], a[1] + b[1]
        case OpKind.SUB:
            return a[0] - b[1], a[1] - b[0]
        case OpKind.MUL:
            corners = [x * y for x in a for y in b]
            return min(corners), max(corners)
        case OpKind.FLOORDIV if b[0] > 0:
            corners = [x // y for x in a for y in b]
            return min(corners), max(corners)
        case OpKind.MOD if b[0] > 0:
            return a if a[0] >= 0 and a[1] < b[0] else (0, b[1] - 1)
        case OpKind.MIN:
            return min(a[0], b[0]), min(a[1], b[1])
        case OpKind.MAX:
            return max(a[0], b[0]), max(a[1], b[1])
        case _:
            return None


def may_exceed_int32(index: Expr, ranges: Mapping[str, Range], dtypes: frozenset[DType]) -> bool:
    """Return whether an intermediate value of an index, of one of `dtypes`, may not fit in 32 bits.

    Loaded values, and values below a cast that is not exact, have their own types and do not count.
    """
    stack = [index]
    while stack:
        part = stack.pop()
        match part:
            case Cast():
                stack += (part.arg,) if part.is_exact else ()
            case Op(args=args) if part.dtype in dtypes:
                known = range_of(part, ranges)
                if known is not None and not _fits_dtype(DType.INT32, known):
                    return True
                stack += args
            case Select(then=then, otherwise=otherwise):
                stack += (then, otherwise)
            case _:
                pass
    return False


def is_within_int32(expr: Expr, ranges: Mapping[str, Range]) -> bool:
    """Return whether all intermediate values of integer arithmetic are known to fit in 32 bits."""
    known = (range_of(part, ranges) for part in iter_subexpressions(expr) if not isinstance(part, Const))
    return all(interval is not None and _fits_dtype(DType.INT32, interval) for interval in known)


def fold(expr: Expr, values: Mapping[str, int]) -> Expr:
    """Substitute known loop variables and fold integer constants. Only arithmetic of axes is folded: it is exact."""
    if isinstance(expr, AxisRef):
        known = values.get(expr.name)
        return expr if known is None else Const(known, expr.dtype)
    if not isinstance(expr, Op) or expr.dtype.is_float:
        return expr
    new = tuple([fold(arg, values) for arg in expr.args])
    if len(new) == 2:
        x, y = new
        if isinstance(x, Const) and isinstance(y, Const) and isinstance(x.value, int) and isinstance(y.value, int):
            result = _value(expr.kind, x.value, y.value)
            least, greatest = expr.dtype.integer_range
            if result is not None and least <= result <= greatest:
                return Const(result, expr.dtype)
        if (operand := _identity(expr.kind, x, y)) is not None:
            return operand
    return expr if all(map(is_, new, expr.args)) else Op(expr.kind, new, expr.dtype)


def _value(kind: OpKind, a: int, b: int) -> int | None:
    if kind not in _FOLDED or (kind in (OpKind.FLOORDIV, OpKind.MOD) and b <= 0):
        return None
    return INTEGER_FUNCTIONS[kind](a, b)


def _identity(kind: OpKind, a: Expr, b: Expr) -> Expr | None:
    """Simplify x + 0, x * 1 and the like; None if nothing applies."""
    if isinstance(b, Const):
        if b.value == 0 and kind in (OpKind.ADD, OpKind.SUB) and a.dtype is b.dtype:
            return a
        if b.value == 1 and kind in (OpKind.MUL, OpKind.FLOORDIV) and a.dtype is b.dtype:
            return a
    if isinstance(a, Const) and a.dtype is b.dtype:
        if a.value == 0 and kind is OpKind.ADD:
            return b
        if a.value == 1 and kind is OpKind.MUL:
            return b
    return None


def split_sum(expr: Expr, unit: int) -> tuple[Expr | None, Expr]:
    """Return the sum of the terms that are multiples of `unit` (None without any), and the sum of the others."""
    coarse: Expr | None = None
    fine: Expr = num(0)
    for term in _terms(expr):
        match term:
            case Const(value=int(value)) | Op(kind=OpKind.MUL, args=(_, Const(value=int(value)))) if value % unit == 0:
                coarse = term if coarse is None else add(coarse, term)
            case _:
                fine = add(fine, term)
    return coarse, fine


def _terms(expr: Expr) -> tuple[Expr, ...]:
    match expr:
        case Op(kind=OpKind.ADD, args=(a, b)) if not expr.dtype.is_float:
            return (*_terms(a), *_terms(b))
        case _:
            return (expr,)
