"""Whether an index stays inside its tensor, decided exactly under the guards that hold where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import islpy as isl
import numpy as np

from roller_svc.analysis.intervals import bounds, widen_to_int64
from roller_svc.frontend.lang import point_grid as points
from roller_svc.frontend.lang.polyhedra import OpaqueExprError, Polyhedra, limited_context
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.expr import Expr, Load, Op, OpKind, axes_of, iter_subexpressions

# Points of the axes of one index (and their guards) that are enumerated where isl cannot decide.
MAX_ENUMERATED_POINTS = 4_000_000


@dataclass(frozen=True, slots=True)
class Inside:
    """Every read stays inside. `index` is the index to use."""

    index: Expr


@dataclass(frozen=True, slots=True)
class FromData:
    """It depends on data and is checked at the call."""

    index: Expr


@dataclass(frozen=True, slots=True)
class Leaves:
    """It leaves the tensor, with this value at this point."""

    point: dict[str, int]
    value: int


@dataclass(frozen=True, slots=True)
class Undecided:
    """Too many points to enumerate, or a function that is not evaluated here."""

    reason: str


Verdict = Inside | FromData | Leaves | Undecided
Coeffs = tuple[tuple[str, int], ...]
Span = tuple[int | None, int | None]


@dataclass(slots=True)
class Guard:
    """A condition on the stack. `region`: points of the box where it and those below it may hold, once asked for."""

    condition: Expr
    holds: bool
    before: list[tuple[Coeffs, Span | None]] = field(default_factory=list)
    region: isl.Set | None = None


@dataclass(slots=True)
class Budget:
    """What deciding the indices of one program may still cost. isl is not tried again once it gave up.

    `evaluations` counts points times nodes; all of them take about a second.
    """

    evaluations: int = 100_000_000
    isl_failed: bool = False
    context: isl.Context = field(default_factory=limited_context)


class Ranges:
    """Decides indices of one statement. Conditions are pushed and popped as the checker goes into branches."""

    def __init__(self, extents: Mapping[str, int], budget: Budget) -> None:
        self._extents = dict(extents)
        self._budget = budget
        self._guards: list[Guard] = []
        # Bounds that the guards on the stack give to sums of axes: enough for the usual padding.
        self._known: dict[Coeffs, Span] = {}
        self._polyhedra: Polyhedra | None = None

    def push(self, condition: Expr, *, holds: bool) -> None:
        guard = Guard(condition, holds)
        for coeffs, span in self._atoms(condition, holds=holds):
            old = self._known.get(coeffs)
            guard.before.append((coeffs, old))
            self._known[coeffs] = span if old is None else _both(old, span)
        self._guards.append(guard)

    def pop(self, count: int = 1) -> None:
        for _ in range(count):
            for coeffs, old in reversed(self._guards.pop().before):
                if old is None:
                    del self._known[coeffs]
                else:
                    self._known[coeffs] = old

    def decide(self, index: Expr, size: int) -> Verdict:
        """Whether 0 <= index < size wherever the guards on the stack hold."""
        data = any(isinstance(node, Load) for node in iter_subexpressions(index))
        found = bounds(index, self._extents)
        if found.wraps and not data:
            index = widen_to_int64(index)
            found = bounds(index, self._extents)
        if found.inside(size):
            return Inside(index)
        if data:
            return FromData(index)
        form = affine(index)
        if form is not None and not found.wraps:
            low, high = self._affine_bounds(form)
            if low >= 0 and high < size:
                return Inside(index)
            if not self._guards:
                return self._corner(form, index, size)
        return self._decide_exactly(index, size)

    def _affine_bounds(self, form: Affine) -> tuple[int, int]:
        low = high = form.offset
        for name, c in form.coeffs:
            reach = c * (self._extents[name] - 1)
            low, high = low + min(0, reach), high + max(0, reach)
        sign, coeffs = _canonical(form.coeffs)
        below, above = self._known.get(coeffs, (None, None))
        if sign < 0:
            below, above = (None if above is None else -above), (None if below is None else -below)
        if below is not None:
            low = max(low, below + form.offset)
        if above is not None:
            high = min(high, above + form.offset)
        return low, high

    def _corner(self, form: Affine, index: Expr, size: int) -> Leaves:
        """Without guards an affine index is at its worst in a corner of the box."""
        low = {name: 0 if c > 0 else self._extents[name] - 1 for name, c in form.coeffs}
        high = {name: self._extents[name] - 1 if c > 0 else 0 for name, c in form.coeffs}
        value = form.offset + sum(c * low[name] for name, c in form.coeffs)
        if value < 0:
            return Leaves(low, value)
        return Leaves(high, form.offset + sum(c * high[name] for name, c in form.coeffs))

    def _decide_exactly(self, index: Expr, size: int) -> Verdict:
        if self._budget.isl_failed:
            return self._enumerate(index, size)
        try:
            outside = self._outside(index, size)
            if outside is None:
                return Inside(index)
            if self._polyhedra is not None and not self._polyhedra.is_loose:
                return self._leaves(outside, index)
        except OpaqueExprError:
            pass
        except isl.Error:
            self._budget.isl_failed = True
        return self._enumerate(index, size)

    def _outside(self, index: Expr, size: int) -> dict[str, int] | None:
        """A point where the index is outside though the guards hold; None where isl proves that there is none."""
        if self._polyhedra is None:
            self._polyhedra = Polyhedra(self._extents, self._budget.context)
        space = self._polyhedra
        outside = space.outside(index, size)
        region = space.box
        for guard in self._guards:
            if guard.region is None:
                guard.region = region.intersect(space.may_hold(guard.condition, holds=guard.holds))
            region = guard.region
        reached = region.intersect(outside)
        return None if reached.is_empty() else space.point_of(reached)

    def _leaves(self, point: dict[str, int], index: Expr) -> Leaves:
        axes = {name: np.asarray(value, np.int64) for name, value in point.items()}
        used = axes_of(index)
        return Leaves({n: v for n, v in point.items() if n in used}, int(points.evaluate(index, axes)))

    def _enumerate(self, index: Expr, size: int) -> Verdict:
        """Evaluate the index at every point of its axes at which its guards may hold."""
        used = axes_of(index)
        wanted = used.union(*(axes_of(guard.condition) for guard in self._guards))
        if points.points({n: self._extents[n] for n in wanted}) > MAX_ENUMERATED_POINTS:
            wanted = used
        extents = {name: extent for name, extent in self._extents.items() if name in wanted}
        count = points.points(extents)
        guards = [guard for guard in self._guards if axes_of(guard.condition) <= wanted]
        work = count * sum(1 for e in (index, *(guard.condition for guard in guards)) for _ in iter_subexpressions(e))
        if count > MAX_ENUMERATED_POINTS or work > self._budget.evaluations:
            return Undecided(f"its axes have {count} points, more than are tried one by one")
        self._budget.evaluations -= work
        axes = points.grid(extents)
        try:
            value = points.evaluate(index, axes)
        except points.OpaqueValueError:
            return Undecided("it has a function that is not evaluated here")
        bad = (value < 0) | (value >= size)
        for guard in guards:
            bad = bad & self._may_hold(guard.condition, axes, holds=guard.holds)
        if not bad.any():
            return Inside(index)
        where = np.argwhere(np.broadcast_to(bad, tuple(extents.values())))[0]
        return self._leaves(dict(zip(extents, map(int, where), strict=True)), index)

    def _may_hold(self, condition: Expr, axes: Mapping[str, points.Array], *, holds: bool) -> points.Array:
        """Where a condition may hold (or fail), loads in it unknown."""
        match condition:
            case Op(kind=OpKind.LNOT, args=(arg,)):
                return self._may_hold(arg, axes, holds=not holds)
            case Op(kind=OpKind.LAND | OpKind.LOR as kind, args=(left, right)):
                a, b = self._may_hold(left, axes, holds=holds), self._may_hold(right, axes, holds=holds)
                return a & b if (kind is OpKind.LAND) is holds else a | b
            case _:
                try:
                    return np.asarray((points.evaluate(condition, axes) != 0) == holds)
                except points.OpaqueValueError:
                    return np.asarray(True)  # noqa: FBT003 - the value, not an option

    def _atoms(self, condition: Expr, *, holds: bool) -> list[tuple[Coeffs, Span]]:
        """Bounds on sums of axes that a condition gives where it holds (or fails)."""
        match condition:
            case Op(kind=OpKind.LNOT, args=(arg,)):
                return self._atoms(arg, holds=not holds)
            case Op(kind=OpKind.LAND | OpKind.LOR as kind, args=(left, right)):
                if (kind is OpKind.LAND) is holds:
                    return self._atoms(left, holds=holds) + self._atoms(right, holds=holds)
                return []
            case Op(kind=kind, args=(left, right)) if kind in _NEGATED:
                return self._comparison(kind if holds else _NEGATED[kind], left, right)
            case _:
                return []

    def _comparison(self, kind: OpKind, left: Expr, right: Expr) -> list[tuple[Coeffs, Span]]:
        a, b = affine(left), affine(right)
        if a is None or b is None or left.dtype.is_float:
            return []
        if bounds(left, self._extents).wraps or bounds(right, self._extents).wraps:
            return []
        sums = dict(a.coeffs)
        for name, c in b.coeffs:
            sums[name] = sums.get(name, 0) - c
        coeffs = tuple(sorted((name, c) for name, c in sums.items() if c))
        span = _span(kind, b.offset - a.offset)
        if not coeffs or span is None:
            return []
        sign, canonical = _canonical(coeffs)
        low, high = span
        if sign < 0:
            low, high = (None if high is None else -high), (None if low is None else -low)
        return [(canonical, (low, high))]


_NEGATED = {
    OpKind.LT: OpKind.GE,
    OpKind.GE: OpKind.LT,
    OpKind.LE: OpKind.GT,
    OpKind.GT: OpKind.LE,
    OpKind.EQ: OpKind.NE,
    OpKind.NE: OpKind.EQ,
}


def _span(kind: OpKind, bound: int) -> Span | None:
    """What `sum KIND bound` says about the sum."""
    match kind:
        case OpKind.LT:
            return None, bound - 1
        case OpKind.LE:
            return None, bound
        case OpKind.GT:
            return bound + 1, None
        case OpKind.GE:
            return bound, None
        case OpKind.EQ:
            return bound, bound
        case _:
            return None


def _canonical(coeffs: Coeffs) -> tuple[int, Coeffs]:
    """The sum with a positive first coefficient, and the sign that was taken out."""
    if coeffs and coeffs[0][1] < 0:
        return -1, tuple((name, -c) for name, c in coeffs)
    return 1, coeffs


def _both(a: Span, b: Span) -> Span:
    """What holds when both do."""
    lows = [x for x in (a[0], b[0]) if x is not None]
    highs = [x for x in (a[1], b[1]) if x is not None]
    return (max(lows) if lows else None), (min(highs) if highs else None)
