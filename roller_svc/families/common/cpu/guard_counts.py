"""Guards on indices in vector loops: how many vectors they split, and what these compute more than others.

A vector whose lanes all pass takes the copy of the loop without guards (`schedule/guards.py`). Others compute a mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from roller_svc.ir.affine import Affine, slack
from roller_svc.ir.expr import Expr, Op, OpKind, Select, axes_of, iter_subexpressions, loads_of
from roller_svc.ir.program import TensorExpr

SAMPLES = 64
# An axis has the fractions of multiples of an irrational number.
_IRRATIONALS = tuple(math.sqrt(prime) for prime in (2, 3, 5, 7, 11, 13, 17, 19))
TEST_OPERATIONS = 1  # whether a lane passes: values that all lanes share are read if one does


def count_guard_operations(statement: TensorExpr, along: Set[str], lanes: int) -> float:
    """Return the operations of guards on indices in a vector along the axes `along`, the mean of all vectors.

    Conditions on data are operations of the statement.
    """
    selects = (part for part in iter_subexpressions(statement.body) if isinstance(part, Select))
    guards = dict.fromkeys(s.cond for s in selects if not along.isdisjoint(axes_of(s.cond)) and not loads_of(s.cond))
    extents = {a.name: a.extent for a in statement.axes}
    return sum(_count_operations(guard) * masked_share(guard, extents, along, lanes) for guard in guards)


def _count_operations(guard: Expr) -> int:
    return TEST_OPERATIONS + sum(isinstance(part, Op) for part in iter_subexpressions(guard))


def masked_share(guard: Expr, extents: Mapping[str, int], along: Set[str], lanes: int) -> float:
    """Return the share of vectors with a lane that fails a guard, of a sample; all if the guard is not convex."""
    slacks = _slacks(guard)
    if slacks is None:
        return 1.0
    last = [name for name in extents if name in along][-1:]
    masked = 0
    for sample in range(1, SAMPLES + 1):
        first = {
            name: int(extent * (sample * _IRRATIONALS[i % len(_IRRATIONALS)] % 1.0))
            for i, (name, extent) in enumerate(extents.items())
        }
        ends = [first, first]
        for name in last:
            start = first[name] // lanes * lanes
            ends = [{**first, name: start}, {**first, name: min(start + lanes, extents[name]) - 1}]
        masked += any(_value(each, at) < 0 for each in slacks for at in ends)
    return masked / SAMPLES


def _slacks(guard: Expr) -> tuple[Affine, ...] | None:
    """Return affine functions that are not negative where the guard holds; None if it is not their conjunction."""
    if isinstance(guard, Op) and guard.kind is OpKind.LAND:
        parts = [_slacks(arg) for arg in guard.args]
        return None if None in parts else tuple(each for part in parts if part is not None for each in part)
    function = slack(guard)
    return None if function is None else (function,)


def _value(function: Affine, at: Mapping[str, int]) -> int:
    return function.offset + sum(coeff * at.get(name, 0) for name, coeff in function.coeffs)
