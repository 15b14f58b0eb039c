"""Pooling and depthwise convolution on a GPU: sliding windows."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.window.cost import windowed_cost
from roller_svc.families.gpu.window.rules import WindowRules
from roller_svc.families.gpu.window.workload import accepts, prepare

WINDOW = Family(
    name="gpu/window",
    prepare=prepare,
    rules=lambda workload: WindowRules(workload, workload.facts.windows),
    cost=windowed_cost,
    accepts=accepts,
)
