"""Attention mask → first and last visible key of the rows of a block."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from roller_svc.analysis.tile_bounds import Span, index_limits, max_bound, negate, range_of_tile
from roller_svc.ir.affine import Affine
from roller_svc.ir.attention import mask
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load, Op, OpKind, axes_of
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.index import add, conjuncts, min_, num
from roller_svc.ir.program import Axis

# Scores this far below the row maximum have an exponential of 0 in float32: 2 ** -150 is half the smallest number.
VANISHING = 150.0 * math.log(2.0)


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Bounds of each row's visible keys: up to all of `uppers`, from all of `lowers` on, over row and batch axes."""

    uppers: tuple[Affine, ...] = ()
    lowers: tuple[Affine, ...] = ()
    lengths: tuple[Expr, ...] = ()  # from data, over batch axes: the last visible key of all rows of a block is below
    period: int | None = None  # keys after which the bounds hold again, of keys along several axes: those of the last one
    finite_fill: float | None = None  # score of masked keys where it does not make them vanish: the row maxima decide

    def of_tiles(self, keys: int) -> KeyBounds:
        """Return the bounds that tiles of that many keys can use: none where a tile crosses the end of a period."""
        return KeyBounds() if self.period is not None and self.period % keys else self

    @property
    def may_need_masked_tiles(self) -> bool:
        """Whether masked tiles may have to be processed after all."""
        return bool(self.uppers or self.lengths) and self.finite_fill is not None


def key_bounds(group: KernelGroup) -> KeyBounds:
    """Return the bounds of visible keys of a group of kind ATTENTION."""
    attention = group.attention
    found = None if attention is None else mask(attention)
    if attention is None or found is None or found.fill_value == math.inf or math.isnan(found.fill_value):
        return KeyBounds()
    (keys,) = group.space.role(AxisRole.K)
    *others, key = keys.members
    uppers, lowers, _ = index_limits(found.cond, key.name)
    if others:  # of chained products
        names = {axis.name for axis in others}
        uppers, lowers = (tuple(x for x in bounds if names.isdisjoint(name for name, _ in x.coeffs)) for bounds in (uppers, lowers))
        return KeyBounds(uppers, lowers, period=key.extent)
    lengths = _lengths(found.cond, key, {axis.name for axis in group.space.role(AxisRole.BATCH)})
    if found.fill_value == -math.inf:
        return KeyBounds(uppers, lowers, lengths)
    return KeyBounds(uppers, (), lengths, finite_fill=found.fill_value)  # masked keys that may count after all are the last ones


def exact_bounds(group: KernelGroup) -> KeyBounds | None:
    """Return the bounds if they describe the mask completely, else None."""
    found = None if group.attention is None else mask(group.attention)
    if found is None:
        return KeyBounds()
    ((key,),) = (axis.members for axis in group.space.role(AxisRole.K))
    uppers, lowers, exact = index_limits(found.cond, key.name)
    return KeyBounds(uppers, lowers) if exact else None


def _lengths(cond: Expr, key: Axis, batch: Collection[str]) -> tuple[Expr, ...]:
    """Return the numbers of keys, from data, that the condition leaves to all rows of a batch."""
    found: list[Expr] = []
    for condition in conjuncts(cond):
        match condition:
            case Op(kind=OpKind.LT, args=(AxisRef(name=name), Load() as last)):
                length: Expr = last
            case Op(kind=OpKind.LE, args=(AxisRef(name=name), Load() as last)):
                length = add(min_(last, num(key.extent - 1)), num(1))
            case _:
                continue
        is_index = last.dtype is DType.INT32 and not any(last.bounds_checked)
        found += [length] if name == key.name and is_index and axes_of(last) <= set(batch) else []
    return tuple(found)


def visible_keys(bounds: KeyBounds, rows: TileAxis, keys: int, first: int, last: int) -> tuple[int, int]:
    """Return the range of keys that rows from `first` to `last` see where all batch axes are 0."""
    return range_of_tile(bounds.uppers, bounds.lowers, keys, [Span(rows, first, last)])


def unmasked_keys(exact: KeyBounds, rows: TileAxis, keys: int, first: int, last: int) -> tuple[int, int]:
    """Return the range of keys that all rows from `first` to `last` see where all batch axes are 0; it may be empty."""
    spans = [Span(rows, first, last)]
    begin = max([0, *(max_bound(b, spans) for b in exact.lowers)])
    end = min([keys, *(1 - max_bound(negate(b), spans) for b in exact.uppers)])
    return begin, end
