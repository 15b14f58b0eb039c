"""Statement → contraction C[b, m, n] += A[b, m, k] * B[b, k, n], if it is one.

In a scaled one, factors that are constant along blocks of k are scales: C += S[b, m, n, k // 128] * A * B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.constant_runs import constant_run
from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.sum_of_products import SumOfProducts, product_of, restate, sum_of_products
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, axes_of, iter_subexpressions
from roller_svc.ir.group import MIN_SCALE_RUN, AxisRole
from roller_svc.ir.program import Axis, TensorExpr

# Below these extents a contraction is a memory-bound nest (GEMV, outer product, dot product).
MIN_M = 4
MIN_N = 4
MIN_K = 4
MAX_FACTORS = 4  # that no other factor has all axes of
MIN_SCALED_FACTORS = 3  # two operands and a scale
# Types whose products, added in float32, cannot exceed its range: scales may then be applied to sums of them.
SCALED_DTYPES = frozenset({
    DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT16, DType.INT8, DType.UINT8, DType.BOOL,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contraction:
    """Axes by role, each in the statement's order, and the operands: `a` over batch, m, k; `b` over batch, k, n.

    `scales` are factors of sums over blocks of k, each over m or n and the number of the block. Points where `guard` fails
    may be left out.
    """

    batch: tuple[Axis, ...]
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]
    k: tuple[Axis, ...]
    a: Expr
    b: Expr
    scales: tuple[Expr, ...] = ()
    guard: Expr | None = None

    @property
    def roles(self) -> tuple[tuple[AxisRole, tuple[Axis, ...]], ...]:
        return ((AxisRole.BATCH, self.batch), (AxisRole.M, self.m), (AxisRole.N, self.n), (AxisRole.K, self.k))

    def product(self, dtype: DType) -> Expr:
        """Return the body of the statement: the product of both operands in a type, and of scales."""
        factors = [f if f.dtype is dtype else Cast(f, dtype, implicit=True) for f in (self.a, self.b, *self.scales)]
        return restate(product_of(factors), self.guard)


def as_contraction(statement: TensorExpr, *, is_thin: bool = False) -> Contraction | None:
    """Return the contraction with the most operand reuse, or None. n has the output's innermost axis.

    A thin one may have a single row or column.
    """
    form = sum_of_products(statement)
    if form is None or len(form.factors) < 2:
        return None
    return _best_split(form, _stated_factors(statement, form.factors), _innermost(statement), is_thin=is_thin)


def _stated_factors(statement: TensorExpr, factors: Sequence[Expr]) -> list[Expr]:
    """Return factors in the float32 to which the statement casts them: a product of several may exceed their own range.

    bfloat16 has the range of float32.
    """
    casts = (node for node in iter_subexpressions(statement.body) if isinstance(node, Cast))
    stated: dict[Expr, Expr] = {node.arg: node for node in casts if node.dtype is DType.FLOAT32 and not node.implicit}
    return [factor if factor.dtype is DType.BFLOAT16 else stated.get(factor, factor) for factor in factors]


def as_scaled_contraction(statement: TensorExpr, *, is_thin: bool = False) -> Contraction | None:
    """Return the contraction whose sums over blocks of k are scaled, or None if no factor is such a scale.

    Scales are not combined with operands: each product with one is rounded to the operands' type, or exceeds its range.
    A thin one may have a single row or column.
    """
    form = sum_of_products(statement)
    if form is None or statement.accumulator is not DType.FLOAT32:
        return None
    reduced = {axis.name for axis in form.reduced}
    factors = form.factors
    if len(factors) < MIN_SCALED_FACTORS:
        return None
    scales = [f for f in factors if constant_run(f, form.reduced) >= MIN_SCALE_RUN]
    operands = [f for f in factors if f not in scales]
    if all(axes_of(f).isdisjoint(reduced) for f in scales) or len(operands) < 2:
        return None
    found = _best_split(form, operands, _innermost(statement), is_thin=is_thin)
    if found is None or any(value_dtype(operand) not in SCALED_DTYPES for operand in (found.a, found.b)):
        return None
    rows, columns = ({axis.name for axis in axes} for axes in (found.m, found.n))
    in_operands = axes_of(found.a) | axes_of(found.b)
    if not in_operands >= {axis.name for axis in form.results}:
        return None
    if any(not axes_of(f).isdisjoint(rows) and not axes_of(f).isdisjoint(columns) for f in scales):
        return None
    return replace(found, scales=tuple(scales))


def _best_split(form: SumOfProducts, factors: Sequence[Expr], innermost: str, *, is_thin: bool) -> Contraction | None:
    """Return the contraction of two products of factors with the most operand reuse, then the least work.

    It does not depend on the order of the factors: one with the axes of both operands joins the smaller one.
    """
    axes = [axes_of(factor) for factor in factors]
    widest = [own for own in dict.fromkeys(axes) if not any(own < other for other in axes)]
    if len(widest) < 2:  # the axes of one operand are all axes, as in the product of a matrix and a vector
        groups = [frozenset({i}) for i in range(len(factors))]
    else:
        groups = [frozenset(i for i, own in enumerate(axes) if own == group) for group in widest]
    if len(groups) > MAX_FACTORS:
        return None
    extents = {axis.name: axis.extent for axis in (*form.results, *form.reduced)}
    best: Contraction | None = None
    best_rank = (0.0, 0, 0)
    for number in range(1, len(groups) // 2 + 1):
        for some in itertools.combinations(groups, number):
            left = frozenset[int]().union(*some)
            right = frozenset[int]().union(*groups) - left
            sides = [_Side.of(side, axes, extents, innermost) for side in (left, right)]
            for i in set(range(len(factors))) - left - right:
                at = min((each for each in sides if axes[i] <= each.axes), key=lambda each: (each.elements, each.has_innermost))
                at.members.append(i)
            candidate = _classify(form, innermost, *(each.product(factors) for each in sides), is_thin=is_thin)
            if candidate is None:
                continue
            work = sum(each.elements * (len(each.members) - 1) for each in sides)
            rank = (_reuse(candidate), -work, -sum(len(each.members) for each in sides if each.has_innermost))
            if best is None or rank > best_rank:
                best, best_rank = candidate, rank
    return best


@dataclass(slots=True)
class _Side:
    """The factors of one operand."""

    members: list[int]
    axes: frozenset[str]
    elements: int
    has_innermost: bool

    @classmethod
    def of(cls, members: Collection[int], axes: Sequence[frozenset[str]], extents: Mapping[str, int], innermost: str) -> _Side:
        own = frozenset[str]().union(*(axes[i] for i in members))
        return cls(list(members), own, math.prod(extents[name] for name in own), innermost in own)

    def product(self, factors: Sequence[Expr]) -> Expr:
        own = [factors[i] for i in sorted(self.members)]
        return product_of(own) if len(own) > 1 else _without_widening(own[0])


def _without_widening(factor: Expr) -> Expr:
    is_widened = isinstance(factor, Cast) and factor.dtype is DType.FLOAT32 and factor.arg.dtype.is_narrow_float
    return factor.arg if is_widened and isinstance(factor, Cast) else factor


def _classify(form: SumOfProducts, innermost: str, left: Expr, right: Expr, *, is_thin: bool) -> Contraction | None:
    in_left, in_right = axes_of(left), axes_of(right)
    batch, only_left, only_right, k = [], [], [], list(form.reduced)
    for axis in form.results:
        if axis.name in in_left and axis.name not in in_right:
            only_left.append(axis)
        elif axis.name in in_right and axis.name not in in_left:
            only_right.append(axis)
        else:
            batch.append(axis)
    if innermost in {a.name for a in only_left}:
        left, right, only_left, only_right = right, left, only_right, only_left
    if _size(k) < MIN_K or (not is_thin and (_size(only_left) < MIN_M or _size(only_right) < MIN_N)):
        return None
    return Contraction(tuple(batch), tuple(only_left), tuple(only_right), tuple(k), left, right, guard=form.guard)


def _innermost(statement: TensorExpr) -> str:
    extents = statement.extents
    wide = [i.name for i in statement.index if isinstance(i, AxisRef) and extents[i.name] > 1]
    return wide[-1] if wide else ""


def _size(axes: list[Axis]) -> int:
    return math.prod(a.extent for a in axes)


def _reuse(c: Contraction) -> float:
    """Return points over operand elements: how often each element is used."""
    b, m, n, k = (math.prod(a.extent for a in axes) for axes in (c.batch, c.m, c.n, c.k))
    return b * m * n * k / (b * m * k + b * n * k)
