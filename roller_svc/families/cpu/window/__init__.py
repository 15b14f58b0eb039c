"""Pooling and depthwise convolution on a CPU: sliding windows over planes."""

from __future__ import annotations

from roller_svc.families.cpu.window.cost import window_cost
from roller_svc.families.cpu.window.rules import window_rules
from roller_svc.families.cpu.window.workload import prepare
from roller_svc.families.family import Family

CPU_WINDOW = Family(
    name="cpu/window",
    prepare=prepare,
    rules=lambda workload: window_rules(workload, workload.facts),
    cost=window_cost,
    can_split=False,
)
