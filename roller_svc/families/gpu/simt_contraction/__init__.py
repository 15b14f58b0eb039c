"""GEMM on the FMA units of a GPU (SIMT)."""

from __future__ import annotations

from roller_svc.families.common.gpu.knobs import SIMT_KNOBS
from roller_svc.families.common.row_launches import store_then_reduce
from roller_svc.families.family import Family
from roller_svc.families.gpu.simt_contraction.cost import simt_contraction
from roller_svc.families.gpu.simt_contraction.rules import SimtContraction
from roller_svc.families.gpu.simt_contraction.workload import prepare

SIMT_CONTRACTION = Family(
    name="gpu/simt_contraction",
    prepare=prepare,
    rules=lambda workload: SimtContraction(workload),
    cost=simt_contraction,
    launches=store_then_reduce,
    knobs=SIMT_KNOBS,
)
