"""Sums of products → matrix products, batched over common axes."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from itertools import pairwise

from roller_bench.baselines.library import Slot, no_baseline
from roller_bench.baselines.translate.nest import Nest, affine_index, bare
from roller_bench.baselines.translate.pointwise import Context, Pointwise
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, axes_of
from roller_svc.ir.program import AxisKind, Combine


@dataclass(frozen=True, slots=True)
class Product:
    """A sum of products of two loads; `scale` and `divisors` are constant along the summed axes."""

    factors: tuple[Load, Load]
    scales: tuple[Expr, ...]
    divisors: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors and divisors of a summed product. `varying` are those that vary along the summed axes."""

    varying: tuple[Expr, ...]
    scales: tuple[Expr, ...]
    divisors: tuple[Expr, ...]


def factors_of(nest: Nest) -> Factors | None:
    """Return the factors of a sum of products, or None if it is none or a divisor varies along the summed axes."""
    if nest.combine is not Combine.SUM:
        return None
    over, under = parts(nest.body)
    summed = {a.name for a in nest.reduced}
    if any(axes_of(f) & summed for f in under):
        return None
    varying = tuple(f for f in over if axes_of(f) & summed)
    return Factors(varying, tuple(f for f in over if not axes_of(f) & summed), tuple(under))


def product_of(nest: Nest) -> Product | None:
    """Return a nest as a product of two matrices, or None."""
    factors = factors_of(nest)
    if factors is None or nest.dtype.compute is not nest.dtype or len(factors.varying) != 2:
        return None
    loads = tuple(f for f in factors.varying if isinstance(f, Load) and affine_index(f) is not None)
    summed = {a.name for a in nest.reduced}
    if len(loads) != 2 or not axes_of(loads[0]) & axes_of(loads[1]) & summed:
        return None
    return Product((loads[0], loads[1]), factors.scales, factors.divisors)


def parts(expr: Expr) -> tuple[list[Expr], list[Expr]]:
    """Return the factors and the divisors of a product."""
    expr = bare(expr)
    match expr:
        case Op(kind=OpKind.MUL, args=(x, y)):
            (a, b), (c, d) = parts(x), parts(y)
            return a + c, b + d
        case Op(kind=OpKind.DIV, args=(x, y)):
            (a, b), (c, d) = parts(x), parts(y)
            return a + d, b + c
        case _:
            return [expr], []


def several_of(nest: Nest) -> tuple[Load, ...] | None:
    """Return the factors of a sum of products of three or more loads, or None for another body."""
    if nest.combine is not Combine.SUM or nest.dtype.compute is not nest.dtype:
        return None
    over, under = parts(nest.body)
    loads = tuple(f for f in over if isinstance(f, Load) and affine_index(f) is not None)
    return loads if len(loads) == len(over) > 2 and not under else None


def contract(context: Context, nest: Nest, factors: tuple[Load, ...]) -> Slot:
    """Compute a sum as an einsum of pairwise products; a new array at every run."""
    loops = Pointwise(context, nest)
    letters = dict(zip((a.name for a in nest.axes), string.ascii_letters, strict=False))
    loads: list[Slot] = []
    terms: list[str] = []
    for factor in factors:
        named = _axes(factor)
        at = tuple(slice(None) if a.name in named else 0 for a in nest.axes)
        loads.append(context.trace.view(lambda v, at=at: v[at], loops.load(factor)))
        terms.append("".join(letters[a.name] for a in nest.axes if a.name in named))
    equation = f"{','.join(terms)}->{''.join(letters[a.name] for a in nest.spatial)}"
    return context.trace.new("einsum", context.library.einsum(equation), *loads)


@dataclass(frozen=True, slots=True)
class _Groups:
    """Classify axes: batch (both factors and result), one factor and result, summed."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    summed: tuple[str, ...]


def multiply(context: Context, nest: Nest, product: Product, out: Slot, *, vectors: bool) -> None:
    """Compute the product into `out`. `vectors`: use matrix-vector products if an extent is 1."""
    loops = Pointwise(context, nest)
    a, b = (loops.load(f) for f in product.factors)
    left, right = (_axes(f) for f in product.factors)
    spatial = [x.name for x in nest.spatial]
    if any(s not in left | right for s in spatial) or any(
        x.name not in left & right for x in nest.axes if x.kind is AxisKind.REDUCE
    ):
        raise no_baseline("an axis of the product is in one factor only")
    target = context.strided(out, _full(nest), _full_strides(context, nest, out))
    groups = _groups(nest, left, right, target, context)
    if _order(nest, target, context, groups) == "columns first":
        a, b = b, a
        groups = _Groups(groups.batch, groups.columns, groups.rows, groups.summed)
    x = _matrix(context, nest, a, (groups.batch, groups.rows, groups.summed))
    y = _matrix(context, nest, b, (groups.batch, groups.summed, groups.columns))
    z = _matrix(context, nest, target, (groups.batch, groups.rows, groups.columns), result=True)
    _call(context, x, y, z, vectors=vectors)


def scaled(context: Context, nest: Nest, product: Product, out: Slot) -> None:
    """Apply scale and divisors to the sums."""
    if not product.scales and not product.divisors:
        return
    flat = Nest(nest.output, nest.dtype, nest.spatial, nest.body, None)
    loops = Pointwise(context, flat)
    for kind, exprs in ((OpKind.MUL, product.scales), (OpKind.DIV, product.divisors)):
        for expr in exprs:
            if isinstance(expr, Const) and expr.value == 1:
                continue
            context.into(kind.name.lower(), context.library.pointwise(kind), out, loops.value(expr), out=out)


def _call(context: Context, x: Slot, y: Slot, z: Slot, *, vectors: bool) -> None:
    library = context.library
    batch, rows, columns = z.value.shape
    if batch > 1:
        context.into("bmm", library.matmul(), x, y, out=z)
        return
    x, y, z = (context.trace.view(lambda v: v[0], s) for s in (x, y, z))
    if vectors and columns == 1:
        context.into("mv", library.matvec(), x, _line(context, y), out=_line(context, z))
    elif vectors and rows == 1:
        transposed = context.trace.view(lambda v: library.permuted(v, (1, 0)), y)
        context.into("mv", library.matvec(), transposed, _line(context, x), out=_line(context, z))
    else:
        context.into("mm", library.matmul(), x, y, out=z)


def _line(context: Context, value: Slot) -> Slot:
    """Return a matrix with one row or column as a vector."""
    shape, strides = tuple(value.value.shape), context.strides(value)
    long = 0 if shape[1] == 1 else 1
    return context.trace.view(lambda v: context.library.strided(v, (shape[long],), (strides[long],), 0), value)


def _axes(load: Load) -> set[str]:
    index = affine_index(load) or ()
    return {name for one in index for name, _ in one.coeffs}


def _full(nest: Nest) -> tuple[int, ...]:
    return tuple(a.extent if a.kind is AxisKind.SPATIAL else 1 for a in nest.axes)


def _full_strides(context: Context, nest: Nest, out: Slot) -> tuple[int, ...]:
    found = iter(context.strides(out))
    return tuple(next(found) if a.kind is AxisKind.SPATIAL else 0 for a in nest.axes)


def _groups(nest: Nest, left: set[str], right: set[str], target: Slot, context: Context) -> _Groups:
    """Move outer result axes to the batch until the rest are rows and columns of one matrix."""
    spatial = [a.name for a in nest.spatial if a.extent > 1]
    batch = [s for s in spatial if s in left & right]
    while True:
        rows = tuple(s for s in spatial if s in left - right and s not in batch)
        columns = tuple(s for s in spatial if s in right - left and s not in batch)
        groups = _Groups(tuple(sorted(batch, key=spatial.index)), rows, columns, tuple(a.name for a in nest.reduced))
        if all(_merged(context, nest, target, g) is not None for g in (groups.batch, rows, columns)):
            return groups
        batch.append(next(s for s in spatial if s not in batch))


def _order(nest: Nest, target: Slot, context: Context, groups: _Groups) -> str:
    columns, rows = (_merged(context, nest, target, g) for g in (groups.columns, groups.rows))
    if columns is None or rows is None:
        return "copied"
    return "columns first" if rows[1] < columns[1] and rows[0] > 1 and columns[0] > 1 else "rows first"


def _merged(context: Context, nest: Nest, value: Slot, names: tuple[str, ...]) -> tuple[int, int] | None:
    """Return extent and stride of several axes as one, or None if they are not contiguous."""
    strides = dict(zip((a.name for a in nest.axes), context.strides(value), strict=True))
    axes_in_memory = [(nest.extents[n], strides[n]) for n in names if nest.extents[n] > 1]
    if not axes_in_memory:
        return 1, 1
    for (_, outer), (extent, inner) in pairwise(axes_in_memory):
        if outer != inner * extent:
            return None
    return math.prod(extent for extent, _ in axes_in_memory), axes_in_memory[-1][1]


def _matrix(context: Context, nest: Nest, value: Slot, groups: tuple[tuple[str, ...], ...], *, result: bool = False) -> Slot:
    """Return a value as a stack of matrices: a view if possible, else a copy at every run."""
    view = _matrix_view(context, nest, value, groups)
    if view is not None:
        return view
    if result:
        raise no_baseline("the result's axes do not form a matrix")
    names = [a.name for a in nest.axes]
    order = [names.index(n) for g in groups for n in g]
    rest = [d for d in range(len(names)) if d not in order]
    wide = tuple(nest.extents[n] for g in groups for n in g)
    transposed = context.trace.view(lambda v: context.library.permuted(v, [*rest, *order])[(0,) * len(rest)], value)
    shape = _matrix_shape(nest, groups)
    return context.trace.view(lambda v: v.reshape(shape), context.copied(transposed, wide, nest.dtype))


def _matrix_view(context: Context, nest: Nest, value: Slot, groups: tuple[tuple[str, ...], ...]) -> Slot | None:
    """Return a value as a stack of matrices in the same memory, or None. A group may be constant along all its axes."""
    present = {a.name for a, size in zip(nest.axes, value.value.shape, strict=True) if size > 1 or a.extent == 1}
    shape, strides = _matrix_shape(nest, groups), list[int]()
    for names, size in zip(groups, shape, strict=True):
        varying = tuple(n for n in names if n in present)
        merged = _merged(context, nest, value, varying)
        if merged is None or len(varying) not in (0, len(names)):
            return None
        strides.append(0 if merged[0] < size else merged[1])
    return context.strided(value, shape, tuple(strides))


def _matrix_shape(nest: Nest, groups: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    return tuple(math.prod(nest.extents[n] for n in g) for g in groups)
