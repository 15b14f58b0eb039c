"""Recurrences, `h[t] = a[t] * h[t - 1].when([t > 0], initial) + b[t]`: maps that read their own result.

The value is linear in the state before. So it is a gate times the state and a value, which are scans of linear steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roller_svc.analysis.constant_folding import holds
from roller_svc.analysis.linear import linear
from roller_svc.errors import InvariantError, require
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of
from roller_svc.ir.index import conjuncts
from roller_svc.ir.program import Axis


@dataclass(frozen=True, slots=True)
class Recurrence:
    """`state = gate * state + value` at each point along an axis, from `initial` on."""

    axis: Axis
    gate: Expr
    initial: Expr
    value: Expr
    is_reversed: bool


@dataclass(frozen=True, slots=True)
class NotLinear:
    """Why an expression states another thing than a step of a linear recurrence."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Form:
    """`gate * state + value`; `gate` is None where the state does not occur."""

    gate: Expr | None
    value: Expr

    @property
    def state_gate(self) -> Expr:
        if self.gate is None:
            raise InvariantError("an expression of the state has a gate")
        return self.gate


class _Refused(Exception):
    """An expression is not linear in the state."""


def find_recurrence(body: Expr, own: str, spatial: Mapping[str, Axis], index: tuple[Expr, ...]) -> Recurrence | NotLinear:
    """Return the recurrence that a map's body states.

    Args:
        body: the value of the map.
        own: the tensor that the map writes.
        spatial: the axes of its left side.
        index: the left side.
    """
    states = [load for load in loads_of(body) if load.tensor == own]
    found = {_neighbour(load, index) for load in states}
    if len(found) != 1 or None in found:
        return NotLinear("a recurrence reads the element before along one axis, or behind, with a guard")
    (place,) = found
    name, step = require(place, "a neighbour")
    linear_form = _Linear(own, spatial[name], is_reversed=step > 0)
    try:
        form = linear_form.of(body)
    except _Refused as refused:
        return NotLinear(str(refused))
    initial = _converted(linear_form.initial or zero(body.dtype), body.dtype)
    return Recurrence(spatial[name], form.state_gate, initial, form.value, step > 0)


def _neighbour(load: Load, index: tuple[Expr, ...]) -> tuple[str, int] | None:
    """Return the axis along which a load reads the element before (-1) or behind (1), or None for other elements."""
    found: list[tuple[str, int]] = []
    for own, here in zip(load.index, index, strict=True):
        if own == here:
            continue
        terms = linear(own)
        step = terms.pop(None, 0)
        if not isinstance(here, AxisRef) or terms != {here: 1} or step not in (-1, 1):
            return None
        found.append((here.name, step))
    return found[0] if len(found) == 1 else None


def zero(dtype: DType) -> Const:
    return Const(0.0 if dtype.is_float else 0, dtype)


def _converted(expr: Expr, dtype: DType) -> Expr:
    if isinstance(expr, Const):
        return Const(float(expr.value) if dtype.is_float else int(expr.value), dtype)
    return expr if expr.dtype is dtype else Cast(expr, dtype, implicit=True)


def _one(dtype: DType) -> Const:
    return Const(1.0 if dtype.is_float else 1, dtype)


def _is_const(expr: Expr, value: int) -> bool:
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Const) and expr.value == value


def _folded(value: float | int, dtype: DType) -> Const | None:
    """Return the constant that an operation on constants gives, or None for an overflow of floats. Integers wrap."""
    if dtype.is_float:
        return Const(value, dtype) if holds(value, dtype) else None
    low, high = dtype.integer_range
    return Const(low + (int(value) - low) % (high - low + 1), dtype)


def _minus_one(dtype: DType) -> Const:
    return Const(-1.0, dtype) if dtype.is_float else require(_folded(-1, dtype), "an integer")


def _product(a: Expr, b: Expr, dtype: DType) -> Expr:
    """Return the product. A factor of zero that stands for no value at all stays zero."""
    if _is_const(a, 1):
        return b
    if _is_const(b, 1):
        return a
    if isinstance(a, Const) and isinstance(b, Const) and (product := _folded(a.value * b.value, dtype)) is not None:
        return product
    for factor, other in ((a, b), (b, a)):
        if factor == _minus_one(dtype):
            return Op(OpKind.NEG, (other,), dtype)
        if isinstance(factor, Select) and any(_is_const(x, 0) for x in (factor.then, factor.otherwise)):
            then, otherwise = (x if _is_const(x, 0) else _product(x, other, dtype) for x in (factor.then, factor.otherwise))
            return _choice(factor.cond, then, otherwise, dtype)
    return Op(OpKind.MUL, (a, b), dtype)


def _sum(a: Expr, b: Expr, dtype: DType) -> Expr:
    if isinstance(a, Const) and isinstance(b, Const) and (total := _folded(a.value + b.value, dtype)) is not None:
        return total
    if _is_const(a, 0):
        return b
    return a if _is_const(b, 0) else Op(OpKind.ADD, (a, b), dtype)


def _choice(cond: Expr, then: Expr, otherwise: Expr, dtype: DType) -> Expr:
    """Return the value of one branch or the other, in the form in which a program states it."""
    if then == otherwise:
        return then
    branches = [then, otherwise]
    for here, other in ((0, 1), (1, 0)):
        a, b = branches[here], branches[other]
        if isinstance(a, Cast) and a.implicit and (_is_const(b, 0) or _is_const(b, 1)):
            branches = [_converted(x.arg if x is a else _plain(x), a.arg.dtype) for x in branches]
            return _converted(Select(cond, branches[0], branches[1], a.arg.dtype), dtype)
    default = DType.FLOAT32 if dtype.is_float else DType.INT32
    if isinstance(then, Const) and isinstance(otherwise, Const) and dtype is not default:
        then = Cast(_converted(then, default), dtype)  # a literal with a type
    return Select(cond, then, otherwise, dtype)


def _plain(expr: Expr) -> Expr:
    """Return a constant without the casts around it."""
    while isinstance(expr, Cast):
        expr = expr.arg
    return expr


class _Linear:
    """Split expressions into a multiple of the state and the rest. `initial` is the state before the first step."""

    def __init__(self, own: str, axis: Axis, *, is_reversed: bool) -> None:
        self.own = own
        self.axis = axis
        self.is_reversed = is_reversed
        self.initial: Expr | None = None

    def of(self, expr: Expr) -> _Form:
        if not any(load.tensor == self.own for load in loads_of(expr)):
            return _Form(None, expr)
        match expr:
            case Load():
                return _Form(_one(expr.dtype), zero(expr.dtype))
            case Cast(arg=arg, dtype=dtype) if expr.implicit or (
                dtype.is_float and arg.dtype.is_float and dtype.compute is arg.dtype.compute and not dtype.is_narrow_float
            ):
                if dtype.is_float is not arg.dtype.is_float or dtype.bits < arg.dtype.bits:
                    raise _Refused("the state is rounded in each step")
                form = self.of(arg)
                gate = None if form.gate is None else _converted(form.gate, dtype)
                return _Form(gate, _converted(form.value, dtype))
            case Select():
                return self._select(expr)
            case Op(args=args, dtype=dtype):
                return self._op(expr.kind, args, dtype)
            case _:
                raise _Refused("the state is rounded in each step")

    def _op(self, kind: OpKind, args: tuple[Expr, ...], dtype: DType) -> _Form:
        if kind is OpKind.FMA:
            return self.of(Op(OpKind.ADD, (Op(OpKind.MUL, args[:2], dtype), args[2]), dtype))
        if kind not in (OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG, OpKind.DIV):
            raise _Refused(f"the state is the operand of `{kind.value}`: a recurrence must be linear in it")
        parts = [self.of(arg) for arg in args]
        if kind is OpKind.NEG or (kind is OpKind.SUB and parts[0].gate is None):
            minus = _minus_one(dtype)
            last = parts[-1]
            gate = _product(minus, last.state_gate, dtype)
            if kind is OpKind.NEG:
                return _Form(gate, _product(minus, last.value, dtype))
            return _Form(gate, self._difference(parts[0].value, last.value, dtype))
        first, second = parts
        if kind in (OpKind.ADD, OpKind.SUB):
            gates = [part.gate for part in parts if part.gate is not None]
            gate = gates[0]
            if len(gates) == 2:
                gate = _sum(gates[0], gates[1], dtype) if kind is OpKind.ADD else Op(kind, (gates[0], gates[1]), dtype)
            if kind is OpKind.ADD:
                return _Form(gate, _sum(first.value, second.value, dtype))
            return _Form(gate, self._difference(first.value, second.value, dtype))
        if first.gate is not None and second.gate is not None:
            raise _Refused("the state is multiplied by itself: a recurrence must be linear in it")
        if kind is OpKind.DIV:
            if first.gate is None or not dtype.is_float:
                raise _Refused("a recurrence must be linear in the state, which is a divisor here")
            gate = Op(kind, (first.gate, second.value), dtype)
            value = first.value if _is_const(first.value, 0) else Op(kind, (first.value, second.value), dtype)
            return _Form(gate, value)
        state, factor = (first, second.value) if first.gate is not None else (second, first.value)
        value = state.value if _is_const(state.value, 0) else _product(state.value, factor, dtype)
        return _Form(_product(factor, state.state_gate, dtype), value)

    @staticmethod
    def _difference(a: Expr, b: Expr, dtype: DType) -> Expr:
        if _is_const(b, 0):
            return a
        return Op(OpKind.NEG, (b,), dtype) if _is_const(a, 0) else Op(OpKind.SUB, (a, b), dtype)

    def _select(self, expr: Select) -> _Form:
        if any(load.tensor == self.own for load in loads_of(expr.cond)):
            raise _Refused("the state decides a condition: a recurrence must be linear in it")
        then, otherwise = self.of(expr.then), self.of(expr.otherwise)
        state, initial = (expr.then, otherwise) if otherwise.gate is None else (expr.otherwise, then)
        is_first = self._excludes_first(expr.cond, holds=otherwise.gate is None)
        if initial.gate is None and is_first and self._is_state(state) and self.axis.name not in axes_of(initial.value):
            if self.initial not in (None, initial.value):
                raise _Refused("the first step has two initial states")
            self.initial = initial.value
            return self.of(state)
        dtype = expr.dtype
        gates = [zero(dtype) if part.gate is None else part.gate for part in (then, otherwise)]
        values = (then.value, otherwise.value)
        return _Form(_choice(expr.cond, gates[0], gates[1], dtype), _choice(expr.cond, *values, dtype))

    @staticmethod
    def _is_state(expr: Expr) -> bool:
        while isinstance(expr, Cast):
            expr = expr.arg
        return isinstance(expr, Load)

    def _excludes_first(self, cond: Expr, *, holds: bool) -> bool:
        """Return whether a condition holds, or fails, exactly at all points but the first."""
        parts = conjuncts(cond)
        first = self.axis.extent - 1 if self.is_reversed else 0
        others = (0, first - 1) if self.is_reversed else (1, self.axis.extent - 1)
        if len(parts) != 1 or axes_of(cond) != {self.axis.name} or loads_of(cond):
            return False
        part = parts[0]
        compare = _COMPARED.get(part.kind) if isinstance(part, Op) else None
        if not isinstance(part, Op) or compare is None:
            return False
        terms = linear(part.args[0])
        for term, c in linear(part.args[1]).items():
            terms[term] = terms.get(term, 0) - c
        constant, scale = terms.pop(None, 0), terms.pop(AxisRef(self.axis.name), 0)
        if any(terms.values()):
            return False

        def is_true(point: int) -> bool:
            return compare(scale * point + constant)

        # a comparison with a constant changes once: what it is at both ends of the others, it is between them
        return is_true(first) is not holds and all(is_true(point) is holds for point in others)


_COMPARED: dict[OpKind, Callable[[int], bool]] = {
    OpKind.LT: lambda x: x < 0, OpKind.LE: lambda x: x <= 0, OpKind.GT: lambda x: x > 0, OpKind.GE: lambda x: x >= 0,
    OpKind.EQ: lambda x: x == 0, OpKind.NE: lambda x: x != 0,
}  # fmt: skip
