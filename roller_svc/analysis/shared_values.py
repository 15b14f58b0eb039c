"""Values of several loads that more than one statement computes: sums of operands before a norm or a softmax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from roller_svc.analysis.unconditional import unconditional_parts
from roller_svc.ir.expr import Expr, Load, Op, children, loads_of, with_children

MIN_LOADS = 2  # of a shared value; one load is held as it is


def shared_values(bodies: Iterable[Expr], may_share: Callable[[Load], bool]) -> tuple[Expr, ...]:
    """Return the largest float expressions that several bodies compute unconditionally from several loads.

    Args:
        bodies: of statements, over the same variables.
        may_share: whether a load is the same for all bodies.
    """
    bodies = tuple(bodies)
    found = [dict.fromkeys(e for e in unconditional_parts(body) if _is_shared(e, may_share)) for body in bodies]
    counts = Counter(value for values in found for value in values)
    repeated = {value for value, count in counts.items() if count > 1}
    return tuple(dict.fromkeys(value for body in bodies for value in _largest(body, repeated)))


def replace_all(expr: Expr, values: Mapping[Expr, Expr]) -> Expr:
    """Replace expressions, the largest first."""
    if expr in values:
        return values[expr]
    operands = children(expr)
    return with_children(expr, tuple([replace_all(x, values) for x in operands])) if operands else expr


def _largest(expr: Expr, repeated: set[Expr]) -> Iterator[Expr]:
    if expr in repeated:
        yield expr
        return
    for child in children(expr):
        yield from _largest(child, repeated)


def _is_shared(expr: Expr, may_share: Callable[[Load], bool]) -> bool:
    if not isinstance(expr, Op) or not expr.dtype.is_float:
        return False
    loads = loads_of(expr)
    return len(set(loads)) >= MIN_LOADS and all(may_share(load) for load in loads)
