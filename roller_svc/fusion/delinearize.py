"""Delinearization: reduced axes that are indexed by quotients and remainders → the axes they were fused from.

An axis k that is read as k // 9, k % 9 // 3 and k % 3 (a convolution written as a GEMM) becomes three axes. Every index
is linear then, and the convolution is recognized.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.analysis.scans import match_scan
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Op,
    OpKind,
    axes_of,
    iter_subexpressions,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, StatementKind, TensorExpr


def delinearize_reduced_axes(statement: TensorExpr) -> TensorExpr:
    """Return the reduction over more axes, or the statement if a quotient or a remainder would remain.

    Scans stay: their order needs the axis as one.
    """
    if statement.kind is not StatementKind.REDUCE or match_scan(statement) is not None:
        return statement
    result = statement
    for axis in statement.reduced:
        result = _delinearize_axis(result, axis)
    return result


def _delinearize_axis(statement: TensorExpr, axis: Axis) -> TensorExpr:
    parts = () if _is_row_of_words(statement, axis) else _parts(statement, axis)
    if len(parts) < 2 or {p.name for p in parts} & {a.name for a in statement.axes}:
        return statement
    value: Expr = num(0)
    for part in parts:
        value = add(mul(value, num(part.extent)), ref(part.name))
    extents = {p.name: p.extent for p in parts}
    body = rewrite(substitute(statement.body, {axis.name: value}), lambda node: simplify_division(node, extents))
    if any(_is_division(node) and axes_of(node) & extents.keys() for node in iter_subexpressions(body)):
        return statement
    i = statement.axes.index(axis)
    return replace(statement, axes=(*statement.axes[:i], *parts, *statement.axes[i + 1 :]), body=body)


def _is_row_of_words(statement: TensorExpr, axis: Axis) -> bool:
    """Return whether some tensor has words of packed values along the axis, whose vectors load and shift them."""
    shifts = (node for node in iter_subexpressions(statement.body) if isinstance(node, Op) and node.kind is OpKind.SHR)
    words = (load for shift in shifts for load in loads_of(shift.args[0]) if load.index)
    return any(_scale(load.index[-1], axis.name) is not None and _is_division(load.index[-1]) for load in words)


def _parts(statement: TensorExpr, axis: Axis) -> tuple[Axis, ...]:
    """Return the parts of an axis, outermost first; () if its divisors do not divide each other."""
    scales = {scale for node in iter_subexpressions(statement.body) if (scale := _scale(node, axis.name)) is not None}
    parts: list[Axis] = []
    inner = 1
    for scale in sorted(scales | {axis.extent}):
        if scale % inner:
            return ()
        if scale > inner:
            parts.append(replace(axis, name=f"{axis.name}.{len(parts)}", extent=scale // inner))
        inner = scale
    return tuple(reversed(parts)) if inner == axis.extent else ()


def _scale(expr: Expr, axis: str) -> int | None:
    """Return the period of a quotient or a remainder along the axis, or None."""
    match expr:
        case Op(kind=OpKind.FLOORDIV | OpKind.MOD, args=(x, Const(value=int(by)))) if by > 0:
            scale = _unit(x, axis)
            return None if scale is None else scale * by
        case _:
            return None


def _unit(expr: Expr, axis: str) -> int | None:
    """Return the number of consecutive values of the axis with one value of the expression, or None."""
    match expr:
        case AxisRef(name=name) if name == axis:
            return 1
        case Cast(arg=arg):
            return _unit(arg, axis)
        case Op(kind=OpKind.FLOORDIV):
            return _scale(expr, axis)
        case Op(kind=OpKind.MOD, args=(x, _)):
            return _unit(x, axis)
        case _:
            return None


def _is_division(expr: Expr) -> bool:
    return isinstance(expr, Op) and expr.kind in (OpKind.FLOORDIV, OpKind.MOD) and not expr.dtype.is_float


def simplify_division(node: Expr, extents: dict[str, int]) -> Expr:
    """Simplify (9 c + 3 h + w) // 9 to c and its remainder to 3 h + w, if 3 h + w < 9."""
    match node:
        case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if by > 0:
            form = affine(x)
            if form is None or form.offset or not {name for name, _ in form.coeffs} <= extents.keys():
                return node
            remainder = [(name, c) for name, c in form.coeffs if c % by]
            if any(c < 0 for _, c in remainder) or sum(c * (extents[name] - 1) for name, c in remainder) >= by:
                return node
            terms = remainder if kind is OpKind.MOD else [(name, c // by) for name, c in form.coeffs if c % by == 0]
            total: Expr = num(0)
            for name, c in terms:
                total = add(total, mul(ref(name), num(c)))
            return total
        case _:
            return node
