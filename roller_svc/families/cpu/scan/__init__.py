"""Scans on a CPU: running sums, products and extrema."""

from __future__ import annotations

from roller_svc.families.common.scan_launches import nearest_pieces, split_scan_launches
from roller_svc.families.cpu.scan.cost import scan_cost
from roller_svc.families.cpu.scan.rules import CpuScanRules
from roller_svc.families.cpu.scan.workload import prepare
from roller_svc.families.family import Family

CPU_SCAN = Family(
    name="cpu/scan",
    prepare=prepare,
    rules=CpuScanRules,
    cost=scan_cost,
    launches=split_scan_launches,
    can_split=False,
    knobs={"split_k": nearest_pieces},
)
