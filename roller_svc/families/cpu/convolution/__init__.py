"""Direct convolution on a CPU: staged input patches, packed weights, the micro-kernel of GEMM."""

from __future__ import annotations

from roller_svc.families.common.row_launches import store_then_reduce
from roller_svc.families.cpu.convolution.cost import cpu_convolution
from roller_svc.families.cpu.convolution.rules import CpuConvolution
from roller_svc.families.cpu.convolution.workload import prepare
from roller_svc.families.family import Family

CPU_CONVOLUTION = Family(
    name="cpu/convolution",
    prepare=prepare,
    rules=lambda workload: CpuConvolution(workload, workload.facts),
    cost=cpu_convolution,
    launches=store_then_reduce,
)
