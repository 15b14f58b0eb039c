"""Elementwise kernels on a GPU."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.elementwise.cost import simt_map
from roller_svc.families.gpu.elementwise.rules import SimtMap
from roller_svc.families.gpu.elementwise.workload import prepare

ELEMENTWISE = Family(
    name="gpu/elementwise",
    prepare=prepare,
    rules=lambda workload: SimtMap(workload, workload.facts),
    cost=simt_map,
)
