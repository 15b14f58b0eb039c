"""GEMM on tensor cores by warps: `mma.sync` and MFMA."""

from __future__ import annotations

from roller_svc.families.common.gpu.knobs import MATRIX_KNOBS
from roller_svc.families.common.gpu.matrix.launches import matrix_launches
from roller_svc.families.common.gpu.matrix.staged_operands import mma_operands
from roller_svc.families.common.gpu.matrix.stream_k import stream_k_launch
from roller_svc.families.family import Family
from roller_svc.families.gpu.mma_contraction.cost import mma_contraction
from roller_svc.families.gpu.mma_contraction.rules import MmaContractionRules
from roller_svc.families.gpu.mma_contraction.workload import prepare

MMA_CONTRACTION = Family(
    name="gpu/mma_contraction",
    prepare=prepare,
    rules=MmaContractionRules,
    varied_rules=lambda workload: MmaContractionRules(workload, varied=True),
    cost=mma_contraction,
    launch=stream_k_launch,
    launches=matrix_launches,
    knobs=MATRIX_KNOBS,
    staging=mma_operands,
)
