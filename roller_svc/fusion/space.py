"""Statements of a kernel group → tile space of construction and the model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from roller_svc.analysis.columns import LINE_BYTES
from roller_svc.analysis.congruences import aligned_run, mean_segment, permuted_block
from roller_svc.analysis.constant_runs import constant_run
from roller_svc.analysis.index_ranges import range_of
from roller_svc.analysis.instruction_counts import count_instructions, sums_products
from roller_svc.analysis.online_reduction import online_reductions
from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.scans import Scan
from roller_svc.analysis.tile_bounds import k_bounds
from roller_svc.analysis.unconditional import unconditional_loads
from roller_svc.fusion.contraction import Contraction
from roller_svc.ir.affine import Dim, dim_of
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Select, axes_of, loads_of
from roller_svc.ir.group import AxisRole, KBounds, ScaleRuns, TileAccess, TileAxis, TileSpace, sum_within_tensors
from roller_svc.ir.index import conjunction, conjuncts
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorType

SHORT_ROW = 32  # shorter reduced axes (windows) are poor vector axes


def contraction_space(
    statements: tuple[TensorExpr, ...],
    c: Contraction,
    types: Mapping[str, TensorType],
    second: Contraction | None = None,
) -> TileSpace:
    """Return the tile space of a contraction: batch axes one by one; m, n and k each fused.

    `types` are those in memory. `second` is the second contraction of a dual GEMM.
    """
    axes = [TileAxis(a.name, AxisRole.BATCH, (a,)) for a in c.batch]
    for role, members in c.roles:
        if role is not AxisRole.BATCH:
            axes.append(TileAxis("_".join(a.name for a in members), role, members))
    b_operands = (c.b,) if second is None else (c.b, second.b)
    accesses = [*_reads(c.a, types, "a"), *(read for b in b_operands for read in _reads(b, types, "b"))]
    accesses += [read for scale in c.scales for read in _reads(scale, types)]
    for statement in statements[len(b_operands) :]:
        accesses += [read for expr in (statement.body, *statement.index) for read in _reads(expr, types)]
    accesses += _writes(statements, types)
    products = statements[: len(b_operands)]
    if c.scales:  # not of each product
        products = (replace(statements[0], body=replace(c, scales=()).product(statements[0].body.dtype)),)
    flops = sum(s.flops for s in (*products, *statements[len(products) :]))
    instructions = sum(2 * s.points for s in products) + count_instructions(statements[len(products) :])
    computed = _computed_part(statements[-1])
    return TileSpace(
        axes=tuple(axes),
        accesses=_distinct(_join_neighbours(accesses, statements)),
        flops=round(computed * flops),
        instructions=round(computed * instructions),
        compute_dtype=statements[0].accumulator,
        vector_axis=next(a.name for a in axes if a.role is AxisRole.N),
        num_accumulators=len(b_operands),
        operand_flops=sum(max(0, s.flops - 2 * s.points) for s in products),
        k_bounds=_k_bounds(c, second, axes) if computed == 1.0 else None,
        computed=computed,
        scale_runs=_scale_runs(c) if c.scales else None,
    )


def _k_bounds(c: Contraction, second: Contraction | None, axes: Sequence[TileAxis]) -> KBounds | None:
    """Return the bounds of the points along k that a product has, of a dual GEMM both; None with scales.

    The product is 0 where its guard fails. So it is where that of an operand fails and the other operand, of integers, is
    finite.
    """
    if c.scales:
        return None
    *results, k = axes
    conditions = _zero_conditions(c)
    if second is not None:
        others = _zero_conditions(second)
        conditions = [condition for condition in conditions if condition in others]
    return k_bounds(conjunction(conditions), k, results)


def _zero_conditions(c: Contraction) -> list[Expr]:
    """Return conditions where one of which fails the product is 0."""
    found = list(conjuncts(c.guard))
    for operand, other in ((c.a, c.b), (c.b, c.a)):
        values = value_dtype(other)
        if values is None or not values.is_float:
            found += _guard_of(operand)
    return found


def _guard_of(operand: Expr) -> tuple[Expr, ...]:
    match operand:
        case Cast(arg=arg):
            return _guard_of(arg)
        case Select(cond=cond, then=then, otherwise=Const(value=0)):
            return (*conjuncts(cond), *_guard_of(then))
        case _:
            return ()


def _scale_runs(c: Contraction) -> ScaleRuns:
    columns = {axis.name for axis in c.n}
    along_n = [scale for scale in c.scales if not axes_of(scale).isdisjoint(columns)]
    along_m = [scale for scale in c.scales if scale not in along_n]
    are_integers = all(dtype is not None and not dtype.is_float for dtype in (value_dtype(c.a), value_dtype(c.b)))
    return ScaleRuns(
        m=math.gcd(*(constant_run(scale, c.m) for scale in along_m)),
        n=math.gcd(*(constant_run(scale, c.n) for scale in along_n)),
        k=math.gcd(*(constant_run(scale, c.k) for scale in c.scales)),
        sum_dtype=DType.INT32 if are_integers else DType.FLOAT32,
    )


def _computed_part(last: TensorExpr) -> float:
    """Return the part of a contraction's tiles that are computed, if the last statement scatters rows.

    Data decide, between all tiles and those of full batches. Rows that fall evenly on batches make half of the rest.
    """
    return (1 + last.type.elements / last.points) / 2 if last.kind is StatementKind.SCATTER else 1.0


def attention_space(
    statements: tuple[TensorExpr, ...], c: Contraction, attention: Attention, types: Mapping[str, TensorType]
) -> TileSpace:
    """Return the tile space of attention: batch axes one by one; m, n, keys and head dimension each fused."""
    dots = attention.softmax_statements[0]
    m = c.m or (Axis(f"{dots.output}.row", 1, AxisKind.SPATIAL),)
    axes = [TileAxis(a.name, AxisRole.BATCH, (a,)) for a in c.batch]
    for role, members in ((AxisRole.M, m), (AxisRole.N, c.n), (AxisRole.K, c.k), (AxisRole.INNER, dots.reduced)):
        axes.append(TileAxis("_".join(a.name for a in members), role, members))
    accesses = [access for q in attention.queries for access in _reads(q, types, "a")]
    accesses += [access for k in attention.keys for access in _reads(k, types, "b")]
    if not attention.has_values_in_keys(c.n):
        accesses += _reads(attention.v, types, "b")
    rows = attention.rows
    of_rows = (*(s.body for s in rows.stored), *(() if rows.result is None else (rows.result,)))
    for expr in (attention.score, *(s.body for s in statements[1:]), *of_rows):
        accesses += _reads(expr, types)
    accesses += _writes((*statements, *rows.stored), types)
    return TileSpace(
        axes=tuple(axes),
        accesses=_distinct(_join_neighbours(accesses, (*attention.softmax_statements, *statements))),
        flops=attention.softmax_flops + sum(s.flops for s in statements),
        instructions=count_instructions((*attention.softmax_statements, *statements)),
        compute_dtype=statements[0].accumulator,
        vector_axis=axes[-3].name,
    )


def scan_space(scan: Scan, statements: tuple[TensorExpr, ...], types: Mapping[str, TensorType]) -> TileSpace:
    """Return the tile space of a scan and of maps over its points: one pass over each row."""
    outer = tuple(a for a in scan.statement.spatial if a.name != scan.axis.name)
    space = nest_space((scan.points, *statements[1:]), outer, types)
    return replace(space, compute_dtype=scan.statement.accumulator)


def nest_space(statements: tuple[TensorExpr, ...], outer: tuple[Axis, ...], types: Mapping[str, TensorType]) -> TileSpace:
    """Return the tile space of a nest: outer axes one by one; inner axes of the largest statement fused."""
    names = {a.name for a in outer}
    anchor = max(statements, key=lambda s: s.points)
    axes = [TileAxis(a.name, AxisRole.OUTER, (a,)) for a in outer]
    inner = tuple(a for a in anchor.axes if a.name not in names)
    if inner:
        axes.append(TileAxis("_".join(a.name for a in inner), AxisRole.INNER, inner))
    reads: list[TileAccess] = []
    ends: list[int] = []
    for statement in statements:
        reads += _statement_reads(statement, types)
        ends.append(len(reads))
    reads = _join_neighbours(reads, statements)
    accesses: list[TileAccess] = []
    fused_second = {joint.second.output for joint in online_reductions(statements)}  # needs no pass of its own
    for statement, (start, end) in zip(statements, pairwise((0, *ends)), strict=True):
        own = _distinct(reads[start:end])
        accesses += [a for a in own if statement.output not in fused_second or a not in accesses]
    accesses += _writes(statements, types)
    always = {load.tensor for statement in statements for load in unconditional_loads(statement.body, in_indices=True)}
    distinct = tuple(
        replace(access, num_uses=uses, is_conditional=not access.is_output and access.tensor not in always)
        for access, uses in Counter(accesses).items()
    )
    extents = {a.name: a.extent for a in anchor.axes}
    distinct = tuple(
        replace(access, rereads=any(_reads_whole_rows(other, access, extents) for other in distinct)) for access in distinct
    )
    targets = [s.target for s in statements if s.target is not None and not s.in_place]
    return TileSpace(
        axes=tuple(axes),
        accesses=distinct,
        flops=sum(s.flops for s in statements),
        instructions=count_instructions(statements),
        compute_dtype=anchor.accumulator,
        vector_axis=_vector_axis(axes, distinct),
        copied_bytes=sum(types[t].bytes for t in targets),
        operand_flops=sum(max(0, s.flops - 2 * s.points) for s in statements if sums_products(s)),
    )


def read_bytes(statements: Iterable[TensorExpr], types: Mapping[str, TensorType]) -> int:
    """Return the bytes that statements read of these tensors, every element once; those of gathers at most once."""
    read: dict[tuple[object, ...], tuple[TileAccess, int]] = {}
    for statement in statements:
        extents = statement.extents
        for access in _join_neighbours(list(_statement_reads(statement, types)), (statement,)):
            moved = min(statement.points * access.num_loads * access.dtype.bytes, access.tile_bytes(extents))
            alike = [(tuple((extents[name], c) for name, c in dim.coeffs), dim.offsets) for dim in access.dims]
            read.setdefault((access.tensor, *alike), (access, moved))
    return sum_within_tensors(read.values())


def _statement_reads(statement: TensorExpr, types: Mapping[str, TensorType]) -> Iterator[TileAccess]:
    predicate = () if statement.predicate is None else (statement.predicate,)
    for expr in (statement.body, *statement.index, *predicate):
        yield from _reads(expr, types)


def _reads(expr: Expr, types: Mapping[str, TensorType], operand: str = "") -> Iterator[TileAccess]:
    for load in loads_of(expr):
        if load.tensor in types:
            type_ = types[load.tensor]
            yield TileAccess(load.tensor, type_.dtype, _read_dims(load, type_), is_output=False, operand=operand)


def _writes(statements: tuple[TensorExpr, ...], types: Mapping[str, TensorType]) -> Iterator[TileAccess]:
    for statement in statements:
        if statement.output in types:
            type_ = types[statement.output]
            yield TileAccess(statement.output, type_.dtype, _dims(statement.index, type_), is_output=True)


def _reads_whole_rows(access: TileAccess, other: TileAccess, extents: Mapping[str, int]) -> bool:
    """Return whether an access reads all rows, along the innermost dimension, of which the other reads parts."""
    if access.tensor != other.tensor or access.is_output or access.is_conditional or not access.dims:
        return False
    *outer, row = access.dims
    *rows_of_other, part = other.dims
    is_whole = row.is_affine and [(c, extents.get(name)) for name, c in row.coeffs] == [(1, row.size)]
    return is_whole and outer == rows_of_other and row.coeffs == part.coeffs and not part.is_affine


def _read_dims(load: Load, type_: TensorType) -> tuple[Dim, ...]:
    checked = load.bounds_checked or (False,) * len(load.index)
    dims = zip(_dims(load.index, type_), load.index, checked, strict=True)
    return tuple(_dim_by_data(dim, index, is_checked=is_checked) if loads_of(index) else dim for dim, index, is_checked in dims)


def _dim_by_data(dim: Dim, index: Expr, *, is_checked: bool) -> Dim:
    if not is_checked:
        return _looked_up(dim, index)
    loads = loads_of(index)
    repeat = math.prod(dim_of(i, dim.size).repeat for i in loads[0].index) if len(loads) == 1 else 1
    return replace(dim, gathered_by=loads, repeat=repeat)


def _looked_up(dim: Dim, index: Expr) -> Dim:
    """Return a dimension that data indexes, without the elements that no index reaches."""
    bounds = range_of(index, {})
    return replace(dim, size=dim.size if bounds is None else min(dim.size, bounds[1] + 1), is_looked_up=True)


def _dims(index: tuple[Expr, ...], type_: TensorType) -> tuple[Dim, ...]:
    return tuple(_dim_with_run(dim_of(i, size), i) for i, size in zip(index, type_.shape, strict=True))


def _dim_with_run(dim: Dim, index: Expr) -> Dim:
    """Add the axes along which an index with // or % has the longest run and segments of adjacent elements."""
    if dim.is_affine or loads_of(index):
        return dim
    runs = {name: aligned_run(index, name, dim.size) for name, _ in dim.coeffs}
    axis, run = max(runs.items(), key=itemgetter(1), default=("", 1))
    segments = {name: max(run, mean_segment(index, name, dim.size)) for name, run in runs.items()}
    along, segment = max(segments.items(), key=itemgetter(1), default=("", 1))
    blocks = ((name, permuted_block(index, name)) for name, _ in dim.coeffs)
    return replace(
        dim,
        run=None if run == 1 else (axis, run),
        segment=None if segment == 1 else (along, segment),
        permuted_block=next((each for each in blocks if each[1] > 1), None),
    )


def _distinct(accesses: Iterable[TileAccess]) -> tuple[TileAccess, ...]:
    return tuple(dict.fromkeys(accesses))


def _join_neighbours(accesses: list[TileAccess], statements: Iterable[TensorExpr]) -> list[TileAccess]:
    """Replace loads whose indices differ by constants by one access of all of them, as the taps of a stencil.

    Loads that share neither elements nor lines, as the halves of a tensor, remain accesses of their own.
    """
    alike: dict[TileAccess, set[tuple[int, ...]]] = {}
    for access in accesses:
        alike.setdefault(_moved(access, (0,) * len(access.dims)), set()).add(_offset(access))
    if all(len(offsets) == 1 for offsets in alike.values()):
        return accesses
    extents = {a.name: a.extent for s in statements for a in s.axes}
    joined: dict[TileAccess, TileAccess] = {}
    for base, offsets in alike.items():
        for cluster in _clusters(base, offsets, extents):
            values = [tuple(sorted(set(along))) for along in zip(*cluster, strict=True)]
            dims = tuple(replace(dim, offsets=along) for dim, along in zip(base.dims, values, strict=True))
            one = replace(base, dims=dims, num_loads=len(cluster))
            joined |= {_moved(base, offset): one for offset in cluster}
    return [joined[access] for access in accesses]


def _offset(access: TileAccess) -> tuple[int, ...]:
    return tuple([dim.offsets[0] for dim in access.dims])


def _moved(access: TileAccess, offset: tuple[int, ...]) -> TileAccess:
    return replace(access, dims=tuple(replace(dim, offsets=(o,)) for dim, o in zip(access.dims, offset, strict=True)))


def _clusters(access: TileAccess, offsets: Iterable[tuple[int, ...]], extents: Mapping[str, int]) -> list[list[tuple[int, ...]]]:
    """Return the offsets in groups of loads that share elements or lines."""
    spans = [1 + sum(abs(c) * (extents[name] - 1) for name, c in dim.coeffs) for dim in access.dims]
    strides = [math.prod(dim.size for dim in access.dims[d + 1 :]) * access.dtype.bytes for d in range(len(spans))]

    def shares(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        steps = [y - x for x, y in zip(a, b, strict=True)]
        overlaps = all(abs(step) < span for step, span in zip(steps, spans, strict=True))
        return overlaps or abs(sum(s * stride for s, stride in zip(steps, strides, strict=True))) < LINE_BYTES

    clusters: list[list[tuple[int, ...]]] = []
    for offset in sorted(offsets):
        near = [cluster for cluster in clusters if any(shares(other, offset) for other in cluster)]
        clusters = [c for c in clusters if c not in near] + [[*(o for c in near for o in c), offset]]
    return clusters


def _vector_axis(axes: list[TileAxis], accesses: tuple[TileAccess, ...]) -> str:
    """Return the tile axis that is contiguous for most bytes; ties go to outer axes, then to the innermost."""
    wide = [a for a in axes if a.extent > 1] or axes
    if not wide:
        return ""

    def score(axis: TileAxis) -> tuple[float, int, int]:
        inner = axis.members[-1]
        total = sum(_contiguity(access, inner) * access.tensor_bytes for access in accesses)
        if axis.role is AxisRole.INNER:
            total *= min(1.0, axis.members[-1].extent / SHORT_ROW)
        return total, axis.role is AxisRole.OUTER, axes.index(axis)

    return max(wide, key=score).name


def _contiguity(access: TileAccess, axis: Axis) -> float:
    """Return 1 if the access is contiguous along the axis, 0 if it does not vary with it, -1 if it is strided."""
    used = [(d, c) for d, dim in enumerate(access.dims) for name, c in dim.coeffs if name == axis.name]
    if not used:
        return 0.0
    last = [d for d, dim in enumerate(access.dims) if dim.size > 1]
    d, coeff = used[-1]
    dim = access.dims[d]
    if len(used) == 1 and (not last or d >= last[-1]):
        if dim.is_affine:
            return 1.0 if abs(coeff) == 1 else 0.25
        if len(dim.coeffs) == 1 and axis.extent % dim.size == 0:  # packed values: one element for several points
            return 1.0
    return -1.0
