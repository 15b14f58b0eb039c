"""Decide exactly whether an index stays inside its tensor, under the guards of the read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roller_svc.analysis.intervals import Bounds, bounds, widen_to_int64
from roller_svc.analysis.wide_values import Array
from roller_svc.frontend.lang import point_grid as points
from roller_svc.frontend.lang.polyhedra import OpaqueExprError, Polyhedra, limited_context
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.expr import Expr, Load, Op, OpKind, axes_of, iter_subexpressions
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    import islpy as isl
else:
    isl = OnUse("islpy")

# Limit on the points of one index's axes (and guards) that are enumerated if isl cannot decide.
MAX_ENUMERATED_POINTS = 4_000_000


@dataclass(frozen=True, slots=True)
class Inside:
    """Every read stays inside. `index` may be widened to int64."""

    index: Expr


@dataclass(frozen=True, slots=True)
class FromData:
    """The index depends on data and is checked at run time."""

    index: Expr


@dataclass(frozen=True, slots=True)
class Leaves:
    """The index leaves the tensor, with this value at this point."""

    point: dict[str, int]
    value: int


@dataclass(frozen=True, slots=True)
class Undecided:
    """There are too many points to enumerate, or a function that is not evaluated here."""

    reason: str


Verdict = Inside | FromData | Leaves | Undecided
Coeffs = tuple[tuple[str, int], ...]
Span = tuple[int | None, int | None]


@dataclass(slots=True)
class Guard:
    """A condition on the stack."""

    condition: Expr
    holds: bool
    previous: list[tuple[Coeffs, Span | None]] = field(default_factory=list)  # bounds to restore at pop
    region: isl.Set | None = None  # points where this and the guards below may hold, computed on demand


@dataclass(slots=True)
class Budget:
    """Remaining cost for deciding the indices of one program."""

    evaluations: int = 100_000_000  # points times nodes: about a second
    isl_failed: bool = False  # isl exceeded its limit and is not tried again
    _context: isl.Context | None = None

    @property
    def context(self) -> isl.Context:
        """Return the context of the program's sets, which is made at the first use."""
        if self._context is None:
            self._context = limited_context()
        return self._context


class Ranges:
    """Decide the indices of one statement. The checker pushes and pops conditions as it enters branches."""

    def __init__(self, extents: Mapping[str, int], budget: Budget, tensors: Mapping[str, Bounds] | None = None) -> None:
        self._extents = dict(extents)
        self._tensors = tensors or {}  # of integers that earlier statements compute
        self._budget = budget
        self._guards: list[Guard] = []
        # Bounds on sums of axes from the guards on the stack: sufficient for ordinary padding.
        self._guard_bounds: dict[Coeffs, Span] = {}
        self._polyhedra: Polyhedra | None = None

    def push(self, condition: Expr, *, holds: bool) -> None:
        guard = Guard(condition, holds)
        for coeffs, span in self._atoms(condition, holds=holds):
            old = self._guard_bounds.get(coeffs)
            guard.previous.append((coeffs, old))
            self._guard_bounds[coeffs] = span if old is None else _intersect(old, span)
        self._guards.append(guard)

    def pop(self, count: int = 1) -> None:
        for _ in range(count):
            for coeffs, old in reversed(self._guards.pop().previous):
                if old is None:
                    del self._guard_bounds[coeffs]
                else:
                    self._guard_bounds[coeffs] = old

    def decide(self, index: Expr, size: int) -> Verdict:
        """Decide whether 0 <= index < size wherever the guards on the stack hold."""
        data = any(isinstance(node, Load) for node in iter_subexpressions(index))
        index_bounds = bounds(index, self._extents, self._tensors)
        if index_bounds.wraps and not data:
            index = widen_to_int64(index)
            index_bounds = bounds(index, self._extents)
        if index_bounds.inside(size):
            return Inside(index)
        if data:
            return FromData(index)
        form = affine(index)
        if form is not None and not index_bounds.wraps:
            low, high = self._affine_bounds(form)
            if low >= 0 and high < size:
                return Inside(index)
            if not self._guards:
                return self._corner(form)
        return self._decide_exactly(index, size)

    def _affine_bounds(self, form: Affine) -> tuple[int, int]:
        low = high = form.offset
        for name, c in form.coeffs:
            span = c * (self._extents[name] - 1)
            low, high = low + min(0, span), high + max(0, span)
        sign, coeffs = _canonical(form.coeffs)
        below, above = self._guard_bounds.get(coeffs, (None, None))
        if sign < 0:
            below, above = (None if above is None else -above), (None if below is None else -below)
        if below is not None:
            low = max(low, below + form.offset)
        if above is not None:
            high = min(high, above + form.offset)
        return low, high

    def _corner(self, form: Affine) -> Leaves:
        """Return the violation of an affine index without guards, which is at a corner of the box."""
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
                return self._make_leaves(outside, index)
        except OpaqueExprError:
            pass
        except isl.Error:
            self._budget.isl_failed = True
        return self._enumerate(index, size)

    def _outside(self, index: Expr, size: int) -> dict[str, int] | None:
        """Return a point where the guards hold and the index is outside; None if isl proves that there is none."""
        if self._polyhedra is None:
            self._polyhedra = Polyhedra(self._extents, self._budget.context)
        space = self._polyhedra
        outside = space.outside(index, size)
        region = space.box
        for guard in self._guards:
            if guard.region is None:
                guard.region = region.intersect(space.may_hold(guard.condition, holds=guard.holds))
            region = guard.region
        violations = region.intersect(outside)
        return None if violations.is_empty() else space.point_of(violations)

    def _make_leaves(self, point: dict[str, int], index: Expr) -> Leaves:
        axes = {name: np.asarray(value, np.int64) for name, value in point.items()}
        used = axes_of(index)
        return Leaves({n: v for n, v in point.items() if n in used}, int(points.evaluate(index, axes)))

    def _enumerate(self, index: Expr, size: int) -> Verdict:
        """Evaluate the index at every point of its axes at which its guards may hold."""
        used = axes_of(index)
        needed = used.union(*(axes_of(guard.condition) for guard in self._guards))
        if points.count_points({n: self._extents[n] for n in needed}) > MAX_ENUMERATED_POINTS:
            needed = used
        extents = {name: extent for name, extent in self._extents.items() if name in needed}
        count = points.count_points(extents)
        guards = [guard for guard in self._guards if axes_of(guard.condition) <= needed]
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
        violation = np.argwhere(np.broadcast_to(bad, tuple(extents.values())))[0]
        return self._make_leaves(dict(zip(extents, map(int, violation), strict=True)), index)

    def _may_hold(self, condition: Expr, axes: Mapping[str, Array], *, holds: bool) -> Array:
        """Return where a condition may hold (or fail), with unknown loads."""
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
                    return np.ones((), bool)

    def _atoms(self, condition: Expr, *, holds: bool) -> list[tuple[Coeffs, Span]]:
        """Return bounds on sums of axes that a condition implies where it holds (or fails)."""
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
    """Return the bounds that `sum KIND bound` implies."""
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
    """Return the sign of the first coefficient, and the sum divided by it."""
    if coeffs and coeffs[0][1] < 0:
        return -1, tuple((name, -c) for name, c in coeffs)
    return 1, coeffs


def _intersect(a: Span, b: Span) -> Span:
    """Return the intersection of two spans."""
    lows = [x for x in (a[0], b[0]) if x is not None]
    highs = [x for x in (a[1], b[1]) if x is not None]
    return (max(lows) if lows else None), (min(highs) if highs else None)
