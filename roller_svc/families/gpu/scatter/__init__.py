"""Scatters on a GPU: writes whose index is data."""

from __future__ import annotations

from roller_svc.families.common.gpu.serial_cost import serial_cost
from roller_svc.families.common.gpu.serial_rules import SerialRules
from roller_svc.families.family import Family
from roller_svc.families.gpu.scatter.workload import prepare

SCATTER = Family(
    name="gpu/scatter",
    prepare=prepare,
    rules=lambda workload: SerialRules(workload),
    cost=serial_cost,
    can_split=False,
)
