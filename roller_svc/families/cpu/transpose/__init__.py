"""Layout changes on a CPU: blocked transposes in registers."""

from __future__ import annotations

from roller_svc.families.cpu.transpose.cost import transpose_cost
from roller_svc.families.cpu.transpose.rules import transpose_rules
from roller_svc.families.cpu.transpose.workload import prepare
from roller_svc.families.family import Family

CPU_TRANSPOSE = Family(
    name="cpu/transpose",
    prepare=prepare,
    rules=lambda workload: transpose_rules(workload, workload.facts),
    cost=transpose_cost,
)
