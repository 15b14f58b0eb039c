"""numpy as a baseline library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_bench.baselines.library import Function, Slot, no_baseline
from roller_bench.baselines.translate.pointwise import Context
from roller_bench.baselines.translate.rows import ArgMost, Pattern, Softmax
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import OpKind
from roller_svc.ir.program import Combine

_K = OpKind
UFUNCS: dict[OpKind, Function] = {
    _K.ADD: np.add, _K.SUB: np.subtract, _K.MUL: np.multiply, _K.DIV: np.divide, _K.NEG: np.negative,
    _K.FLOORDIV: np.floor_divide, _K.MOD: np.remainder, _K.SHL: np.left_shift, _K.SHR: np.right_shift,
    _K.LT: np.less, _K.LE: np.less_equal, _K.GT: np.greater, _K.GE: np.greater_equal, _K.EQ: np.equal,
    _K.NE: np.not_equal, _K.LAND: np.logical_and, _K.LOR: np.logical_or, _K.LNOT: np.logical_not,
    _K.BITAND: np.bitwise_and, _K.BITOR: np.bitwise_or, _K.BITXOR: np.bitwise_xor, _K.BITNOT: np.invert,
    _K.EXP: np.exp, _K.EXP2: np.exp2, _K.EXPM1: np.expm1, _K.LOG: np.log, _K.LOG2: np.log2, _K.LOG10: np.log10,
    _K.LOG1P: np.log1p, _K.SQRT: np.sqrt, _K.RECIPROCAL: np.reciprocal, _K.SQUARE: np.square, _K.ABS: np.abs,
    _K.SIGN: np.sign, _K.SIN: np.sin, _K.COS: np.cos, _K.TAN: np.tan, _K.ASIN: np.arcsin, _K.ACOS: np.arccos,
    _K.ATAN: np.arctan, _K.SINH: np.sinh, _K.COSH: np.cosh, _K.TANH: np.tanh, _K.ASINH: np.arcsinh,
    _K.ACOSH: np.arccosh, _K.ATANH: np.arctanh, _K.RFLOOR: np.floor, _K.RCEIL: np.ceil, _K.ROUND: np.rint,
    _K.TRUNC: np.trunc, _K.ISNAN: np.isnan, _K.ISINF: np.isinf, _K.MAX: np.maximum, _K.MIN: np.minimum,
    _K.FMAX: np.fmax, _K.FMIN: np.fmin, _K.POW: np.power, _K.FMOD: np.fmod, _K.ATAN2: np.arctan2,
    _K.HYPOT: np.hypot,
}  # fmt: skip
_UFUNC_OF_COMBINE: dict[Combine, np.ufunc] = {
    Combine.SUM: np.add, Combine.PROD: np.multiply, Combine.MAX: np.maximum, Combine.MIN: np.minimum,
    Combine.ALL: np.minimum, Combine.ANY: np.maximum,
}  # fmt: skip
Array = NDArray[Any]


def _rsqrt(x: Array, out: Array) -> None:
    np.sqrt(x, out=out)
    np.divide(1, out, out=out)


def _relu(x: Array, out: Array) -> None:
    np.maximum(x, 0, out=out)


def _sigmoid(x: Array, out: Array) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, 1, out=out)
    np.divide(1, out, out=out)


def _clip(x: Array, low: Array, high: Array, out: Array) -> None:
    np.maximum(x, low, out=out)
    np.minimum(out, high, out=out)


_COMPOSED: dict[OpKind, Function] = {_K.RSQRT: _rsqrt, _K.RELU: _relu, _K.SIGMOID: _sigmoid, _K.CLIP: _clip}


class NumpyLibrary:
    """Library of numpy calls."""

    name = "numpy"

    def __init__(self) -> None:
        config: dict[str, Any] = dict(np.show_config(mode="dicts") or {})
        blas = config["Build Dependencies"]["blas"]
        self.versions = {"numpy": np.__version__, "numpy_blas": f"{blas['name']} {blas['version']}"}

    def place(self, array: Array) -> Array:
        return array

    def numpy(self, value: Array) -> Array:
        return value

    def constant(self, value: float, dtype: DType) -> Any:
        if dtype.is_narrow_float:
            raise no_baseline(f"numpy has no fast {dtype.value}")
        return np.dtype(dtype.value).type(value)

    def strides(self, value: Array) -> tuple[int, ...]:
        return tuple(s // value.itemsize for s in value.strides)

    def strided(self, value: Array, shape: Sequence[int], strides: Sequence[int], offset: int) -> Array:
        as_strided = np.lib.stride_tricks.as_strided
        start = as_strided(value, (offset + 1,), (value.itemsize,))[offset:]
        return as_strided(start, shape, [s * value.itemsize for s in strides])

    def permuted(self, value: Array, order: Sequence[int]) -> Array:
        return value.transpose(order)

    def pointwise(self, kind: OpKind) -> Function:
        function = UFUNCS.get(kind) or _COMPOSED.get(kind)
        if function is None:
            raise no_baseline(f"numpy has no {kind.value}")
        return function

    def where(self, cond: Array, then: Array, otherwise: Array, out: Array) -> None:
        np.copyto(out, otherwise)
        np.copyto(out, then, where=cond)

    def convert(self, value: Array, out: Array) -> None:
        np.copyto(out, value, casting="unsafe")

    def reduce(self, combine: Combine) -> Function:
        ufunc = _UFUNC_OF_COMBINE[combine]

        def reduced(x: Array, dims: tuple[int, ...], out: Array) -> None:
            ufunc.reduce(x, axis=dims, out=out)

        return reduced

    def take(self, value: Array, index: tuple[Array, ...], out: Array) -> None:
        out[...] = value[index]

    def take_along(self, value: Array, dim: int, index: Array, out: Array) -> None:
        np.take(value, index, axis=dim, out=out, mode="clip")  # mode: "raise" would buffer the result

    def put(self, target: Array, index: tuple[Array, ...], values: Array) -> None:
        target[index] = values

    def matmul(self) -> Function:
        return np.matmul

    def matvec(self) -> Function:
        return np.matmul

    def einsum(self, equation: str) -> Function:
        return partial(np.einsum, equation, optimize=True)

    def argmost(self, combine: Combine) -> Function:
        function = np.argmax if combine is Combine.MAX else np.argmin

        def argmost(x: Array, dim: int, out: Array) -> None:
            function(x, axis=dim, out=out)

        return argmost


def row_call(context: Context, pattern: Pattern, out: Slot, *, swapped: bool) -> Slot:
    """Compute a row pattern; numpy has no norms, so `swapped` never applies."""
    match pattern:
        case Softmax(data=data, dims=dims) if not swapped:
            context.into("softmax", partial(_softmax, dims=dims), context.tensors[data], out=out)
            return out
        case ArgMost(data=data, dim=dim, combine=combine) if not swapped:
            name = f"arg{combine.name.lower()}"
            context.into(name, partial(context.library.argmost(combine), dim=dim), context.tensors[data], out=out)
            return out
    raise no_baseline("numpy has no call for these statements")


def _softmax(x: NDArray[Any], dims: tuple[int, ...], out: NDArray[Any]) -> None:
    """Compute softmax without a temporary of the size of x."""
    np.subtract(x, x.max(axis=dims, keepdims=True), out=out)
    np.exp(out, out=out)
    np.divide(out, out.sum(axis=dims, keepdims=True), out=out)
