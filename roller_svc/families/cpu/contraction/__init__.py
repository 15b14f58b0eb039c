"""GEMM on a CPU: packed panels and a register-blocked micro-kernel (BLIS)."""

from __future__ import annotations

from roller_svc.families.common.row_launches import row_reduction_launches
from roller_svc.families.cpu.contraction.cost import cpu_contraction
from roller_svc.families.cpu.contraction.rules import CpuContractionRules
from roller_svc.families.cpu.contraction.workload import prepare
from roller_svc.families.family import Family

CPU_CONTRACTION = Family(
    name="cpu/contraction",
    prepare=prepare,
    rules=lambda workload: CpuContractionRules(workload),
    cost=cpu_contraction,
    launches=row_reduction_launches,
)
