"""Scans: reductions of all elements up to each one along an axis, `y[i, j] +=! x[i, o].when([o <= j], 0)`.

Linear recurrences, `h[t] = a[t] * h[t - 1] + b[t]`, are scans of linear steps (Blelloch).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.analysis.constant_folding import fold_casts
from roller_svc.analysis.linear import linear
from roller_svc.analysis.operand import can_represent_all
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, Select, axes_of, convert, iter_subexpressions, substitute
from roller_svc.ir.index import conjuncts, logical_and, lt, num
from roller_svc.ir.program import COMBINE_OPS, Axis, Combine, StatementKind, TensorExpr, identity

LEAST_GATE = 2.0**-1022  # of a product that underflows: the smallest normal float64

# comparison → (sign of left - right, constant) so that it holds where sign * (left - right) + constant <= 0
_ORDERS = {OpKind.LE: (1, 0), OpKind.LT: (1, 1), OpKind.GE: (-1, 0), OpKind.GT: (-1, 1)}
_NEGATED = {OpKind.LE: OpKind.GT, OpKind.LT: OpKind.GE, OpKind.GE: OpKind.LT, OpKind.GT: OpKind.LE}


@dataclass(frozen=True, slots=True)
class Scan:
    """A statement whose element `j` along `axis` combines `value` of the elements up to `j`, or from `j` on.

    The reduced axis has become `axis` in `value`.
    """

    statement: TensorExpr
    axis: Axis
    value: Expr
    combine: Combine
    neutral: Const  # in the accumulator's type
    is_exclusive: bool  # without the element itself
    is_reversed: bool  # from the last element on

    @property
    def points(self) -> TensorExpr:
        """Return the map that one pass computes: the value at each point, which is then combined with those before."""
        return replace(self.statement, kind=StatementKind.MAP, axes=self.statement.spatial, body=self.value)

    @property
    def step(self) -> LinearStep | None:
        """Return the step of a linear recurrence; None for other scans."""
        return linear_step(self.value) if self.combine is Combine.RECURRENCE else None


@dataclass(frozen=True, slots=True)
class LinearStep:
    """A step of a linear recurrence, `h = gate * h + value`, which begins with `initial`.

    Where `may_reset`, a gate of zero forgets the state, even if that is infinite or NaN.
    """

    gate: Expr
    initial: Expr
    value: Expr
    may_reset: bool

    def applied(self, state: Expr, gate: Expr, value: Expr, *, is_composed: bool = False) -> Expr:
        """Return the state after a step, or after several that are composed.

        The value of composed steps is the state that they make of a state of zero. So it is the result there, and a
        product of gates that overflowed is not multiplied by zero.
        """
        dtype = value.dtype
        after: Expr = convert(_linear(gate, convert(state, gate.dtype), convert(value, gate.dtype)), dtype)
        if is_composed and dtype.is_float:
            after = Select(_differs(state), after, value, dtype)
        return Select(_differs(gate), after, value, dtype) if self.may_reset else after

    @property
    def has_guarded_products(self) -> bool:
        """Return whether a product of gates that underflows must differ from a gate that resets."""
        return self.may_reset and self.gate.dtype.is_float and not _is_sign(self.gate)

    def product(self, gate: Expr, earlier: Expr) -> Expr:
        """Return the gate of a step, or of composed steps, after others.

        Where a gate may reset, only a gate of zero makes the product zero. An underflow leaves a gate that no finite
        state survives, and that later gates do not increase.
        """
        dtype = gate.dtype
        product = Op(OpKind.MUL, (gate, earlier), dtype)
        if not self.has_guarded_products:
            return product
        least, zero = Const(LEAST_GATE, dtype), Const(0.0, dtype)
        after = Select(_is_least(gate), gate, Select(_is_least(product), least, product, dtype), dtype)
        return Select(_is_least(earlier), Select(_differs(gate), earlier, zero, dtype), after, dtype)


def gate_product_dtype(dtype: DType) -> DType:
    """Return the type of products of gates of a recurrence whose states have a type (ADR 0090)."""
    return DType.FLOAT64 if dtype.is_float else dtype


def _is_sign(gate: Expr) -> bool:
    """Return whether a gate is 0, 1 or -1, as those of segmented sums are. A product of such gates is exact."""
    match gate:
        case Cast(arg=arg):
            return _is_sign(arg)
        case Select(then=then, otherwise=otherwise):
            return _is_sign(then) and _is_sign(otherwise)
        case _:
            return isinstance(gate, Const) and gate.value in (0, 1, -1)


def _linear(gate: Expr, state: Expr, value: Expr) -> Expr:
    return Op(OpKind.ADD, (Op(OpKind.MUL, (gate, state), value.dtype), value), value.dtype)


def _differs(expr: Expr) -> Expr:
    """Return whether a value is not zero."""
    return Op(OpKind.NE, (expr, Const(0.0 if expr.dtype.is_float else 0, expr.dtype)), DType.INT8)


def _is_least(gate: Expr) -> Expr:
    """Return whether a gate is zero, or what an underflow leaves."""
    return Op(OpKind.LE, (Op(OpKind.ABS, (gate,), gate.dtype), Const(LEAST_GATE, gate.dtype)), DType.INT8)


def linear_step(body: Expr) -> LinearStep:
    """Return the step that a recurrence's body at a point states."""
    casts = list[Cast]()
    while isinstance(body, Cast):
        casts.append(body)
        body = body.arg
    if not isinstance(body, Op) or body.kind is not OpKind.FMA:
        raise InvariantError("the body of a recurrence is not a linear step")
    gate, initial, value = body.args
    resets = any(
        isinstance(node, Select) and any(isinstance(branch, Const) and branch.value == 0 for branch in (node.then, node.otherwise))
        for node in iter_subexpressions(gate)
    )
    for cast in reversed(casts):
        gate, initial, value = (replace(cast, arg=part) for part in (gate, initial, value))
    return LinearStep(gate, initial, value, may_reset=resets)


def recurrence_body(gate: Expr, initial: Expr, value: Expr, along: tuple[str, str], *, is_reversed: bool) -> Expr:
    """Return the body of the reduction that a linear recurrence is.

    Args:
        gate: the factor of the state at a point of the reduced axis.
        initial: the state before the first step.
        value: what a step adds.
        along: names of the reduced axis and of the result's axis.
        is_reversed: whether the last step comes first.
    """
    order = OpKind.GE if is_reversed else OpKind.LE
    joins = Op(order, (AxisRef(along[0]), AxisRef(along[1])), DType.INT8)
    step = Op(OpKind.FMA, (gate, initial, value), value.dtype)
    return Select(joins, step, identity(Combine.RECURRENCE, value.dtype), value.dtype)


def match_scan(statement: TensorExpr) -> Scan | None:
    """Return the scan that a reduction is, or None."""
    combine = statement.combine
    if statement.kind is not StatementKind.REDUCE or combine is None or len(statement.reduced) != 1:
        return None
    if combine not in COMBINE_OPS and combine is not Combine.RECURRENCE:
        return None
    body, casts = statement.body, list[Cast]()
    while isinstance(body, Cast):
        casts.append(body)
        body = body.arg
    if not isinstance(body, Select):
        return None
    body = replace(body, then=fold_casts(body.then), otherwise=fold_casts(body.otherwise))
    if isinstance(body.then, Const) and isinstance(body.cond, Op) and body.cond.kind in _NEGATED:
        negated = replace(body.cond, kind=_NEGATED[body.cond.kind])
        body = replace(body, cond=negated, then=body.otherwise, otherwise=body.then)
    reduced = statement.reduced[0]
    for axis in statement.spatial:
        order = _order_of(body.cond, reduced, axis) if axis.extent == reduced.extent else None
        if order is not None:
            break
    else:
        return None
    neutral = body.otherwise
    if not isinstance(neutral, Const) or neutral != identity(combine, neutral.dtype):
        return None
    if combine in (Combine.MAX, Combine.MIN) and not all(can_represent_all(c.dtype, c.arg.dtype) for c in casts):
        return None  # the neutral element may become another value
    rest = order.rest
    if order.is_exclusive:  # no result joins the last element, which may be out of range
        here = AxisRef(reduced.name)
        rest = logical_and(rest, lt(num(0), here) if order.is_reversed else lt(here, num(reduced.extent - 1)))
    value = body.then if rest is None else Select(rest, body.then, neutral, body.dtype)
    for cast in reversed(casts):
        value = replace(cast, arg=value)
    if axis.name in axes_of(value) or sum(index == AxisRef(axis.name) for index in statement.index) != 1:
        return None
    value = substitute(value, {reduced.name: AxisRef(axis.name)})
    dtype = statement.accumulator
    start = Const(float(neutral.value) if dtype.is_float else int(neutral.value), dtype)
    return Scan(statement, axis, value, combine, start, order.is_exclusive, order.is_reversed)


@dataclass(frozen=True, slots=True)
class _Order:
    """Which elements a guard joins, and what else it demands."""

    is_exclusive: bool
    is_reversed: bool
    rest: Expr | None


def _order_of(cond: Expr, reduced: Axis, axis: Axis) -> _Order | None:
    """Return the order in which a guard joins elements of `reduced` to one of `axis`, or None."""
    found: _Order | None = None
    rest: Expr | None = None
    for part in conjuncts(cond):
        order = _compared(part, reduced, axis) if found is None else None
        if order is not None:
            found = order
        elif axis.name in axes_of(part):
            return None
        else:
            rest = logical_and(rest, part)
    return None if found is None else replace(found, rest=rest)


def _compared(part: Expr, reduced: Axis, axis: Axis) -> _Order | None:
    """Return the order that a comparison of the two axes states: reduced <= axis, <, >= or >."""
    if not isinstance(part, Op) or part.kind not in _ORDERS:
        return None
    sign, constant = _ORDERS[part.kind]
    left, right = part.args
    terms = linear(left)
    for term, c in linear(right).items():
        terms[term] = terms.get(term, 0) - c
    terms = {term: sign * c for term, c in terms.items() if c}
    constant += terms.pop(None, 0)
    other, here = AxisRef(reduced.name), AxisRef(axis.name)
    if constant not in (0, 1) or terms not in ({other: 1, here: -1}, {other: -1, here: 1}):
        return None
    return _Order(constant == 1, terms[other] == -1, None)
