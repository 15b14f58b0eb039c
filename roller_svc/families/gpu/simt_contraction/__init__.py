"""GEMM on the FMA units of a GPU (SIMT)."""

from __future__ import annotations

from roller_svc.families.common.gpu.knobs import SIMT_KNOBS
from roller_svc.families.common.row_launches import row_reduction_launches
from roller_svc.families.family import Family
from roller_svc.families.gpu.simt_contraction.cost import simt_contraction
from roller_svc.families.gpu.simt_contraction.rules import SimtContractionRules
from roller_svc.families.gpu.simt_contraction.workload import prepare

SIMT_CONTRACTION = Family(
    name="gpu/simt_contraction",
    prepare=prepare,
    rules=lambda workload: SimtContractionRules(workload),
    cost=simt_contraction,
    launches=row_reduction_launches,
    knobs=SIMT_KNOBS,
)
