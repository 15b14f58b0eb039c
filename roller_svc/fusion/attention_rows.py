"""Rows of attention: what statements compute from a row's maximum and sum, and from its undivided results.

A kernel keeps the maximum and the sum of each row, so it can store a log-sum-exp, or divide by a sum with a sink.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.analysis.inlining import is_small_inlined, value_of
from roller_svc.ir.affine import slack
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    axes_of,
    children,
    loads_of,
    rewrite,
    substitute,
)
from roller_svc.ir.index import conjuncts
from roller_svc.ir.program import Axis, StatementKind, TensorExpr

_F32 = DType.FLOAT32
_ONE = Const(1.0, _F32)
_BOUNDS = (OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE)


@dataclass(frozen=True, slots=True)
class RowStatements:
    """The row's maximum and sum, and maps over rows that read them, inlined up to these. All have the axes of QK^T."""

    row_max: TensorExpr
    row_sum: TensorExpr
    maps: Mapping[str, TensorExpr]

    @classmethod
    def of(
        cls, row_max: TensorExpr, row_sum: TensorExpr, statements: Sequence[TensorExpr], depending: Collection[str]
    ) -> RowStatements:
        """Find the maps over rows in statements. `depending`: tensors that depend on QK^T in another way."""
        found = cls(row_max, row_sum, {})
        later = set(depending)
        for statement in statements:
            if statement.output in (row_max.output, row_sum.output) or found.names.isdisjoint(statement.reads_tensors):
                if not later.isdisjoint(statement.reads_tensors) and statement.output not in (row_max.output, row_sum.output):
                    later.add(statement.output)
                continue
            row = found._row_map(statement) if later.isdisjoint(statement.reads_tensors) else None
            if row is None:
                later.add(statement.output)
            else:
                found = replace(found, maps={**found.maps, row.output: row})
        return found

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.row_max.output, self.row_sum.output, *self.maps))

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis.name for axis in self.row_sum.spatial)

    def inline(self, expr: Expr) -> Expr | None:
        """Replace loads of the maps by their values. None if too large."""
        if not is_small_inlined((expr,), self.maps):
            return None

        def change(node: Expr) -> Expr:
            return value_of(self.maps[node.tensor], node.index) if isinstance(node, Load) and node.tensor in self.maps else node

        return rewrite(expr, change)

    def statement(self, name: str) -> TensorExpr:
        """Return the statement of a tensor of rows, as a map of the maximum and the sum."""
        if name in self.maps:
            return self.maps[name]
        base = self.row_max if name == self.row_max.output else self.row_sum
        load = Load(base.output, base.index, base.accumulator)
        return replace(base, kind=StatementKind.MAP, axes=base.spatial, body=load, combine=None)

    def reads_only_rows(self, expr: Expr) -> bool:
        """Return whether an expression depends on the row alone, and loads the maximum and sum of no other row."""
        own = {base.output: base.index for base in (self.row_max, self.row_sum)}
        return axes_of(expr) <= self.axes and all(
            own.get(load.tensor, load.index) == load.index and not any(load.bounds_checked) for load in loads_of(expr)
        )

    def _row_map(self, statement: TensorExpr) -> TensorExpr | None:
        """Return a map over rows with its axes renamed, or None for any other statement."""
        if statement.kind is not StatementKind.MAP or len(statement.spatial) != len(self.row_sum.spatial):
            return None
        body = self.inline(statement.body)
        if body is None:
            return None
        row = align(replace(statement, body=body), {s.output: s for s in (self.row_max, self.row_sum)})
        return row if row is not None and self.reads_only_rows(row.body) else None


def align(statement: TensorExpr, bases: Mapping[str, TensorExpr]) -> TensorExpr | None:
    """Rename the axes of a statement to those of the statements that it reads. None if it reads several elements."""
    names: dict[str, str] | None = None
    for load in loads_of(statement.body):
        if load.tensor in bases:
            here = renaming(bases[load.tensor], load, statement)
            if here is None or names not in (None, here):
                return None
            names = here
    if names is None:
        return None
    used = {a.name for base in bases.values() for a in base.axes}
    for axis in statement.axes:
        if axis.name not in names:
            names[axis.name] = _unused_name(axis.name, used)
            used.add(names[axis.name])
    refs: dict[str, Expr] = {old: AxisRef(new) for old, new in names.items()}
    return replace(
        statement,
        axes=tuple(replace(a, name=names[a.name]) for a in statement.axes),
        index=tuple(substitute(i, refs) for i in statement.index),
        body=substitute(statement.body, refs),
    )


def _unused_name(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "_"
    return name


def renaming(written: TensorExpr, load: Load, reader: TensorExpr) -> dict[str, str] | None:
    """Return {reader's axis: axis of the statement}, or None if they do not correspond one to one."""
    extents = reader.extents
    names: dict[str, str] = {}
    for mine, its in zip(written.index, load.index, strict=True):
        match mine, its:
            case AxisRef(name=left), AxisRef(name=right) if right not in names and extents[right] == written.extents[left]:
                names[right] = left
            case Const(), Const():
                continue
            case _:
                return None
    return names if len(names) == len(written.spatial) else None


# what readers compute of undivided results ----------------------------------------------------------------------------
def take_result(reader: TensorExpr, mixed: TensorExpr, rows: RowStatements) -> tuple[TensorExpr, Expr] | None:
    """Return the reader with loads of `mixed` in place of what it computes from elements of it and their rows.

    The second value is that expression, at the points of `mixed`. None without a single one.
    """
    body = rows.inline(reader.body)
    if body is None:
        return None
    read = {mixed.output, *rows.names}
    for parts in (_innermost_parts(body, mixed.output, rows), [_common_part(body, read)]):
        found = {part: _at_element(part, mixed, rows) for part in parts}
        results = {at[1] for at in found.values() if at is not None}
        if len(results) != 1 or None in found.values():
            continue
        loads: dict[Expr, Load] = {part: replace(at[0], tensor=_TAKEN) for part, at in found.items() if at is not None}
        rest = _replace_all(body, loads)
        if read.isdisjoint(load.tensor for load in loads_of(rest)):
            own: dict[Expr, Expr] = {load: replace(load, tensor=mixed.output) for load in loads.values()}
            return replace(reader, body=_replace_all(rest, own)), results.pop()
    return None


_TAKEN = ".taken"


def _replace_all(expr: Expr, values: Mapping[Expr, Expr]) -> Expr:
    return rewrite(expr, lambda node: values.get(node, node))


def _at_element(part: Expr, mixed: TensorExpr, rows: RowStatements) -> tuple[Load, Expr] | None:
    """Return the load of the part's element of `mixed`, and the part at the points of `mixed`.

    None if it reads two elements, or more than an element and its row.
    """
    elements = {load for load in loads_of(part) if load.tensor == mixed.output}
    if len(elements) != 1:
        return None
    (element,) = elements
    axes = [a for a in mixed.index if isinstance(a, AxisRef)]
    indices = [i for a, i in zip(mixed.index, element.index, strict=True) if isinstance(a, AxisRef)]
    names: dict[str, Expr] = {i.name: a for a, i in zip(axes, indices, strict=True) if isinstance(i, AxisRef)}
    bases = {base.output: base for base in (rows.row_max, rows.row_sum)}
    others = rewrite(part, lambda node: _ONE if isinstance(node, Load) and node.tensor in {mixed.output, *bases} else node)
    if not axes_of(others) <= names.keys():
        return None
    at = {a.name: i for a, i in zip(axes, indices, strict=True)}
    own = {name: tuple(substitute(i, at) for i in base.index) for name, base in bases.items()}
    if any(own.get(load.tensor, load.index) != load.index for load in loads_of(part)):
        return None

    def change(node: Expr) -> Expr:
        match node:
            case Load(tensor=tensor) if tensor == mixed.output:
                return replace(node, index=mixed.index)
            case Load(tensor=tensor) if tensor in bases:
                return replace(node, index=bases[tensor].index)
            case _:
                return node

    result = rewrite(substitute(part, names), change)
    alone = rewrite(result, lambda node: _ONE if isinstance(node, Load) and node.tensor == mixed.output else node)
    return (element, result) if rows.reads_only_rows(alone) else None


def _common_part(body: Expr, read: Collection[str]) -> Expr:
    """Return the smallest part that has all loads of the tensors `read`."""
    while not isinstance(body, Load):
        inside = [c for c in children(body) if any(load.tensor in read for load in loads_of(c))]
        if len(inside) != 1:
            return body
        (body,) = inside
    return body


def _innermost_parts(expr: Expr, mixed: str, rows: RowStatements) -> list[Expr]:
    inner = [part for child in children(expr) for part in _innermost_parts(child, mixed, rows)]
    if inner:
        return inner
    tensors = {load.tensor for load in loads_of(expr)}
    return [expr] if mixed in tensors and not rows.names.isdisjoint(tensors) else []


# what a kernel's own maximum and sum say ------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RowValues:
    """A row's values in terms of the kernel's own maximum and sum of exponentials below it.

    The exponentials of statements may be below any other value of the row: `weight` is their ratio.
    """

    maximum: Expr
    weight: Expr
    total: Expr
    undivided: Expr

    def of(self, expr: Expr, rows: RowStatements, mixed: str) -> Expr:
        """Replace loads of the maximum, the sum and undivided results in an expression."""

        def change(node: Expr) -> Expr:
            match node:
                case Load(tensor=tensor) if tensor == rows.row_max.output:
                    return self.maximum
                case Load(tensor=tensor) if tensor == rows.row_sum.output:
                    return self.total
                case Load(tensor=tensor) if tensor == mixed:
                    return times(self.undivided, self.weight)
                case Op(kind=OpKind.DIV, args=(value, row), dtype=dtype) if self._is_element(value) and not self._is_element(row):
                    return times(value, Op(OpKind.DIV, (Const(1.0, dtype), row), dtype))
                case _:
                    return node

        return rewrite(expr, change)

    def _is_element(self, expr: Expr) -> bool:
        return self.undivided in loads_of(expr)


def times(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MUL, (a, b), a.dtype)


def sees_every_key(cond: Expr, key: Axis) -> Expr | None:
    """Return the condition that a mask hides no key of the row, or None if two keys cannot tell.

    A condition that is monotone along the keys holds for all of them if it holds for the first and the last one.
    """
    if not all(_is_monotone(part, key.name) for part in conjuncts(cond)):
        return None
    first, last = (substitute(cond, {key.name: Const(at, DType.INT32)}) for at in (0, key.extent - 1))
    return Op(OpKind.LAND, (first, last), DType.INT8)


def _is_monotone(condition: Expr, key: str) -> bool:
    if key not in axes_of(condition) or slack(condition) is not None:
        return True
    match condition:
        case Op(kind=kind, args=(AxisRef(name=name), other)) | Op(kind=kind, args=(other, AxisRef(name=name))):
            return kind in _BOUNDS and name == key and key not in axes_of(other)
        case _:
            return False


def strip_float_casts(expr: Expr) -> Expr:
    """Strip casts between floats: operands of a matrix unit are rounded anyway."""
    while isinstance(expr, Cast) and expr.dtype.is_float and expr.arg.dtype.is_float:
        expr = expr.arg
    return expr


def largest_unmasked(visible: Expr, score: Expr, cond: Expr, key: Axis) -> Expr | None:
    """Return the maximum of all scores of a row from that of the visible ones. None if it is not known.

    `score` is the statement's own, in which masked keys may count as a constant.
    """
    match strip_float_casts(score):
        case Select(cond=same, otherwise=otherwise) if same == cond:
            fill = strip_float_casts(otherwise)
        case _:
            return None
    if not isinstance(fill, Const):
        return None
    if fill.value == -math.inf:
        return visible
    whole = sees_every_key(cond, key)
    if whole is None:
        return None
    filled = Op(OpKind.FMAX, (visible, Const(float(fill.value), _F32)), _F32)
    return Select(whole, visible, filled, _F32)
