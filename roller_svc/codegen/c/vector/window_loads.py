"""Loads of adjacent lanes from one vector's width of memory: the growth of an index over lanes, and its quotients.

An index that never falls from one lane to the next, and grows by less than the lanes, stays within one vector in
memory. Nearest neighbours of an image that grows are such loads: one load and one permutation replace scalar loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.analysis.index_ranges import Range
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, axes_of

MAX_SHIFT = 30


@dataclass(frozen=True, slots=True)
class Quotient:
    """`x // divisor` as `((x + offset) * factor >> shift) - quotient_offset` in int32, for x in a known interval."""

    offset: int
    factor: int
    shift: int
    quotient_offset: int


def find_quotient(interval: Range, divisor: int) -> Quotient | None:
    """Return how to divide by a constant without overflow of int32, or None if the interval is too long.

    With `factor = 2**shift / divisor` rounded up by `error / divisor`, the quotient of n is exact if
    `n * error < 2**shift` (Granlund and Montgomery, 1994).
    """
    low, high = interval
    below = -(low // divisor)  # the quotients begin at 0
    greatest = high + below * divisor
    largest_int32 = DType.INT32.integer_range[1]
    for shift in range(MAX_SHIFT + 1):
        factor = -(-(1 << shift) // divisor)
        error = factor * divisor - (1 << shift)
        if greatest * factor > largest_int32:
            return None
        if greatest * error < 1 << shift:
            return Quotient(below * divisor, factor, shift, below)
    return None


def find_growth(index: Expr, var: str, lanes: int) -> int | None:
    """Return a bound on the growth of an index from the first to the last lane; None if it may fall, or is unknown.

    The arithmetic must not wrap.
    """
    if var not in axes_of(index):
        return 0
    match index:
        case AxisRef():
            return lanes - 1
        case Cast(arg=arg) if not arg.dtype.is_float and not index.dtype.is_float:
            return find_growth(arg, var, lanes)
        case Op(kind=OpKind.ADD | OpKind.MIN | OpKind.MAX as kind, args=(x, y)):
            first, second = find_growth(x, var, lanes), find_growth(y, var, lanes)
            if first is None or second is None:
                return None
            return first + second if kind is OpKind.ADD else max(first, second)
        case Op(kind=OpKind.SUB, args=(x, y)) if var not in axes_of(y):
            return find_growth(x, var, lanes)
        case Op(kind=OpKind.MUL, args=(x, Const(value=int(by))) | (Const(value=int(by)), x)) if by >= 0:
            growth = find_growth(x, var, lanes)
            return None if growth is None else growth * by
        case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=int(by)))) if by > 0:
            growth = find_growth(x, var, lanes)
            return None if growth is None else -(-growth // by)
        case _:
            return None


def find_total_growth(index: tuple[Expr, ...], strides: tuple[int, ...], var: str, lanes: int) -> int | None:
    """Return a bound on the growth of an element's address in elements, or None."""
    total = 0
    for place, stride in zip(index, strides, strict=True):
        growth = find_growth(place, var, lanes)
        if growth is None:
            return None
        total += growth * stride
    return total


def count_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the elements from the first to the last of a tensor; 0 if it has none."""
    if not shape or 0 in shape:
        return 0
    return 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))


def find_lane_ranges(ranges: Mapping[str, Range], var: str, first: int, lanes: int) -> dict[str, Range]:
    """Return the ranges of variables in a vector: its own has the values of its lanes."""
    return {**ranges, var: (first, first + lanes - 1)}
