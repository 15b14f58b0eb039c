"""Attention on tensor cores by warpgroups: `wgmma`, TMA and warp specialisation (FlashAttention-3)."""

from __future__ import annotations

from roller_svc.families.common.gpu.warpgroups.launch import warpgroup_launch
from roller_svc.families.family import Family, GroupLaunch
from roller_svc.families.gpu.wgmma_attention.cost import wgmma_attention
from roller_svc.families.gpu.wgmma_attention.knobs import KNOBS
from roller_svc.families.gpu.wgmma_attention.rules import WgmmaAttentionRules
from roller_svc.families.gpu.wgmma_attention.staging import attention_operands
from roller_svc.families.gpu.wgmma_attention.workload import prepare

WGMMA_ATTENTION = Family(
    name="gpu/wgmma_attention",
    prepare=prepare,
    rules=lambda workload: WgmmaAttentionRules(workload),
    cost=wgmma_attention,
    launch=warpgroup_launch,
    launches=lambda group, program, hw: (GroupLaunch(group, program),),
    knobs=KNOBS,
    staging=attention_operands,
)
