"""Scalar expressions over loops → array calls, one per operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roller_bench.baselines.library import Library, Slot, Trace, no_baseline
from roller_bench.baselines.translate.nest import Nest, affine_index, bare, bare_axes, index_range
from roller_svc.ir.affine import Affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    COMPARISONS,
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    iter_subexpressions,
    loads_of,
)
from roller_svc.runtime.binding import aligned_empty, numpy_dtype

_LOGIC = COMPARISONS | {OpKind.LAND, OpKind.LOR, OpKind.LNOT, OpKind.ISNAN, OpKind.ISINF}
_MAX_TEMPORARY_ELEMENTS = 1 << 28  # of a temporary; larger programs are not translated


@dataclass(frozen=True, slots=True)
class Context:
    """The trace and the tensors so far. `trusting`: treat a guard that looks like padding as padding."""

    library: Library
    trace: Trace
    tensors: dict[str, Slot]
    trusting: bool

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Slot:
        """Return memory whose pages are already faulted in."""
        if int(np.prod(shape, dtype=np.int64)) > _MAX_TEMPORARY_ELEMENTS:
            raise no_baseline(f"an intermediate array of shape {list(shape)} is too large")
        array = aligned_empty(shape, numpy_dtype(dtype))
        array.fill(0)
        return Slot(self.library.place(array), fixed=True)

    def strided(self, value: Slot, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Slot:
        return self.trace.view(lambda x: self.library.strided(x, shape, strides, offset), value)

    def strides(self, value: Slot) -> tuple[int, ...]:
        return self.library.strides(value.value)

    def copied(self, value: Slot, shape: tuple[int, ...], dtype: DType) -> Slot:
        """Record a dense copy, made at every run."""
        result = self.empty(shape, dtype)
        self.into("copy", self.library.convert, value, out=result)
        return result

    def into(self, name: str, function: Any, *args: Slot, out: Slot, **more: Any) -> None:
        self.trace.into(name, function, *args, out=out, **more)


class Pointwise:
    """Translates the body of one nest. Values have a dimension for each axis (extent 1 if constant along it)."""

    def __init__(self, context: Context, nest: Nest) -> None:
        self.context = context
        self.nest = nest
        self._counts: Counter[Expr] = Counter()
        self._shared: dict[Expr, Slot] = {}
        self._own: dict[int, Slot] = {}  # buffers that their only reader may overwrite, by id

    def store(self, expr: Expr, out: Slot) -> None:
        """Compute an expression into `out`, which has all dimensions or broadcasts to them."""
        expr = simplified(expr)
        self._counts.update(node for node in iter_subexpressions(expr) if isinstance(node, Op | Select | Cast))
        value = self.value(expr, out)
        if value is not out:
            self.context.into("copy", self.context.library.convert, value, out=out)

    def value(self, expr: Expr, into: Slot | None = None) -> Slot:
        """Compute an expression, into `into` if that fits."""
        expr = bare(expr) if isinstance(expr, Cast) and expr.implicit and expr.arg.dtype is expr.dtype else expr
        match expr:
            case Const(value=number, dtype=dtype):
                return Slot(self.context.library.constant(number, dtype), fixed=True)
            case Cast(arg=Const(value=number), dtype=dtype):
                return Slot(self.context.library.constant(number, dtype), fixed=True)
            case AxisRef(name=name):
                return self._axis(name)
            case Load():
                return self.load(expr)
        if expr in self._shared:
            return self._shared[expr]
        if not loads_of(expr):
            return self._static(expr)
        shared = self._counts[expr] > 1
        result = self._computed(expr, None if shared else into)
        if shared:
            self._shared[expr] = result
            self._own.pop(id(result), None)
        return result

    def whole(self, expr: Expr) -> Slot:
        """Compute an index that is known to be in bounds."""
        return self._whole(expr, 0, clamped=False)

    def load(self, load: Load, fill: float | None = None) -> Slot:
        """Load a tensor: a view if the index is affine. `fill` is the value out of bounds."""
        index = affine_index(load)
        value = self.context.tensors[load.tensor]
        if index is None or any(c < 0 for one in index for _, c in one.coeffs):
            return self._gathered(load, value, clamped=fill is not None)
        shape = tuple(value.value.shape)
        ranges = [index_range(one, self.nest.extents) for one in index]
        if any(low < 0 or high >= size for (low, high), size in zip(ranges, shape, strict=True)):
            if fill is None:
                raise no_baseline(f"{load.tensor} is read outside")
            value, index = self._padded(load, value, index, fill)
        return self._strided_view(value, index)

    def _strided_view(self, value: Slot, index: tuple[Affine, ...]) -> Slot:
        steps = self.context.strides(value)
        axes = self.nest.axes
        strides = tuple(sum(one.coeff(a.name) * s for one, s in zip(index, steps, strict=True)) for a in axes)
        named = {name for one in index for name, _ in one.coeffs}
        shape = tuple(a.extent if a.name in named else 1 for a in axes)
        if shape == tuple(value.value.shape) and strides == steps and not any(one.offset for one in index):
            return value
        return self.context.strided(value, shape, strides, sum(o.offset * s for o, s in zip(index, steps, strict=True)))

    def _padded(self, load: Load, value: Slot, index: tuple[Affine, ...], fill: float) -> tuple[Slot, tuple[Affine, ...]]:
        """Return the tensor padded for the index, and the index into it."""
        shape = tuple(value.value.shape)
        ranges = [index_range(one, self.nest.extents) for one in index]
        lows = [min(0, low) for low, _ in ranges]
        wide = tuple(max(size, high + 1) - low for size, low, (_, high) in zip(shape, lows, ranges, strict=True))
        border = self.context.empty(wide, load.dtype)
        border.value[...] = fill
        strides = self.context.strides(border)
        start = sum(-low * s for low, s in zip(lows, strides, strict=True))
        self.context.into("pad", self.context.library.convert, value, out=self.context.strided(border, shape, strides, start))
        return border, tuple(Affine(one.coeffs, one.offset - low) for one, low in zip(index, lows, strict=True))

    def _computed(self, expr: Expr, into: Slot | None) -> Slot:
        library, into_call = self.context.library, self.context.into
        match expr:
            case Op(kind=kind, args=args):
                values = self._arguments(args, into)
                out = self._buffer(values, DType.BOOL if kind in _LOGIC else expr.dtype, into)
                into_call(kind.name.lower(), library.pointwise(kind), *values, out=out)
                return out
            case Cast(arg=arg, dtype=dtype):
                value = self.value(arg)
                out = self._buffer([value], dtype, into)
                into_call("cast", library.convert, value, out=out)
                return out
            case Select():
                return self._selected(expr, into)
        raise no_baseline(f"no call for {type(expr).__name__}")

    def _arguments(self, args: tuple[Expr, ...], into: Slot | None) -> list[Slot]:
        """Compute the arguments; the first may use `into`, which its reader overwrites anyway."""
        values: list[Slot] = []
        for arg in args:
            values.append(self.value(arg, into))
            if into is not None and values[-1] is into:
                into = None
        return values

    def _selected(self, expr: Select, into: Slot | None) -> Slot:
        then, otherwise = bare(expr.then), bare(expr.otherwise)
        fill = _number(otherwise)
        if isinstance(then, Load) and not loads_of(expr.cond) and fill is not None and self.context.trusting:
            index = affine_index(then)
            if index is not None and self._leaves(then, index):
                return self.load(then, fill)
        cond = self.value(expr.cond)
        values = [self._branch(then, expr.dtype), self._branch(otherwise, expr.dtype)]
        out = self._buffer([cond, *values], expr.dtype, into)
        self.context.into("where", self.context.library.where, cond, *values, out=out)
        return out

    def _branch(self, expr: Expr, dtype: DType) -> Slot:
        if (number := _number(expr)) is not None:
            return Slot(self.context.library.constant(number, dtype), fixed=True)
        if isinstance(expr, Load):
            return self.load(expr, 0)
        return self.value(expr)

    def _leaves(self, load: Load, index: tuple[Affine, ...]) -> bool:
        shape = self.context.tensors[load.tensor].value.shape
        ranges = [index_range(one, self.nest.extents) for one in index]
        return any(low < 0 or high >= size for (low, high), size in zip(ranges, shape, strict=True))

    def _gathered(self, load: Load, value: Slot, *, clamped: bool) -> Slot:
        """Gather by integer indices, along one dimension if only one index is not an axis."""
        context, nest = self.context, self.nest
        indices = [self._whole(part, size, clamped=clamped) for part, size in zip(load.index, value.value.shape, strict=True)]
        opaque = [d for d, part in enumerate(load.index) if not isinstance(part, AxisRef)]
        if len(opaque) == 1 and (gathered_axes := _one_axis(load, opaque[0], indices[opaque[0]], nest)) is not None:
            dim = opaque[0]
            flat = context.trace.view(lambda i: i.reshape(-1), indices[dim])
            found = context.empty(tuple(nest.extents[name] for name in gathered_axes), load.dtype)
            context.into("take", lambda x, i, out: context.library.take_along(x, dim, i, out), value, flat, out=found)
            names = [a.name for a in nest.axes]
            order = sorted(range(len(gathered_axes)), key=lambda d: names.index(gathered_axes[d]))
            shape = tuple(a.extent if a.name in gathered_axes else 1 for a in nest.axes)
            return context.trace.view(lambda x: context.library.permuted(x, order).reshape(shape), found)
        shape = tuple(np.broadcast_shapes(*(tuple(i.value.shape) for i in indices)))
        out = context.empty(shape, load.dtype)
        context.into("take", lambda x, *i, out: context.library.take(x, i, out), value, *indices, out=out)
        return out

    def _whole(self, expr: Expr, size: int, *, clamped: bool) -> Slot:
        index = self.value(expr)
        shape = tuple(index.value.shape) or (1,) * len(self.nest.axes)
        out = self.context.empty(shape, DType.INT64)
        if not loads_of(expr):  # a constant
            self.context.library.convert(index.value, out.value)
            if clamped:
                out.value[...] = out.value.clip(0, size - 1)
            return out
        self.context.into("cast", self.context.library.convert, index, out=out)
        return out

    def _axis(self, name: str) -> Slot:
        """Return the values of an axis along its dimension."""
        shape = tuple(a.extent if a.name == name else 1 for a in self.nest.axes)
        array = np.arange(self.nest.extents[name], dtype=np.int32).reshape(shape)
        return Slot(self.context.library.place(array), fixed=True)

    def _static(self, expr: Expr) -> Slot:
        """Record a call; compute it once if it depends on no tensor."""
        alone = Context(self.context.library, Trace(), self.context.tensors, self.context.trusting)
        result = Pointwise(alone, self.nest)._computed(expr, None)
        return Slot(result.value, fixed=True)

    def _buffer(self, values: list[Slot], dtype: DType, into: Slot | None) -> Slot:
        """Choose the output of an operator: `into`, an argument with no other reader, or new memory."""
        shape = tuple(np.broadcast_shapes(*(tuple(v.value.shape) for v in values)))
        wanted = self.context.library.place(np.empty(0, numpy_dtype(dtype))).dtype
        for slot in (into, *(v for v in values if id(v) in self._own)):
            if slot is not None and tuple(slot.value.shape) == shape and slot.value.dtype == wanted:
                return slot
        out = self.context.empty(shape, dtype)
        self._own[id(out)] = out
        return out


def simplified(expr: Expr) -> Expr:
    """Match activations that the libraries have as one call."""
    match expr:
        case Select(cond=Op(kind=OpKind.GT | OpKind.GE, args=(x, zero)), then=then, otherwise=otherwise) if _number(
            zero
        ) == 0 == _number(otherwise) and bare(x) == bare(then):
            return Op(OpKind.RELU, (simplified(then),), expr.dtype)
        case Op(kind=OpKind.MAX, args=(x, zero)) if _number(zero) == 0 and expr.dtype.is_float:
            return Op(OpKind.RELU, (simplified(x),), expr.dtype)
        case Op(args=args, dtype=dtype):
            argument = _gelu(expr)
            if argument is not None:
                return Op(OpKind.GELU, (simplified(argument),), dtype)
            return replace(expr, args=tuple(simplified(arg) for arg in args))
        case Cast(arg=arg):
            return replace(expr, arg=simplified(arg))
        case Select(then=then, otherwise=otherwise):
            return replace(expr, then=simplified(then), otherwise=simplified(otherwise))
        case _:
            return expr


def _gelu(expr: Expr) -> Expr | None:
    """Return x of 0.5 x (1 + erf(x / sqrt 2)), with factors in any order."""
    factors = _factors(expr)
    rest = [f for f in factors if _number(f) != 0.5]
    if len(factors) != 3 or len(rest) != 2:
        return None
    for x, tail in (rest, rest[::-1]):
        added = tail.args if isinstance(tail, Op) and tail.kind is OpKind.ADD else ()
        for erf in (one for one in added if isinstance(one, Op) and one.kind is OpKind.ERF):
            inner = _factors(erf.args[0])
            scales = [f for f in inner if abs((_number(f) or 0.0) - 0.70710678) < 1e-6]
            if 1.0 in map(_number, added) and len(inner) == 2 and x in inner and scales:
                return x
    return None


def _factors(expr: Expr) -> list[Expr]:
    if isinstance(expr, Op) and expr.kind is OpKind.MUL:
        return [f for arg in expr.args for f in _factors(arg)]
    return [expr]


def _number(expr: Expr) -> float | None:
    while isinstance(expr, Cast):
        expr = expr.arg
    return expr.value if isinstance(expr, Const) else None


def _one_axis(load: Load, dim: int, index: Slot, nest: Nest) -> tuple[str, ...] | None:
    """Return the axes of the gathered dimensions if the computed index varies along one axis only."""
    varying = [a.name for a, size in zip(nest.axes, index.value.shape, strict=True) if size > 1]
    others = bare_axes(Load(load.tensor, load.index[:dim] + load.index[dim + 1 :], load.dtype))
    if len(varying) != 1 or others is None or varying[0] in others:
        return None
    return (*others[:dim], varying[0], *others[dim:])
