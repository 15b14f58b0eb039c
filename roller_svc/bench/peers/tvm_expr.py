"""An expression → TVM's, with what the language says where TVM says something else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from roller_svc.bench.peers.library import no_peer
from roller_svc.bench.peers.nest import affine_index, reach
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, loads_of

_K = OpKind
_FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
_TRUTHS = COMPARISONS | {_K.LAND, _K.LOR, _K.LNOT, _K.ISNAN, _K.ISINF}


def type_name(dtype: DType) -> str:
    """TVM's name of a type as it is stored; raises no_peer."""
    if dtype in _FLOAT8:
        raise no_peer(f"{dtype.value} is not translated: TVM's conversions to it do not say that they saturate")
    return dtype.value


def converted(value: Any, source: DType, target: DType) -> Any:
    """A conversion as C does it; where the language's saturates instead, results differ and the comparison says so."""
    if source is target:
        return value
    if target is DType.BOOL:
        return value != tirx.const(0, type_name(source))
    return tirx.Cast(type_name(target), value)


@dataclass(frozen=True, slots=True)
class Point:
    """What expressions of a statement refer to. Narrow floats are computed in float32, truths are TVM's bool."""

    tensors: Mapping[str, Any]
    axes: Mapping[str, Any]
    extents: Mapping[str, int]

    def value(self, expr: Expr) -> Any:
        """In the type expr.dtype.compute; raises no_peer for what TVM has no form for."""
        match expr:
            case Const(value=number, dtype=dtype):
                return tirx.const(number, type_name(dtype.compute))
            case AxisRef(name=name):
                return self.axes[name]
            case Load(tensor=tensor, index=index, dtype=dtype):
                loaded = self.tensors[tensor](*(self._index(part) for part in index))
                return converted(loaded, dtype, dtype.compute)
            case Cast(arg=arg, dtype=dtype, implicit=implicit):
                whole = converted(self.value(arg), arg.dtype.compute, dtype.compute)
                if implicit or dtype is dtype.compute:
                    return whole
                return converted(converted(whole, dtype.compute, dtype), dtype, dtype.compute)
            case Select(cond=cond, then=then, otherwise=otherwise):
                choose = tirx.Select if self._is_safe(then) and self._is_safe(otherwise) else tirx.if_then_else
                return choose(self.truth(cond), self.value(then), self.value(otherwise))
            case Op(kind=kind, dtype=dtype) if kind in _TRUTHS:
                return tirx.Cast(type_name(dtype), self.truth(expr))
            case Op():
                return self._operator(expr)

    def truth(self, expr: Expr) -> Any:
        """Whether the expression is not 0, as TVM's bool."""
        match expr:
            case Op(kind=_K.LAND, args=(a, b)):
                return tirx.all(self.truth(a), self.truth(b))
            case Op(kind=_K.LOR, args=(a, b)):
                return tirx.any(self.truth(a), self.truth(b))
            case Op(kind=_K.LNOT, args=(a,)):
                return tirx.Not(self.truth(a))
            case Op(kind=kind, args=args) if kind in _TRUTHS:
                return _COMPARE[kind](*(self.value(a) for a in args))
            case Cast(arg=arg, dtype=dtype, implicit=True) if not dtype.is_float and not arg.dtype.is_float:
                return self.truth(arg)
            case _:
                return converted(self.value(expr), expr.dtype.compute, DType.BOOL)

    def _index(self, expr: Expr) -> Any:
        return converted(self.value(expr), expr.dtype, DType.INT32)

    def _is_safe(self, expr: Expr) -> bool:
        """Whether all that the expression reads is there, so that a branch may be evaluated in vain."""
        for load in loads_of(expr):
            index = affine_index(load)
            if index is None:
                return False
            ends = [reach(one, self.extents) for one in index]
            shape = [int(size) for size in self.tensors[load.tensor].shape]
            if any(low < 0 or high >= size for (low, high), size in zip(ends, shape, strict=True)):
                return False
        return True

    def _operator(self, op: Op) -> Any:
        args, kind = [self.value(a) for a in op.args], op.kind
        if kind is _K.FLOORDIV:
            return _by_nonzero(tirx.floordiv, *args)
        if kind is _K.TRUNC_DIV:
            return _by_nonzero(tirx.truncdiv, *args)
        if kind is _K.MOD and not op.dtype.is_float:
            return _by_nonzero(tirx.floormod, *args)
        if kind in (_K.FLOOR, _K.CEIL):
            return tirx.Cast("int32", _FUNCTIONS[kind](*args))
        if kind not in _FUNCTIONS:  # tirx.fmod is there, but its code generator for CPUs does not know it
            raise no_peer(f"TVM has no {kind.value}")
        return _FUNCTIONS[kind](*args)


def _by_nonzero(divide: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """A quotient or remainder that is 0 where the divisor is."""
    if isinstance(b, tirx.IntImm) and b.value != 0:
        return divide(a, b)
    zero, one = tirx.const(0, a.ty.dtype), tirx.const(1, a.ty.dtype)
    return tirx.Select(b == zero, zero, divide(a, tirx.Select(b == zero, one, b)))


def _like(x: Any, value: float) -> Any:
    return tirx.const(value, x.ty.dtype)


def _sign(x: Any) -> Any:
    above = tirx.Select(x > _like(x, 0), _like(x, 1), x)  # zeros keep their sign, NaN stays
    return tirx.Select(x < _like(x, 0), _like(x, -1), above)


def _normcdf(x: Any) -> Any:
    return (tirx.erf(x * _like(x, math.sqrt(0.5))) + _like(x, 1)) * _like(x, 0.5)


def _softplus(x: Any) -> Any:
    return tirx.max(x, _like(x, 0)) + tirx.log1p(tirx.exp(-tirx.abs(x)))


def _ignoring_nan(join: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: tirx.Select(tirx.isnan(a), b, tirx.Select(tirx.isnan(b), a, join(a, b)))


_COMPARE: dict[OpKind, Callable[..., Any]] = {
    _K.LT: lambda a, b: a < b, _K.LE: lambda a, b: a <= b, _K.GT: lambda a, b: a > b, _K.GE: lambda a, b: a >= b,
    _K.EQ: tirx.EQ, _K.NE: tirx.NE, _K.ISNAN: tirx.isnan, _K.ISINF: tirx.isinf,
}  # fmt: skip

_FUNCTIONS: dict[OpKind, Callable[..., Any]] = {
    _K.ADD: lambda a, b: a + b, _K.SUB: lambda a, b: a - b, _K.MUL: lambda a, b: a * b, _K.DIV: tirx.div,
    _K.NEG: lambda x: -x, _K.SHL: lambda a, b: a << b, _K.SHR: lambda a, b: a >> b, _K.BITAND: tirx.bitwise_and,
    _K.BITOR: tirx.bitwise_or, _K.BITXOR: tirx.bitwise_xor, _K.BITNOT: tirx.bitwise_not, _K.EXP: tirx.exp,
    _K.EXP2: tirx.exp2, _K.LOG: tirx.log, _K.LOG2: tirx.log2, _K.LOG10: tirx.log10, _K.LOG1P: tirx.log1p,
    _K.SQRT: tirx.sqrt, _K.RSQRT: tirx.rsqrt, _K.RECIPROCAL: lambda x: tirx.div(_like(x, 1), x),
    _K.SQUARE: lambda x: x * x, _K.ABS: tirx.abs, _K.SIGN: _sign, _K.SIN: tirx.sin, _K.COS: tirx.cos, _K.TAN: tirx.tan,
    _K.ASIN: tirx.asin, _K.ACOS: tirx.acos, _K.ATAN: tirx.atan, _K.SINH: tirx.sinh, _K.COSH: tirx.cosh,
    _K.TANH: tirx.tanh, _K.ASINH: tirx.asinh, _K.ACOSH: tirx.acosh, _K.ATANH: tirx.atanh, _K.ERF: tirx.erf,
    _K.NORMCDF: _normcdf, _K.SIGMOID: tirx.sigmoid, _K.SILU: lambda x: x * tirx.sigmoid(x),
    _K.GELU: lambda x: x * _normcdf(x), _K.RELU: lambda x: tirx.max(x, _like(x, 0)), _K.SOFTPLUS: _softplus,
    _K.FLOOR: tirx.floor, _K.CEIL: tirx.ceil, _K.RFLOOR: tirx.floor, _K.RCEIL: tirx.ceil, _K.ROUND: tirx.nearbyint,
    _K.TRUNC: tirx.trunc, _K.MAX: tirx.max, _K.MIN: tirx.min, _K.FMAX: _ignoring_nan(tirx.max),
    _K.FMIN: _ignoring_nan(tirx.min), _K.POW: tirx.power, _K.ATAN2: tirx.atan2,
    _K.HYPOT: tirx.hypot, _K.FMA: lambda a, b, c: a * b + c,
    _K.CLIP: lambda x, low, high: tirx.min(tirx.max(x, low), high),
}  # fmt: skip
