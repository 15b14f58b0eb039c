"""Loop nests on a CPU: elementwise programs, row and column reductions, scatters."""

from __future__ import annotations

from roller_svc.families.cpu.loops.cost import cpu_loop_cost
from roller_svc.families.cpu.loops.rules import loop_rules
from roller_svc.families.cpu.loops.workload import prepare
from roller_svc.families.family import Family

CPU_LOOPS = Family(
    name="cpu/loops",
    prepare=prepare,
    rules=lambda workload: loop_rules(workload, serial=workload.facts.serial),
    cost=cpu_loop_cost,
)
