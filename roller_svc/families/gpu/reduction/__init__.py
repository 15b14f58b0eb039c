"""Row and column reductions on a GPU, and every loop nest that no other family takes."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.reduction.cost import reduction_cost
from roller_svc.families.gpu.reduction.rules import reduction_rules
from roller_svc.families.gpu.reduction.workload import prepare

REDUCTION = Family(
    name="gpu/reduction",
    prepare=prepare,
    rules=reduction_rules,
    cost=reduction_cost,
)
