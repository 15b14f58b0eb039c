"""Typed integer expressions → isl sets over a statement's axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from roller_svc.analysis.constant_folding import constant_int
from roller_svc.analysis.intervals import bounds
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, iter_subexpressions
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    import islpy as isl
else:
    isl = OnUse("islpy")

# isl operations of one program, whose cost in seconds varies a hundredfold. No public program needs this many (audit of
# November 2026).
MAX_OPERATIONS = 10_000


def limited_context() -> isl.Context:
    """Return a context for the statements of one program, which share its operations.

    isl's contexts are not for several threads.
    """
    context = isl.Context()
    context.set_max_operations(MAX_OPERATIONS)
    return context


class OpaqueExprError(Exception):
    """The expression is not describable in isl: loads, floats, products of axes, arithmetic that may wrap."""


class Polyhedra:
    """The box of a statement's axes, and sets of its points. Raises isl.Error beyond the context's operation limit."""

    def __init__(self, extents: Mapping[str, int], context: isl.Context) -> None:
        self._extents = extents
        self._names = tuple(extents)
        self._context = context
        space = isl.Space.set_alloc(self._context, 0, len(self._names))
        self._local = isl.LocalSpace.from_space(space)
        self.universe = isl.Set.universe(space)
        # Whether isl cannot describe some condition of axes alone.
        self.is_loose = False
        self._axes = {name: isl.PwAff.var_on_domain(self._local, isl.dim_type.set, i) for i, name in enumerate(self._names)}
        self.box = self.universe
        for name, extent in extents.items():
            axis = self._axes[name]
            inside = axis.ge_set(self._constant(0)).intersect(axis.lt_set(self._constant(extent)))
            self.box = self.box.intersect(inside)

    def may_hold(self, condition: Expr, *, holds: bool) -> isl.Set:
        """Return a superset of the points where the condition holds (or fails); exact if nothing in it is opaque."""
        match condition:
            case Op(kind=OpKind.LNOT, args=(arg,)):
                return self.may_hold(arg, holds=not holds)
            case Op(kind=OpKind.LAND | OpKind.LOR as kind, args=(left, right)):
                a, b = self.may_hold(left, holds=holds), self.may_hold(right, holds=holds)
                return a.intersect(b) if (kind is OpKind.LAND) is holds else a.union(b)
            case _:
                try:
                    exact = self._exact(condition)
                except OpaqueExprError:
                    self.is_loose |= not any(isinstance(node, Load) for node in iter_subexpressions(condition))
                    return self.universe
                return exact if holds else exact.complement()

    def outside(self, index: Expr, size: int) -> isl.Set:
        """Return the points where the index is below 0 or at least `size`."""
        value = self._checked_value(index)
        return value.lt_set(self._constant(0)).union(value.ge_set(self._constant(size)))

    def point_of(self, points: isl.Set) -> dict[str, int]:
        """Return the lexicographically smallest point of a nonempty set, by axis."""
        point = points.lexmin().sample_point()
        values = (point.get_coordinate_val(isl.dim_type.set, i) for i in range(len(self._names)))
        return {name: int(value.to_python()) for name, value in zip(self._names, values, strict=True)}

    def _constant(self, value: int) -> isl.PwAff:
        return isl.PwAff.from_aff(isl.Aff.val_on_domain(self._local, isl.Val(value, self._context)))

    def _checked_value(self, expr: Expr) -> isl.PwAff:
        if expr.dtype.is_float or bounds(expr, self._extents).wraps:
            raise OpaqueExprError
        return self._value(expr)

    def _exact(self, condition: Expr) -> isl.Set:
        """Return the points where a condition holds."""
        match condition:
            case Op(kind=OpKind.LNOT, args=(arg,)):
                return self._exact(arg).complement()
            case Op(kind=OpKind.LAND, args=(left, right)):
                return self._exact(left).intersect(self._exact(right))
            case Op(kind=OpKind.LOR, args=(left, right)):
                return self._exact(left).union(self._exact(right))
            case Op(kind=kind, args=(left, right)) if kind in _COMPARED:
                method = _COMPARED[kind]
                points: isl.Set = getattr(self._checked_value(left), method)(self._checked_value(right))
                return points
            case _:
                return self._checked_value(condition).ne_set(self._constant(0))

    def _value(self, expr: Expr) -> isl.PwAff:
        match expr:
            case Const(value=int(value)):
                return self._constant(value)
            case AxisRef(name=name):
                return self._axes[name]
            case Cast(arg=arg) if not arg.dtype.is_float:
                return self._value(arg)
            case Select(cond=cond, then=then, otherwise=otherwise):
                where = self._exact(cond)
                chosen = self._value(then).intersect_domain(where)
                return chosen.union_add(self._value(otherwise).intersect_domain(where.complement()))
            case Op(kind=kind) if kind in _COMPARED or kind in (OpKind.LAND, OpKind.LOR, OpKind.LNOT):
                return self._exact(expr).indicator_function()
            case Op(kind=kind, args=args) if not any(arg.dtype.is_float for arg in args):
                return self._operation(kind, args)
            case _:
                raise OpaqueExprError

    def _operation(self, kind: OpKind, args: tuple[Expr, ...]) -> isl.PwAff:
        match kind:
            case OpKind.ADD:
                return self._value(args[0]).add(self._value(args[1]))
            case OpKind.SUB:
                return self._value(args[0]).sub(self._value(args[1]))
            case OpKind.NEG:
                return self._value(args[0]).neg()
            case OpKind.MAX | OpKind.FMAX:
                return self._value(args[0]).max(self._value(args[1]))
            case OpKind.MIN | OpKind.FMIN:
                return self._value(args[0]).min(self._value(args[1]))
            case OpKind.CLIP:
                return self._value(args[0]).max(self._value(args[1])).min(self._value(args[2]))
            case OpKind.ABS:
                value = self._value(args[0])
                return value.max(value.neg())
            case OpKind.MUL | OpKind.FLOORDIV | OpKind.MOD:
                return self._scaled(kind, *args)
            case _:
                raise OpaqueExprError

    def _scaled(self, kind: OpKind, left: Expr, right: Expr) -> isl.PwAff:
        """Return a product with a constant, or // or % by a positive one."""
        factor = constant_int(right)
        if kind is OpKind.MUL:
            if factor is None:
                factor, left = constant_int(left), right
            if factor is None:
                raise OpaqueExprError
            return self._value(left).scale_val(isl.Val(factor, self._context))
        if factor is None or factor < 1:
            raise OpaqueExprError
        divisor = isl.Val(factor, self._context)
        value = self._value(left)
        return value.mod_val(divisor) if kind is OpKind.MOD else value.scale_down_val(divisor).floor()


_COMPARED = {
    OpKind.LT: "lt_set",
    OpKind.LE: "le_set",
    OpKind.GT: "gt_set",
    OpKind.GE: "ge_set",
    OpKind.EQ: "eq_set",
    OpKind.NE: "ne_set",
}
