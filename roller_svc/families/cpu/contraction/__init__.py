"""GEMM on a CPU: packed panels and a register-blocked micro-kernel (BLIS)."""

from __future__ import annotations

from roller_svc.families.common.row_launches import store_then_reduce
from roller_svc.families.cpu.contraction.cost import cpu_contraction
from roller_svc.families.cpu.contraction.rules import CpuContraction
from roller_svc.families.cpu.contraction.workload import prepare
from roller_svc.families.family import Family

CPU_CONTRACTION = Family(
    name="cpu/contraction",
    prepare=prepare,
    rules=lambda workload: CpuContraction(workload),
    cost=cpu_contraction,
    launches=store_then_reduce,
)
