"""torch as a peer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from roller_svc.bench.peers.library import Function, no_peer
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import OpKind
from roller_svc.ir.program import Combine

_K = OpKind
_NN = torch._C._nn  # the activations with `out`
FUNCTIONS: dict[OpKind, Function] = {
    _K.ADD: torch.add, _K.SUB: torch.sub, _K.MUL: torch.mul, _K.DIV: torch.div, _K.NEG: torch.neg,
    _K.FLOORDIV: torch.floor_divide, _K.MOD: torch.remainder, _K.SHL: torch.bitwise_left_shift,
    _K.SHR: torch.bitwise_right_shift, _K.LT: torch.lt, _K.LE: torch.le, _K.GT: torch.gt, _K.GE: torch.ge,
    _K.EQ: torch.eq, _K.NE: torch.ne, _K.LAND: torch.logical_and, _K.LOR: torch.logical_or,
    _K.LNOT: torch.logical_not, _K.BITAND: torch.bitwise_and, _K.BITOR: torch.bitwise_or,
    _K.BITXOR: torch.bitwise_xor, _K.BITNOT: torch.bitwise_not, _K.EXP: torch.exp, _K.EXP2: torch.exp2,
    _K.EXPM1: torch.expm1, _K.LOG: torch.log, _K.LOG2: torch.log2, _K.LOG10: torch.log10, _K.LOG1P: torch.log1p,
    _K.SQRT: torch.sqrt, _K.RSQRT: torch.rsqrt, _K.RECIPROCAL: torch.reciprocal, _K.SQUARE: torch.square,
    _K.ABS: torch.abs, _K.SIGN: torch.sign, _K.SIN: torch.sin, _K.COS: torch.cos, _K.TAN: torch.tan,
    _K.ASIN: torch.asin, _K.ACOS: torch.acos, _K.ATAN: torch.atan, _K.SINH: torch.sinh, _K.COSH: torch.cosh,
    _K.TANH: torch.tanh, _K.ASINH: torch.asinh, _K.ACOSH: torch.acosh, _K.ATANH: torch.atanh, _K.ERF: torch.erf,
    _K.NORMCDF: torch.special.ndtr, _K.SIGMOID: torch.sigmoid, _K.SILU: _NN.silu, _K.GELU: _NN.gelu,
    _K.RFLOOR: torch.floor, _K.RCEIL: torch.ceil, _K.ROUND: torch.round, _K.TRUNC: torch.trunc,
    _K.MAX: torch.maximum, _K.MIN: torch.minimum, _K.FMAX: torch.fmax, _K.FMIN: torch.fmin, _K.POW: torch.pow,
    _K.FMOD: torch.fmod, _K.ATAN2: torch.atan2, _K.HYPOT: torch.hypot, _K.SOFTPLUS: _NN.softplus,
    _K.CLIP: torch.clamp,
}  # fmt: skip


_amax: Function = torch.amax
_amin: Function = torch.amin
_argmax: Function = torch.argmax
_argmin: Function = torch.argmin
_mv: Function = torch.mv


def _relu(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.clamp_min(x, 0, out=out)


class TorchLibrary:
    """See Library. For use under torch.inference_mode()."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"torch": torch.__version__, "torch_blas": _versions()}

    def place(self, array: NDArray[Any]) -> torch.Tensor:
        try:
            return torch.from_numpy(array)
        except TypeError as failure:
            raise no_peer(f"torch does not take {array.dtype} from numpy") from failure

    def numpy(self, value: torch.Tensor) -> NDArray[Any]:
        found: NDArray[Any] = value.numpy()
        return found

    def constant(self, value: float, dtype: DType) -> Any:
        return torch.tensor(value, dtype=torch_dtype(dtype))

    def strides(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(value.stride())

    def strided(self, value: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
        return value.as_strided(tuple(shape), tuple(strides), value.storage_offset() + offset)

    def permuted(self, value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        return value.permute(*order)

    def pointwise(self, kind: OpKind) -> Function:
        if kind is OpKind.RELU:
            return _relu
        function: Function | None = FUNCTIONS.get(kind)
        if function is None:
            raise no_peer(f"torch has no {kind.value} with out=")
        return function

    def where(self, cond: torch.Tensor, then: torch.Tensor, otherwise: torch.Tensor, out: torch.Tensor) -> None:
        torch.where(cond, then, otherwise, out=out)

    def convert(self, value: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(value)

    def reduce(self, combine: Combine) -> Function:
        match combine:
            case Combine.SUM:
                return _sum
            case Combine.MAX | Combine.ANY:
                return _amax
            case Combine.MIN | Combine.ALL:
                return _amin
            case Combine.PROD:
                raise no_peer("torch has no product over several dimensions")

    def take(self, value: torch.Tensor, index: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        torch.ops.aten.index.Tensor_out(value, list(index), out=out)

    def take_along(self, value: torch.Tensor, dim: int, index: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(value, dim, index, out=out)

    def put(self, target: torch.Tensor, index: tuple[torch.Tensor, ...], values: torch.Tensor) -> None:
        target.index_put_(index, values)

    def matmul(self) -> Function:
        return _matmul

    def matvec(self) -> Function:
        return _mv

    def einsum(self, equation: str) -> Function:
        return partial(torch.einsum, equation)

    def argmost(self, combine: Combine) -> Function:
        return _argmax if combine is Combine.MAX else _argmin


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.value)
    return found


def _sum(x: torch.Tensor, dims: tuple[int, ...], out: torch.Tensor) -> None:
    torch.sum(x, dims, dtype=out.dtype, out=out)


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    if a.ndim == b.ndim == 2:
        torch.mm(a, b, out=out)
    else:
        torch.bmm(a, b, out=out)


def _versions() -> str:
    """What torch says of the libraries it calls."""
    lines = (line.strip(" -") for line in torch.__config__.show().splitlines())
    return "; ".join(line.split(" Product")[0] for line in lines if "oneAPI" in line or "MKL-DNN" in line)
