"""Program, device → kernel groups, their candidates, and whole plans, as the model ranks them. Builds nothing.

What stands here, and all that it imports, is loaded by every process that makes estimates: no compiler, no text.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.construct.construct import rank_units
from roller_svc.errors import NoCandidateError
from roller_svc.ir.constraints import NO_DEMANDS, Demands
from roller_svc.ir.estimate import Candidate, Construction, Estimate, Roof
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import GroupedPlan, Plan
from roller_svc.perf.roofline import together


class RankedPartition(NamedTuple):
    """One way in which statements become kernels: its groups, for each its candidates best first, and how they were
    constructed."""

    groups: tuple[KernelGroup, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    constructions: tuple[Construction, ...]


RankedPartitions = tuple[RankedPartition, ...]  # the one with the model's best plan first
EXPLORATION_DIVISOR = 3  # one place in so many may go to other units and groupings out of reach
# What tells plans apart beside their tiles: the grouping's number; or with it a kernel's, and the kind of unit that
# computes it.
PlanFeature = tuple[int] | tuple[int, int, UnitKind]
FeaturedPlan = tuple[PlanFeature, GroupedPlan]  # a plan, with what tells it from those that the model puts first


@dataclass(frozen=True, slots=True)
class TargetEstimate:
    """What the model says of a program on a device: its plans, best first, and the least that any plan could take."""

    spec: HardwareSpec
    plans: tuple[Plan, ...]
    roofline: tuple[Roof, ...]


def estimate_program(
    cache: PartitionCache, spec: HardwareSpec, top_k: int = 1, demands: Demands = NO_DEMANDS
) -> TargetEstimate:
    """What the model says of the best plans. Builds nothing, opens no device."""
    _, candidates, constructions = rank_partitions(cache, spec, top_k, demands)[0]
    return TargetEstimate(spec, best_plans(candidates, top_k), together(tuple(c.roofline for c in constructions)))


def rank_best_partition(
    program: TensorProgram, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS
) -> RankedPartition:
    """The grouping that the model expects to be the fastest."""
    return rank_partitions(PartitionCache(program), hw, top_k, demands)[0]


def rank_partitions(
    cache: PartitionCache, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS
) -> RankedPartitions:
    """All of them: attention and pairs of sums are one kernel or several. `shared`: what is known of the program from
    other devices."""
    ranked: list[RankedPartition] = []
    failures: list[NoCandidateError] = []
    for groups in cache.partitions(hw):
        try:
            ranked.append(_rank(groups, cache, hw, top_k, demands))
        except NoCandidateError as failure:
            failures.append(failure)
    if not ranked:
        raise failures[-1]
    return tuple(sorted(ranked, key=_partition_seconds))


def _partition_seconds(ranked: RankedPartition) -> float:
    return _best_plan(ranked).ranking_seconds


def _rank(
    groups: tuple[KernelGroup, ...], cache: PartitionCache, hw: HardwareSpec, top_k: int, demands: Demands
) -> RankedPartition:
    constrained = [g for g in groups if g.kind in (GroupKind.CONTRACTION, GroupKind.ATTENTION)] or groups
    others = Demands(demands.allow_tf32)
    results = [
        rank_units(group, hw, top_k, demands if group in constrained else others, cache.footprints) for group in groups
    ]
    return RankedPartition(
        groups, tuple(candidates for candidates, _ in results), tuple(construction for _, construction in results)
    )


def best_plans(candidates_by_group: tuple[tuple[Candidate, ...], ...], top_k: int) -> tuple[Plan, ...]:
    """The `top_k` least sums of one candidate a group, best first."""

    def ranking_seconds(indices: tuple[int, ...]) -> float:
        return sum(candidates[i].ranking_seconds for candidates, i in zip(candidates_by_group, indices, strict=True))

    first = (0,) * len(candidates_by_group)
    heap, seen = [(ranking_seconds(first), first)], {first}
    plans: list[Plan] = []
    while heap and len(plans) < top_k:
        _, indices = heapq.heappop(heap)
        plans.append(Plan(tuple(candidates[i] for candidates, i in zip(candidates_by_group, indices, strict=True))))
        for g, candidates in enumerate(candidates_by_group):
            successor = (*indices[:g], indices[g] + 1, *indices[g + 1 :])
            if successor[g] < len(candidates) and successor not in seen:
                seen.add(successor)
                heapq.heappush(heap, (ranking_seconds(successor), successor))
    return tuple(plans)


def merge_ranked_plans(partitions: RankedPartitions, count: int) -> tuple[GroupedPlan, ...]:
    """The `count` plans that the model puts first, of all groupings whose best may in truth be the fastest."""
    contenders = [ranked for number, ranked in enumerate(partitions) if _within_uncertainty(partitions, number)]
    plans = [GroupedPlan(plan, ranked.groups) for ranked in contenders for plan in best_plans(ranked.candidates, count)]
    return tuple(heapq.nsmallest(count, plans, key=_ranking_seconds))


def select_for_measurement(
    plans: tuple[GroupedPlan, ...], partitions: RankedPartitions, count: int
) -> tuple[GroupedPlan, ...]:
    """The first `count` of `plans_of_all`, the last of them giving way to the best plan of what is not there: groupings
    that may be the fastest; and, in up to a third of the places, the other groupings, whose estimates may be wrong by
    more than they say, then other kinds of units for a kernel that may be the fastest. So measuring decides these too,
    and not only between tiles."""
    selected = list(plans[:count])
    features = {trait for one in selected for trait in _features(one, partitions)}
    contenders, others, units = (
        [one for trait, one in sorted(found, key=lambda pair: _ranking_seconds(pair[1])) if trait not in features]
        for found in (*_other_partitions(partitions), _other_units(partitions[0]))
    )
    for plan in (*contenders, *[*others, *units][: count // EXPLORATION_DIVISOR])[: count - 1]:
        if len(selected) == count:
            index = _replaceable_index(selected, partitions)
            if index is None:
                break
            del selected[index]
        selected.append(plan)
    return tuple(sorted(selected, key=_ranking_seconds))


def _ranking_seconds(grouped: GroupedPlan) -> float:
    return grouped.plan.ranking_seconds


def _other_partitions(partitions: RankedPartitions) -> tuple[list[FeaturedPlan], list[FeaturedPlan]]:
    """The best plans of groupings that may be faster than the first, and of those that may not."""
    contenders: list[FeaturedPlan] = []
    others: list[FeaturedPlan] = []
    for number, ranked in enumerate(partitions[1:], 1):
        (contenders if _within_uncertainty(partitions, number) else others).append(
            ((number,), GroupedPlan(_best_plan(ranked), ranked.groups))
        )
    return contenders, others


def _other_units(best: RankedPartition) -> Iterator[FeaturedPlan]:
    """The best plan of the first grouping with a kernel computed by another kind of unit."""
    first = _best_plan(best).choices
    for g, candidates in enumerate(best.candidates):
        features = {_unit_feature(0, g, candidates[0])}
        for candidate in candidates:
            feature = _unit_feature(0, g, candidate)
            if feature not in features and _may_be_faster(candidate.estimate, candidates[0].estimate):
                yield feature, GroupedPlan(Plan((*first[:g], candidate, *first[g + 1 :])), best.groups)
            features.add(feature)


def _best_plan(ranked: RankedPartition) -> Plan:
    return Plan(tuple(candidates[0] for candidates in ranked.candidates))


def _within_uncertainty(partitions: RankedPartitions, number: int) -> bool:
    return _may_be_faster(_best_plan(partitions[number]).estimate, _best_plan(partitions[0]).estimate)


def _may_be_faster(candidate: Estimate, best: Estimate) -> bool:
    """Whether it may be in truth: each is known within a factor."""
    return candidate.seconds <= best.seconds * candidate.uncertainty * best.uncertainty


def _features(grouped: GroupedPlan, partitions: RankedPartitions) -> tuple[PlanFeature, ...]:
    number = next(i for i, ranked in enumerate(partitions) if ranked.groups is grouped.groups)
    return ((number,), *(_unit_feature(number, g, choice) for g, choice in enumerate(grouped.plan.choices)))


def _unit_feature(number: int, g: int, candidate: Candidate) -> PlanFeature:
    return number, g, candidate.program.unit.kind


def _replaceable_index(selected: list[GroupedPlan], partitions: RankedPartitions) -> int | None:
    """The last plan behind the first that has nothing that others lack but its tiles."""
    features = [_features(one, partitions) for one in selected]
    counts = Counter(trait for found in features for trait in found)
    return next((i for i in range(len(selected) - 1, 0, -1) if all(counts[trait] > 1 for trait in features[i])), None)
