"""Index expressions read as affine functions of axes."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, axes_of


@dataclass(frozen=True, slots=True)
class Affine:
    """sum(coeff * axis) + offset; coefficients are not 0 and sorted by axis name."""

    coeffs: tuple[tuple[str, int], ...]
    offset: int = 0

    def coeff(self, axis: str) -> int:
        return next((c for name, c in self.coeffs if name == axis), 0)


def affine(expr: Expr) -> Affine | None:
    """The expression as an affine function of its axes; None where it is not one (//, %, loads, selects, floats)."""
    terms = _terms(expr)
    if terms is None:
        return None
    offset = terms.pop("", 0)
    return Affine(tuple(sorted((name, c) for name, c in terms.items() if c)), offset)


def slack(condition: Expr) -> Affine | None:
    """What is at least 0 exactly where a comparison of affine functions holds; None for other conditions."""
    match condition:
        case Op(kind=OpKind.LT, args=(a, b)) | Op(kind=OpKind.GT, args=(b, a)):
            less, more, by = affine(a), affine(b), 1
        case Op(kind=OpKind.LE, args=(a, b)) | Op(kind=OpKind.GE, args=(b, a)):
            less, more, by = affine(a), affine(b), 0
        case _:
            return None
    if less is None or more is None:
        return None
    coeffs = dict(more.coeffs)
    for name, c in less.coeffs:
        coeffs[name] = coeffs.get(name, 0) - c
    return Affine(tuple(sorted((name, c) for name, c in coeffs.items() if c)), more.offset - less.offset - by)


def _terms(expr: Expr) -> dict[str, int] | None:
    """axis name -> coefficient, '' -> offset."""
    match expr:
        case Const(value=int(value)):
            return {"": value}
        case AxisRef(name=name):
            return {name: 1}
        case Cast(arg=arg) if expr.is_exact:
            return _terms(arg)
        case Op(kind=OpKind.NEG, args=(x,)):
            return _scaled(_terms(x), -1)
        case Op(kind=OpKind.ADD, args=(x, y)):
            return _sum(_terms(x), _terms(y))
        case Op(kind=OpKind.SUB, args=(x, y)):
            return _sum(_terms(x), _scaled(_terms(y), -1))
        case Op(kind=OpKind.MUL, args=(x, y)):
            a, b = _terms(x), _terms(y)
            if a is None or b is None:
                return None
            if set(a) <= {""}:
                return _scaled(b, a.get("", 0))
            if set(b) <= {""}:
                return _scaled(a, b.get("", 0))
            return None
        case _:
            return None


def _scaled(terms: dict[str, int] | None, by: int) -> dict[str, int] | None:
    return None if terms is None else {name: c * by for name, c in terms.items()}


def _sum(a: dict[str, int] | None, b: dict[str, int] | None) -> dict[str, int] | None:
    if a is None or b is None:
        return None
    total = dict(a)
    for name, c in b.items():
        total[name] = total.get(name, 0) + c
    return total


@dataclass(frozen=True, slots=True)
class Dim:
    """How one dimension of a tensor is walked. `opaque`: not affine, every combination of its axes an element, but
    that `shared` neighbours have the same one (`k // 8`: eight)."""

    size: int
    coeffs: tuple[tuple[str, int], ...]
    opaque: bool = False
    repeat: int = 1


def dim_of(index: Expr, size: int) -> Dim:
    """The walk of an index expression over a dimension of that size."""
    known = affine(index)
    if known is None:
        coeffs = tuple((name, 1) for name in sorted(axes_of(index)))
        return Dim(size, coeffs, opaque=True, repeat=_divisor(index) if len(coeffs) == 1 else 1)
    return Dim(size, known.coeffs)


def _divisor(index: Expr) -> int:
    """That of an axis that is divided by a constant; 1 for anything else."""
    match index:
        case Op(kind=OpKind.FLOORDIV, args=(AxisRef(), Const(value=int(by)))) if by > 0:
            return by
        case _:
            return 1
