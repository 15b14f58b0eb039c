"""Scans on a GPU: running sums, products and extrema."""

from __future__ import annotations

from roller_svc.families.common.scan_launches import nearest_pieces, split_scan_launches
from roller_svc.families.family import Family
from roller_svc.families.gpu.scan.cost import scan_cost
from roller_svc.families.gpu.scan.rules import ScanRules
from roller_svc.families.gpu.scan.workload import prepare

SCAN = Family(
    name="gpu/scan",
    prepare=prepare,
    rules=ScanRules,
    cost=scan_cost,
    launches=split_scan_launches,
    can_split=False,
    knobs={"split_k": nearest_pieces},
)
