"""Split-K: kernel group with a split reduction → group of partial results, group that combines them.

The reduction over k becomes C'[s, ...] over the k of split s, and C[...] over s (Halide's rfactor). Both are ordinary
statements, so schedules and code generators do not know of splitting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.analysis.online_reduction import OnlineReduction
from roller_svc.analysis.operand import MAX_VECTOR_WIDTH
from roller_svc.fusion.contraction import Contraction
from roller_svc.fusion.space import contraction_space, nest_space
from roller_svc.fusion.split.online_reduction import (
    combine_partials,
    equal_splits,
    online_reduction_of,
    partial_reductions,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, Load, Op, OpKind, Select, rewrite, split_restated, substitute
from roller_svc.ir.group import AxisRole, ContractionOperands, GroupKind, KernelGroup, TileSpace
from roller_svc.ir.hardware import ComputeUnit
from roller_svc.ir.index import add, ceil_div, conjunction, lt, min_, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType, identity
from roller_svc.ir.rprogram import RProgram, RTile


@dataclass(frozen=True, slots=True)
class SplitGroups:
    partial: KernelGroup
    partial_program: RProgram
    combining: KernelGroup
    workspaces: tuple[tuple[str, TensorType], ...]


def may_split(group: KernelGroup) -> bool:
    """Return whether a group's reduction can be split.

    It has independent reductions over the same points, or two that share a pass, and maps of its points. A convolution
    is split as a contraction instead. A dual GEMM is not split, nor are blocks of k that have one scale.
    """
    if group.is_dual_gemm or group.space.role(AxisRole.PIXEL):
        return False
    if group.space.scale_runs is not None and len(group.space.reduced[0].members) > 1:
        return False
    return bool(_independent_reductions(group)) or online_reduction_of(group) is not None


def _independent_reductions(group: KernelGroup) -> tuple[TensorExpr, ...]:
    """Return the reductions of a group, none of which reads another's result; () if others or other maps exist."""
    outer = {a.name for a in group.outer}
    first, *rest = tuple([s for s in group.statements if s.kind is StatementKind.REDUCE]) or (None,)
    maps = [s for s in group.statements if s.kind is not StatementKind.REDUCE]
    if first is None or not all(s.kind is StatementKind.MAP and {a.name for a in s.axes} == outer for s in maps):
        return ()
    if not rest:
        return (first,) if group.statements[0] is first else ()
    written = {s.output for s in group.statements}
    extents = [a.extent for a in first.reduced]
    are_alike = all([a.extent for a in s.reduced] == extents and s.spatial == first.spatial for s in rest)
    reads_none = not any(written & set(s.reads_tensors) for s in (first, *rest))
    return (first, *rest) if group.kind is GroupKind.NEST and are_alike and reads_none else ()


def split_length(space: TileSpace, unit: ComputeUnit, block: Mapping[str, int], split_k: int) -> int:
    """Return the points of the longest reduced axis in one split.

    If that axis is the innermost one, the length is a multiple of a matrix unit's step (with several axes, of a vector)
    or of a nest's vector, so that vector accesses stay aligned.
    """
    longest, inner = space.longest_reduced, space.reduced[-1]
    length = ceil_div(longest.extent, split_k)
    if inner.members[-1] != longest:
        return length
    is_only_axis = all(m.extent == 1 for m in inner.members[:-1])
    if unit.is_matrix:
        step = block[inner.name] if is_only_axis else MAX_VECTOR_WIDTH
    else:
        step = MAX_VECTOR_WIDTH if inner.role is AxisRole.INNER else 1
    return ceil_div(length, step) * step


def split_group(group: KernelGroup, program: RProgram) -> SplitGroups:
    """Split a group into `program.split_k` parts. The rProgram of the combination is constructed like any other."""
    reductions = _independent_reductions(group)
    if (pair := None if reductions else online_reduction_of(group)) is not None:
        return _split_pair(group, program, pair)
    first = reductions[0]
    longest = max(first.reduced, key=lambda a: a.extent)
    length = split_length(group.space, program.unit, program.block.as_dict(), program.split_k)
    pieces = ceil_div(longest.extent, length)
    piece = Axis(f"{longest.name}_piece_", pieces, AxisKind.SPATIAL)
    contraction = _partial_contraction(group, longest, length, piece)
    partials: list[TensorExpr] = []
    combined: dict[str, TensorExpr] = {}
    for statement in reductions:
        tensor = f"{statement.output}.partial"
        type_ = TensorType(statement.accumulator, (pieces, *statement.type.shape))
        partials.append(_partial(statement, tensor, length, piece, type_, contraction))
        # partial results have the accumulator's type
        body = Load(tensor, (AxisRef(piece.name), *statement.index), type_.dtype, (False,) * len(type_.shape))
        axes = (*statement.spatial, replace(piece, kind=AxisKind.REDUCE))
        combined[statement.output] = replace(statement, axes=axes, body=body)
    workspaces = tuple([(s.output, s.type) for s in partials])
    types = {**dict(group.inputs), **dict(workspaces)}
    partial_group = _regrouped(group, tuple(partials), types, workspaces, contraction)
    if program.space.k_bounds is None:  # all parts of k whole, as the rProgram has them
        partial_group = replace(partial_group, space=replace(partial_group.space, k_bounds=None))
    statements = tuple([combined.get(s.output, s) for s in group.statements])
    combining = _combining_group(group, statements, workspaces)
    return SplitGroups(partial_group, _with_space(program, partial_group.space), combining, workspaces)


def _split_pair(group: KernelGroup, program: RProgram, pair: OnlineReduction) -> SplitGroups:
    longest = max(pair.first.reduced, key=lambda a: a.extent)
    pieces = equal_splits(longest.extent, program.split_k)
    cut = replace(longest, extent=longest.extent // pieces)
    piece = Axis(f"{longest.name}_piece_", pieces, AxisKind.SPATIAL)
    names = (f"{pair.first.output}.partial", f"{pair.second.output}.partial")
    position = add(mul(ref(piece.name), num(cut.extent)), ref(cut.name))
    partials = partial_reductions(pair, names, cut, position, piece)
    workspaces = tuple((s.output, s.type) for s in partials)
    types = {**dict(group.inputs), **dict(workspaces)}
    partial_group = _regrouped(group, partials, types, workspaces, None)
    points = math.prod(a.extent for a in partials[0].reduced)
    combining = _combining_group(group, combine_partials(pair, names, piece, points, group.statements), workspaces)
    return SplitGroups(partial_group, _with_space(program, partial_group.space), combining, workspaces)


def _partial_contraction(group: KernelGroup, longest: Axis, length: int, piece: Axis) -> Contraction | None:
    """Return the contraction of the partial results of a contraction group; None of other groups.

    It has the group's roles, and the pieces are a batch, also those of an axis that one operand alone has.
    """
    if group.operands is None:
        return None
    first, space = group.statements[0], group.space
    position, guard = _position(longest, length, piece)

    def members(role: AxisRole) -> tuple[Axis, ...]:
        found = (a for axis in space.role(role) for a in axis.members)
        return tuple(replace(a, extent=length) if a == longest else a for a in found)

    def part(operand: Expr) -> Expr:
        value = _widen_product(substitute(operand, {longest.name: position}), first.accumulator)
        if not value.dtype.is_float and value.dtype is not first.accumulator:
            value = Cast(value, first.accumulator, implicit=True)
        return value if guard is None else _guard_product(value, guard)

    batch, m, n, k = (members(role) for role in (AxisRole.BATCH, AxisRole.M, AxisRole.N, AxisRole.K))
    types = {} if guard is None else dict(group.inputs)
    scales = tuple(_clamp(substitute(scale, {longest.name: position}), types) for scale in group.operands.scales)
    _, conditions = split_restated(first.body)
    guard_of_part = conjunction(substitute(condition, {longest.name: position}) for condition in conditions)
    return Contraction((piece, *batch), m, n, k, part(group.operands.a), part(group.operands.b), scales, guard_of_part)


def _clamp(scale: Expr, types: Mapping[str, TensorType]) -> Expr:
    """Keep the indices of a scale in bounds where the last piece is longer than the axis: products there are 0."""

    def change(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.tensor not in types:
            return node
        shape = types[node.tensor].shape
        index = tuple(min_(place, num(size - 1)) for place, size in zip(node.index, shape, strict=True))
        return replace(node, index=index)

    return rewrite(scale, change)


def _position(longest: Axis, length: int, piece: Axis) -> tuple[Expr, Expr | None]:
    """Return the position on the whole axis, and the condition that it exists (None: always)."""
    position = add(mul(ref(piece.name), num(length)), ref(longest.name))
    return position, lt(position, num(longest.extent)) if longest.extent % length else None


def _partial(
    first: TensorExpr, tensor: str, length: int, piece: Axis, type_: TensorType, contraction: Contraction | None
) -> TensorExpr:
    longest = max(first.reduced, key=lambda a: a.extent)
    position, guard = _position(longest, length, piece)
    if contraction is not None:
        body = contraction.product(first.body.dtype if first.body.dtype.is_float else first.accumulator)
    else:
        body = substitute(first.body, {longest.name: position})
        body = body if guard is None else _select_identity(body, guard, first.combine or Combine.SUM)
    axes = [piece, *(replace(a, extent=length) if a == longest else a for a in first.axes)]
    return replace(
        first,
        output=tensor,
        name=tensor,
        type=type_,
        axes=tuple(axes),
        index=(AxisRef(piece.name), *first.index),
        body=body,
    )


def _widen_product(body: Expr, accumulator: DType) -> Expr:
    """Widen an integer product to the accumulator's type; the complete result is truncated."""
    if isinstance(body, Op) and body.kind is OpKind.MUL and not body.dtype.is_float and body.dtype is not accumulator:
        wide = (_widen_product(arg, accumulator) for arg in body.args)
        args = tuple(a if a.dtype is accumulator else Cast(a, accumulator, implicit=True) for a in wide)
        return Op(OpKind.MUL, args, accumulator)
    return body


def _select_identity(body: Expr, guard: Expr, combine: Combine) -> Expr:
    """Return the body where the guard holds, else the identity."""
    return Select(guard, body, identity(combine, body.dtype), body.dtype)


def _guard_product(body: Expr, guard: Expr) -> Expr:
    """Guard the factors of a product that is summed, so that it is still a product."""
    if isinstance(body, Op) and body.kind is OpKind.MUL:
        return Op(OpKind.MUL, tuple(_guard_product(a, guard) for a in body.args), body.dtype)
    if isinstance(body, Cast) and body.implicit:
        return Cast(_guard_product(body.arg, guard), body.dtype, implicit=True)
    return _select_identity(body, guard, Combine.SUM)


def _regrouped(
    group: KernelGroup,
    statements: tuple[TensorExpr, ...],
    types: dict[str, TensorType],
    stored: tuple[tuple[str, TensorType], ...],
    contraction: Contraction | None,
) -> KernelGroup:
    outer = statements[0].spatial
    if contraction is not None:
        kind, space = GroupKind.CONTRACTION, contraction_space(statements, contraction, types)
        factors: ContractionOperands | None = ContractionOperands(contraction.a, contraction.b, scales=contraction.scales)
    else:
        kind, space, factors = GroupKind.NEST, nest_space(statements, outer, types), None
    read = {t for s in statements for t in s.reads_tensors}
    written = {s.output for s in statements}
    inputs = tuple((t, ty) for t, ty in types.items() if t in read and t not in written)
    return KernelGroup(f"{group.name}_partial", kind, statements, outer, frozenset(), stored, inputs, space, factors)


def _combining_group(
    group: KernelGroup, statements: tuple[TensorExpr, ...], workspaces: tuple[tuple[str, TensorType], ...]
) -> KernelGroup:
    types = {**dict(workspaces), **dict(group.inputs), **dict(group.stored)}
    read = {t for s in statements for t in s.reads_tensors}
    inputs = tuple((t, ty) for t, ty in types.items() if t in read and t not in {s.output for s in statements})
    views = {t: ty for t, ty in types.items() if t not in group.register_tensors}
    space = nest_space(statements, group.outer, views)
    return KernelGroup(
        f"{group.name}_combine",
        GroupKind.NEST,
        statements,
        group.outer,
        group.register_tensors,
        group.stored,
        inputs,
        space,
    )


def _with_space(program: RProgram, space: TileSpace) -> RProgram:
    """Return the rProgram with the tiles in the space of the partial group, one split at a time."""

    def tile(old: RTile) -> RTile:
        known = old.as_dict()
        extents = []
        for axis in space.axes:
            extent = known.get(axis.name, 1)
            extents.append((axis.name, min(extent, axis.extent) if axis.role is AxisRole.INNER else extent))
        return RTile(tuple(extents))

    return replace(program, space=space, block=tile(program.block), thread=tile(program.thread), split_k=1)
