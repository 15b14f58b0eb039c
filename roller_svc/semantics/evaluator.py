"""Evaluate a typed expression at many points at once, optionally with a bound on a kernel's error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from roller_svc.analysis.scalar_ops import apply
from roller_svc.analysis.wide_values import Array, convert, round_to, wide_dtype
from roller_svc.errors import IndexRangeError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, children, loads_of
from roller_svc.ir.program import Combine, TensorType
from roller_svc.semantics import rounding


@dataclass(frozen=True, slots=True)
class Term:
    """Wide values with a bound on a kernel's distance from them."""

    value: Array
    error: Array | None = None  # None: exact


# tensor id, one index array per dimension (in range, broadcastable), mask of points read (None: all) -> values
Fetch = Callable[[str, tuple[Array, ...], Array | None], Term]


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors that loads read, by id."""

    types: Mapping[str, TensorType]
    names: Mapping[str, str]  # as the source has them
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluate expressions over one block of points.

    `live` marks the points that count. Values elsewhere are arbitrary, but nothing is read out of range.
    """

    tensors: Tensors
    axes: Mapping[str, Array]  # coordinates: integer arrays that broadcast with each other
    track: bool  # compute error bounds
    allow_tf32: bool = False
    exactly: bool = False  # round each floating operator to the type it computes in
    rounded: Collection[Expr] = ()  # operators whose results a kernel may round to their type

    def term(self, expr: Expr, live: Array | None = None) -> Term:
        match expr:
            case Const(value=value, dtype=dtype):
                wide = np.asarray(value, dtype=wide_dtype(dtype))
                return Term(round_to(wide, dtype.compute) if self.exactly and dtype.is_float else wide)
            case AxisRef(name=name):
                return Term(self.axes[name])
            case Load():
                return self._load(expr, live)
            case Op(kind=OpKind.FLOOR | OpKind.CEIL) | Cast() if _is_grid_index(expr):
                return self._grid_index(expr)
            case Cast():
                return self._cast(expr, live)
            case Select():
                return self._select(expr, live)
            case Op(kind=OpKind.LAND | OpKind.LOR):
                return self._logical(expr, live)
            case Op():
                return self._op(expr, live)

    def index_of(self, tensor: str, dim: int, expr: Expr, live: Array | None) -> Term:
        """Evaluate the index of one dimension: check live points, clamp the others into the range."""
        size = self.tensors.types[tensor].shape[dim]
        term = self.term(expr, live)
        index = term.value.astype(np.int64)
        outside = (index < 0) | (index >= size)
        if outside.any():
            wrong = outside if live is None else outside & live
            if wrong.any():
                value = int(np.broadcast_to(term.value, wrong.shape)[wrong][0])
                raise out_of_range(self.tensors.names.get(tensor, tensor), dim, size, value)
            index = np.clip(index, 0, size - 1)
        return Term(index, term.error)

    def _load(self, load: Load, live: Array | None) -> Term:
        index = [self.index_of(load.tensor, d, e, live) for d, e in enumerate(load.index)]
        got = self.tensors.fetch(load.tensor, tuple(t.value for t in index), live)
        error = got.error
        for term in index:
            if term.error is not None:
                # A different index reads a different element, whose distance is unknown here.
                error = np.where(term.error > 0, np.inf, np.zeros(()) if error is None else error)
        return Term(got.value, error)

    def _grid_index(self, expr: Op | Cast) -> Term:
        """Evaluate an integer made from floats of axes alone, rounding as the expression's types do: exact."""
        (arg,) = children(expr)
        value = replace(self, exactly=True).term(arg).value
        if isinstance(expr, Op):
            return Term(apply(expr.kind, arg.dtype, expr.dtype, (value,)))
        return Term(convert(value, arg.dtype, expr.dtype, rounded=False))

    def _op(self, op: Op, live: Array | None) -> Term:
        args = [self.term(arg, live) for arg in op.args]
        operand = op.args[0].dtype
        values = tuple(arg.value for arg in args)
        value = apply(op.kind, operand, op.dtype, values)
        if self.exactly and op.dtype.is_float:
            return Term(round_to(value, op.dtype.compute))
        if not self.track:
            return Term(value)
        errors = [arg.error for arg in args]
        error = rounding.propagate(op.kind, operand, op.dtype, values, errors, value)
        if self.allow_tf32 and op.kind in (OpKind.MUL, OpKind.FMA) and op.dtype is DType.FLOAT32:
            # TF32 truncates both factors to a 10-bit fraction.
            product = np.abs(values[0] * values[1])
            error = (np.zeros(()) if error is None else error) + 2.0**-10 * product
        if op in self.rounded:
            error = rounding.store_error(value, error, op.dtype)
        return Term(value, error)

    def _logical(self, op: Op, live: Array | None) -> Term:
        """Evaluate `&&` or `||`: the right operand counts only where the left one does not decide."""
        left = self.term(op.args[0], live)
        needs_right = (left.value != 0) if op.kind is OpKind.LAND else (left.value == 0)
        right = self.term(op.args[1], _and(live, needs_right))
        value = apply(op.kind, op.args[0].dtype, op.dtype, (left.value, right.value))
        if left.error is None and right.error is None:
            return Term(value)
        zero = np.zeros(())
        right_error = np.where(needs_right, zero if right.error is None else right.error, zero)
        return Term(value, np.maximum(zero if left.error is None else left.error, right_error))

    def _cast(self, cast: Cast, live: Array | None) -> Term:
        arg = self.term(cast.arg, live)
        source, target = cast.arg.dtype, cast.dtype
        value = convert(arg.value, source, target, rounded=not cast.implicit)
        if self.exactly and target.is_float:
            return Term(round_to(value, target.compute if cast.implicit else target))
        if not self.track:
            return Term(value)
        return Term(value, rounding.cast_error(arg.value, arg.error, source, target, rounded=not cast.implicit))

    def _select(self, select: Select, live: Array | None) -> Term:
        condition = self.term(select.cond, live)
        taken = condition.value != 0
        then = self.term(select.then, _and(live, taken))
        otherwise = self.term(select.otherwise, _and(live, ~taken))
        value = np.where(taken, then.value, otherwise.value)
        if not self.track:
            return Term(value)
        branches = (then.value, then.error), (otherwise.value, otherwise.error)
        return Term(value, rounding.select_error(condition.error, *branches, taken))


def _is_grid_index(expr: Expr) -> bool:
    """Whether an integer is made from floats that depend on axes and numbers alone."""
    (arg,) = children(expr)
    return arg.dtype.is_float and not expr.dtype.is_float and not loads_of(arg)


def _and(live: Array | None, also: Array) -> Array:
    return also if live is None else live & also


def out_of_range(tensor: str, dim: int, size: int, value: int) -> IndexRangeError:
    """Return the error for an index from data that is outside its tensor."""
    return IndexRangeError(
        f"{tensor}: index {value} in dimension {dim} is outside 0..{size - 1}",
        hint="guard the access with when(...), or correct the data",
    )


def accumulation_dtype(body: DType, result: DType, combine: Combine) -> DType:
    """Return the type in which a reduction of `body` into `result` is computed: the wider one in the language's order.

    Integer maxima and minima are computed before the conversion, because a change of sign must not change the order.
    """
    if combine in (Combine.MAX, Combine.MIN) and not (body.is_float or result.is_float):
        return body
    if body.is_float != result.is_float:
        return body if body.is_float else result
    return body if body.bits > result.bits else result


def as_dtype(term: Term, source: DType, target: DType, *, track: bool) -> Term:
    """Convert a term without rounding."""
    value = convert(term.value, source, target, rounded=False)
    if not track:
        return Term(value)
    return Term(value, rounding.cast_error(term.value, term.error, source, target, rounded=False))
