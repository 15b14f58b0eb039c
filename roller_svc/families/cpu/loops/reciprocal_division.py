"""A map over rows that divides by a value of the row → one that multiplies by its reciprocal, and when it may."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, axes_of, loads_of
from roller_svc.ir.index import le, logical_and

# Least normal numbers: 2 to the power of these.
_LEAST_EXPONENT = {DType.FLOAT32: -126, DType.FLOAT64: -1022}


@dataclass(frozen=True, slots=True)
class RowQuotient:
    """`body` is a map's, with products by `reciprocal`, a tensor of one value, where it divided by `divisor`.

    Products are within 1.5 units in the last place of the quotient, and agree with it about zeros, infinities and NaN,
    as long as neither the divisor nor its reciprocal is subnormal or infinite: where `is_safe` holds.
    """

    divisor: Expr
    body: Expr
    reciprocal: str

    @property
    def dtype(self) -> DType:
        return self.divisor.dtype

    @property
    def inverse(self) -> Expr:
        return Op(OpKind.DIV, (Const(1.0, self.dtype), self.divisor), self.dtype)

    @property
    def is_safe(self) -> Expr:
        least = 2.0 ** _LEAST_EXPONENT[self.dtype]
        size = Op(OpKind.ABS, (self.divisor,), self.dtype)
        return logical_and(le(Const(least, self.dtype), size), le(size, Const(1 / least, self.dtype)))


def row_quotient(body: Expr, inner: frozenset[str], reciprocal: str) -> RowQuotient | None:
    """The quotient that the body is, but for factors, if what divides has no axis among `inner`.

    Sums and anything that rounds to integers could show the difference of a unit: quotients below those stay.
    """
    match body:
        case Cast(arg=arg, implicit=True, dtype=dtype) if dtype.is_float and arg.dtype.is_float:
            found = row_quotient(arg, inner, reciprocal)
            return found and RowQuotient(found.divisor, Cast(found.body, dtype, implicit=True), reciprocal)
        case Op(kind=OpKind.MUL, args=(a, b), dtype=dtype):
            if (left := row_quotient(a, inner, reciprocal)) is not None:
                return RowQuotient(left.divisor, Op(OpKind.MUL, (left.body, b), dtype), reciprocal)
            right = row_quotient(b, inner, reciprocal)
            return right and RowQuotient(right.divisor, Op(OpKind.MUL, (a, right.body), dtype), reciprocal)
        case Op(kind=OpKind.DIV, args=(a, b), dtype=dtype) if dtype.compute in _LEAST_EXPONENT:
            if axes_of(b) & inner or not axes_of(a) & inner or not loads_of(b) or b.dtype is not dtype.compute:
                return None
            return RowQuotient(b, Op(OpKind.MUL, (a, Load(reciprocal, (), b.dtype)), dtype), reciprocal)
        case _:
            return None
