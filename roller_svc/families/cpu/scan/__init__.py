"""Scans on a CPU: running sums, products and extrema."""

from __future__ import annotations

from roller_svc.families.cpu.scan.cost import scan_cost
from roller_svc.families.cpu.scan.rules import scan_rules
from roller_svc.families.cpu.scan.workload import prepare
from roller_svc.families.family import Family

CPU_SCAN = Family(
    name="cpu/scan",
    prepare=prepare,
    rules=scan_rules,
    cost=scan_cost,
    can_split=False,
)
