"""A statement → its loops, split until indices with // and % are affine."""

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
    """The loops of a map or a reduction. The output is dense over the spatial axes, in their order."""

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
    """The statement's loops; an axis that occurs under // and % by divisors of its extent becomes two."""
    nest = Nest(statement.output, statement.type.dtype, statement.axes, statement.body, statement.combine)
    while (found := _divided(nest)) is not None:
        nest = _split(nest, *found)
    return nest


def affine_index(load: Load) -> tuple[Affine, ...] | None:
    """The load's index as affine functions of axes; None where a dimension's is none."""
    index = tuple(affine(expr) for expr in load.index)
    return None if any(one is None for one in index) else tuple(one for one in index if one is not None)


def reach(index: Affine, extents: Mapping[str, int]) -> tuple[int, int]:
    """Least and greatest value of an index over its axes."""
    ends = [(c * (extents[name] - 1)) for name, c in index.coeffs]
    return index.offset + sum(min(0, e) for e in ends), index.offset + sum(max(0, e) for e in ends)


def bare(expr: Expr) -> Expr:
    """The expression below conversions that the language added."""
    while isinstance(expr, Cast) and expr.implicit:
        expr = expr.arg
    return expr


def bare_axes(load: Load) -> tuple[str, ...] | None:
    """The axes of a load whose index is distinct axes and nothing else."""
    names = tuple(part.name for part in load.index if isinstance(part, AxisRef))
    return names if len(names) == len(load.index) == len(set(names)) else None


def _divided(nest: Nest) -> tuple[str, int] | None:
    """An axis that can be split, and the extent of its inner part."""
    divisors: dict[str, set[int]] = {}
    for load in loads_of(nest.body):
        for node in (n for part in load.index for n in iter_subexpressions(part)):
            match node:
                case Op(kind=kind, args=(AxisRef(name=name), by)) if kind in _DIVISIONS:
                    divisors.setdefault(name, set()).add(_whole(by))
    extents = nest.extents
    for name, found in divisors.items():
        inner = min(found)
        if 1 < inner < extents[name] and extents[name] % inner == 0 and all(by % inner == 0 for by in found):
            return name, inner
    return None


def _whole(expr: Expr) -> int:
    """A constant's value; 0 for anything else."""
    found = affine(expr)
    return found.offset if found is not None and not found.coeffs else 0


def _split(nest: Nest, name: str, inner: int) -> Nest:
    high, low = f"{name}.h", f"{name}.l"

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=n), by)) if n == name and _whole(by) % inner == 0:
                return _over(AxisRef(high), OpKind.FLOORDIV, _whole(by) // inner)
            case Op(kind=OpKind.MOD, args=(AxisRef(name=n), by)) if n == name and _whole(by) % inner == 0:
                outer = _whole(by) // inner
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


def _over(axis: Expr, kind: OpKind, by: int) -> Expr:
    return axis if by == 1 else Op(kind, (axis, Const(by, DType.INT32)), DType.INT32)


def _scaled(expr: Expr, by: int) -> Expr:
    return Op(OpKind.MUL, (expr, Const(by, DType.INT32)), DType.INT32)


def _sum(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.ADD, (a, b), DType.INT32)
