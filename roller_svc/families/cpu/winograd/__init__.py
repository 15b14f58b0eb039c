"""Winograd convolution on a CPU: transformed tiles in L2, batched products in registers, results transformed in place.

For each task: patch -> B^T d B -> V; U * V -> M, one product for each position of a tile; A^T M A -> epilogue.
"""

from __future__ import annotations

from roller_svc.families.cpu.winograd.cost import cpu_winograd
from roller_svc.families.cpu.winograd.rules import CpuWinogradRules
from roller_svc.families.cpu.winograd.workload import prepare
from roller_svc.families.family import Family

CPU_WINOGRAD = Family(
    name="cpu/winograd",
    prepare=prepare,
    rules=CpuWinogradRules,
    cost=cpu_winograd,
    can_split=False,
)
