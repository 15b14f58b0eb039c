"""torch as a baseline library: elementwise calls, matrix products, convolutions, pooling, norms and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional

from roller_bench.baselines.library import Function, Slot, no_baseline
from roller_bench.baselines.translate.nest import Nest, affine_index
from roller_bench.baselines.translate.pointwise import Context, Pointwise
from roller_bench.baselines.translate.rows import ArgMost, Attention, FixedNorm, Norm, Pattern, Softmax
from roller_bench.baselines.translate.windows import Convolution, Pooling, Window
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
    """Library of torch calls, for use under torch.inference_mode()."""

    name = "torch"

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.versions = {"torch": torch.__version__, "torch_blas": _versions()}

    def place(self, array: NDArray[Any]) -> torch.Tensor:
        try:
            return torch.from_numpy(array)
        except TypeError as failure:
            raise no_baseline(f"torch has no dtype for numpy's {array.dtype}") from failure

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
            raise no_baseline(f"torch has no {kind.value} with out=")
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
                raise no_baseline("torch has no product over several dimensions")
            case Combine.RECURRENCE:
                raise no_baseline("torch has no linear recurrence")

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
    """Return torch's description of the libraries that it calls."""
    lines = (line.strip(" -") for line in torch.__config__.show().splitlines())
    return "; ".join(line.split(" Product")[0] for line in lines if "oneAPI" in line or "MKL-DNN" in line)


def row_call(context: Context, pattern: Pattern, out: Slot, *, swapped: bool) -> Slot:
    """Compute a row pattern. `swapped`: the first of two vectors is the shift, the second the scale."""
    tensors, trace = context.tensors, context.trace
    match pattern:
        case Softmax(data=data, dims=dims):
            shape = tuple(tensors[data].value.shape)
            if list(dims) != list(range(dims[0], dims[-1] + 1)):
                raise no_baseline("torch's softmax has one dimension")
            flat = (*shape[: dims[0]], -1, *shape[dims[-1] + 1 :])
            x, y = (trace.view(lambda v: v.view(flat), s) for s in (tensors[data], out))
            context.into("softmax", partial(torch.softmax, dim=dims[0]), x, out=y)
            return out
        case ArgMost(data=data, dim=dim, combine=combine):
            context.into(f"arg{combine.name.lower()}", partial(context.library.argmost(combine), dim=dim), tensors[data], out=out)
            return out
        case Norm():
            return _norm(context, pattern, swapped=swapped)
        case FixedNorm(data=data, mean=mean, variance=variance, vectors=vectors, eps=eps):
            ordered = vectors[::-1] if swapped else vectors
            given = [tensors[n] for n in (data, mean, variance, *ordered)]
            return trace.new("batch_norm", lambda *a: functional.batch_norm(*a, eps=eps), *given)
        case Attention(query=query, key=key, value=value, scale=scale):
            q = tensors[query]
            k = _transposed(context, tensors[key], swap=pattern.key_transposed)
            v = _transposed(context, tensors[value], swap=pattern.value_transposed)
            q, k, v = (trace.view(lambda t: t.unsqueeze(0) if t.ndim == 3 else t, t) for t in (q, k, v))
            shape = tuple(out.value.shape)
            found = trace.new(
                "scaled_dot_product_attention", partial(functional.scaled_dot_product_attention, scale=scale), q, k, v
            )
            return trace.view(lambda t: t.reshape(shape), found)


def _norm(context: Context, pattern: Norm, *, swapped: bool) -> Slot:
    """Compute a norm: over the last dimensions as layer norm, over all but batch and channel as group norm."""
    tensors, trace, eps = context.tensors, context.trace, pattern.eps
    data = tensors[pattern.data]
    shape = tuple(data.value.shape)
    ordered = [tensors[n] for n in (pattern.vectors[::-1] if swapped else pattern.vectors)]
    if pattern.dims == tuple(range(len(shape) - len(pattern.dims), len(shape))):
        reduced = tuple(shape[d] for d in pattern.dims)
        if all(tuple(v.value.shape) == reduced for v in ordered):
            if len(ordered) == 1:
                return trace.new("rms_norm", lambda x, w: functional.rms_norm(x, reduced, w, eps), data, *ordered)
            return trace.new("layer_norm", lambda x, *p: functional.layer_norm(x, reduced, *p, eps=eps), data, *ordered)
        if pattern.dims == tuple(range(2, len(shape))) and all(tuple(v.value.shape) == shape[1:2] for v in ordered):
            groups = shape[1]
            return trace.new("group_norm", lambda x, *p: functional.group_norm(x, groups, *p, eps=eps), data, *ordered)
    if pattern.dims == (0, *range(2, len(shape))) and all(tuple(v.value.shape) == shape[1:2] for v in ordered):
        weight, bias = [*ordered, None, None][:2]
        given = [s for s in (weight, bias) if s is not None]
        return trace.new(
            "batch_norm", lambda x, *wb: functional.batch_norm(x, None, None, *wb, training=True, eps=eps), data, *given
        )
    raise no_baseline("torch has no norm over these dimensions")


def _transposed(context: Context, value: Slot, *, swap: bool) -> Slot:
    return context.trace.view(lambda t: t.transpose(-1, -2), value) if swap else value


_CONVOLUTIONS: dict[int, Function] = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def convolve(context: Context, nest: Nest, found: Convolution, bias: Slot | None = None) -> Slot:
    """Compute a convolution in the nest's order of dimensions; a new array at every run."""
    trace = context.trace
    data = context.tensors[found.data.tensor]
    x = trace.view(lambda v: _batched(v.permute(found.order), len(found.batch)), data)
    w = _weight(context, nest, found)
    x, pads = _padded(context, x, found.windows, 0.0)
    call = _CONVOLUTIONS[len(found.windows)]
    arguments = [x, w] if bias is None else [x, w, bias]
    groups = nest.extents[found.group] if found.group else 1
    options: dict[str, Any] = {
        "stride": tuple(v.stride for v in found.windows), "padding": pads,
        "dilation": tuple(v.dilation for v in found.windows), "groups": groups,
    }  # fmt: skip
    y = trace.new(f"conv{len(found.windows)}d", lambda *a: call(*a, **options), *arguments)
    names = [*found.batch, *([found.group] if found.group else []), *found.filters, *(v.out for v in found.windows)]
    shape = tuple(nest.extents[n] for n in names)
    order = [names.index(a.name) for a in nest.spatial]
    return trace.view(lambda v: v.reshape(shape).permute(order), y)


def _batched(value: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the data with one leading batch dimension."""
    return value.unsqueeze(0) if batch == 0 else value


def _weight(context: Context, nest: Nest, found: Convolution) -> Slot:
    """Return the weight with dimensions (filters of all groups, channels of one group, taps)."""
    loops = Pointwise(context, nest)
    weight = loops.load(found.weight)
    names = [a.name for a in nest.axes]
    outer = [n for n in (found.group, *found.filters) if n]
    inner = [found.channel] if found.channel else []
    taps = [w.tap for w in found.windows if w.tap]
    order = [names.index(n) for n in (*outer, *inner, *taps)]
    rest = [d for d in range(len(names)) if d not in order]
    if any(weight.value.shape[d] != 1 for d in rest) or len(affine_index(found.weight) or ()) < len(taps):
        raise no_baseline("the weight has axes that a convolution's has not")
    filters = math.prod(nest.extents[n] for n in outer)
    channels = nest.extents[found.channel] if found.channel else 1
    shape = (filters, channels, *(w.taps for w in found.windows))
    return context.trace.view(lambda v: v.permute(*rest, *order)[(0,) * len(rest)].reshape(shape), weight)


def _padded(
    context: Context, x: Slot, windows: Sequence[Window], fill: float, *, is_taken: bool = True
) -> tuple[Slot, tuple[int, ...]]:
    """Return the data and the call's padding, or explicitly padded data if torch lacks that padding.

    `is_taken`: whether the call takes as much padding on both sides.
    """
    if is_taken and all(w.is_symmetric for w in windows):
        return x, tuple(w.pad for w in windows)
    none = (0,) * len(windows)
    borders = [(w.pad, w.missing) for w in windows]
    if all(low <= 0 and high <= 0 for low, high in borders):
        first = x.value.ndim - len(windows)
        for dim, (w, (low, high)) in enumerate(zip(windows, borders, strict=True)):
            x = _narrowed(context, x, first + dim, -low, w.size + low + high)
        return x, none
    flat = [b for pair in reversed(borders) for b in pair]
    return context.trace.new("pad", lambda v: functional.pad(v, flat, value=fill), x), none


def _narrowed(context: Context, x: Slot, dim: int, start: int, size: int) -> Slot:
    return context.trace.view(lambda v: v.narrow(dim, start, size), x)


def pool(context: Context, nest: Nest, found: Pooling, out: Slot) -> Slot:
    """Compute pooling, into `out` if torch can write there."""
    trace, windows = context.trace, found.windows
    ones = (1,) if len(windows) == 1 else ()  # a dimension without windows: torch writes 2-D and 3-D pooling to `out`
    data = context.tensors[found.data.tensor]
    lasts = tuple(data.value.shape[-len(windows) :])
    x = trace.view(lambda v: v.reshape(-1, *ones, *lasts), data)
    is_taken = all(w.pad <= w.taps // 2 for w in windows)
    ceil_mode = is_taken and all(map(_ceils, windows)) and not all(w.is_symmetric for w in windows)
    if ceil_mode:
        pads = tuple(w.pad for w in windows)
    else:
        x, pads = _padded(context, x, windows, 0.0 if found.combine is Combine.SUM else -math.inf, is_taken=is_taken)
    sizes = {
        "kernel_size": (*ones, *(w.taps for w in windows)), "stride": (*ones, *(w.stride for w in windows)),
        "padding": (*(0 for _ in ones), *pads), "ceil_mode": ceil_mode,
    }  # fmt: skip
    if found.combine is Combine.SUM:
        if any(w.dilation != 1 for w in windows) or not float(found.divisor).is_integer():
            raise no_baseline("torch averages dense windows, by a whole number")
        result = trace.view(lambda v: v.view(-1, *ones, *(w.outs for w in windows)), out)
        call = torch._C._nn.avg_pool2d if len(windows) < 3 else torch._C._nn.avg_pool3d
        context.into("avg_pool", call, x, out=result, divisor_override=int(found.divisor), **sizes)
        return out
    sizes["dilation"] = (*ones, *(w.dilation for w in windows))
    call = functional.max_pool2d if len(windows) < 3 else functional.max_pool3d
    pooled = trace.new("max_pool", lambda v: call(v, **sizes), x)
    return trace.view(lambda v: v.reshape(nest.shape), pooled)


def _ceils(w: Window) -> bool:
    """Return whether ceil_mode is needed: the last window is partly out of bounds."""
    span = w.size + 2 * w.pad - w.dilation * (w.taps - 1) - 1
    outs = -(-span // w.stride) + 1
    if (outs - 1) * w.stride >= w.size + w.pad:
        outs -= 1
    return w.pad >= 0 and outs == w.outs
