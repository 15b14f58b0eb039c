"""Mask of attention's scores → the first and the last key that any row of a block has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.attention import mask
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis

# An exponential that far below its row's maximum is 0 in float32: 2 ** -150 is half of the least number there is.
VANISHING = 150.0 * math.log(2.0)


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Every row keeps no keys but those up to all of `uppers` and from all of `lowers` on, over rows' and batch axes.

    `beyond`: what scores of other keys are, where that need not make them vanish: the rows' maxima must tell.
    """

    uppers: tuple[Affine, ...] = ()
    lowers: tuple[Affine, ...] = ()
    beyond: float | None = None


def key_bounds(group: KernelGroup) -> KeyBounds:
    """Of a group of kind ATTENTION."""
    attention = group.attention
    found = None if attention is None else mask(attention)
    if attention is None or found is None or found.filled == math.inf or math.isnan(found.filled):
        return KeyBounds()
    ((key,),) = (axis.members for axis in group.space.role(AxisRole.K))
    uppers: list[Affine] = []
    lowers: list[Affine] = []
    for difference in _differences(found.cond):
        pace = difference.coeff(key.name)
        rest = tuple((name, c) for name, c in difference.coeffs if name != key.name)
        if pace == 1:
            uppers.append(Affine(tuple((name, -c) for name, c in rest), -difference.offset))
        elif pace == -1:
            lowers.append(Affine(rest, difference.offset))
    if found.filled == -math.inf:
        return KeyBounds(tuple(uppers), tuple(lowers))
    return KeyBounds(tuple(uppers), (), found.filled)  # keys that may come back are the last ones


def _differences(cond: Expr) -> Iterator[Affine]:
    """Sums that are at most 0 wherever the condition holds."""
    match cond:
        case Op(kind=OpKind.LAND, args=args):
            for arg in args:
                yield from _differences(arg)
        case Op(kind=OpKind.LT | OpKind.LE | OpKind.GT | OpKind.GE as kind, args=(a, b)):
            less, more = (a, b) if kind in (OpKind.LT, OpKind.LE) else (b, a)
            left, right = affine(less), affine(more)
            if left is not None and right is not None:
                strict = kind in (OpKind.LT, OpKind.GT)
                coeffs = dict(left.coeffs)
                for name, c in right.coeffs:
                    coeffs[name] = coeffs.get(name, 0) - c
                terms = tuple((name, c) for name, c in coeffs.items() if c)
                yield Affine(terms, left.offset - right.offset + strict)


def greatest(bound: Affine, rows: TileAxis, first: int, last: int) -> int:
    """Of a sum over axes, the greatest value for rows from `first` to `last`; other axes stand at 0."""
    total = bound.offset
    outermost, stride = rows.members[0], rows.extent // rows.members[0].extent
    inner = {a.name: a.extent for a in rows.members[1:]}
    for name, c in bound.coeffs:
        if name == outermost.name:
            total += c * ((last if c > 0 else first) // stride)
        elif name in inner:
            total += max(0, c * (inner[name] - 1))
    return total


def seen_keys(bounds: KeyBounds, rows: TileAxis, keys: int, first: int, last: int) -> tuple[int, int]:
    """Keys from the one to before the other that rows from `first` to `last` look at where all batch axes are 0."""
    begin = max([0, *(-greatest(_negative(b), rows, first, last) for b in bounds.lowers)])
    end = min([keys, *(greatest(b, rows, first, last) + 1 for b in bounds.uppers)])
    return min(begin, keys), max(end, min(begin, keys))


def _negative(bound: Affine) -> Affine:
    return Affine(tuple((name, -c) for name, c in bound.coeffs), -bound.offset)
