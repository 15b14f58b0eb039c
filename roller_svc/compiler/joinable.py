"""The best kernel of a request that can be rTasks of a kernel with others, where the fastest cannot.

A launch that cannot join cuts a persistent kernel in two. A slower kernel is better than that, within the cost of a cut.
A kernel that streams its weights fetches them while others wait for a barrier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from roller_svc.compiler.autotune import build_alone, spills
from roller_svc.compiler.explain import parse_request
from roller_svc.compiler.lower_and_emit import find_plan_refusal
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans, merge_ranked_plans
from roller_svc.compiler.rank import MAX_PROGRAMS, TIE_FRACTION
from roller_svc.compiler.workspace import rank_within
from roller_svc.errors import NoCandidateError
from roller_svc.families.matching import can_stream, is_streamed
from roller_svc.hardware.catalog import load
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.estimate import LAUNCH, Candidate
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import BuildRequest, CandidateResult, GroupedPlan, Plan
from roller_svc.ir.rprogram import RProgram

MAX_PLANS = 8  # that are lowered to see whether they can join


@dataclass(frozen=True, slots=True)
class _Search:
    """A request whose program is parsed."""

    request: BuildRequest
    program: TensorProgram
    hardware: HardwareSpec


def find_joinable(request: BuildRequest, fastest: Plan, *, is_cut: bool) -> CandidateResult | None:
    """Return the best candidate for a kernel of many operators, built; None if the fastest is, or a cut costs less.

    It streams its weights, and is slower by less than a barrier costs. Else it can join others where the fastest cannot.
    Its workspace fits the limit of the request.

    Args:
        request: what the kernel computes.
        fastest: the fastest plan.
        is_cut: whether the fastest cannot join others.
    """
    search = _Search(request, parse_request(request)[0], request.hardware or load(request.target))
    hw, constraints = search.hardware, replace(request.constraints, joinable=True)
    cut_s = cut_seconds(hw)
    if not cut_s:
        return None
    most_s = _work_seconds(fastest) + barrier_seconds(hw) + is_cut * cut_s
    streaming = [each for each in _streaming_plans(search) if _work_seconds(each.plan) <= most_s]
    if streaming and streaming[0].plan == fastest:
        return None
    built = _build_first(streaming, search)
    if built is not None:
        return built
    if not is_cut:
        return None
    ranked = _rank(search, constraints, MAX_PLANS)
    fast = (each for each in ranked if each.plan.estimate.seconds <= fastest.estimate.seconds + cut_s)
    return _build_first((each for each in fast if find_plan_refusal(each.plan, search.program, each.groups, hw) is None), search)


def _work_seconds(plan: Plan) -> float:
    """Return the seconds of a plan without its launches."""
    return plan.estimate.seconds - sum(each.seconds for each in plan.estimate.stages if each.name == LAUNCH)


def _rank(search: _Search, constraints: ScheduleConstraints, count: int) -> Iterator[GroupedPlan]:
    """Yield plans of a request, the fastest first."""
    cache = PartitionCache(search.program)
    try:
        partitions = rank_within(cache, search.hardware, count, constraints, search.request.max_workspace_bytes)
    except NoCandidateError:
        return
    yield from merge_ranked_plans(partitions, count)


def _streams(program: RProgram, hw: HardwareSpec) -> bool:
    """Return whether a launch streams an operand, with at most one rTask a core."""
    return is_streamed(program) and program.pipeline.persistent_blocks <= hw.num_cores


def _streaming_plans(search: _Search) -> list[GroupedPlan]:
    """Return a plan of each fusion alternative of which a launch streams, the fastest first."""
    hw, cache = search.hardware, PartitionCache(search.program)
    constraints = replace(search.request.constraints, joinable=True, streams=True)
    if not any(can_stream(group, hw) for groups in cache.partitions(hw, constraints) for group in groups):
        return []
    try:
        partitions = rank_within(cache, hw, MAX_PROGRAMS, constraints, search.request.max_workspace_bytes)
    except NoCandidateError:
        return []
    plans: list[GroupedPlan] = []
    for groups, candidates, _ in partitions:
        chosen = tuple((_with_fewest_threads(each, hw),) for each in candidates)
        if any(_streams(each.program, hw) for (each,) in chosen):
            plans += (GroupedPlan(plan, groups) for plan in best_plans(chosen, 1))
    return sorted(plans, key=lambda each: _work_seconds(each.plan))


def _with_fewest_threads(candidates: Sequence[Candidate], hw: HardwareSpec) -> Candidate:
    """Return the candidate with the fewest threads of those that stream and tie; the first one if none streams.

    Its threads, and those that fill pages, leave the registers that all other rTasks of a kernel have. Of as many threads
    the one with the smallest page is taken, because the pages of a ring are as large as the largest.
    """
    streaming = [each for each in candidates if _streams(each.program, hw)]
    if not streaming:
        return candidates[0]
    tied_s = (1 + TIE_FRACTION) * min(each.estimate.seconds for each in streaming)
    tied = (each for each in streaming if each.estimate.seconds <= tied_s)
    return min(tied, key=lambda each: (each.program.threads, _page_elements(each.program), each.estimate.seconds))


def _page_elements(program: RProgram) -> int:
    """Return the elements of a page that streams."""
    return math.prod(extent for _, extent in program.block.extents)


def _build_first(plans: Iterable[GroupedPlan], search: _Search) -> CandidateResult | None:
    """Return the first of these plans that compiles without spills, built."""
    for grouped in plans:
        built = build_alone(grouped, search.program, search.hardware)
        if built.error is None and not spills(built):
            return built
    return None


def barrier_seconds(hw: HardwareSpec) -> float:
    """Return the seconds of a signal and a wait, which weights that stream hide at best."""
    return (hw.limits.signal_s or 0.0) + (hw.limits.wait_s or 0.0)


def cut_seconds(hw: HardwareSpec) -> float:
    """Return the seconds that a launch between two segments costs: a second cooperative launch, with its fill.

    0 for a device without cooperative launches.
    """
    limits = hw.limits
    return 0.0 if limits.cooperative_launch_s is None else limits.cooperative_launch_s + limits.launch_overhead_s
