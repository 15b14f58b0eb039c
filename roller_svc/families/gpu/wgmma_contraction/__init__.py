"""GEMM on tensor cores by warpgroups: `wgmma`, TMA and warp specialisation."""

from __future__ import annotations

from roller_svc.families.common.gpu.matrix.launches import matrix_launches
from roller_svc.families.common.gpu.warpgroups.launch import warpgroup_launch
from roller_svc.families.common.gpu.warpgroups.staged_operands import wgmma_operands
from roller_svc.families.family import Family
from roller_svc.families.gpu.wgmma_contraction.cost import wgmma_contraction
from roller_svc.families.gpu.wgmma_contraction.knobs import KNOBS
from roller_svc.families.gpu.wgmma_contraction.rules import WgmmaContractionRules
from roller_svc.families.gpu.wgmma_contraction.workload import prepare

WGMMA_CONTRACTION = Family(
    name="gpu/wgmma_contraction",
    prepare=prepare,
    rules=WgmmaContractionRules,
    varied_rules=lambda workload: WgmmaContractionRules(workload, varied=True),
    cost=wgmma_contraction,
    launch=warpgroup_launch,
    launches=matrix_launches,
    knobs=KNOBS,
    staging=wgmma_operands,
)
