"""Scatters on a GPU: writes whose index is data."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.scatter.cost import scatter_cost
from roller_svc.families.gpu.scatter.rules import ScatterRules
from roller_svc.families.gpu.scatter.workload import prepare

SCATTER = Family(
    name="gpu/scatter",
    prepare=prepare,
    rules=lambda workload: ScatterRules(workload, workload.facts),
    cost=scatter_cost,
    can_split=False,
)
