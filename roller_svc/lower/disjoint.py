"""Where iterations of a loop write: index values over loop variables, and whether two iterations can meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roller_svc.ir.expr import AxisRef, Expr, Load, walk
from roller_svc.lower.linear import linear


@dataclass(frozen=True, slots=True)
class Value:
    """An index as loops make it. `terms`: loop variable → coefficient, '' → constant; None where it is no such sum."""

    terms: tuple[tuple[str, int], ...] | None
    loops: frozenset[str]
    from_data: bool
    expr: Expr | None  # tells values without terms from each other

    @classmethod
    def of_loop(cls, var: str) -> Value:
        return cls(((var, 1),), frozenset((var,)), from_data=False, expr=None)


Position = tuple[Value, ...]


@dataclass(slots=True)
class Variables:
    """What is in scope: loop variables and Lets by name, and which loops the contents of storage nodes follow."""

    values: dict[str, Value] = field(default_factory=dict)
    contents: dict[str, frozenset[str]] = field(default_factory=dict)

    def value(self, expr: Expr) -> Value:
        """The value of an expression."""
        if isinstance(expr, AxisRef):
            return self.values[expr.name]
        total: dict[str, int] = {}
        for term, c in linear(expr).items():
            if term is None:
                total[""] = total.get("", 0) + c
                continue
            known = self.values[term.name].terms if isinstance(term, AxisRef) else None
            if known is None:
                return self._opaque(expr)
            for name, k in known:
                total[name] = total.get(name, 0) + c * k
        terms = tuple(sorted((name, c) for name, c in total.items() if c))
        return Value(terms, frozenset(name for name, _ in terms if name), from_data=False, expr=None)

    def _opaque(self, expr: Expr) -> Value:
        loops, from_data = self.followed(expr)
        return Value(None, loops, from_data, expr)

    def followed(self, expr: Expr) -> tuple[frozenset[str], bool]:
        """The loops that an expression follows, and whether it reads anything."""
        loops: set[str] = set()
        from_data = False
        for node in walk(expr):
            if isinstance(node, AxisRef):
                value = self.values[node.name]
                loops |= value.loops
                from_data |= value.from_data
            elif isinstance(node, Load):
                loops |= self.contents.get(node.tensor, frozenset())
                from_data = True
        return frozenset(loops), from_data


def are_disjoint(position: Position, var: str, extent: int, inner: Mapping[str, int]) -> bool:
    """Whether two iterations of the loop over `var` never write one element, whatever the loops inside of it do.

    A dimension decides it where its terms are digits of a number: each coefficient exceeds what the smaller ones
    reach together. One that is no sum of loop variables (a decoded fused axis) is taken at its word.
    """
    moving = {name: n for name, n in {**inner, var: extent}.items() if n > 1}
    for value in position:
        if var not in value.loops:
            continue
        if value.terms is None:
            return True
        reach = 0
        for name, c in sorted(value.terms, key=lambda term: abs(term[1])):
            if name not in moving:
                continue
            if abs(c) <= reach:
                break
            reach += abs(c) * (moving[name] - 1)
        else:
            return True
    return False


def are_apart(write: Position, read: Position, moving: Mapping[str, int]) -> bool:
    """Whether what is read lies beyond all that is written while the loops in `moving` run."""
    for a, b in zip(write, read, strict=True):
        if a.terms is None or b.terms is None:
            continue
        (still, low, high), (other, first, last) = (_reach(v.terms or (), moving) for v in (a, b))
        if still == other and (high < first or last < low):
            return True
    return False


def _reach(terms: tuple[tuple[str, int], ...], moving: Mapping[str, int]) -> tuple[list[tuple[str, int]], int, int]:
    """(what stands still, least and greatest of the rest)."""
    still, low, high = [], 0, 0
    for name, c in terms:
        if not name:
            low, high = low + c, high + c
        elif name in moving:
            end = c * (moving[name] - 1)
            low, high = low + min(0, end), high + max(0, end)
        else:
            still.append((name, c))
    return still, low, high
