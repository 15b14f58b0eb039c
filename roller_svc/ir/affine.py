"""Affine functions of axes, and how a dimension of a tensor is indexed by them."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, axes_of


@dataclass(frozen=True, slots=True)
class Affine:
    """sum(coeff * axis) + offset; coefficients are not 0 and sorted by axis name."""

    coeffs: tuple[tuple[str, int], ...]
    offset: int = 0

    def coeff(self, axis: str) -> int:
        for name, c in self.coeffs:
            if name == axis:
                return c
        return 0


def affine(expr: Expr) -> Affine | None:
    """Return the expression as an affine function of its axes, or None (//, %, loads, selects, floats)."""
    if isinstance(expr, AxisRef):  # most indices
        return Affine(((expr.name, 1),))
    terms = _terms(expr)
    if terms is None:
        return None
    offset = terms.pop("", 0)
    return Affine(tuple(sorted((name, c) for name, c in terms.items() if c)), offset)


def slack(condition: Expr) -> Affine | None:
    """Return the affine function that is >= 0 exactly where the comparison holds, or None for other conditions."""
    match condition:
        case Op(kind=OpKind.LT, args=(a, b)) | Op(kind=OpKind.GT, args=(b, a)):
            less, more, margin = affine(a), affine(b), 1
        case Op(kind=OpKind.LE, args=(a, b)) | Op(kind=OpKind.GE, args=(b, a)):
            less, more, margin = affine(a), affine(b), 0
        case _:
            return None
    if less is None or more is None:
        return None
    coeffs = dict(more.coeffs)
    for name, c in less.coeffs:
        coeffs[name] = coeffs.get(name, 0) - c
    return Affine(tuple(sorted((name, c) for name, c in coeffs.items() if c)), more.offset - less.offset - margin)


def _terms(expr: Expr) -> dict[str, int] | None:
    """Return {axis name: coefficient, "": offset}, or None."""
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


def _scaled(terms: dict[str, int] | None, factor: int) -> dict[str, int] | None:
    return None if terms is None else {name: c * factor for name, c in terms.items()}


def _sum(a: dict[str, int] | None, b: dict[str, int] | None) -> dict[str, int] | None:
    if a is None or b is None:
        return None
    total = dict(a)
    for name, c in b.items():
        total[name] = total.get(name, 0) + c
    return total


@dataclass(frozen=True, slots=True)
class Dim:
    """How one dimension of a tensor is indexed."""

    size: int
    coeffs: tuple[tuple[str, int], ...]  # (axis, coefficient)
    is_affine: bool = True  # False: every combination of the axes may be another element
    repeat: int = 1  # consecutive points of the axis with the same element: 8 of `k // 8`; 1 if affine
    is_looked_up: bool = False  # by data that is never out of range: fields of bits
    offsets: tuple[int, ...] = (0,)  # constants of an affine index; several: of loads that share elements or lines
    gathered_by: tuple[Expr, ...] = ()  # loads in the index: any element may follow another
    # of an index with // or %: an axis, and how many points along it, from a multiple of this number on, have adjacent
    # elements, from a multiple on: (d, 64) of `(d + 64) % 128`
    run: tuple[str, int] | None = None
    # of an index with // or %: an axis, and its points in the mean between two jumps: (d, n) of `(d + 1) % n`
    segment: tuple[str, int] | None = None
    # the same of elements that change places within aligned blocks: (d, 2) of `d // 2 * 2 + (d + 1) % 2`
    permuted_block: tuple[str, int] | None = None

    @property
    def is_divided(self) -> bool:
        """Whether points that follow one another have the same element, and then the next one."""
        return self.repeat > 1 and not self.gathered_by


def dim_of(index: Expr, size: int) -> Dim:
    """Return how an index expression accesses a dimension of that size."""
    form = affine(index)
    if form is None:
        coeffs = tuple((name, 1) for name in sorted(axes_of(index)))
        return Dim(size, coeffs, is_affine=False, repeat=_divisor(index) if len(coeffs) == 1 else 1)
    return Dim(size, form.coeffs, offsets=(form.offset,))


def _divisor(index: Expr) -> int:
    """Return the divisor of an axis divided by a constant; 1 for anything else."""
    match index:
        case Op(kind=OpKind.FLOORDIV, args=(AxisRef(), Const(value=int(divisor)))) if divisor > 0:
            return divisor
        case _:
            return 1
