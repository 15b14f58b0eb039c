"""Mask, split keys → the steps over keys that a block makes, as expressions of where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.affine import Affine
from roller_svc.ir.build import add, ceil_div, div, least, mul, num, ref, sub
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.ir.group import TileAxis
from roller_svc.ir.schedule import Let, Node
from roller_svc.lower.ring import Steps
from roller_svc.perf.attention_mask import KeyBounds
from roller_svc.perf.attention_tile import AttentionTile

PART = "k.part"
FIRST, SEEN, LAST = ".first_step", ".seen_steps", ".last_step"


@dataclass(frozen=True, slots=True)
class KeySteps:
    """A block's steps: those with keys that its rows see, and those beyond, of which maxima may say that they count."""

    tile: AttentionTile
    rows: TileAxis
    keys: TileAxis
    bounds: KeyBounds

    @property
    def steps(self) -> int:
        return ceil_div(self.keys.extent, self.tile.keys)

    @property
    def share(self) -> int:
        """Of a block, where several share the keys."""
        return ceil_div(self.steps, self.tile.parts)

    @property
    def comes_back(self) -> bool:
        """Whether steps that the mask leaves out may have to be made after all."""
        return bool(self.bounds.uppers) and self.bounds.beyond is not None

    def around(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes, with the numbers of the first step, of the first that the mask leaves out, of the first that is
        not the block's."""
        begin: Expr = mul(ref(PART), num(self.share)) if self.tile.parts > 1 else num(0)
        end: Expr = least(add(begin, num(self.share)), num(self.steps)) if self.tile.parts > 1 else num(self.steps)
        first = begin
        for lower in self.bounds.lowers:
            key = sub(num(0), self._greatest(Affine(tuple((n, -c) for n, c in lower.coeffs), -lower.offset)))
            first = _most(first, div(_most(key, num(0)), self.tile.keys))
        seen: Expr = ref(LAST)
        for upper in self.bounds.uppers:
            count = div(add(self._greatest(upper), num(self.tile.keys)), self.tile.keys)
            seen = least(seen, _most(count, ref(FIRST)))
        return (Let(LAST, end, (Let(FIRST, first, (Let(SEEN, seen, nodes),)),)),)

    @property
    def seen(self) -> Steps:
        return self._steps(ref(FIRST), ref(SEEN))

    @property
    def beyond(self) -> Steps:
        return self._steps(ref(SEEN), ref(LAST))

    def _steps(self, first: Expr, last: Expr) -> Steps:
        if self.tile.parts == 1 and not self.bounds.uppers and not self.bounds.lowers:
            return Steps(num(0), num(self.steps), self.steps)
        return Steps(first, sub(last, first), self.share)

    def _greatest(self, bound: Affine) -> Expr:
        """Of the bound, over the block's rows (`attention_mask.greatest`)."""
        outermost = self.rows.members[0]
        stride = self.rows.extent // outermost.extent
        inner = {a.name: a.extent for a in self.rows.members[1:]}
        begin = mul(ref("m.block"), num(self.tile.m))
        last = least(add(begin, num(self.tile.m - 1)), num(self.rows.extent - 1))
        total: Expr = num(bound.offset)
        for name, c in bound.coeffs:
            if name == outermost.name:
                total = add(mul(div(last if c > 0 else begin, stride), num(c)), total)
            elif name in inner:
                total = add(num(max(0, c * (inner[name] - 1))), total)
            else:
                total = add(mul(ref(name), num(c)), total)
        return total


def _most(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MAX, (a, b), DType.INT32)
