"""Facts of a reduction on a GPU: how threads may share its rows."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.analysis.instruction_counts import count_by_axes, sums_products
from roller_svc.analysis.online_reduction import joint_reductions
from roller_svc.analysis.shared_values import replace_all, shared_values
from roller_svc.families.common.gpu.packed_rows import axis_positions, packed_rows
from roller_svc.families.common.gpu.row_space import RowAccess, RowSpace, row_space
from roller_svc.ir.expr import Const, Load, axes_of, loads_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.program import StatementKind
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[RowSpace | None] | None:
    """Prepare any loop nest on a GPU; its facts are None where nothing is reduced (a single point)."""
    if not base.machine.is_gpu or base.is_contraction or group.kind is not GroupKind.NEST:
        return None
    if not base.space.role(AxisRole.INNER):
        return base.with_facts(None)
    rows = row_space(base.space, base.footprint, base.machine.hw)
    accumulators = tuple([(s.output, s.accumulator) for s in group.statements if s.kind is StatementKind.REDUCE])
    rows = replace(rows, products=_products(group), accumulators_of=accumulators)
    rows = _with_shared_values(_with_joint_passes(rows, group), group)
    packed = packed_rows(group, base.machine.hw, rows.vector_elems, rows.vector_rows)
    return base.with_facts(rows if packed is None else replace(rows, vector_elems=packed.vector_elems, packed=packed))


def _with_joint_passes(rows: RowSpace, group: KernelGroup) -> RowSpace:
    """Return the rows with one pass for all reductions that the schedule computes in one loop."""
    passes: dict[str, int] = {}
    for access in rows.accesses:
        passes[access.footprint.access.tensor] = max(access.num_passes, passes.get(access.footprint.access.tensor, 0))
    for first, *later in joint_reductions(group.statements):
        seen = set(first.reads_tensors)
        for statement in later:
            for tensor in seen & set(statement.reads_tensors) & passes.keys():
                passes[tensor] = max(1, passes[tensor] - 1)
            seen |= set(statement.reads_tensors)

    def renew(accesses: tuple[RowAccess, ...]) -> tuple[RowAccess, ...]:
        return tuple([replace(a, num_passes=min(a.num_passes, passes[a.footprint.access.tensor])) for a in accesses])

    return replace(rows, accesses=renew(rows.accesses), read=renew(rows.read))


def _with_shared_values(rows: RowSpace, group: KernelGroup) -> RowSpace:
    """Return the rows whose registers hold a value of several operands once."""
    outer = {a.name for a in group.outer}
    written = {s.output for s in group.statements}
    along = [s.body for s in group.statements if any(a.name not in outer for a in s.axes)]

    def moves(load: Load) -> bool:
        return load.tensor not in written and bool(axes_of(load) - outer)

    merged: set[str] = set()
    for value in shared_values(along, moves):
        tensors = list(dict.fromkeys(load.tensor for load in loads_of(value)))
        others = {load.tensor for body in along for load in loads_of(replace_all(body, {value: Const(0, value.dtype)}))}
        merged |= set(tensors[1:]) - others
    read = tuple([replace(a, is_merged=a.footprint.access.tensor in merged) for a in rows.read])
    return replace(rows, read=read) if merged else rows


def _products(group: KernelGroup) -> tuple[tuple[float, Tile], ...] | None:
    """Return the instructions of a group that sums products along its rows, by outer axes; None for other groups."""
    outer = {a.name for a in group.outer}
    along = [s for s in group.statements if any(a.name not in outer for a in s.axes)]
    if len(along) != 1 or not sums_products(along[0]):
        return None
    return tuple((float(count), axis_positions(group.space, axes)) for axes, count in count_by_axes(along[0]).items())
