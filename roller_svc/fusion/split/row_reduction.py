"""Launches of a contraction followed by a row reduction: `C[m, n] +=! A[m, k] * B[k, n]`, `Y[m] +=! f(C[m, n])`.

A block on a matrix unit reduces the columns of its own tile; with several tiles along n a second launch combines the
partial results. Other units store C and reduce it in a second launch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.errors import InvariantError
from roller_svc.fusion.contraction import as_contraction
from roller_svc.fusion.space import contraction_space, nest_space
from roller_svc.ir.expr import AxisRef, Load
from roller_svc.ir.group import COLUMN_TILE, AxisRole, GroupKind, KernelGroup
from roller_svc.ir.program import Axis, AxisKind, TensorExpr, TensorType
from roller_svc.ir.rprogram import RProgram

Workspace = tuple[tuple[str, TensorType], ...]


@dataclass(frozen=True, slots=True)
class RowReductionLaunches:
    """The launches of a contraction with a row reduction."""

    contraction: KernelGroup
    program: RProgram  # of the contraction
    reduction: KernelGroup  # the second launch, a nest
    workspace: Workspace = ()  # partial results


def column_tiles(program: RProgram) -> int:
    """Return the number of tiles along n."""
    (n,) = program.space.role(AxisRole.N)
    return -(-n.extent // program.block[n.name])


def store_then_reduce_groups(group: KernelGroup, program: RProgram) -> RowReductionLaunches:
    """Return launches in which the contraction stores its results and the reduction reads them."""
    reduction = _reduction(group)
    statements = tuple(s for s in group.statements if s is not reduction)
    written = {s.output: s for s in statements}
    stored_types = dict(group.stored)
    types = {name: stored_types.get(name, TensorType(s.type.dtype.compute, s.type.shape)) for name, s in written.items()}
    read = {t for t in reduction.reads_tensors if t in written}
    stored = tuple((t, ty) for t, ty in types.items() if t in stored_types or t in read)
    contraction = _contraction(group, statements, stored)
    inputs = tuple((t, ty) for t, ty in (*group.inputs, *types.items()) if t in reduction.reads_tensors)
    result = (reduction.output, stored_types[reduction.output])
    return RowReductionLaunches(contraction, replace(program, space=contraction.space), _nest(group, reduction, inputs, result))


def reduce_then_combine_groups(group: KernelGroup, program: RProgram, parts: int) -> RowReductionLaunches:
    """Return launches in which blocks reduce their tiles along n and the second launch combines them."""
    reduction = _reduction(group)
    partial = (f"{reduction.output}.parts", TensorType(reduction.accumulator, (parts, *reduction.type.shape)))
    partial_reduction = replace(
        reduction, output=partial[0], name=partial[0], type=partial[1], index=(AxisRef(COLUMN_TILE), *reduction.index)
    )
    statements = tuple(partial_reduction if s is reduction else s for s in group.statements)
    stored = tuple(partial if t == reduction.output else (t, ty) for t, ty in group.stored)
    contraction = replace(group, statements=statements, stored=stored)
    part = Axis("part_", parts, AxisKind.REDUCE)
    body = Load(
        partial[0],
        (AxisRef(part.name), *reduction.index),
        reduction.accumulator,
        (False,) * len(partial_reduction.index),
    )
    combination = replace(reduction, axes=(*reduction.spatial, part), body=body)
    result = (reduction.output, dict(group.stored)[reduction.output])
    return RowReductionLaunches(contraction, program, _nest(group, combination, (partial,), result), (partial,))


def _reduction(group: KernelGroup) -> TensorExpr:
    if group.row_reduction is None:
        raise InvariantError(f"{group.name} has no row reduction")
    return group.row_reduction


def _contraction(group: KernelGroup, statements: tuple[TensorExpr, ...], stored: Workspace) -> KernelGroup:
    contraction = as_contraction(statements[0])
    if contraction is None:
        raise InvariantError(f"{group.name} is not a contraction")
    space = contraction_space(statements, contraction, {**dict(group.inputs), **dict(stored)})
    read = {t for s in statements for t in s.reads_tensors}
    stored_names = {t for t, _ in stored}
    return replace(
        group,
        statements=statements,
        stored=stored,
        space=space,
        register_tensors=frozenset(group.register_tensors - stored_names),
        inputs=tuple((t, ty) for t, ty in group.inputs if t in read),
    )


def _nest(group: KernelGroup, statement: TensorExpr, inputs: Workspace, result: tuple[str, TensorType]) -> KernelGroup:
    space = nest_space((statement,), statement.spatial, dict((*inputs, result)))
    return KernelGroup(f"{group.name}_rows", GroupKind.NEST, (statement,), statement.spatial, frozenset(), (result,), inputs, space)
