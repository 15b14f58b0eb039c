"""Facts of an elementwise kernel: its space."""

from __future__ import annotations

from roller_svc.families.common.gpu.elementwise_space import MapSpace, is_map, map_space
from roller_svc.ir.group import KernelGroup
from roller_svc.perf.workload import Workload


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[MapSpace] | None:
    """Prepare an elementwise program on a GPU; None for any other group or device."""
    if not base.machine.is_gpu or base.is_contraction or not is_map(base.space):
        return None
    return base.with_facts(map_space(base.space))
