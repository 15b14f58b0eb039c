"""Elementwise kernels on a GPU."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.elementwise.cost import elementwise_cost
from roller_svc.families.gpu.elementwise.rules import ElementwiseRules
from roller_svc.families.gpu.elementwise.workload import prepare

ELEMENTWISE = Family(
    name="gpu/elementwise",
    prepare=prepare,
    rules=lambda workload: ElementwiseRules(workload, workload.facts),
    cost=elementwise_cost,
)
