"""Pooling and depthwise convolution on a CPU: sliding windows over planes."""

from __future__ import annotations

from roller_svc.families.cpu.window.cost import cpu_window
from roller_svc.families.cpu.window.rules import cpu_window as window_rules
from roller_svc.families.cpu.window.workload import prepare
from roller_svc.families.family import Family

CPU_WINDOW = Family(
    name="cpu/window",
    prepare=prepare,
    rules=lambda workload: window_rules(workload, workload.facts),
    cost=cpu_window,
    can_split=False,
)
