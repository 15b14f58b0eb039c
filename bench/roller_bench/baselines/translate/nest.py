"""Statement → loop nest, with axes split until indices with // and % are affine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    iter_subexpressions,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.program import Axis, AxisKind, Combine, TensorExpr

_DIVISIONS = (OpKind.FLOORDIV, OpKind.MOD)


@dataclass(frozen=True, slots=True)
class Nest:
    """The loop nest of a map or reduction. The output is dense over the spatial axes, in order."""

    output: str
    dtype: DType
    axes: tuple[Axis, ...]
    body: Expr
    combine: Combine | None

    @property
    def spatial(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is AxisKind.SPATIAL)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is AxisKind.REDUCE)

    @property
    def extents(self) -> dict[str, int]:
        return {a.name: a.extent for a in self.axes}

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.extent for a in self.spatial)


def nest_of(statement: TensorExpr) -> Nest:
    """Return the loop nest; split an axis that occurs under // and % by divisors of its extent."""
    nest = Nest(statement.output, statement.type.dtype, statement.axes, statement.body, statement.combine)
    while (split := _divided(nest)) is not None:
        nest = _split(nest, *split)
    return nest


def affine_index(load: Load) -> tuple[Affine, ...] | None:
    """Return the index of a load as affine functions of axes, or None if one is not affine."""
    index = tuple(affine(expr) for expr in load.index)
    return None if any(one is None for one in index) else tuple(one for one in index if one is not None)


def index_range(index: Affine, extents: Mapping[str, int]) -> tuple[int, int]:
    """Return the smallest and the largest value of an index."""
    ends = [(c * (extents[name] - 1)) for name, c in index.coeffs]
    return index.offset + sum(min(0, e) for e in ends), index.offset + sum(max(0, e) for e in ends)


def bare(expr: Expr) -> Expr:
    """Strip implicit conversions."""
    while isinstance(expr, Cast) and expr.implicit:
        expr = expr.arg
    return expr


def bare_axes(load: Load) -> tuple[str, ...] | None:
    """Return the axes of a load if its index consists of distinct axes, else None."""
    names = tuple(part.name for part in load.index if isinstance(part, AxisRef))
    return names if len(names) == len(load.index) == len(set(names)) else None


def _divided(nest: Nest) -> tuple[str, int] | None:
    """Return an axis that can be split and the extent of its inner part, or None."""
    divisors: dict[str, set[int]] = {}
    for load in loads_of(nest.body):
        for node in (n for part in load.index for n in iter_subexpressions(part)):
            match node:
                case Op(kind=kind, args=(AxisRef(name=name), divisor)) if kind in _DIVISIONS:
                    divisors.setdefault(name, set()).add(_whole(divisor))
    extents = nest.extents
    for name, values in divisors.items():
        inner = min(values)
        if 1 < inner < extents[name] and extents[name] % inner == 0 and all(divisor % inner == 0 for divisor in values):
            return name, inner
    return None


def _whole(expr: Expr) -> int:
    """Return the value of a constant, 0 for other expressions."""
    form = affine(expr)
    return form.offset if form is not None and not form.coeffs else 0


def _split(nest: Nest, name: str, inner: int) -> Nest:
    high, low = f"{name}.h", f"{name}.l"

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=n), divisor)) if n == name and _whole(divisor) % inner == 0:
                return _over(AxisRef(high), OpKind.FLOORDIV, _whole(divisor) // inner)
            case Op(kind=OpKind.MOD, args=(AxisRef(name=n), divisor)) if n == name and _whole(divisor) % inner == 0:
                outer = _whole(divisor) // inner
                if outer == 1:
                    return AxisRef(low)
                return _sum(_scaled(_over(AxisRef(high), OpKind.MOD, outer), inner), AxisRef(low))
            case _:
                return node

    body = substitute(rewrite(nest.body, change), {name: _sum(_scaled(AxisRef(high), inner), AxisRef(low))})
    axes: list[Axis] = []
    for axis in nest.axes:
        if axis.name == name:
            axes += [Axis(high, axis.extent // inner, axis.kind), Axis(low, inner, axis.kind)]
        else:
            axes.append(axis)
    return replace(nest, axes=tuple(axes), body=body)


def _over(axis: Expr, kind: OpKind, divisor: int) -> Expr:
    return axis if divisor == 1 else Op(kind, (axis, Const(divisor, DType.INT32)), DType.INT32)


def _scaled(expr: Expr, divisor: int) -> Expr:
    return Op(OpKind.MUL, (expr, Const(divisor, DType.INT32)), DType.INT32)


def _sum(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.ADD, (a, b), DType.INT32)
