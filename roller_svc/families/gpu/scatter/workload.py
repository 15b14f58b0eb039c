"""Which groups are scatters on a GPU."""

from __future__ import annotations

from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.perf.workload import Workload


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[None] | None:
    return base if base.machine.is_gpu and group.kind is GroupKind.SCATTER else None
