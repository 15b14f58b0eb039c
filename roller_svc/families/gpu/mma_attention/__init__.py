"""Attention on matrix units by warps: `mma.sync` or MFMA, perhaps with keys split over blocks (FlashDecoding)."""

from __future__ import annotations

from roller_svc.families.family import Family
from roller_svc.families.gpu.mma_attention.cost import mma_attention
from roller_svc.families.gpu.mma_attention.knobs import KNOBS
from roller_svc.families.gpu.mma_attention.launches import split_kv_launch, split_kv_launches
from roller_svc.families.gpu.mma_attention.rules import MmaAttentionRules
from roller_svc.families.gpu.mma_attention.staging import attention_operands
from roller_svc.families.gpu.mma_attention.workload import prepare

MMA_ATTENTION = Family(
    name="gpu/mma_attention",
    prepare=prepare,
    rules=lambda workload: MmaAttentionRules(workload),
    cost=mma_attention,
    launch=split_kv_launch,
    launches=split_kv_launches,
    knobs=KNOBS,
    staging=attention_operands,
)
