"""Congruence analysis of index expressions (Granger, 1989), and their strides along a loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from roller_svc.analysis.index_ranges import fold
from roller_svc.analysis.linear import Linear, linear
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of, substitute
from roller_svc.ir.index import add, num, ref, sub


@dataclass(frozen=True, slots=True)
class Congruence:
    """A value is `remainder` plus a multiple of `modulus`; with modulus 0 it is `remainder`."""

    modulus: int
    remainder: int

    @property
    def divisor(self) -> int:
        """Return the largest known divisor of the value; 0 if the value is 0."""
        return math.gcd(self.modulus, self.remainder)


ANY = Congruence(1, 0)
_ORDERS = frozenset({OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE})
Known = Mapping[str, Congruence]


def congruence(expr: Expr, known: Known) -> Congruence:
    """Return the congruence of an integer expression, given those of its variables."""
    match expr:
        case Const(value=int(value)):
            return Congruence(0, value)
        case AxisRef(name=name):
            return known.get(name, ANY)
        case Cast(arg=arg) if expr.is_exact:
            return ANY if loads_of(arg) else congruence(arg, known)
        case Select(then=then, otherwise=otherwise):
            return _join(congruence(then, known), congruence(otherwise, known))
        case Op(args=(x, y)) if not expr.dtype.is_float and not loads_of(expr):  # values from data may wrap
            return _operation(expr.kind, congruence(x, known), congruence(y, known))
        case _:
            return ANY


def is_multiple(expr: Expr, divisor: int, known: Known, definitions: Mapping[str, Expr]) -> bool:
    """Return whether an index is a multiple of `divisor`, given the definitions of its variables.

    Terms of variables and of what defines them may cancel each other: x + (8 - x % 8) % 8 is a multiple of 8.
    """
    terms: Linear = {}
    _add_residues(expr, 1, divisor, definitions, terms)
    return all(c * (1 if term is None else congruence(term, known).divisor) % divisor == 0 for term, c in terms.items())


def aligned_run(index: Expr, axis: str, most: int) -> int:
    """Return how many points along an axis have adjacent elements; a power of two of at most `most`.

    Both the points and their elements begin at multiples of the number: 64 for `(d + 64) % 128` along d.
    """
    run, start, lane = 1, f"{axis}.start", f"{axis}.lane"
    moved = substitute(index, {axis: add(ref(start), ref(lane))})
    while 2 * run <= most:
        lanes = LaneStrideAnalysis(lane, 2 * run, {start: Congruence(2 * run, 0)}, frozenset())
        if lanes.stride(moved) != 1 or congruence(lanes.first_value(moved), lanes.known).divisor % (2 * run):
            break
        run *= 2
    return run


def mean_segment(index: Expr, axis: str, most: int) -> int:
    """Return how many points along an axis have adjacent elements in the mean, up or down, at most `most`; 1 for none.

    Each quotient or remainder jumps wherever what it divides passes a multiple: `(d + 1) % n` once in n points.
    """
    known = _stride_and_jumps(index, axis)
    if known is None or abs(known[0]) != 1:
        return 1
    return min(most, math.ceil(1 / known[1])) if known[1] else most


def permuted_block(index: Expr, axis: str) -> int:
    """Return b of an index `d // b * b` plus a remainder of b: elements stay in their aligned block; 1 for none."""
    known = _stride_and_jumps(index, axis)
    match sorted(linear(index).items(), key=lambda term: -term[1]):
        case [
            (Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(block)))), stride),
            (Op(kind=OpKind.MOD, args=(_, Const(value=modulus))), 1),
        ] if name == axis and block == stride == modulus and known is not None and abs(known[0]) == 1:
            return block
        case _:
            return 1


def _stride_and_jumps(expr: Expr, axis: str) -> tuple[int, Fraction] | None:
    """Return the difference between neighbours along an axis, and the share of neighbours with another one."""
    if axis not in axes_of(expr):
        return 0, Fraction(0)
    match expr:
        case AxisRef():
            return 1, Fraction(0)
        case Cast(arg=arg) if expr.is_exact and not loads_of(arg):
            return _stride_and_jumps(arg, axis)
        case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)) if not loads_of(expr):
            a, b = _stride_and_jumps(x, axis), _stride_and_jumps(y, axis)
            if a is None or b is None:
                return None
            return a[0] + b[0] if kind is OpKind.ADD else a[0] - b[0], a[1] + b[1]
        case Op(kind=OpKind.MUL, args=(x, Const(value=int(by))) | (Const(value=int(by)), x)) if not loads_of(expr):
            a = _stride_and_jumps(x, axis)
            return None if a is None else (a[0] * by, a[1])
        case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if by > 0 and not loads_of(x):
            a = _stride_and_jumps(x, axis)
            if a is None:
                return None
            stride, jumps = a
            if stride % by:
                return (0 if kind is OpKind.FLOORDIV else stride), jumps + Fraction(min(abs(stride), by), by)
            return (stride // by if kind is OpKind.FLOORDIV else 0), jumps
        case _:
            return None


def _add_residues(expr: Expr, factor: int, modulus: int, definitions: Mapping[str, Expr], terms: Linear) -> None:
    """Add terms that are congruent to factor * expr modulo `modulus`, with variables replaced by their values."""
    for term, coefficient in linear(expr).items():
        c = factor * coefficient % modulus
        match term:
            case _ if c == 0:
                pass
            case AxisRef(name=name) if name in definitions:
                _add_residues(definitions[name], c, modulus, definitions, terms)
            case Op(kind=OpKind.MOD, args=(x, Const(value=int(by)))) if by > 0 and c * by % modulus == 0:
                _add_residues(x, c, modulus, definitions, terms)
            case _:
                terms[term] = (terms.get(term, 0) + c) % modulus


def _operation(kind: OpKind, a: Congruence, b: Congruence) -> Congruence:
    match kind:
        case OpKind.ADD | OpKind.SUB:
            sign = 1 if kind is OpKind.ADD else -1
            return _normalize(math.gcd(a.modulus, b.modulus), a.remainder + sign * b.remainder)
        case OpKind.MUL:
            modulus = math.gcd(a.modulus * b.modulus, a.modulus * b.remainder, b.modulus * a.remainder)
            return _normalize(modulus, a.remainder * b.remainder)
        case OpKind.FLOORDIV if b.modulus == 0 and b.remainder > 0 and a.modulus % b.remainder == 0:
            return _normalize(a.modulus // b.remainder, a.remainder // b.remainder)
        case OpKind.MOD if b.modulus == 0 and b.remainder > 0:
            if a.modulus % b.remainder == 0:
                return Congruence(0, a.remainder % b.remainder)
            return _normalize(math.gcd(a.modulus, b.remainder), a.remainder)
        case OpKind.MIN | OpKind.MAX:
            return _join(a, b)
        case _:
            return ANY


def _join(a: Congruence, b: Congruence) -> Congruence:
    return _normalize(math.gcd(a.modulus, b.modulus, a.remainder - b.remainder), a.remainder)


def _normalize(modulus: int, remainder: int) -> Congruence:
    return Congruence(modulus, remainder % modulus if modulus else remainder)


@dataclass(frozen=True, slots=True)
class LaneStrideAnalysis:
    """Strides of expressions along a loop over `var` from 0 to count - 1."""

    var: str
    count: int
    known: Known
    written: frozenset[str]  # tensors that the loop writes

    def first_value(self, expr: Expr) -> Expr:
        return fold(substitute(expr, {self.var: num(0)}), {})

    def is_uniform(self, expr: Expr) -> bool:
        """Return whether the value is the same in every iteration."""
        return self.stride(expr) == 0

    def stride(self, expr: Expr) -> int | None:
        """Return the difference of the value between consecutive iterations, or None if it is not constant."""
        match expr:
            case AxisRef(name=name):
                return int(name == self.var)
            case Load(tensor=tensor) if tensor in self.written:
                return None
            case Cast(arg=arg) if expr.is_exact:
                step = self.stride(arg)
                return step if not step or not loads_of(arg) else None
            case Op(kind=kind, args=(x, y)) if kind in _ORDERS and not x.dtype.is_float and not loads_of(expr):
                # x < y, or not, is x - y < 0, or not; x <= y is x - y - 1 < 0
                strict = kind in (OpKind.LT, OpKind.GE)
                return 0 if self._keeps_sign(sub(sub(x, y), num(0 if strict else 1))) else None
            case Op(kind=kind, args=(x, y)) if not expr.dtype.is_float and not loads_of(expr):
                a, b = self.stride(x), self.stride(y)
                return None if a is None or b is None else self._combine_strides(kind, x, y, (a, b))
            case _:
                return 0 if all(self.stride(child) == 0 for child in children(expr)) else None

    def _combine_strides(self, kind: OpKind, x: Expr, y: Expr, steps: tuple[int, int]) -> int | None:
        a, b = steps
        if steps == (0, 0):
            return 0
        match kind, x, y:
            case OpKind.ADD, _, _:
                return a + b
            case OpKind.SUB, _, _:
                return a - b
            case OpKind.MUL, _, Const(value=int(by)):
                return a * by
            case OpKind.MUL, Const(value=int(by)), _:
                return b * by
            case ((OpKind.MIN | OpKind.MAX), _, _):
                return a if a == b else None
            case OpKind.FLOORDIV, _, Const(value=int(by)) if by > 0:
                return a // by if a % by == 0 else self._stride_within_multiple(x, a, by, 0)
            case OpKind.MOD, _, Const(value=int(by)) if by > 0:
                return 0 if a % by == 0 else self._stride_within_multiple(x, a, by, a)
            case _:
                return None

    def _keeps_sign(self, x: Expr) -> bool:
        """Return whether x < 0 holds in all iterations or in none."""
        step = self.stride(x)
        if not step:
            return step == 0
        start = congruence(self.first_value(x), self.known)
        end = start.remainder + step * (self.count - 1)
        if start.modulus == 0:
            return (start.remainder < 0) == (end < 0)
        return 0 <= end < start.modulus

    def _stride_within_multiple(self, x: Expr, step: int, divisor: int, result: int) -> int | None:
        """Return `result` if x stays between the same multiples of `divisor` in all iterations, else None."""
        start = congruence(self.first_value(x), self.known)
        period = math.gcd(start.modulus, divisor)
        end = start.remainder % period + step * (self.count - 1)
        return result if 0 <= end < period else None
