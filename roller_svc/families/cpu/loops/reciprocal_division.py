"""Strength reduction: a map that divides rows by a value of the row multiplies by its reciprocal (LLVM `arcp`)."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, axes_of, loads_of
from roller_svc.ir.index import le, logical_and

# Exponents of the smallest normal numbers.
_MIN_NORMAL_EXPONENT = {DType.FLOAT32: -126, DType.FLOAT64: -1022}


@dataclass(frozen=True, slots=True)
class ReciprocalDivision:
    """A map's body in which `reciprocal`, a tensor of one value, multiplies in place of the division by `divisor`.

    Products are within 1.5 ulp of the quotient. They agree with it on zeros, infinities and NaN if neither the divisor
    nor its reciprocal is subnormal or infinite (`is_safe`).
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
        min_normal = 2.0 ** _MIN_NORMAL_EXPONENT[self.dtype]
        magnitude = Op(OpKind.ABS, (self.divisor,), self.dtype)
        return logical_and(le(Const(min_normal, self.dtype), magnitude), le(magnitude, Const(1 / min_normal, self.dtype)))


def find_row_division(body: Expr, inner: frozenset[str], reciprocal: str) -> ReciprocalDivision | None:
    """Return the division in the body, below factors only, if the divisor has no axis in `inner`.

    Divisions below sums and roundings to integers stay, since those could amplify a difference of one ulp.
    """
    match body:
        case Cast(arg=arg, implicit=True, dtype=dtype) if dtype.is_float and arg.dtype.is_float:
            division = find_row_division(arg, inner, reciprocal)
            return division and ReciprocalDivision(division.divisor, Cast(division.body, dtype, implicit=True), reciprocal)
        case Op(kind=OpKind.MUL, args=(a, b), dtype=dtype):
            if (lhs := find_row_division(a, inner, reciprocal)) is not None:
                return ReciprocalDivision(lhs.divisor, Op(OpKind.MUL, (lhs.body, b), dtype), reciprocal)
            rhs = find_row_division(b, inner, reciprocal)
            return rhs and ReciprocalDivision(rhs.divisor, Op(OpKind.MUL, (a, rhs.body), dtype), reciprocal)
        case Op(kind=OpKind.DIV, args=(a, b), dtype=dtype) if dtype.compute in _MIN_NORMAL_EXPONENT:
            if axes_of(b) & inner or not axes_of(a) & inner or not loads_of(b) or b.dtype is not dtype.compute:
                return None
            return ReciprocalDivision(b, Op(OpKind.MUL, (a, Load(reciprocal, (), b.dtype)), dtype), reciprocal)
        case _:
            return None
