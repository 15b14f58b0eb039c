"""Direct convolution on a CPU: staged input patches, packed weights, the micro-kernel of GEMM."""

from __future__ import annotations

from roller_svc.families.common.row_launches import row_reduction_launches
from roller_svc.families.cpu.convolution.cost import cpu_convolution
from roller_svc.families.cpu.convolution.rules import CpuConvolutionRules
from roller_svc.families.cpu.convolution.workload import prepare
from roller_svc.families.family import Family

CPU_CONVOLUTION = Family(
    name="cpu/convolution",
    prepare=prepare,
    rules=lambda workload: CpuConvolutionRules(workload, workload.facts),
    cost=cpu_convolution,
    launches=row_reduction_launches,
)
