"""Statement → contraction C[b, m, n] += A[b, m, k] * B[b, k, n], if it is one."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from roller_svc.analysis.sum_of_products import SumOfProducts, product_of, sum_of_products
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, Op, OpKind, axes_of
from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import Axis, TensorExpr

# Below these extents a contraction is a memory-bound nest (GEMV, outer product, dot product).
MIN_M = 4
MIN_N = 4
MIN_K = 4
MAX_FACTORS = 4


@dataclass(frozen=True, slots=True)
class Contraction:
    """Axes by role, each in the statement's order, and the operands: `a` over batch, m, k; `b` over batch, k, n."""

    batch: tuple[Axis, ...]
    m: tuple[Axis, ...]
    n: tuple[Axis, ...]
    k: tuple[Axis, ...]
    a: Expr
    b: Expr

    @property
    def roles(self) -> tuple[tuple[AxisRole, tuple[Axis, ...]], ...]:
        return ((AxisRole.BATCH, self.batch), (AxisRole.M, self.m), (AxisRole.N, self.n), (AxisRole.K, self.k))

    def product(self, dtype: DType) -> Expr:
        """Return the body of the statement: the product of both operands in a type."""
        factors = (f if f.dtype is dtype else Cast(f, dtype, implicit=True) for f in (self.a, self.b))
        return Op(OpKind.MUL, tuple(factors), dtype)


def as_contraction(statement: TensorExpr, *, is_thin: bool = False) -> Contraction | None:
    """Return the contraction with the most operand reuse, or None. n has the output's innermost axis.

    A thin one may have a single row or column.
    """
    form = sum_of_products(statement)
    if form is None or not 2 <= len(form.factors) <= MAX_FACTORS:
        return None
    factors = form.factors
    best: Contraction | None = None
    innermost = _innermost(statement)
    for size in range(1, len(factors) // 2 + 1):
        for left_indices in itertools.combinations(range(len(factors)), size):
            left = [factors[i] for i in left_indices]
            right = [f for i, f in enumerate(factors) if i not in left_indices]
            candidate = _classify(form, innermost, product_of(left), product_of(right), is_thin=is_thin)
            if candidate is not None and (best is None or _reuse(candidate) > _reuse(best)):
                best = candidate
    return best


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
    return Contraction(tuple(batch), tuple(only_left), tuple(only_right), tuple(k), left, right)


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
