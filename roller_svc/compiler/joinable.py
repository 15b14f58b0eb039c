"""The best kernel of a request that can be rTasks of a kernel with others, where the fastest cannot.

A launch that cannot join cuts a persistent kernel in two. A slower kernel is better than that, within the cost of a cut.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.compiler.autotune import build_alone, spills
from roller_svc.compiler.lower_and_emit import find_plan_refusal
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.pipeline import parse_request
from roller_svc.compiler.plans import merge_ranked_plans
from roller_svc.compiler.workspace import rank_within
from roller_svc.errors import NoCandidateError
from roller_svc.hardware.catalog import load
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import BuildRequest, CandidateResult, Plan

MAX_PLANS = 8  # that are lowered to see whether they can join


def find_joinable(request: BuildRequest, fastest: Plan) -> CandidateResult | None:
    """Return the best candidate that can join others, built; None if a cut costs less.

    `fastest` is the fastest plan of the request, which cannot join. The workspace fits the limit of the request.
    """
    hw = request.hardware or load(request.target)
    cut_s = cut_seconds(hw)
    if not cut_s:
        return None
    program, constraints = parse_request(request)[0], replace(request.constraints, joinable=True)
    try:
        partitions = rank_within(PartitionCache(program), hw, MAX_PLANS, constraints, request.max_workspace_bytes)
    except NoCandidateError:
        return None
    for grouped in merge_ranked_plans(partitions, MAX_PLANS):
        if grouped.plan.estimate.seconds > fastest.estimate.seconds + cut_s:
            continue
        if find_plan_refusal(grouped.plan, program, grouped.groups, hw) is None:
            built = build_alone(grouped, program, hw)
            if built.error is None and not spills(built):
                return built
    return None


def cut_seconds(hw: HardwareSpec) -> float:
    """Return the seconds that a launch between two segments costs: a second cooperative launch, with its fill.

    0 for a device without cooperative launches.
    """
    limits = hw.limits
    return 0.0 if limits.cooperative_launch_s is None else limits.cooperative_launch_s + limits.launch_overhead_s
