"""Program, device → kernel groups, their candidates, and whole plans, as the model ranks them. Builds nothing.

What stands here, and all that it imports, is loaded by every process that makes estimates: no compiler, no text.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from roller_svc.construct import rank_units
from roller_svc.construct.shared import Shared
from roller_svc.errors import NoCandidateError
from roller_svc.ir.demands import NO_DEMANDS, Demands
from roller_svc.ir.estimate import Candidate, Construction, Roof
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.perf.roofline import together

Ranked = tuple[tuple[KernelGroup, ...], tuple[tuple[Candidate, ...], ...], tuple[Construction, ...]]


@dataclass(frozen=True, slots=True)
class Estimated:
    """What the model says of a program on a device: its plans, best first, and the least that any plan could take."""

    spec: HardwareSpec
    plans: tuple[Plan, ...]
    roofline: tuple[Roof, ...]


def estimate_program(shared: Shared, spec: HardwareSpec, top_k: int = 1, demands: Demands = NO_DEMANDS) -> Estimated:
    """What the model says of the best plans. Builds nothing, opens no device."""
    _, ranked, constructions = ranked_shared(shared, spec, top_k, demands)
    return Estimated(spec, best_plans(ranked, top_k), together(tuple(c.roofline for c in constructions)))


def ranked_groups(program: TensorProgram, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS) -> Ranked:
    """Kernel groups, for each its candidates best first, and how they were constructed."""
    return ranked_shared(Shared(program), hw, top_k, demands)


def ranked_shared(shared: Shared, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS) -> Ranked:
    """The same, with what is known of the program from other devices. Attention and pairs of sums are one kernel or
    several, whichever the model expects to be faster."""
    found: list[Ranked] = []
    failures: list[NoCandidateError] = []
    for groups in shared.groupings(hw):
        try:
            found.append(_ranked(groups, shared, hw, top_k, demands))
        except NoCandidateError as failure:
            failures.append(failure)
    if not found:
        raise failures[-1]
    return min(found, key=_seconds)


def _seconds(ranked: Ranked) -> float:
    return sum(candidates[0].estimate.seconds for candidates in ranked[1])


def _ranked(groups: tuple[KernelGroup, ...], shared: Shared, hw: HardwareSpec, top_k: int, demands: Demands) -> Ranked:
    addressed = [g for g in groups if g.kind in (GroupKind.CONTRACTION, GroupKind.ATTENTION)] or groups
    others = Demands(demands.allow_tf32)
    found = [
        rank_units(group, hw, top_k, demands if group in addressed else others, shared.footprints) for group in groups
    ]
    return groups, tuple(candidates for candidates, _ in found), tuple(construction for _, construction in found)


def best_plans(ranked: tuple[tuple[Candidate, ...], ...], top_k: int) -> tuple[Plan, ...]:
    """The `top_k` least sums of one candidate a group, best first."""

    def seconds(at: tuple[int, ...]) -> float:
        return sum(candidates[i].estimate.seconds for candidates, i in zip(ranked, at, strict=True))

    first = (0,) * len(ranked)
    heap, seen = [(seconds(first), first)], {first}
    plans: list[Plan] = []
    while heap and len(plans) < top_k:
        _, at = heapq.heappop(heap)
        plans.append(Plan(tuple(candidates[i] for candidates, i in zip(ranked, at, strict=True))))
        for g, candidates in enumerate(ranked):
            following = (*at[:g], at[g] + 1, *at[g + 1 :])
            if following[g] < len(candidates) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (seconds(following), following))
    return tuple(plans)
