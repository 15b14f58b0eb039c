"""The language's operators and functions on wide numpy values.

One table for floats, one for integers. Integer results may exceed their type; `apply` wraps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from roller_svc.analysis.integer_power import raise_integers
from roller_svc.analysis.wide_values import Array, truncate, wrap
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, OpKind

_Function = Callable[..., Any]


def _map_elements(function: Callable[[float], float], x: Array) -> Array:
    """Apply a function of the math module to every element."""
    values: Iterable[float] = np.ravel(x).tolist()
    return np.fromiter(map(function, values), np.float64, count=x.size).reshape(x.shape)


def _erf(x: Array) -> Array:
    return _map_elements(math.erf, np.asarray(x))


def _normcdf(x: Array) -> Array:
    # erfc avoids cancellation to 0 for large negative x.
    return 0.5 * _map_elements(math.erfc, np.asarray(-x / math.sqrt(2.0)))


def _ieee_remainder(x: Array, y: Array) -> Array:
    """Return x - n*y with n the integer nearest to x / y, ties to even. Exact, as fmod is."""
    size = np.abs(y)
    remainder = np.fmod(np.abs(x), 2.0 * size)
    above = 2.0 * remainder > size
    once = np.where(above, remainder - size, remainder)
    twice = np.where(above & (2.0 * once >= size), once - size, once)
    return np.where(np.signbit(x), -twice, twice)


_FLOAT: dict[OpKind, _Function] = {
    OpKind.ADD: np.add, OpKind.SUB: np.subtract, OpKind.MUL: np.multiply, OpKind.DIV: np.divide, OpKind.MOD: np.fmod,
    OpKind.NEG: np.negative, OpKind.EXP: np.exp, OpKind.EXP2: np.exp2, OpKind.EXPM1: np.expm1, OpKind.LOG: np.log,
    OpKind.LOG2: np.log2, OpKind.LOG10: np.log10, OpKind.LOG1P: np.log1p, OpKind.SQRT: np.sqrt,
    OpKind.RSQRT: lambda x: 1.0 / np.sqrt(x), OpKind.RECIPROCAL: lambda x: 1.0 / x, OpKind.SQUARE: lambda x: x * x,
    OpKind.ABS: np.abs, OpKind.SIGN: np.sign, OpKind.SIN: np.sin, OpKind.COS: np.cos, OpKind.TAN: np.tan,
    OpKind.ASIN: np.arcsin, OpKind.ACOS: np.arccos, OpKind.ATAN: np.arctan, OpKind.SINH: np.sinh,
    OpKind.COSH: np.cosh, OpKind.TANH: np.tanh, OpKind.ASINH: np.arcsinh, OpKind.ACOSH: np.arccosh,
    OpKind.ATANH: np.arctanh, OpKind.ERF: _erf, OpKind.NORMCDF: _normcdf,
    OpKind.SIGMOID: lambda x: 1.0 / (1.0 + np.exp(-x)), OpKind.SILU: lambda x: x / (1.0 + np.exp(-x)),
    OpKind.GELU: lambda x: x * _normcdf(x), OpKind.RELU: lambda x: np.maximum(x, 0.0),
    OpKind.SOFTPLUS: lambda x: np.logaddexp(x, 0.0), OpKind.RFLOOR: np.floor, OpKind.RCEIL: np.ceil,
    OpKind.ROUND: np.rint, OpKind.TRUNC: np.trunc, OpKind.MAX: np.maximum, OpKind.MIN: np.minimum,
    OpKind.FMAX: np.fmax, OpKind.FMIN: np.fmin, OpKind.POW: np.power, OpKind.FMOD: np.fmod,
    OpKind.REMAINDER: _ieee_remainder, OpKind.ATAN2: np.arctan2, OpKind.HYPOT: np.hypot,
    OpKind.FMA: lambda x, y, z: x * y + z, OpKind.CLIP: lambda x, low, high: np.minimum(np.maximum(x, low), high),
}  # fmt: skip


def _nonzero(y: Any) -> Any:
    return np.where(y == 0, np.ones_like(y), y)


def _floor_divide(x: Array, y: Array) -> Array:
    return np.where(y == 0, np.zeros_like(y), np.floor_divide(x, _nonzero(y)))


def _floor_mod(x: Array, y: Array) -> Array:
    return np.where(y == 0, np.zeros_like(y), np.mod(x, _nonzero(y)))


def _truncating_mod(x: Array, y: Array) -> Array:
    return np.where(y == 0, np.zeros_like(y), np.fmod(x, _nonzero(y)))


def _truncating_divide(x: Array, y: Array) -> Array:
    quotient = np.floor_divide(x, _nonzero(y))
    inexact = quotient * _nonzero(y) != x
    upwards = inexact & ((x < 0) != (y < 0))
    return np.where(y == 0, np.zeros_like(y), quotient + upwards.astype(quotient.dtype))


def _integer_remainder(x: Array, y: Array) -> Array:
    """Return the IEEE remainder of integers: x minus the nearest multiple of y, ties to the even multiple."""
    divisor = _nonzero(y)
    rest = np.mod(x, divisor)
    size, far = (np.abs(each).astype(np.uint64) for each in (divisor, rest))  # |-2^63| is 2^63
    odd = np.mod(np.floor_divide(x, divisor), np.full_like(divisor, 2)) != 0
    above = (far > size - far) | ((far == size - far) & odd)
    return np.where(y == 0, np.zeros_like(y), np.where(above, rest - divisor, rest))


_INTEGER: dict[OpKind, _Function] = {
    OpKind.ADD: np.add, OpKind.SUB: np.subtract, OpKind.MUL: np.multiply, OpKind.FLOORDIV: _floor_divide,
    OpKind.DIV: _floor_divide, OpKind.MOD: _floor_mod, OpKind.NEG: np.negative, OpKind.BITAND: np.bitwise_and,
    OpKind.BITOR: np.bitwise_or, OpKind.BITXOR: np.bitwise_xor, OpKind.BITNOT: np.bitwise_not, OpKind.ABS: np.abs,
    OpKind.SIGN: np.sign, OpKind.SQUARE: lambda x: x * x, OpKind.RELU: lambda x: np.maximum(x, np.zeros_like(x)),
    OpKind.MAX: np.maximum, OpKind.MIN: np.minimum, OpKind.FMAX: np.maximum, OpKind.FMIN: np.minimum,
    OpKind.POW: raise_integers, OpKind.FMOD: _truncating_mod, OpKind.REMAINDER: _integer_remainder,
    OpKind.TRUNC_DIV: _truncating_divide, OpKind.FMA: lambda x, y, z: x * y + z,
    OpKind.CLIP: lambda x, low, high: np.minimum(np.maximum(x, low), high),
    OpKind.RFLOOR: np.positive, OpKind.RCEIL: np.positive, OpKind.ROUND: np.positive, OpKind.TRUNC: np.positive,
    OpKind.FLOOR: np.positive, OpKind.CEIL: np.positive,
}  # fmt: skip

_COMPARE: dict[OpKind, _Function] = {
    OpKind.LT: np.less, OpKind.LE: np.less_equal, OpKind.GT: np.greater, OpKind.GE: np.greater_equal,
    OpKind.EQ: np.equal, OpKind.NE: np.not_equal,
}  # fmt: skip


def _shift(kind: OpKind, x: Any, count: Any, dtype: DType) -> Any:
    """Shift. A count of the width or more shifts all bits out; a negative count shifts nothing."""
    size = x.dtype.type
    beyond = count >= dtype.bits
    within = np.clip(count, 0, dtype.bits - 1).astype(x.dtype)
    if kind is OpKind.SHL:
        return np.where(beyond, size(0), np.left_shift(x, within))
    emptied = np.where(x < 0, size(-1), size(0)) if x.dtype == np.int64 else size(0)
    return np.where(beyond, emptied, np.right_shift(x, within))


def apply(kind: OpKind, operand: DType, result: DType, args: tuple[Array, ...]) -> Array:
    """Apply the operator to wide values of type `operand`. Returns wide values of type `result`.

    LAND and LOR evaluate both sides.
    """
    if kind in COMPARISONS:
        return np.asarray(_COMPARE[kind](*args)).astype(np.int64)
    if kind is OpKind.LAND:
        return np.logical_and(*args).astype(np.int64)
    if kind is OpKind.LOR:
        return np.logical_or(*args).astype(np.int64)
    if kind is OpKind.LNOT:
        return np.asarray(args[0] == 0).astype(np.int64)
    if kind in (OpKind.ISNAN, OpKind.ISINF):
        test = np.isnan if kind is OpKind.ISNAN else np.isinf
        return test(np.asarray(args[0], np.float64)).astype(np.int64)
    if operand.is_float:
        if kind in (OpKind.FLOOR, OpKind.CEIL):
            whole = np.floor(args[0]) if kind is OpKind.FLOOR else np.ceil(args[0])
            return truncate(np.asarray(whole), result)
        if kind in _FLOAT:
            return np.asarray(_FLOAT[kind](*args))
    elif kind in (OpKind.SHL, OpKind.SHR):
        return wrap(np.asarray(_shift(kind, args[0], args[1], operand)), result)
    elif kind in _INTEGER:
        return wrap(np.asarray(_INTEGER[kind](*args)), result)
    raise InvariantError(f"operator {kind.value} is not defined for {operand.value}")
