"""Products of rows with matrices that data selects → a grouped GEMM over rows ordered by their matrix.

y[t, n] += x[t, k] * w[e[t], n, k] reads a matrix for each row: no two rows share an operand. A stable counting sort gives
each row a slot. Blocks of slots belong to one matrix each, and are the rows of a batched GEMM:

    before[c, g]   rows of chunks before c that select matrix g; all rows for the last c
    end[g]         blocks of the matrices up to g
    matrix[b]      matrix of block b
    slot[t]        place of row t: blocks of the matrices before its own, and earlier rows of the same matrix
    row[p]         row at slot p
    z[b, i, n]     the GEMM: x[row[b, i], k] * w[matrix[b], n, k]
    y[row[p], n]   z of slot p, after the maps over y

Rows whose index is out of range have slots of the last matrix, and their results are 0. Products of rows that the same data
selects in the same way share one sort.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

from roller_svc.analysis.sum_of_products import product_of, sum_of_products
from roller_svc.fusion.contraction import as_contraction
from roller_svc.fusion.inline import drop_unit_axes
from roller_svc.fusion.scaled_sums import merge_scaled_sums
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, loads_of, rewrite, substitute
from roller_svc.ir.index import add, ceil_div, div, eq, le, linearize, logical_and, lt, max_, mod, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType

MIN_BLOCK_ROWS = 64  # of the tile of a warpgroup
MAX_BLOCK_ROWS = 128

ONE, ZERO = num(1), num(0)


def group_rows(
    statements: Sequence[TensorExpr], types: Mapping[str, TensorType], outputs: Set[str], *, scale_sums: bool = False
) -> tuple[TensorExpr, ...]:
    """Return the statements with products of rows and selected matrices as grouped GEMMs.

    Their epilogues compute the maps that alone read a result, and write it in the order of the rows. With `scale_sums`,
    scales of the selected matrices are factors of sums, as those of any other GEMM.
    """
    done: list[TensorExpr] = []
    moved: dict[str, tuple[TensorExpr, ...]] = {}  # results of grouped GEMMs, and what takes their place
    sorts: dict[tuple[object, ...], str] = {}  # the product that each sort was made for
    for position, statement in enumerate(statements):
        found = None if statement.output in moved else _match(statement, types)
        if found is None:
            done += moved.get(statement.output, (statement,))
            continue
        found = replace(found, sorted_for=sorts.setdefault(found.sort_key, statement.output))
        last = found.result
        products = merge_scaled_sums((found.product,), ()) if scale_sums else (found.product,)
        if not found.sums_rows:
            while (reader := _only_reader(last, statements[position + 1 :], outputs)) is not None and reader.output not in moved:
                moved[last.output] = ()
                last = _compose(last, reader)
            scatter = found.scatter(last)
            product, *scaled = products
            products = (product,)
            moved[last.output] = (_compose(scaled[0], scatter) if scaled else scatter,)
        sort = found.sort() if found.sorted_for == statement.output else ()
        done += (*(drop_unit_axes(part) for part in sort), *products, *moved.get(statement.output, (last,)))
    return tuple(done)


def _only_reader(written: TensorExpr, later: Sequence[TensorExpr], outputs: Set[str]) -> TensorExpr | None:
    """Return the map that alone reads a result, at its own point."""
    readers = [statement for statement in later if written.output in statement.reads_tensors]
    if written.output in outputs or len(readers) != 1 or readers[0].kind is not StatementKind.MAP:
        return None
    (reader,) = readers
    indices = {load.index for load in reader.reads if load.tensor == written.output}
    names = [i.name for index in indices for i in index if isinstance(i, AxisRef)]
    is_own = len(indices) == 1 and sorted(names) == sorted(axis.name for axis in reader.axes)
    return reader if is_own and len(names) == len(written.index) and reader.points == written.points else None


def _compose(first: TensorExpr, second: TensorExpr) -> TensorExpr:
    """Return the second of two maps with the first in place of its loads, over the axes of the first."""
    (index,) = {load.index for load in second.reads if load.tensor == first.output}
    names = {i.name: own for i, own in zip(index, first.index, strict=True) if isinstance(i, AxisRef)}
    dtype = first.type.dtype
    value = first.body if first.body.dtype is dtype else Cast(first.body, dtype, implicit=dtype.is_float)
    body = rewrite(second.body, lambda node: ref("") if isinstance(node, Load) and node.tensor == first.output else node)
    body = substitute(substitute(body, names), {"": value})
    return replace(second, axes=first.axes, index=tuple(substitute(i, names) for i in second.index), body=body)


def selects_matrices(statement: TensorExpr, types: Mapping[str, TensorType]) -> bool:
    """Return whether a statement multiplies rows by matrices that data selects."""
    return _match(statement, types) is not None


def _match(statement: TensorExpr, types: Mapping[str, TensorType]) -> _GroupedGemm | None:
    form = sum_of_products(statement)
    if form is None or len(form.factors) < 2 or as_contraction(statement) is not None:
        return None
    for load in (load for factor in form.factors for load in loads_of(factor)):
        for d, index in enumerate(load.index):
            count = types[load.tensor].shape[d] if load.tensor in types else 0
            if loads_of(index) and count > 1:
                selection = _Selection(index, count, any(load.bounds_checked[d : d + 1]))
                found = _classify(statement, form.factors, selection) if selection.is_in_all(statement, types) else None
                if found is not None:
                    return found
    return None


def _classify(statement: TensorExpr, factors: Sequence[Expr], selection: _Selection) -> _GroupedGemm | None:
    in_rows = axes_of(selection.index)
    rows = tuple(axis for axis in statement.axes if axis.name in in_rows)
    summed = {axis.name for axis in statement.reduced} - in_rows
    of_rows, of_a, of_b = [], [], []
    for factor in factors:
        axes = axes_of(selection.replaced(factor, ZERO))
        if in_rows.isdisjoint(axes) and axes != axes_of(factor):
            of_b.append(factor)
        elif axes <= in_rows:
            of_rows.append(factor)
        elif axes <= in_rows | summed:
            of_a.append(factor)
        else:
            return None
    if not of_a or not of_b:
        return None
    found = _GroupedGemm(statement, selection, rows, tuple(of_rows), tuple(of_a), tuple(of_b))
    return found if as_contraction(found.product) is not None else None


@dataclass(frozen=True, slots=True)
class _Selection:
    """The index of a dimension that selects the matrix of a row."""

    index: Expr
    count: int  # of matrices
    is_checked: bool

    def is_in_all(self, statement: TensorExpr, types: Mapping[str, TensorType]) -> bool:
        """Return whether no tensor with this index has fewer elements along it: a valid one is in range of all."""
        reads = (load for load in statement.reads if load.tensor in types)
        sizes = (types[load.tensor].shape[d] for load in reads for d, index in enumerate(load.index) if index == self.index)
        return all(size >= self.count for size in sizes)

    def replaced(self, expr: Expr, by: Expr) -> Expr:
        """Return the expression with another index, which is in range."""

        def change(node: Expr) -> Expr:
            if not isinstance(node, Load) or self.index not in node.index:
                return node
            checked = zip(node.bounds_checked, node.index, strict=False)
            index = tuple(by if i == self.index else i for i in node.index)
            return replace(node, index=index, bounds_checked=tuple(c and i != self.index for c, i in checked))

        return rewrite(expr, change)


@dataclass(frozen=True)
class _GroupedGemm:
    statement: TensorExpr
    selection: _Selection
    rows: tuple[Axis, ...]
    of_rows: tuple[Expr, ...]  # factors of a whole row
    of_a: tuple[Expr, ...]
    of_b: tuple[Expr, ...]
    sorted_for: str = ""

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Return what the sort depends on."""
        return self._selected(ref("row")), self.num_rows, self.selection.count, self.block_rows

    def sort(self) -> tuple[TensorExpr, ...]:
        return (self._before(), self._end(), self._matrix(), self._slot(), self._row())

    # sizes ----------------------------------------------------------------------------------------------------------
    @cached_property
    def num_rows(self) -> int:
        return math.prod(axis.extent for axis in self.rows)

    @cached_property
    def block_rows(self) -> int:
        """Return the rows of a block: as many as an average matrix has, within those of tiles."""
        return MAX_BLOCK_ROWS if self.num_rows >= MAX_BLOCK_ROWS * self.selection.count else MIN_BLOCK_ROWS

    @cached_property
    def num_blocks(self) -> int:
        """Return the most blocks that any selection fills, each matrix with a partial one."""
        partial = self.selection.count * (self.block_rows - 1)
        return min(self.num_rows, (self.num_rows + partial) // self.block_rows)

    @cached_property
    def chunks(self) -> int:
        return ceil_div(self.num_rows, self.chunk_rows)

    @cached_property
    def chunk_rows(self) -> int:
        """Return the rows of a chunk, with which both counts take about as many comparisons."""
        return min(self.num_rows, 1 << (math.isqrt(self.num_rows * self.selection.count) - 1).bit_length())

    # values of a row ------------------------------------------------------------------------------------------------
    def _at(self, expr: Expr, row: Expr) -> Expr:
        """Return an expression of the rows' axes at the row of a number."""
        places: dict[str, Expr] = {}
        for position, axis in reversed(list(enumerate(self.rows))):
            places[axis.name] = mod(row, axis.extent) if position else row
            row = div(row, axis.extent)
        return substitute(expr, places)

    def _selected(self, row: Expr) -> Expr:
        """Return the matrix of a row; the last one for an index out of range."""
        index = self._at(self.selection.index, row)
        selected = index if index.dtype is DType.INT32 else Cast(index, DType.INT32)
        valid = self._is_valid(index)
        return selected if valid is None else Select(valid, selected, num(self.selection.count - 1), DType.INT32)

    def _is_valid(self, index: Expr) -> Expr | None:
        first, end = Const(0, index.dtype), Const(self.selection.count, index.dtype)
        is_inside = logical_and(Op(OpKind.LE, (first, index), DType.INT8), Op(OpKind.LT, (index, end), DType.INT8))
        return is_inside if self.selection.is_checked else None

    def _exists(self, row: Expr) -> Expr | None:
        return lt(row, num(self.num_rows)) if self.num_rows % self.chunk_rows else None

    # counting sort --------------------------------------------------------------------------------------------------
    def _name(self, part: str) -> str:
        return f"{self.sorted_for}.{part}"

    def _load(self, part: str, *index: Expr) -> Load:
        return Load(self._name(part), index, DType.INT32)

    def _sum(self, part: str, axes: Sequence[Axis], body: Expr) -> TensorExpr:
        spatial = [axis for axis in axes if axis.kind is AxisKind.SPATIAL]
        index = tuple(ref(axis.name) for axis in spatial)
        type_ = TensorType(DType.INT32, tuple(axis.extent for axis in spatial))
        name = self._name(part)
        return TensorExpr(name, name, StatementKind.REDUCE, type_, tuple(axes), index, body, Combine.SUM)

    def _before(self) -> TensorExpr:
        chunk, matrix = _axis("chunk", self.chunks + 1), _axis("matrix", self.selection.count)
        row = _axis("row", self.num_rows, REDUCE)
        is_earlier = lt(ref(row.name), mul(ref(chunk.name), num(self.chunk_rows)))
        holds = logical_and(is_earlier, eq(self._selected(ref(row.name)), ref(matrix.name)))
        return self._sum("before", (chunk, matrix, row), _if(holds, ONE))

    def _end(self) -> TensorExpr:
        matrix, earlier = _axis("matrix", self.selection.count), _axis("earlier", self.selection.count, REDUCE)
        total = self._load("before", num(self.chunks), ref(earlier.name))
        blocks = div(add(total, num(self.block_rows - 1)), self.block_rows)
        return self._sum("end", (matrix, earlier), _if(le(ref(earlier.name), ref(matrix.name)), blocks))

    def _matrix(self) -> TensorExpr:
        block, matrix = _axis("block", self.num_blocks), _axis("matrix", self.selection.count - 1, REDUCE)
        return self._sum("matrix", (block, matrix), _if(le(self._load("end", ref(matrix.name)), ref(block.name)), ONE))

    def _slot(self) -> TensorExpr:
        chunk, row, other = _axis("chunk", self.chunks), _axis("row", self.chunk_rows), _axis("other", self.chunk_rows, REDUCE)
        place, selected = self._place(chunk, row), self._selected(self._place(chunk, row))
        blocks = _if(lt(ZERO, selected), self._load("end", add(selected, num(-1))))
        first = add(mul(blocks, num(self.block_rows)), self._load("before", ref(chunk.name), selected))
        is_same = eq(self._selected(self._place(chunk, other)), selected)
        rank = _if(logical_and(logical_and(self._exists(place), lt(ref(other.name), ref(row.name))), is_same), ONE)
        is_itself = logical_and(self._exists(place), eq(ref(other.name), ref(row.name)))
        return self._sum("slot", (chunk, row, other), add(rank, _if(is_itself, first)))

    def _row(self) -> TensorExpr:
        row = _axis("row", self.num_rows)
        name, size = self._name("row"), self.num_blocks * self.block_rows
        return TensorExpr(
            name,
            name,
            StatementKind.SCATTER,
            TensorType(DType.INT32, (size,)),
            (row,),
            (self._slot_of(ref(row.name)),),
            ref(row.name),
            Combine.MAX,
            bounds_checked=(False,),
        )

    def _place(self, chunk: Axis, row: Axis) -> Expr:
        return add(mul(ref(chunk.name), num(self.chunk_rows)), ref(row.name)) if self.chunks > 1 else ref(row.name)

    def _slot_of(self, row: Expr) -> Expr:
        if self.chunks == 1:
            return self._load("slot", ZERO, row)
        return self._load("slot", div(row, self.chunk_rows), mod(row, self.chunk_rows))

    # products -------------------------------------------------------------------------------------------------------
    @cached_property
    def columns(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.statement.spatial if axis not in self.rows)

    @cached_property
    def product(self) -> TensorExpr:
        block, place = _axis("block", self.num_blocks), _axis("place", self.block_rows)
        slot = add(mul(ref(block.name), num(self.block_rows)), ref(place.name))
        a = self._at(product_of(self.of_a), max_(self._load("row", slot), ZERO))
        b = self.selection.replaced(product_of(self.of_b), self._load("matrix", ref(block.name)))
        dtype = self.statement.accumulator
        body = Op(OpKind.MUL, (_as(a, dtype), _as(b, dtype)), dtype)
        summed = tuple(axis for axis in self.statement.reduced if axis not in self.rows)
        axes = (block, place, *self.columns)
        type_ = TensorType(dtype, tuple(axis.extent for axis in axes))
        index, name = tuple(ref(axis.name) for axis in axes), f"{self.statement.output}.grouped"
        return TensorExpr(name, name, StatementKind.REDUCE, type_, (*axes, *summed), index, body, Combine.SUM)

    @property
    def sums_rows(self) -> bool:
        return any(axis.kind is AxisKind.REDUCE for axis in self.rows)

    @cached_property
    def result(self) -> TensorExpr:
        """Return the map, or the sum of rows, that reads the results of the GEMM."""
        slot = self._slot_of(linearize((ref(axis.name), axis.extent) for axis in self.rows))
        index = (div(slot, self.block_rows), mod(slot, self.block_rows), *(ref(axis.name) for axis in self.columns))
        dtype = self.statement.accumulator
        value: Expr = Load(self.product.output, index, dtype)
        for factor in self.of_rows:
            value = Op(OpKind.MUL, (value, _as(factor, dtype)), dtype)
        valid = self._is_valid(self.selection.index)
        if valid is not None:
            value = Select(valid, value, Const(0.0 if dtype.is_float else 0, dtype), dtype)
        axes = tuple(axis for axis in self.statement.axes if axis.kind is AxisKind.SPATIAL or axis in self.rows)
        if self.sums_rows:
            return replace(self.statement, axes=axes, body=value)
        return replace(self.statement, kind=StatementKind.MAP, axes=axes, body=value, combine=None)

    def scatter(self, result: TensorExpr) -> TensorExpr:
        """Return a map over results of the GEMM as a scatter of rows from their slots."""
        product = self.product
        own, row = Load(product.output, product.index, product.accumulator), self._row_at_slot

        def change(node: Expr) -> Expr:
            return own if isinstance(node, Load) and node.tensor == product.output else node

        return replace(
            result,
            kind=StatementKind.SCATTER,
            axes=product.spatial,
            index=tuple(self._at(i, row) for i in result.index),
            body=self._at(rewrite(result.body, change), row),
            predicate=logical_and(lt(ref(product.axes[0].name), self._used_blocks), le(ZERO, row)),
            in_place=True,
            writes_once=True,
        )

    @property
    def _used_blocks(self) -> Load:
        return self._load("end", num(self.selection.count - 1))

    @property
    def _row_at_slot(self) -> Load:
        block, place = (axis.name for axis in self.product.axes[:2])
        return self._load("row", add(mul(ref(block), num(self.block_rows)), ref(place)))


SPATIAL, REDUCE = AxisKind.SPATIAL, AxisKind.REDUCE


def _axis(name: str, extent: int, kind: AxisKind = SPATIAL) -> Axis:
    return Axis(f"grouped.{name}", extent, kind)


def _if(condition: Expr, value: Expr) -> Expr:
    return Select(condition, value, ZERO, DType.INT32)


def _as(value: Expr, dtype: DType) -> Expr:
    return value if value.dtype is dtype else Cast(value, dtype, implicit=True)
