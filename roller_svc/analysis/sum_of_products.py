"""Sums of products: the form of a statement that the matchers of fusion read.

S[results] += f1 * f2 * ..., summed over the reduced axes. Each factor varies with some of both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.operand import value_dtype
from roller_svc.ir.dtype import DType, promote
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind, Select, axes_of, rewrite, split_restated
from roller_svc.ir.index import conjunction
from roller_svc.ir.program import Axis, Combine, StatementKind, TensorExpr

MAX_EXPONENT = 14  # of a power of two whose inverse is a normal number in all floats of 16 bits and more


@dataclass(frozen=True, slots=True)
class SumOfProducts:
    """A statement that adds products."""

    results: tuple[Axis, ...]
    reduced: tuple[Axis, ...]
    factors: tuple[Expr, ...]  # without implicit casts between floats
    selects: tuple[Select, ...]  # in the product, perhaps in casts: where one of them is 0, the product is 0
    guard: Expr | None = None  # points where it fails may be left out of the sum; None: no points

    def split(self, axis: str) -> tuple[Sequence[Expr], Sequence[Expr]]:
        """Return the factors that vary with an axis, and the others."""
        varying = [factor for factor in self.factors if axis in axes_of(factor)]
        return varying, [factor for factor in self.factors if factor not in varying]


def sum_of_products(statement: TensorExpr) -> SumOfProducts | None:
    """Return the form of a statement, or None unless it is a sum over reduced axes."""
    if statement.kind is not StatementKind.REDUCE or statement.combine is not Combine.SUM:
        return None
    body, conditions = split_restated(statement.body)
    factors = tuple(_Factoring(statement.type.dtype, statement.extents).factors(body))
    return SumOfProducts(statement.spatial, statement.reduced, factors, tuple(selects_of(body)), conjunction(conditions))


def restate(product: Expr, guard: Expr | None) -> Expr:
    """Return a product, of which a factor is 0 where the guard fails, with this guard; None: without one."""
    if guard is None:
        return product
    return Select(guard, product, Const(0.0 if product.dtype.is_float else 0, product.dtype), product.dtype, restated=True)


def without_restated_guards(statement: TensorExpr) -> TensorExpr:
    """Return a statement without the guards that factors of its products have, too."""
    body = rewrite(statement.body, lambda node: node.then if isinstance(node, Select) and node.restated else node)
    return statement if body is statement.body else replace(statement, body=body)


@dataclass(frozen=True, slots=True)
class _Factoring:
    """Factoring of a product of a type over axes of these extents."""

    dtype: DType
    extents: Mapping[str, int]

    def factors(self, body: Expr) -> list[Expr]:
        """Return the factors of the product, without casts between floats that round nothing."""
        dtype = self.dtype
        while (
            isinstance(body, Cast)
            and body.dtype.compute is body.arg.dtype.compute
            and (body.implicit or body.dtype is dtype.compute)
        ):
            body = body.arg
        if (factors := self._bytes(body)) is not None:
            return factors
        if isinstance(body, Op) and body.kind is OpKind.DIV:
            return self._divide(self.factors(body.args[0]), body.args[1])
        if not (isinstance(body, Op) and body.kind is OpKind.MUL):
            return [body]
        # an integer product narrower than its accumulator wraps: it is not a multiply-add of the accumulator's type
        if not body.dtype.is_float and body.dtype is not dtype:
            return [body]
        return [f for arg in body.args for f in self.factors(arg)]

    def _bytes(self, body: Expr) -> list[Expr] | None:
        """Return the factors of a product of bytes that is added as a float, in which it is exact; None of others."""
        product = body.arg if isinstance(body, Cast) and body.dtype is DType.FLOAT32 else body
        if not (isinstance(product, Op) and product.kind is OpKind.MUL and product.dtype is DType.INT32 and self.dtype.is_float):
            return None
        types = [value_dtype(arg) for arg in product.args]
        if any(dtype is None or dtype.bits > 8 for dtype in types):
            return None
        return [Cast(arg, DType.FLOAT32, implicit=True) for arg in product.args]

    def _divide(self, factors: list[Expr], divisor: Expr) -> list[Expr]:
        """Divide a product: its least factor with all axes of the divisor, if there is one."""
        if isinstance(divisor, Const) and (inverse := _exact_inverse(divisor)) is not None:
            return [*factors, inverse]
        axes = axes_of(divisor)
        fitting = [i for i, f in enumerate(factors) if axes <= axes_of(f) and axes_of(f)]
        at = min(fitting, key=lambda i: math.prod(self.extents[name] for name in axes_of(factors[i])), default=0)
        dtype = promote(factors[at].dtype, divisor.dtype)
        quotient = Op(OpKind.DIV, (_convert(factors[at], dtype), _convert(divisor, dtype)), dtype)
        return [*factors[:at], quotient, *factors[at + 1 :]]


def _exact_inverse(divisor: Const) -> Const | None:
    """Return the inverse of a power of two, if floats have both."""
    mantissa, exponent = math.frexp(divisor.value)
    if divisor.dtype.is_float and divisor.dtype.bits > 8 and abs(mantissa) == 0.5 and abs(exponent - 1) <= MAX_EXPONENT:
        return replace(divisor, value=1.0 / divisor.value)
    return None


def selects_of(body: Expr) -> list[Select]:
    """Return the body, or the operands of its products, that have a condition."""
    match body:
        case Select():
            return [body]
        case Cast(arg=arg):
            return selects_of(arg)
        case Op(kind=OpKind.MUL, args=args):
            return [select for arg in args for select in selects_of(arg)]
        case _:
            return []


def product_of(factors: Sequence[Expr]) -> Expr:
    """Return the product of at least one factor, in their common type."""
    product = factors[0]
    for factor in factors[1:]:
        dtype = promote(product.dtype, factor.dtype)
        product = Op(OpKind.MUL, (_convert(product, dtype), _convert(factor, dtype)), dtype)
    return product


def _convert(factor: Expr, dtype: DType) -> Expr:
    return factor if factor.dtype is dtype else Cast(factor, dtype, implicit=True)


def is_window(index: Expr, reduced: Collection[str]) -> bool:
    """Return whether an index varies with reduced axes and with others, as that of a convolution's input."""
    axes = axes_of(index)
    return not axes.isdisjoint(reduced) and not axes <= set(reduced)
