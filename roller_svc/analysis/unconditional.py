"""Parts of an expression that are evaluated whatever its conditions are."""

from __future__ import annotations

from collections.abc import Iterator

from roller_svc.ir.expr import Expr, Load, Op, OpKind, Select, children


def unconditional_parts(expr: Expr, *, in_indices: bool = False) -> Iterator[Expr]:
    """Yield the subexpressions that are evaluated whatever the conditions are, outer ones first.

    Args:
        in_indices: whether the indices of loads are parts.
    """
    yield expr
    match expr:
        case Load() if not in_indices:
            parts: tuple[Expr, ...] = ()
        case Select(cond=cond, then=then, restated=is_restated):
            parts = (cond, then) if is_restated else (cond,)
        case Op(kind=OpKind.LAND | OpKind.LOR, args=(first, _)):
            parts = (first,)
        case _:
            parts = children(expr)
    for part in parts:
        yield from unconditional_parts(part, in_indices=in_indices)


def unconditional_loads(expr: Expr, *, in_indices: bool = False) -> Iterator[Load]:
    """Yield the loads that are evaluated whatever the conditions are."""
    return (part for part in unconditional_parts(expr, in_indices=in_indices) if isinstance(part, Load))
