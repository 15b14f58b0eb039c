"""Sums of linear combinations of products → a sum of each product, and a map that adds them.

Σ -(a * b), Σ (a * b - c * d) and Σ (a - z) * b of integers are contractions in another spelling. Each product is summed
over the axes that it varies with. What does not vary along the sum is a factor of the result. Unsigned bytes become
signed ones and an offset, where matrix units multiply no others.

Σ (a - b)² of all pairs of rows is Σ a² + Σ b² - 2 Σ ab. In floats its error is relative to the sums of squares, not to
the distance: it is expanded where all sums are exact, or where the caller allows it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.constant_folding import holds
from roller_svc.analysis.index_ranges import range_of
from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.sum_of_products import product_of, restate
from roller_svc.analysis.tile_bounds import index_limits
from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.fusion.contraction import as_contraction
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, rewrite
from roller_svc.ir.index import conjunction, conjuncts, ref
from roller_svc.ir.program import Axis, Combine, StatementKind, TensorExpr, TensorType

Statements = tuple[TensorExpr, ...]
MAX_TERMS = 4  # of a sum: (a - u) * (b - v) has four
MIN_SPLIT_K = 16  # of several products: each further one takes a pass over the result, which shorter sums do not repay
INTEGER_BITS = 8  # of integers that matrix units multiply
DIGITS = {DType.FLOAT32: 1 << 24, DType.FLOAT64: 1 << 53}  # up to which a type has all integers
SIGN_BIT = 128  # of a byte: flipped, an unsigned byte is a signed one, less by as much


@dataclass(frozen=True, slots=True)
class _Term:
    """A product, added or subtracted, that is 0 where one of its conditions fails."""

    factors: tuple[Expr, ...]
    is_negative: bool = False
    has_sign: bool = False  # written around a factor or a product, perhaps twice
    conditions: tuple[Expr, ...] = ()
    count: int = 1  # of equal products
    is_of_square: bool = False  # of a difference
    restated: tuple[Expr, ...] = ()  # conditions of the whole product that its factors have, too

    def times(self, other: _Term) -> _Term:
        return _Term(
            (*self.factors, *other.factors),
            self.is_negative != other.is_negative,
            self.has_sign or other.has_sign,
            (*self.conditions, *other.conditions),
            self.count * other.count,
            self.is_of_square or other.is_of_square,
            (*self.restated, *other.restated),
        )

    def divided_by(self, other: _Term) -> _Term:
        product = product_of(self.factors)
        divisor = product_of(other.factors)
        return replace(self.times(other), factors=(Op(OpKind.DIV, (product, divisor), product.dtype),))

    @property
    def closed(self) -> _Term:
        """Return the product with its conditions in its own factors: multiplied by NaN, a product of 0 is NaN."""
        guarded = self.guarded(frozenset[str]().union(*map(axes_of, self.conditions)))
        return replace(guarded, restated=())

    @property
    def negated(self) -> _Term:
        return replace(self, is_negative=not self.is_negative, has_sign=True)

    def guarded(self, axes: frozenset[str]) -> _Term:
        """Return the product with its conditions that vary with some axes in its factors; the others stay.

        Each is in the factors that vary with all of it, or in their product.
        """
        factors, outer = self.factors, []
        restated = list(self.restated)
        for cond in self.conditions:
            if axes_of(cond).isdisjoint(axes):
                outer.append(cond)
                continue
            restated.append(cond)
            guarded = _guard(factors, cond)
            factors = guarded if guarded != factors else _guard((product_of(factors),), cond, in_all=True)
        return replace(self, factors=factors, conditions=tuple(outer), restated=tuple(restated))


@dataclass(frozen=True, slots=True)
class _Splitting:
    """The ways in which a sum may be split."""

    types: Mapping[str, TensorType]  # of all tensors that statements read
    is_signing: bool = False  # matrix units take int8 but not uint8: an unsigned factor a becomes (a - 128) + 128
    allow_expanded_squares: bool = False  # of differences, where their sums are rounded


def split_linear_sums(
    statements: Statements,
    types: Mapping[str, TensorType],
    *,
    has_signed_bytes_only: bool = False,
    allow_expanded_squares: bool = False,
) -> Statements:
    """Split sums of which a product is a contraction, but that are none as they are written.

    `types` are those of all tensors that statements read. With `has_signed_bytes_only`, matrix units take int8 but not
    uint8.
    """
    return tuple(
        each
        for s in statements
        for each in _split(s, _Splitting(types, has_signed_bytes_only and s.accumulator is DType.INT32, allow_expanded_squares))
    )


def has_rounded_squares(statement: TensorExpr, types: Mapping[str, TensorType]) -> bool:
    """Return whether only permission keeps a sum of squares of differences from being products; exact ones are split."""
    return bool(_split_squares(statement, _Splitting(types, allow_expanded_squares=True)))


def _split(statement: TensorExpr, how: _Splitting) -> Statements:
    if statement.kind is not StatementKind.REDUCE or statement.combine is not Combine.SUM:
        return (statement,)
    dtype = statement.accumulator
    if statement.body.dtype.compute is not dtype:  # products wrap, or are rounded, before they are added
        return (statement,)
    body = rewrite(statement.body, _without_signs)
    if body is not statement.body:
        statement = replace(statement, body=body)
    reduced = frozenset(axis.name for axis in statement.reduced)
    all_axes = frozenset(statement.extents)
    if form := _split_squares(statement, how):
        return tuple(each for s in form for each in _split(s, how))
    expansion, signed = _Expansion(dtype, reduced), []
    if how.is_signing:
        signed = [t.guarded(all_axes) for t in replace(expansion, is_signing=True).terms(statement.body)]
    terms = expansion.terms(statement.body)
    plain = [term.guarded(all_axes) for term in terms]
    hoisted = [term.guarded(reduced) for term in terms]
    if any(term.conditions for term in hoisted) and len(hoisted) <= MAX_TERMS:
        form = _split_terms(statement, hoisted, how.types)
        if form:
            return tuple(each for s in form for each in _split(s, how))
    if len(plain) == 1 and signed in ([], plain) and as_contraction(statement) is not None:
        (term,) = plain
        has_own_factors = bool(_split_factors(term, statement)[1] or term.conditions)
        if not term.has_sign and not has_own_factors:
            return (statement,)
        product = product_of([_convert(factor, dtype) for factor in term.factors])
        if not term.is_negative and not has_own_factors and _is_readable(product, statement, how.types):
            return (replace(statement, body=_restate(product, term, statement)),)
    forms = (_split_terms(statement, terms, how.types) for terms in (signed, plain) if 0 < len(terms) <= MAX_TERMS)
    return next((form for form in forms if form), (statement,))


def _split_squares(statement: TensorExpr, how: _Splitting) -> Statements:
    """Return the sums of squares of differences as sums of products; none if there is no such square, or it must stay."""
    if statement.combine is not Combine.SUM:
        return ()
    reduced = frozenset(axis.name for axis in statement.reduced)
    terms = _Expansion(statement.accumulator, reduced, expands_squares=True).terms(statement.body)
    if not any(term.is_of_square for term in terms) or not (how.allow_expanded_squares or _is_exact(terms, statement)):
        return ()
    terms = _join_partial([term.guarded(reduced) for term in terms], statement)
    return _split_terms(statement, terms, how.types) if len(terms) <= MAX_TERMS else ()


def _without_signs(expr: Expr) -> Expr:
    """Return -(-x) as x, x + (-y) as x - y, x - (-y) as x + y: the same values, in floats too."""
    match expr:
        case Op(kind=OpKind.NEG, args=(Op(kind=OpKind.NEG, args=(arg,), dtype=dtype),)) if dtype is expr.dtype:
            return arg
        case Op(kind=OpKind.ADD, args=(first, Op(kind=OpKind.NEG, args=(arg,), dtype=dtype))) if dtype is expr.dtype:
            return replace(expr, kind=OpKind.SUB, args=(first, arg))
        case Op(kind=OpKind.ADD, args=(Op(kind=OpKind.NEG, args=(arg,), dtype=dtype), second)) if dtype is expr.dtype:
            return replace(expr, kind=OpKind.SUB, args=(second, arg))
        case Op(kind=OpKind.SUB, args=(first, Op(kind=OpKind.NEG, args=(arg,), dtype=dtype))) if dtype is expr.dtype:
            return replace(expr, kind=OpKind.ADD, args=(first, arg))
        case _:
            return expr


def _split_terms(statement: TensorExpr, terms: list[_Term], types: Mapping[str, TensorType]) -> Statements:
    """Return the sums of terms and the map that adds them; none unless that is better than the statement."""
    dtype = statement.accumulator
    sums = [_sum(statement, term, f"{statement.output}.term{i}") for i, term in enumerate(terms)]
    if not _is_better(statement, terms, sums) or not all(_is_readable(each.body, statement, types) for each in sums if each):
        return ()
    values = [_value(statement, term, each) for term, each in zip(terms, sums, strict=True)]
    axes = statement.spatial
    total = _add(values, [term.is_negative for term in terms], dtype)
    if dtype.is_float and any(term.is_of_square for term in terms):
        total = _clamp(total, _sign(statement.body), dtype)
    combined = replace(statement, kind=StatementKind.MAP, axes=axes, body=total, combine=None)
    # the largest last: its kernel computes the result
    return (*sorted((each for each in sums if each is not None), key=lambda each: each.points), combined)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """Expansion of an expression to a sum of products, of a type, that is added over `reduced` axes."""

    dtype: DType
    reduced: frozenset[str]
    is_signing: bool = False
    expands_squares: bool = False  # of differences
    expands_factors: bool = False  # of floats that are sums

    def terms(self, expr: Expr) -> list[_Term]:
        """Return the products that an expression adds, with their conditions apart."""
        dtype = self.dtype
        if expr.dtype.compute is not dtype:
            return [_Term((expr,))]
        match expr:
            case Cast(arg=arg) if arg.dtype.compute is dtype and (expr.implicit or expr.dtype is dtype):
                terms = self.terms(arg)
                is_stated = dtype.is_float and not expr.implicit and terms == [_Term((arg,))]
                return [_Term((expr,))] if is_stated else terms  # products with it are of the stated type
            case Op(kind=OpKind.NEG, args=(arg,)):
                return [term.negated for term in self.terms(arg)]
            case Op(kind=OpKind.ADD, args=(first, second)):
                return [*self.terms(first), *self.terms(second)]
            case Op(kind=OpKind.SUB, args=(first, second)):
                return [*self.terms(first), *(term.negated for term in self.terms(second))]
            case Op(kind=OpKind.SQUARE | OpKind.MUL | OpKind.POW) if square := self._square(expr):
                return square
            case Op(kind=OpKind.MUL):
                return self._product(expr)
            case Op(kind=OpKind.DIV, args=(first, second)):
                parts = [self.terms(first), self.terms(second)]
                if len(parts[1]) > 1 or (len(parts[0]) > 1 and not (dtype.is_float and self._may_expand(parts))):
                    return self._factor(expr)
                return [term.closed.divided_by(parts[1][0].closed) for term in parts[0]]
            case Select(otherwise=Const(value=0)):
                return self._conditional(expr)
            case _:
                return self._factor(expr)

    def _conditional(self, expr: Select) -> list[_Term]:
        """Return the terms of an expression that is 0 where a condition fails."""
        cond, terms = expr.cond, self.terms(expr.then)
        if expr.restated:
            return [replace(term, restated=(*term.restated, cond)) for term in terms]
        if len(terms) == 1 or (not self.is_signing and axes_of(cond).isdisjoint(self.reduced)):
            return [replace(term, conditions=(*term.conditions, cond)) for term in terms]
        guarded = [_guard(term.factors, cond) for term in terms]
        if any(new == term.factors for new, term in zip(guarded, terms, strict=True)):
            return self._factor(expr)
        return [replace(term, factors=new) for new, term in zip(guarded, terms, strict=True)]

    def _product(self, expr: Op) -> list[_Term]:
        """Return the products of the terms of two factors."""
        parts = [self.terms(arg) for arg in expr.args]
        if self.dtype.is_float:  # a sum is a factor: expanded, it would be rounded in other places
            may_expand = self._may_expand(parts)
            parts = [
                [term.closed for term in each] if len(each) == 1 or may_expand else [_Term((arg,))]
                for each, arg in zip(parts, expr.args, strict=True)
            ]
        elif self.is_signing:
            parts = [self._join_offsets(each) for each in parts]
        if len(parts[0]) * len(parts[1]) > MAX_TERMS:
            return [_Term((expr,))]
        return [one.times(other) for one, other in itertools.product(*parts)]

    def _may_expand(self, parts: Sequence[Sequence[_Term]]) -> bool:
        """Return whether a product of sums of floats becomes a sum: in a square that is expanded, or around one."""
        return self.expands_factors or any(term.is_of_square for part in parts for term in part)

    def _square(self, expr: Op) -> list[_Term]:
        """Return the square of a sum of two parts, neither of which has all axes of the other; [] for others."""
        base = squared(expr)
        if base is None or not self.expands_squares:
            return []
        parts = _join_by_axes(replace(self, expands_factors=True).terms(base), self.dtype)
        if len(parts) != 2:
            return []
        one, other = parts
        products = (one.times(one), other.times(other), replace(one.times(other), count=2))
        return [replace(each, is_of_square=True) for each in products]

    def _factor(self, expr: Expr) -> list[_Term]:
        """Return an expression as it is, or an unsigned byte as a signed one and an offset."""
        varies = not axes_of(expr).isdisjoint(self.reduced)
        if not self.is_signing or not varies or value_dtype(expr) is not DType.UINT8:
            return [_Term((expr,))]
        byte = expr if expr.dtype is DType.UINT8 else Cast(expr, DType.UINT8)
        signed = Cast(Op(OpKind.BITXOR, (byte, Const(SIGN_BIT, DType.UINT8)), DType.UINT8), DType.INT8)
        return [_Term((signed,)), _Term((Const(SIGN_BIT, self.dtype),))]

    def _join_offsets(self, terms: list[_Term]) -> list[_Term]:
        """Join the terms of a factor that do not vary along the sum to one: 128 - z."""
        if any(term.conditions for term in terms):
            return terms
        varying = [term for term in terms if any(not axes_of(factor).isdisjoint(self.reduced) for factor in term.factors)]
        offsets = [term for term in terms if term not in varying]
        numbers = [term for term in offsets if all(isinstance(factor, Const) for factor in term.factors)]
        number = sum(_number(term) for term in numbers)
        if not holds(number, self.dtype):
            return terms
        offsets = [term for term in offsets if term not in numbers] + ([_Term((Const(number, self.dtype),))] if number else [])
        if not offsets:
            return varying
        values = [product_of([_convert(factor, self.dtype) for factor in term.factors]) for term in offsets]
        return [*varying, _Term((_add(values, [term.is_negative for term in offsets], self.dtype),))]


def squared(expr: Expr) -> Expr | None:
    """Return x of x², x * x, x ** 2 and |x|²; None for others."""
    match expr:
        case Op(kind=OpKind.SQUARE, args=(arg,)) | Op(kind=OpKind.POW, args=(arg, Const(value=2))):
            pass
        case Op(kind=OpKind.MUL, args=(arg, other)) if arg == other:
            pass
        case _:
            return None
    return arg.args[0] if isinstance(arg, Op) and arg.kind is OpKind.ABS else arg


def _axes_of(term: _Term) -> frozenset[str]:
    return frozenset[str]().union(*map(axes_of, (*term.factors, *term.conditions)))


def _join_by_axes(terms: list[_Term], dtype: DType) -> list[_Term]:
    """Join each term to one that varies with all of its axes."""
    axes = [_axes_of(term) for term in terms]
    widest = [own for own in dict.fromkeys(axes) if not any(own < other for other in axes)]
    places = [next(i for i, each in enumerate(widest) if own <= each) for own in axes]
    return [_join([term for term, at in zip(terms, places, strict=True) if at == i], dtype) for i in range(len(widest))]


def _join_partial(terms: list[_Term], statement: TensorExpr) -> list[_Term]:
    """Join terms that vary with the same part of the results' axes: one sum adds them."""
    results = frozenset(axis.name for axis in statement.spatial)
    groups: dict[object, list[_Term]] = {}
    for number, term in enumerate(terms):
        axes = _axes_of(term)
        groups.setdefault(number if results <= axes or term.count > 1 else axes, []).append(term)
    return [_join(group, statement.accumulator) for group in groups.values()]


def _join(terms: list[_Term], dtype: DType) -> _Term:
    """Return the sum of terms as one factor; of one term, the term."""
    if len(terms) == 1:
        return terms[0]
    values = [product_of([_convert(factor, dtype) for factor in term.closed.factors]) for term in terms]
    total = _add(values, [term.is_negative for term in terms], dtype)
    return _Term((total,), is_of_square=any(term.is_of_square for term in terms))


def _is_exact(terms: list[_Term], statement: TensorExpr) -> bool:
    """Return whether the sums of terms are integers that their type has, in any order, and so is their total.

    The positive terms are added before the negative ones are subtracted.
    """
    dtype = statement.accumulator
    if not dtype.is_float:
        return True  # modulo a power of two
    length = math.prod(axis.extent for axis in statement.reduced)
    greatest = [0, 0]
    for term in terms:
        types = [value_dtype(factor) for factor in term.factors]
        if any(each is None or each.is_float for each in types):
            return False
        sizes = (max(map(abs, each.integer_range)) for each in types if each is not None)
        greatest[term.is_negative] += term.count * length * math.prod(sizes)
    return max(greatest) <= DIGITS.get(dtype, 0)


def _sign(expr: Expr) -> int:
    """Return 1 of an expression that is never negative, -1 of one that is never positive, 0 of others.

    Sums of NaN and infinities are none of them in any case.
    """
    match expr:
        case Const(value=value):
            return (value > 0) - (value < 0)
        case Cast(arg=arg) if arg.dtype.is_float:
            return _sign(arg)
        case Op(kind=OpKind.NEG, args=(arg,)):
            return -_sign(arg)
        case Op(kind=OpKind.MUL | OpKind.DIV, args=(first, second)):
            return 1 if squared(expr) is not None else _sign(first) * _sign(second)
        case Op(kind=OpKind.ADD, args=(first, second)):
            return _sign(first) if _sign(first) == _sign(second) else 0
        case Op(kind=OpKind.SUB, args=(first, second)):
            return _sign(first) if _sign(first) == -_sign(second) else 0
        case Op(kind=OpKind.ABS | OpKind.RELU | OpKind.EXP | OpKind.EXP2 | OpKind.SQRT):
            return 1
        case Op():
            return int(squared(expr) is not None)
        case Select(then=then, otherwise=otherwise):
            signs = {_sign(each) for each in (then, otherwise) if not (isinstance(each, Const) and each.value == 0)}
            return signs.pop() if len(signs) == 1 else 0
        case _:
            return 0


def _clamp(total: Expr, sign: int, dtype: DType) -> Expr:
    """Return a value without the sign that only rounding can give it."""
    kinds = {1: OpKind.MAX, -1: OpKind.MIN}
    return Op(kinds[sign], (total, Const(0.0, dtype)), dtype) if sign in kinds else total


def _number(term: _Term) -> int:
    value = math.prod(int(factor.value) for factor in term.factors if isinstance(factor, Const))
    return -value if term.is_negative else value


def _guard(factors: tuple[Expr, ...], cond: Expr, *, in_all: bool = False) -> tuple[Expr, ...]:
    """Return factors that are 0 where a condition fails: those that vary with all of it, or all."""
    used = axes_of(cond)
    zeros = [Const(0.0 if factor.dtype.is_float else 0, factor.dtype) for factor in factors]
    return tuple(
        Select(cond, factor, zero, factor.dtype) if in_all or used <= axes_of(factor) else factor
        for factor, zero in zip(factors, zeros, strict=True)
    )


def _is_readable(expr: Expr, statement: TensorExpr, types: Mapping[str, TensorType]) -> bool:
    """Return whether no load of an expression needs a condition around it to be in bounds."""
    ranges = {axis.name: (0, axis.extent - 1) for axis in statement.axes}

    def is_inside(index: Expr, size: int) -> bool:
        known = range_of(index, ranges)
        return known is not None and known[0] >= 0 and known[1] < size

    return all(
        all(is_inside(index, size) for index, size in zip(load.index, types[load.tensor].shape, strict=True))
        for load in unconditional_loads(expr, in_indices=True)
    )


def _is_better(statement: TensorExpr, terms: list[_Term], sums: list[TensorExpr | None]) -> bool:
    """Return whether a sum of a product is a contraction: for integers, one whose operands matrix units take."""
    contractions = [c for each in sums if each is not None and (c := as_contraction(each)) is not None]
    if statement.accumulator.is_float:
        is_long = math.prod(axis.extent for axis in statement.reduced) >= MIN_SPLIT_K
        is_other = as_contraction(statement) is None or any(term.has_sign or term.conditions for term in terms)
        return bool(contractions) and is_other and (is_long or len(sums) == 1)
    full = [each for each in sums if each is not None and len(each.spatial) == len(statement.spatial)]
    return len(full) == len(contractions) > 0 and all(
        (stored := value_dtype(operand)) is not None and stored.bits <= INTEGER_BITS for c in contractions for operand in (c.a, c.b)
    )


def _split_factors(term: _Term, statement: TensorExpr) -> tuple[list[Expr], list[Expr]]:
    """Return the factors that are summed, and those of the sum: of integers, those that do not vary along it.

    A factor of floats stays where it is: it may keep the products in the range of their type.
    """
    reduced = {axis.name for axis in statement.reduced}
    varying = [factor for factor in term.factors if not axes_of(factor).isdisjoint(reduced)]
    if varying and statement.accumulator.is_float:
        return list(term.factors), []
    return varying, [factor for factor in term.factors if factor not in varying]


def _sum(statement: TensorExpr, term: _Term, name: str) -> TensorExpr | None:
    """Return the sum of a term's factors, over the axes that they vary with; None if none is summed."""
    inner, _ = _split_factors(term, statement)
    if not inner:
        return None
    axes = _varying_axes(statement, inner)
    dtype = statement.accumulator
    return replace(
        statement,
        output=name,
        name=name,
        type=TensorType(dtype, tuple(axis.extent for axis in axes)),
        axes=(*axes, *statement.reduced),
        index=tuple(ref(axis.name) for axis in axes),
        body=_restate(product_of([_convert(factor, dtype) for factor in inner]), term, statement),
    )


def _restate(product: Expr, term: _Term, statement: TensorExpr) -> Expr:
    """Return a term's product with the conditions that bound a single reduced axis, which kernels may leave out."""
    reduced = [axis.name for axis in statement.reduced if axis.extent > 1]
    if len(reduced) != 1:
        return product
    parts = dict.fromkeys(part for cond in term.restated for part in conjuncts(cond))
    return restate(product, conjunction(part for part in parts if any(index_limits(part, reduced[0])[:2])))


def _varying_axes(statement: TensorExpr, factors: list[Expr]) -> tuple[Axis, ...]:
    """Return the spatial axes that factors vary with, at least one."""
    names = frozenset[str]().union(*(axes_of(factor) for factor in factors))
    return tuple(axis for axis in statement.spatial if axis.name in names) or statement.spatial[-1:]


def _value(statement: TensorExpr, term: _Term, total: TensorExpr | None) -> Expr:
    """Return the value of a term's sum at a point of the result."""
    dtype = statement.accumulator
    outer = [_convert(factor, dtype) for factor in _split_factors(term, statement)[1]]
    if total is None:
        count = math.prod(axis.extent for axis in statement.reduced)
        value = product_of([*outer, Const(count, dtype)])
    else:
        value = product_of([Load(total.output, total.index, dtype), *outer])
    if term.count > 1:
        value = product_of([Const(float(term.count) if dtype.is_float else term.count, dtype), value])
    for cond in term.conditions:
        value = Select(cond, value, Const(0.0 if dtype.is_float else 0, dtype), dtype)
    return value


def _add(values: list[Expr], negative: list[bool], dtype: DType) -> Expr:
    """Return the sum of values, the negative ones subtracted."""
    order = sorted(range(len(values)), key=lambda i: negative[i])
    first, *others = order
    total = Op(OpKind.NEG, (values[first],), dtype) if negative[first] else values[first]
    for i in others:
        total = Op(OpKind.SUB if negative[i] else OpKind.ADD, (total, values[i]), dtype)
    return total


def _convert(factor: Expr, dtype: DType) -> Expr:
    return factor if factor.dtype is dtype else Cast(factor, dtype, implicit=True)
