"""Facts of a reduction on a GPU: how threads may share its rows."""

from __future__ import annotations

from roller_svc.families.common.gpu.row_space import RowSpace, row_space
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.perf.workload import Workload


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[RowSpace | None] | None:
    """Prepare any loop nest on a GPU; its facts are None where nothing is reduced (a single point)."""
    if not base.machine.is_gpu or base.is_contraction or group.kind is not GroupKind.NEST:
        return None
    has_rows = bool(base.space.role(AxisRole.INNER))
    return base.with_facts(row_space(base.space, base.footprint, base.machine.hw) if has_rows else None)
