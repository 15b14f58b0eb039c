"""Nested sums whose inner one is a contraction → one sum of scaled products.

P[m, n, g] += A * B over a block of k, and C[m, n] += S[m, g] * P[m, n, g], become C[m, n] += A * B * S[m, g] over g and
the block, or over k = 128 g + r. Blocks are outermost along k: a kernel scales sums of whole tiles of k in registers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from roller_svc.analysis.operand import can_represent_all, value_dtype
from roller_svc.analysis.sum_of_products import SumOfProducts, product_of, sum_of_products
from roller_svc.fusion.contraction import (
    SCALED_DTYPES,
    Contraction,
    as_contraction,
    as_scaled_contraction,
)
from roller_svc.fusion.few_bits import state_bytes
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, rewrite, substitute
from roller_svc.ir.group import MAX_BYTE_PRODUCTS
from roller_svc.ir.index import add, div, mul, num, ref
from roller_svc.ir.program import AxisKind, StatementKind, TensorExpr, TensorType

Statements = tuple[TensorExpr, ...]


def merge_scaled_sums(statements: Statements, outputs: Collection[str], *, is_thin: bool = False) -> Statements:
    """Return the statements with scaled sums of partial sums as one sum; the same ones if there is none.

    Thin ones may have a single row or column.
    """
    sums = {s.output: s for s in statements if s.kind is StatementKind.REDUCE}
    readers = Counter(tensor for s in statements for tensor in s.reads_tensors)
    merged: dict[str, Statements] = {}
    inner: set[str] = set()
    for statement in statements:
        form = sum_of_products(statement)
        if form is None:
            continue
        found = _merge(statement, form, {t: s for t, s in sums.items() if readers[t] == 1 and t not in outputs})
        ordered = _with_blocks_first(found or statement, is_thin=is_thin)
        if ordered is not None:
            merged[statement.output] = (ordered,)
            inner |= {t for t in statement.reads_tensors if found is not None and t not in ordered.reads_tensors}
        elif (parts := apply_scales_last(statement, form)) is not None:
            merged[statement.output] = parts
    if not merged:
        return statements
    still_read = {t for output, parts in merged.items() if output not in inner for each in parts for t in each.reads_tensors}
    return tuple(each for s in statements if s.output not in inner - still_read for each in merged.get(s.output, (s,)))


def has_scaled_sum(statements: Statements, outputs: Collection[str], *, is_cpu: bool = False) -> bool:
    """Return whether kernels may scale sums, or sums of blocks of k, in registers."""
    statements = tuple(state_bytes(s, with_bytes=is_cpu) for s in statements)
    merged = merge_scaled_sums(statements, outputs, is_thin=is_cpu)
    return merged != statements or any(as_scaled_contraction(s, is_thin=is_cpu) is not None for s in statements)


def _merge(statement: TensorExpr, form: SumOfProducts, partial: dict[str, TensorExpr]) -> TensorExpr | None:
    """Return a sum over the points of the partial sums that it reads, or None if it scales none."""
    loads = [load for load in map(_load_of, form.factors) if load is not None and load.tensor in partial]
    if len(loads) != 1 or statement.accumulator is not DType.FLOAT32:
        return None
    (load,) = loads
    sums = partial[load.tensor]
    own = sum_of_products(sums)
    places = [each.name for each in load.index if isinstance(each, AxisRef)]
    if own is None or len(set(places)) < len(load.index) or not all(isinstance(each, AxisRef) for each in sums.index):
        return None
    if not _adds_exactly(sums):
        return None
    used = {axis.name for axis in statement.axes}
    inner = tuple(replace(axis, name=_unused(axis.name, used)) for axis in sums.reduced)
    values: dict[str, Expr] = {old.name: ref(new.name) for old, new in zip(sums.reduced, inner, strict=True)}
    values |= {at.name: place for at, place in zip(sums.index, load.index, strict=True) if isinstance(at, AxisRef)}
    others = [factor for factor in form.factors if _load_of(factor) != load]
    factors = [substitute(sums.body, values), *others]
    body = product_of([_convert(f, DType.FLOAT32) for f in factors])
    return replace(statement, axes=(*statement.axes, *inner), body=body)


def _adds_exactly(sums: TensorExpr) -> bool:
    """Return whether partial sums have the values that sums in float32, or in a matrix unit's int32, have."""
    if sums.accumulator.is_float:
        return sums.accumulator is DType.FLOAT32
    extent = sums.points // max(1, sums.type.elements)
    return sums.accumulator is sums.type.dtype is DType.INT32 and extent <= MAX_BYTE_PRODUCTS


def _load_of(factor: Expr) -> Load | None:
    """Return the tensor that a factor is, in any type that is as wide."""
    while (
        isinstance(factor, Cast)
        and factor.dtype.compute in (DType.FLOAT32, factor.arg.dtype.compute)
        and (factor.implicit or factor.dtype is factor.dtype.compute)
    ):
        factor = factor.arg
    return factor if isinstance(factor, Load) else None


def _unused(name: str, used: set[str]) -> str:
    while name in used:
        name += "_"
    used.add(name)
    return name


def apply_scales_last(statement: TensorExpr, form: SumOfProducts, *, may_exceed_range: bool = False) -> Statements | None:
    """Return the sum without scales that do not vary along it, and a map that applies them; None for other sums.

    The map multiplies by scales, and divides by those that factors are divided by. The sum of bytes is one of integers,
    which the map converts. A user may accept sums that exceed the range of float32 where scaled products do not.
    """
    reduced = {axis.name for axis in form.reduced}
    factors, divisors = _without_divisors(form.factors, reduced)
    scales = [f for f in factors if axes_of(f).isdisjoint(reduced)]
    if len(scales) == len(factors) or statement.accumulator is not DType.FLOAT32:
        return None
    name = f"{statement.output}.sum"
    extents = tuple(axis.extent for axis in form.results)
    index = tuple(ref(axis.name) for axis in form.results)
    body = product_of([_convert(f, DType.FLOAT32) for f in factors if f not in scales])
    sums = replace(statement, output=name, name=name, type=TensorType(DType.FLOAT32, extents), index=index, body=body)
    found = as_contraction(sums)
    is_in_range = found is not None and _has_narrow_operands(found)
    if not is_in_range and not may_exceed_range:
        return None
    integers = [_integer(operand) for operand in (found.a, found.b)] if found is not None and is_in_range else [None]
    if all(integers) and math.prod(axis.extent for axis in form.reduced) <= MAX_BYTE_PRODUCTS:
        body = product_of([_convert(each, DType.INT32) for each in integers if each is not None])
        sums = replace(sums, type=TensorType(DType.INT32, extents), body=body)
    elif not scales and not divisors:
        return None
    total = product_of([_convert(f, DType.FLOAT32) for f in (Load(name, index, sums.type.dtype), *scales)])
    for divisor in divisors:
        total = Op(OpKind.DIV, (total, divisor), DType.FLOAT32)
    return sums, replace(statement, kind=StatementKind.MAP, axes=form.results, body=total, combine=None)


def _without_divisors(factors: Iterable[Expr], reduced: Collection[str]) -> tuple[list[Expr], list[Expr]]:
    """Return the factors without divisors in float32 that do not vary with the reduced axes, and these divisors.

    Computed values of 16 bits are divided in the sum: they may exceed the range of their type where quotients do not.
    A factor that does not vary with the axes is a scale, such as an inverse, and stays whole.
    """
    plain: list[Expr] = []
    divisors: list[Expr] = []
    for factor in factors:
        rest, own = factor, list[Expr]()
        while (
            isinstance(rest, Op)
            and rest.kind is OpKind.DIV
            and rest.dtype is DType.FLOAT32
            and not axes_of(rest.args[0]).isdisjoint(reduced)
            and axes_of(rest.args[1]).isdisjoint(reduced)
        ):
            own.append(rest.args[1])
            rest = rest.args[0]
        if own and not _is_of_its_type(rest):
            plain.append(factor)
            continue
        divisors += own
        plain.append(rest)
    return plain, divisors


def _has_narrow_operands(contraction: Contraction) -> bool:
    """Return whether sums of products of the operands cannot exceed the range of float32."""
    operands = contraction.a, contraction.b
    return all(value_dtype(operand) in SCALED_DTYPES and _is_of_its_type(operand) for operand in operands)


def _is_of_its_type(value: Expr) -> bool:
    """Return whether a value has the range of its type in the program: no arithmetic in a wider type computes it."""
    match value:
        case Load() | Const():
            return True
        case Cast(arg=arg, dtype=dtype, implicit=False):
            return dtype.is_narrow_float or _is_of_its_type(arg)
        case Cast(arg=arg, dtype=dtype):
            inner = value_dtype(arg)
            return (inner is None or can_represent_all(dtype, inner)) and _is_of_its_type(arg)
        case Select(then=then, otherwise=otherwise):
            return _is_of_its_type(then) and _is_of_its_type(otherwise)
        case _:
            return not value.dtype.is_float


def _integer(operand: Expr) -> Expr | None:
    """Return an operand without conversions to floats, if it is an integer."""
    dtype = value_dtype(operand)
    while isinstance(operand, Cast) and operand.dtype.is_float:
        operand = operand.arg
    return operand if dtype is value_dtype(operand) and not operand.dtype.is_float else None


def _convert(factor: Expr, dtype: DType) -> Expr:
    return factor if factor.dtype is dtype else Cast(factor, dtype, implicit=True)


def _with_blocks_first(statement: TensorExpr, *, is_thin: bool) -> TensorExpr | None:
    """Return a scaled sum with the axes of its scales first along k, as one axis if possible; None for other sums."""
    if as_scaled_contraction(statement, is_thin=is_thin) is not None:
        return _with_one_axis(statement, is_thin=is_thin)
    form = sum_of_products(statement)
    if form is None or len(form.reduced) < 2:
        return None
    reduced = {axis.name for axis in form.reduced}
    partial = [axes_of(factor) & reduced for factor in form.factors]
    outer = frozenset[str]().union(*(axes for axes in partial if axes < reduced))
    axes = sorted(statement.axes, key=lambda axis: (axis.kind is AxisKind.REDUCE, axis.name not in outer))
    ordered = replace(statement, axes=tuple(axes))
    return _with_one_axis(ordered, is_thin=is_thin) if as_scaled_contraction(ordered, is_thin=is_thin) is not None else None


def _with_one_axis(statement: TensorExpr, *, is_thin: bool) -> TensorExpr:
    """Return a sum over blocks g and points r of them as one over k = 128 g + r, if all that varies with r has this index."""
    if len(statement.reduced) != 2:
        return statement
    *others, outer, inner = statement.axes
    name = _unused(f"{outer.name}_{inner.name}", {axis.name for axis in statement.axes})
    block = div(ref(name), inner.extent)

    def change(node: Expr) -> Expr:
        form = affine(node) if inner.name in axes_of(node) else None
        if form is None or form.coeff(outer.name) != inner.extent * form.coeff(inner.name):
            return node
        total: Expr = mul(ref(name), num(form.coeff(inner.name)))
        for axis, coeff in form.coeffs:
            if axis not in (outer.name, inner.name):
                total = add(total, mul(ref(axis), num(coeff)))
        return add(total, num(form.offset))

    body = substitute(rewrite(statement.body, change), {outer.name: block})
    axis = replace(outer, name=name, extent=outer.extent * inner.extent)
    fused = replace(statement, axes=(*others, axis), body=body)
    return statement if inner.name in axes_of(body) or as_scaled_contraction(fused, is_thin=is_thin) is None else fused
