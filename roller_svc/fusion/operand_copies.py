"""Contractions of operands that no copy engine takes as they lie → maps that write such operands to memory once.

TMA and cp.async copy elements as they are in memory, in rows of whole words. All other operands are loaded, converted
or computed by threads in every block that reads them: packed weights, float8 that is multiplied as float16, rows that
begin anywhere, channels that are not innermost. A copy in the type and layout of the matrix unit pays that cost once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.sum_of_products import is_window
from roller_svc.fusion.contraction import Contraction
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Select,
    axes_of,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.index import add, div, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorType
from roller_svc.ir.tensor_map import STRIDE_BYTES

MIN_ROW_BYTES = 32  # of a swizzled row of a box (PTX ISA, "Shared Memory Matrix Layout")
ContractionOf = Callable[[TensorExpr], Contraction | None]


@dataclass(frozen=True, slots=True)
class OperandCopy:
    """An operand of a contraction that is written to memory before it, in rows of whole 16 bytes.

    `output` is the tensor that the contraction writes; `side` is 0 for operand A and 1 for B.
    """

    output: str
    side: int
    dtype: DType
    k_major: bool  # rows are along k, else along m or n
    tensor: str = ""  # a tensor that is only converted, and lies in the copy as it does in memory

    @property
    def operand(self) -> tuple[str, int]:
        return self.output, self.side


def insert_operand_copies(
    statements: Sequence[TensorExpr],
    wanted: Collection[OperandCopy],
    types: Mapping[str, TensorType],
    contraction_of: ContractionOf,
) -> tuple[TensorExpr, ...]:
    """Insert the wanted copies before the contractions that read them. Operands that cannot be copied stay.

    `contraction_of` returns the contraction of a statement that gets tiles of its own.
    """
    copies: dict[str, TensorExpr] = {}
    result: list[TensorExpr] = []
    for statement in statements:
        own = sorted((copy for copy in wanted if copy.output == statement.output), key=lambda copy: copy.side)
        converted = [copy for copy in own if copy.tensor]
        own = [copy for copy in own if not copy.tensor]
        changed = _order_k(statement, own, types, contraction_of)
        for one in converted:
            copy = _conversion(one, types[one.tensor])
            if copy.output not in copies:
                copies[copy.output] = copy
                result.insert(_earliest(copy, result, copies), copy)
            changed = _read_conversion(changed, one, copy.output)
        for one in own:
            contraction = contraction_of(changed)
            planned = None if contraction is None else _plan(contraction, one, types)
            if contraction is None or planned is None:
                continue
            copy = _same_copy(planned.statement, copies) or _with_new_name(planned.statement, copies)
            if copy.output not in copies:
                copies[copy.output] = copy
                result.insert(_earliest(copy, result, copies), copy)
            changed = _read_copy(changed, contraction, one.side, planned, copy.output)
        result.append(changed)
    return tuple(result)


def _conversion(copy: OperandCopy, type_: TensorType) -> TensorExpr:
    """Return the map that writes a tensor in the type of the copy."""
    axes = tuple(Axis(f"copy.{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(type_.shape))
    at = tuple(ref(axis.name) for axis in axes)
    body = Cast(Load(copy.tensor, at, type_.dtype), copy.dtype, implicit=True)
    name = f"{copy.tensor}.{copy.dtype.value}"
    return TensorExpr(name, name, StatementKind.MAP, TensorType(copy.dtype, type_.shape), axes, at, body)


def _read_conversion(statement: TensorExpr, copy: OperandCopy, name: str) -> TensorExpr:
    """Return the statement with loads of the converted tensor."""

    def change(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.tensor != copy.tensor:
            return node
        return Cast(replace(node, tensor=name, dtype=copy.dtype), node.dtype, implicit=True)

    return replace(statement, body=rewrite(statement.body, change))


def _earliest(copy: TensorExpr, statements: Sequence[TensorExpr], copies: Collection[str]) -> int:
    """Return the first place where all that the copy reads has been written, after other copies there.

    Statements that follow it may still be fused.
    """
    place = max((i + 1 for i, s in enumerate(statements) if s.output in copy.reads_tensors), default=0)
    while place < len(statements) and statements[place].output in copies:
        place += 1
    return place


def _order_k(
    statement: TensorExpr, wanted: Sequence[OperandCopy], types: Mapping[str, TensorType], contraction_of: ContractionOf
) -> TensorExpr:
    """Return the contraction with the axes last along k that are rows of a copy with windows."""
    contraction = contraction_of(statement) if wanted else None
    if contraction is None:
        return statement
    planned = [_plan(contraction, one, types) for one in wanted]
    innermost = frozenset[str]().union(*(one.innermost_k for one in planned if one is not None))
    axes = sorted(statement.axes, key=lambda a: (a.kind is AxisKind.REDUCE, a.name in innermost))
    return replace(statement, axes=tuple(axes))


@dataclass(frozen=True, slots=True)
class _Coordinate:
    """A dimension of the copy: an axis of the contraction, or an index of several axes (a window)."""

    index: Expr
    extent: int


@dataclass(frozen=True, slots=True)
class _PlannedCopy:
    """A copy, and how the contraction reads it."""

    statement: TensorExpr
    index: tuple[Expr, ...]
    guard: Expr | None  # elsewhere the operand is 0
    innermost_k: frozenset[str]  # axes that must be last along k


def _plan(contraction: Contraction, wanted: OperandCopy, types: Mapping[str, TensorType]) -> _PlannedCopy | None:
    expr, rows = (contraction.a, contraction.m) if wanted.side == 0 else (contraction.b, contraction.n)
    guard, value = _memory_value(expr, None)
    if any(any(load.bounds_checked) for load in loads_of(value)):
        return None
    windows = _windows(value, guard, types, frozenset(a.name for a in contraction.k))
    if windows is None:
        return None
    if guard is not None and not windows:  # the copy has all axes of the condition
        value = Select(guard, value, Const(0.0 if value.dtype.is_float else 0, value.dtype), value.dtype)
        guard = None
    rest = _without(value, windows)
    if axes_of(rest) & {name for window in windows for name in axes_of(window.index)}:
        return None  # something depends on the axes of a window one by one
    batch, along_rows, along_k = (
        [_Coordinate(ref(a.name), a.extent) for a in axes if a.name in axes_of(rest)]
        for axes in (contraction.batch, rows, contraction.k)
    )
    along_k_first = not (wanted.k_major or windows)
    outer, row = (along_k, along_rows) if along_k_first else ([*along_rows, *windows], along_k)
    if not row:
        return None
    statement, index = _write(value, [*batch, *outer], row, wanted.dtype)
    name = f"{value.tensor}.copy" if isinstance(value, Load) else f"{wanted.output}.{'ab'[wanted.side]}"
    innermost = frozenset(name for c in along_k for name in axes_of(c.index)) if windows else frozenset[str]()
    return _PlannedCopy(replace(statement, output=name, name=name), index, guard, innermost)


def _memory_value(expr: Expr, guard: Expr | None) -> tuple[Expr | None, Expr]:
    """Return the operand as it would be in memory, without lossless conversions, and where it is not 0."""
    match expr:
        case Cast(arg=arg) if value_dtype(expr) is value_dtype(arg):
            return _memory_value(arg, guard)
        case Select(cond=cond, then=then, otherwise=Const(value=0)) if not loads_of(cond):
            return _memory_value(then, logical_and(guard, cond))
        case _:
            return guard, expr


def _windows(value: Expr, guard: Expr | None, types: Mapping[str, TensorType], reduced: frozenset[str]) -> list[_Coordinate] | None:
    """Return the indices that become dimensions of the copy in place of their axes; None if one cannot.

    These are indices of reduced and other axes, unless they are data. With a guard they are all indices but plain axes,
    since a copy of windows has no guard.
    """
    found: dict[Expr, int] = {}
    for load in loads_of(value):
        for index, size in zip(load.index, types[load.tensor].shape, strict=True):
            is_dimension = guard is not None or (is_window(index, reduced) and not loads_of(index))
            if isinstance(index, AxisRef | Const) or not is_dimension:
                continue
            if affine(index) is None or found.setdefault(index, size) != size:
                return None
    return [_Coordinate(index, size) for index, size in found.items()]


def _without(value: Expr, windows: Sequence[_Coordinate]) -> Expr:
    """Replace the indices of windows by constants."""
    indices = {window.index for window in windows}
    return rewrite(value, lambda node: num(0) if node in indices else node)


def _write(
    value: Expr, outer: Sequence[_Coordinate], row: Sequence[_Coordinate], dtype: DType
) -> tuple[TensorExpr, tuple[Expr, ...]]:
    """Return the map that writes the copy, and the index that reads it.

    Rows that are not whole 16 bytes are padded with zeros, and then one dimension. If the innermost coordinate makes up
    rows of its own, these are padded.
    """
    granule = STRIDE_BYTES // dtype.bytes
    if row[-1].extent * dtype.bytes >= MIN_ROW_BYTES:
        outer, row = [*outer, *row[:-1]], row[-1:]
    length = math.prod(c.extent for c in row)
    is_padded = length % granule != 0
    dims = [*outer, *([] if is_padded else row)]
    shape = (*(c.extent for c in dims), *((-(-length // granule) * granule,) if is_padded else ()))
    axes = tuple(Axis(f"copy.{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(shape))
    places: dict[Expr, Expr] = {c.index: ref(axis.name) for c, axis in zip(dims, axes, strict=False)}
    index = tuple(c.index for c in dims)
    if is_padded:
        last: Expr = ref(axes[-1].name)
        position: Expr = num(0)
        stride = 1
        for number, c in reversed(list(enumerate(row))):
            place = div(last, stride)
            places[c.index] = mod(place, c.extent) if number else place
            position, stride = add(mul(c.index, num(stride)), position), stride * c.extent
        index = (*index, position)
    body = _at(value, places)
    body = body if body.dtype is dtype else Cast(body, dtype, implicit=True)
    if is_padded:
        zero = Const(0.0 if dtype.is_float else 0, dtype)
        body = Select(lt(ref(axes[-1].name), num(length)), body, zero, dtype)
    at = tuple(ref(axis.name) for axis in axes)
    return TensorExpr("", "", StatementKind.MAP, TensorType(dtype, shape), axes, at, body), index


def _at(value: Expr, places: Mapping[Expr, Expr]) -> Expr:
    """Replace axes and windows by the copy's own axes."""
    windows: dict[Expr, Expr] = {index: place for index, place in places.items() if not isinstance(index, AxisRef)}
    plain = {index.name: place for index, place in places.items() if isinstance(index, AxisRef)}
    return substitute(rewrite(value, lambda node: windows.get(node, node)), plain)


def _same_copy(copy: TensorExpr, copies: Mapping[str, TensorExpr]) -> TensorExpr | None:
    return next((one for one in copies.values() if replace(copy, output=one.output, name=one.name) == one), None)


def _with_new_name(copy: TensorExpr, copies: Mapping[str, TensorExpr]) -> TensorExpr:
    name, count = copy.output, 1
    while name in copies:
        name, count = f"{copy.output}{count}", count + 1
    return replace(copy, output=name, name=name)


def _read_copy(statement: TensorExpr, contraction: Contraction, side: int, planned: _PlannedCopy, name: str) -> TensorExpr:
    """Return the contraction with the copy in place of the operand."""
    old = (contraction.a, contraction.b)[side]
    new: Expr = Load(name, planned.index, planned.statement.type.dtype)
    new = new if new.dtype is old.dtype else Cast(new, old.dtype, implicit=True)
    if planned.guard is not None:
        new = Select(planned.guard, new, Const(0.0 if old.dtype.is_float else 0, old.dtype), old.dtype)
    read = replace(contraction, a=new) if side == 0 else replace(contraction, b=new)
    return replace(statement, body=read.product(statement.body.dtype))
