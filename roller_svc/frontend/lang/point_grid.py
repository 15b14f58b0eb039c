"""Evaluate expressions of axes at every point of a grid: for floating index arithmetic, which isl cannot describe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from roller_svc.analysis.integer_power import raise_integers
from roller_svc.analysis.narrowing import round_to_narrow
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, Select

Array = npt.NDArray[Any]


class OpaqueValueError(Exception):
    """The value depends on data, or on a function that is not evaluated here."""


def evaluate(expr: Expr, axes: Mapping[str, Array]) -> Array:
    """Return the value at each point. Integers are wrapped to their type, in int64 or, for uint64, uint64.

    Floats are float32 or float64.
    """
    with np.errstate(all="ignore"):
        return _evaluate(expr, axes)


def _evaluate(expr: Expr, axes: Mapping[str, Array]) -> Array:
    match expr:
        case Const(value=value, dtype=dtype):
            return np.asarray(value, _representation(dtype))
        case AxisRef(name=name):
            return axes[name]
        case Cast(arg=arg, dtype=dtype, implicit=implicit):
            return _cast(_evaluate(arg, axes), arg.dtype, dtype, implicit=implicit)
        case Select(cond=cond, then=then, otherwise=otherwise):
            return np.where(_evaluate(cond, axes) != 0, _evaluate(then, axes), _evaluate(otherwise, axes))
        case Op(kind=kind, args=args, dtype=dtype):
            function = _FUNCTIONS.get(kind)
            if function is None:
                raise OpaqueValueError
            result: Array = np.asarray(function(*(_evaluate(arg, axes) for arg in args)))
            if dtype.is_float:
                return np.asarray(result, _representation(dtype))
            return _wrap(result, dtype) if result.dtype.kind != "f" else _saturate(result, dtype)
        case _:
            raise OpaqueValueError


def grid(extents: Mapping[str, int]) -> dict[str, Array]:
    """Return every axis as an array that broadcasts with the others."""
    rank = len(extents)
    return {
        name: np.arange(extent, dtype=np.int64).reshape([-1 if i == d else 1 for i in range(rank)])
        for d, (name, extent) in enumerate(extents.items())
    }


def _representation(dtype: DType) -> type[np.generic]:
    if not dtype.is_float:
        return np.uint64 if dtype is DType.UINT64 else np.int64
    return np.float64 if dtype is DType.FLOAT64 else np.float32


def _cast(value: Array, source: DType, dtype: DType, *, implicit: bool) -> Array:
    if dtype.is_float:
        if dtype.is_narrow_float and not implicit:
            value = round_to_narrow(value, dtype)
        return np.asarray(value, _representation(dtype))
    return _saturate(value, dtype) if source.is_float else _wrap(value, dtype)


def _saturate(value: Array, dtype: DType) -> Array:
    """Convert a float to an integer type: truncates and saturates, NaN gives 0."""
    if dtype is DType.BOOL:
        return np.asarray(value != 0, np.int64)
    low, high = dtype.integer_range
    clear = np.nan_to_num(value.astype(np.float64), nan=0.0, posinf=2.0**64, neginf=-(2.0**64))
    small = np.clip(np.trunc(clear), -(2.0**62), 2.0**62).astype(np.int64)
    return np.asarray(np.clip(small, max(low, -(2**62)), min(high, 2**62)), _representation(dtype))


def _wrap(value: Array, dtype: DType) -> Array:
    value = value.astype(_representation(dtype))
    if dtype is DType.BOOL:
        return np.asarray(value != 0, np.int64)
    if dtype.bits == 64:
        return value
    modulus = 1 << dtype.bits
    low: Array = value & (modulus - 1)
    return np.asarray(np.where(low >= modulus // 2, low - modulus, low)) if dtype.is_signed else low


def _floordiv(x: Array, y: Array) -> Array:
    return np.where(y == 0, 0, x // np.where(y == 0, 1, y))


def _mod(x: Array, y: Array) -> Array:
    if x.dtype.kind == "f":
        return np.asarray(np.fmod(x, y))
    return np.asarray(np.where(y == 0, 0, x % np.where(y == 0, 1, y)))


def _as_float(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return floor or ceil for floats and integers, which numpy would not convert."""
    return lambda x: function(x.astype(np.float64) if x.dtype.kind != "f" else x)


def _shift(*, left: bool) -> Callable[[Array, Array], Array]:
    def shifted(x: Array, y: Array) -> Array:
        by = np.clip(y, 0, 63)
        return np.asarray(np.where(y > 63, 0, np.left_shift(x, by)) if left else np.right_shift(x, by))

    return shifted


def _pow(x: Array, y: Array) -> Array:
    """Return a power. One of integers that exceeds 64 bits is opaque: an index does not wrap."""
    if x.dtype.kind == "f":
        return np.asarray(np.power(x, y))
    if (np.power(np.abs(x.astype(np.float64)), np.maximum(y, 0)) >= 2.0**63).any():
        raise OpaqueValueError
    return raise_integers(x, y)


_FUNCTIONS: dict[OpKind, Callable[..., Any]] = {
    OpKind.ADD: np.add, OpKind.SUB: np.subtract, OpKind.MUL: np.multiply, OpKind.DIV: np.true_divide,
    OpKind.FLOORDIV: _floordiv, OpKind.MOD: _mod, OpKind.NEG: np.negative, OpKind.ABS: np.abs,
    OpKind.LT: np.less, OpKind.LE: np.less_equal, OpKind.GT: np.greater, OpKind.GE: np.greater_equal,
    OpKind.EQ: np.equal, OpKind.NE: np.not_equal,
    OpKind.LAND: lambda x, y: (x != 0) & (y != 0), OpKind.LOR: lambda x, y: (x != 0) | (y != 0),
    OpKind.LNOT: lambda x: x == 0,
    OpKind.BITAND: np.bitwise_and, OpKind.BITOR: np.bitwise_or, OpKind.BITXOR: np.bitwise_xor,
    OpKind.BITNOT: np.invert, OpKind.SHL: _shift(left=True), OpKind.SHR: _shift(left=False),
    OpKind.MAX: np.maximum, OpKind.MIN: np.minimum, OpKind.FMAX: np.fmax, OpKind.FMIN: np.fmin,
    OpKind.CLIP: lambda x, low, high: np.minimum(np.maximum(x, low), high), OpKind.FMA: lambda x, y, z: x * y + z,
    OpKind.FLOOR: _as_float(np.floor), OpKind.CEIL: _as_float(np.ceil), OpKind.RFLOOR: np.floor,
    OpKind.RCEIL: np.ceil, OpKind.ROUND: np.rint, OpKind.TRUNC: np.trunc, OpKind.SQUARE: np.square,
    OpKind.SIGN: np.sign, OpKind.RELU: lambda x: np.maximum(x, 0), OpKind.SQRT: np.sqrt,
    OpKind.RECIPROCAL: np.reciprocal, OpKind.EXP: np.exp, OpKind.EXP2: np.exp2, OpKind.LOG: np.log,
    OpKind.LOG2: np.log2, OpKind.SIN: np.sin, OpKind.COS: np.cos,
    OpKind.ISNAN: np.isnan, OpKind.ISINF: np.isinf, OpKind.FMOD: np.fmod,
    OpKind.TRUNC_DIV: lambda x, y: np.sign(x) * np.sign(y) * _floordiv(np.abs(x), np.abs(y)),
    OpKind.POW: _pow,
}  # fmt: skip


def count_points(extents: Mapping[str, int]) -> int:
    return math.prod(extents.values())
