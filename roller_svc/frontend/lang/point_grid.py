"""Evaluate expressions of axes at every point of a grid: for floating index arithmetic, which isl cannot describe."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from roller_svc.analysis.scalar_ops import apply
from roller_svc.analysis.wide_values import Array, convert, round_to, wide_dtype
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, Select

# Other functions of floats are opaque: libraries round them in several ways.
_EVALUATED = frozenset(
    {
        OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.DIV, OpKind.FLOORDIV, OpKind.MOD, OpKind.NEG, OpKind.ABS, OpKind.LT,
        OpKind.LE, OpKind.GT, OpKind.GE, OpKind.EQ, OpKind.NE, OpKind.LAND, OpKind.LOR, OpKind.LNOT, OpKind.BITAND,
        OpKind.BITOR, OpKind.BITXOR, OpKind.BITNOT, OpKind.SHL, OpKind.SHR, OpKind.MAX, OpKind.MIN, OpKind.FMAX,
        OpKind.FMIN, OpKind.CLIP, OpKind.FMA, OpKind.FLOOR, OpKind.CEIL, OpKind.RFLOOR, OpKind.RCEIL, OpKind.ROUND,
        OpKind.TRUNC, OpKind.SQUARE, OpKind.SIGN, OpKind.RELU, OpKind.SQRT, OpKind.RECIPROCAL, OpKind.EXP, OpKind.EXP2,
        OpKind.LOG, OpKind.LOG2, OpKind.SIN, OpKind.COS, OpKind.ISNAN, OpKind.ISINF, OpKind.FMOD, OpKind.TRUNC_DIV,
        OpKind.POW,
    }
)  # fmt: skip


class OpaqueValueError(Exception):
    """The value depends on data, or on a function that is not evaluated here."""


def evaluate(expr: Expr, axes: Mapping[str, Array]) -> Array:
    """Return the value at each point, in wide values. Floats are rounded to the type in which they are computed."""
    with np.errstate(all="ignore"):
        return _evaluate(expr, axes)


def _evaluate(expr: Expr, axes: Mapping[str, Array]) -> Array:
    match expr:
        case Const(value=value, dtype=dtype):
            return _rounded(np.asarray(value, wide_dtype(dtype)), dtype)
        case AxisRef(name=name):
            return axes[name]
        case Cast(arg=arg, dtype=dtype, implicit=implicit):
            return _rounded(convert(_evaluate(arg, axes), arg.dtype, dtype, rounded=not implicit), dtype)
        case Select(cond=cond, then=then, otherwise=otherwise):
            return np.where(_evaluate(cond, axes) != 0, _evaluate(then, axes), _evaluate(otherwise, axes))
        case Op(kind=kind, args=args, dtype=dtype) if kind in _EVALUATED:
            values = tuple(_evaluate(arg, axes) for arg in args)
            if kind is OpKind.POW and not dtype.is_float and _exceeds_64_bits(*values):
                raise OpaqueValueError  # an index does not wrap
            return _rounded(apply(kind, args[0].dtype, dtype, values), dtype)
        case _:
            raise OpaqueValueError


def _rounded(value: Array, dtype: DType) -> Array:
    return round_to(value, dtype.compute) if dtype.is_float else value


def _exceeds_64_bits(base: Array, exponent: Array) -> bool:
    return bool((np.power(np.abs(base.astype(np.float64)), np.maximum(exponent, 0)) >= 2.0**63).any())


def grid(extents: Mapping[str, int]) -> dict[str, Array]:
    """Return every axis as an array that broadcasts with the others."""
    rank = len(extents)
    return {
        name: np.arange(extent, dtype=np.int64).reshape([-1 if i == d else 1 for i in range(rank)])
        for d, (name, extent) in enumerate(extents.items())
    }


def count_points(extents: Mapping[str, int]) -> int:
    return math.prod(extents.values())
