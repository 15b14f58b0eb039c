"""Parts of k that the guard of a product leaves to a task and to a register tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.analysis.tile_bounds import IndexSpan, max_bound_index, min_bound_index
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import KBounds
from roller_svc.ir.index import add, div, max_, min_, mul, num


@dataclass(frozen=True, slots=True)
class GuardedK:
    """The part of `depth` packed words, each of `group` points along k, that bounds leave; perhaps none."""

    bounds: KBounds
    depth: int
    group: int

    def first_word(self, spans: Sequence[IndexSpan]) -> Expr:
        """Return the first word of a tile."""
        first: Expr = num(0)
        for lower in self.bounds.lowers:
            first = max_(first, min_bound_index(lower, spans))
        return div(first, self.group)

    def end_word(self, spans: Sequence[IndexSpan]) -> Expr:
        """Return the word after the last one of a tile, at least 0."""
        end: Expr = num(self.depth)
        for upper in self.bounds.uppers:
            end = min_(end, div(add(max_(max_bound_index(upper, spans), num(-1)), num(self.group)), self.group))
        return end


def round_down(word: Expr, granule: int) -> Expr:
    return mul(div(word, granule), num(granule))
