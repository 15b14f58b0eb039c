"""Loop unswitching: one test for all lanes of a vector loop, and a copy of the loop without guards where it holds.

A conjunction of comparisons of affine index expressions holds on a convex set: if the first and the last lane are
inside, all are. Guarded loads prevent vectorization, and padding is rare compared with the interior.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Expr, Op, OpKind, Select, axes_of, iter_subexpressions, rewrite, substitute
from roller_svc.ir.index import logical_and, num
from roller_svc.ir.schedule import Branch, Compute, Loop, Node

_ORDER = frozenset({OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE})


def unswitch_guards(loop: Loop) -> Node:
    """Return the loop, or a branch to a copy without the guards that a test before the loop decides."""
    guards: dict[Expr, None] = {}
    for node in loop.body:
        if isinstance(node, Compute):
            for part in iter_subexpressions(node.value):
                if isinstance(part, Select) and _is_convex(part.cond):
                    guards[part.cond] = None
    if not guards:
        return loop
    inside: Expr | None = None
    for guard in guards:
        inside = logical_and(inside, substitute(guard, {loop.var: num(0)}))
        if loop.var in axes_of(guard):
            inside = logical_and(inside, substitute(guard, {loop.var: num(loop.extent - 1)}))

    def without_guard(expr: Expr) -> Expr:
        return expr.then if isinstance(expr, Select) and expr.cond in guards else expr

    unguarded = tuple(replace(n, value=rewrite(n.value, without_guard)) if isinstance(n, Compute) else n for n in loop.body)
    return loop if inside is None else Branch(inside, (replace(loop, body=unguarded),), (loop,))


def _is_convex(cond: Expr) -> bool:
    match cond:
        case Op(kind=OpKind.LAND, args=(a, b)):
            return _is_convex(a) and _is_convex(b)
        case Op(kind=kind, args=(a, b)) if kind in _ORDER:
            return not a.dtype.is_float and affine(a) is not None and affine(b) is not None
        case _:
            return False
