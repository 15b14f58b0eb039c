"""Statement → contraction C[b, m, n] += A[b, m, k] * B[b, k, n], if it is one."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, Op, OpKind, axes_of
from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import Axis, Combine, StatementKind, TensorExpr

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
    if statement.kind is not StatementKind.REDUCE or statement.combine is not Combine.SUM:
        return None
    factors = factors_of(statement.body, statement.type.dtype)
    if not 2 <= len(factors) <= MAX_FACTORS:
        return None
    best: Contraction | None = None
    for size in range(1, len(factors) // 2 + 1):
        for left_indices in itertools.combinations(range(len(factors)), size):
            left = [factors[i] for i in left_indices]
            right = [f for i, f in enumerate(factors) if i not in left_indices]
            candidate = _classify(statement, product_of(left), product_of(right), is_thin=is_thin)
            if candidate is not None and (best is None or _reuse(candidate) > _reuse(best)):
                best = candidate
    return best


def factors_of(body: Expr, dtype: DType) -> list[Expr]:
    """Return the factors of the product, without implicit casts between floats."""
    while isinstance(body, Cast) and body.dtype.compute is body.arg.dtype.compute and body.implicit:
        body = body.arg
    if isinstance(body, Op) and body.kind is OpKind.DIV:
        return _divide_factor(factors_of(body.args[0], dtype), body.args[1])
    if not (isinstance(body, Op) and body.kind is OpKind.MUL):
        return [body]
    # an integer product narrower than its accumulator wraps: it is not a multiply-add of the accumulator's type
    if not body.dtype.is_float and body.dtype is not dtype:
        return [body]
    return [f for arg in body.args for f in factors_of(arg, dtype)]


def _divide_factor(factors: list[Expr], divisor: Expr) -> list[Expr]:
    """Divide one factor of a product: one with all axes of the divisor, if possible."""
    axes = axes_of(divisor)
    at = next((i for i, f in enumerate(factors) if axes <= axes_of(f)), 0)
    quotient = Op(OpKind.DIV, (factors[at], divisor), factors[at].dtype)
    return [*factors[:at], quotient, *factors[at + 1 :]]


def product_of(factors: list[Expr]) -> Expr:
    product = factors[0]
    for factor in factors[1:]:
        product = Op(OpKind.MUL, (product, factor), factor.dtype)
    return product


def _classify(statement: TensorExpr, left: Expr, right: Expr, *, is_thin: bool) -> Contraction | None:
    in_left, in_right = axes_of(left), axes_of(right)
    batch, only_left, only_right, k = [], [], [], []
    for axis in statement.axes:
        if axis in statement.reduced:
            k.append(axis)
        elif axis.name in in_left and axis.name not in in_right:
            only_left.append(axis)
        elif axis.name in in_right and axis.name not in in_left:
            only_right.append(axis)
        else:
            batch.append(axis)
    innermost = _innermost(statement)
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
