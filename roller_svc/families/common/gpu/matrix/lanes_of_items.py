"""Lanes of an item: the elements of one vector that a thread copies to shared memory."""

from __future__ import annotations

from roller_svc.ir.expr import AxisRef, Const, Expr, Op, OpKind, rewrite
from roller_svc.ir.index import add, div, mod, ref

LANE_OF_ITEM = ref(".lane")  # element of an item


def share_word_loads(value: Expr, width: int) -> Expr:
    """Rewrite divisions and remainders of `axis + .lane` by multiples of `width`.

    The axes are multiples of `width`. All lanes then have one quotient, so that a packed word or a group's scale is
    loaded once.
    """

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.FLOORDIV, args=(Op(kind=OpKind.ADD, args=(axis, AxisRef(".lane"))), Const(int(by)))):
                return div(axis, by) if by > 0 and by % width == 0 else node
            case Op(kind=OpKind.MOD, args=(Op(kind=OpKind.ADD, args=(axis, AxisRef(".lane"))), Const(int(by)))):
                if by == width:
                    return ref(".lane")
                return add(mod(axis, by), ref(".lane")) if by > 0 and by % width == 0 else node
            case _:
                return node

    return rewrite(value, change)
