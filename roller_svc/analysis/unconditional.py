"""Parts of an expression that are evaluated whatever its conditions are."""

from __future__ import annotations

from collections.abc import Iterator

from roller_svc.ir.expr import Expr, Load, Op, OpKind, Select, children, loads_of


def unconditional_parts(expr: Expr, *, in_indices: bool = False) -> Iterator[Expr]:
    """Yield the subexpressions that are evaluated whatever the conditions are, outer ones first.

    Args:
        in_indices: whether the indices of loads are parts.
    """
    stack = [expr]
    while stack:
        part = stack.pop()
        yield part
        stack += _operands(part, in_indices=in_indices)[::-1]


def unconditional_loads(expr: Expr, *, in_indices: bool = False) -> Iterator[Load]:
    """Yield the loads that are evaluated whatever the conditions are."""
    stack = [expr]
    while stack:
        part = stack.pop()
        if not loads_of(part):
            continue
        if isinstance(part, Load):
            yield part
        stack += _operands(part, in_indices=in_indices)[::-1]


def _operands(expr: Expr, *, in_indices: bool) -> tuple[Expr, ...]:
    """Return the operands that are evaluated whatever the conditions are."""
    match expr:
        case Load() if not in_indices:
            return ()
        case Select(cond=cond, then=then, restated=is_restated):
            return (cond, then) if is_restated else (cond,)
        case Op(kind=OpKind.LAND | OpKind.LOR, args=(first, _)):
            return (first,)
        case _:
            return children(expr)
