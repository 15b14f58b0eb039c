"""Rank partitions, kernel candidates and whole plans of a program by the performance model.

Estimate workers load this module: it must import neither code generators nor toolchains.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.program_floor import program_floor, reason_above_floor
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import NoCandidateError
from roller_svc.families.matching import copied_bytes, unloadable_operands
from roller_svc.ir.constraints import NO_CONSTRAINTS, ScheduleConstraints
from roller_svc.ir.estimate import Candidate, Construction, Estimate, ProgramFloor, RooflineBound
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import GroupedPlan, Plan
from roller_svc.perf.roofline import add_rooflines


class RankedPartition(NamedTuple):
    """One fusion alternative, with ranked kernel candidates."""

    groups: tuple[KernelGroup, ...]
    candidates: tuple[tuple[Candidate, ...], ...]  # of each group, best first
    constructions: tuple[Construction, ...]  # of each group


RankedPartitions = tuple[RankedPartition, ...]  # the one with the best predicted plan first
MAX_WINOGRAD_PLANS = 4  # that are measured
EXPLORATION_DIVISOR = 3  # 1/3 of the measured plans may explore other units and partitions outside the uncertainty
# What distinguishes plans other than tile sizes: the number of the partition, or the partition, a kernel of it, the
# kind of unit that the kernel runs on, and its Winograd tile.
PlanFeature = tuple[int] | tuple[int, int, UnitKind, int]
FeaturedPlan = tuple[PlanFeature, GroupedPlan]  # a plan with the feature that the top-ranked plans lack


@dataclass(frozen=True, slots=True)
class TargetEstimate:
    """Estimates of a program on one device."""

    spec: HardwareSpec
    plans: tuple[Plan, ...]  # best first
    roofline: tuple[RooflineBound, ...]  # lower bounds for every plan of these groups
    floor: ProgramFloor  # for any groups and units
    reasons: tuple[str, ...]  # of each plan that is far above the floor: why; "" for others
    ranked: RankedPartition  # of the plans
    notes: tuple[str, ...] = ()  # on the first plan


def estimate_program(
    cache: PartitionCache, spec: HardwareSpec, top_k: int = 1, constraints: ScheduleConstraints = NO_CONSTRAINTS
) -> TargetEstimate:
    """Estimate the best plans of a program on a device. Uses no compiler and no device."""
    ranked = rank_partitions(cache, spec, top_k, constraints)[0]
    plans = best_plans(ranked.candidates, top_k)
    roofline = add_rooflines(tuple(c.roofline for c in ranked.constructions))
    floor = program_floor(cache, spec, constraints, roofline)
    reasons = tuple(reason_above_floor(floor, plan, ranked.groups, ranked.constructions, roofline) for plan in plans)
    return TargetEstimate(spec, plans, roofline, floor, reasons, ranked)


def rank_best_partition(
    program: TensorProgram, hw: HardwareSpec, top_k: int, constraints: ScheduleConstraints = NO_CONSTRAINTS
) -> RankedPartition:
    """Return the partition with the fastest predicted plan."""
    return rank_partitions(PartitionCache(program), hw, top_k, constraints)[0]


def rank_partitions(
    cache: PartitionCache, hw: HardwareSpec, top_k: int, constraints: ScheduleConstraints = NO_CONSTRAINTS
) -> RankedPartitions:
    """Rank the candidates of all fusion alternatives. `cache` shares work between devices."""
    ranked: list[RankedPartition] = []
    failures: list[NoCandidateError] = []

    def rank_all(partitions: Iterable[tuple[KernelGroup, ...]]) -> None:
        for groups in partitions:
            try:
                ranked.append(_rank(groups, cache, hw, top_k, constraints))
            except NoCandidateError as failure:
                failures.append(failure)

    rank_all(cache.partitions(hw, constraints))
    if not ranked:
        raise failures[-1]
    for plain in tuple(ranked):
        if _copies_may_pay(plain, hw, constraints, min(map(_partition_seconds, ranked))):
            rank_all(cache.with_operand_copies(plain.groups, hw, constraints))
    return tuple(sorted(ranked, key=_partition_seconds))


def _copies_may_pay(ranked: RankedPartition, hw: HardwareSpec, constraints: ScheduleConstraints, best_s: float) -> bool:
    """Return whether a partition with operand copies may be faster than `best_s`: by rooflines, and the copies' writes.

    The bound costs a small part of a construction.
    """
    wanted = [(group, copy) for group in ranked.groups for copy in unloadable_operands(group, hw, constraints)]
    if not wanted:
        return False
    written_bytes = sum(copied_bytes(group, copy) for group, copy in wanted)
    least_s = written_bytes / hw.dram.bandwidth_bytes_per_s
    least_s += (len(ranked.groups) + len(wanted)) * hw.limits.launch_overhead_s
    least_s += sum(max(bound.seconds for bound in c.roofline) for c in ranked.constructions)
    return least_s < best_s


def _partition_seconds(ranked: RankedPartition) -> float:
    return _best_plan(ranked).ranking_seconds


def _rank(
    groups: tuple[KernelGroup, ...],
    cache: PartitionCache,
    hw: HardwareSpec,
    top_k: int,
    constraints: ScheduleConstraints,
) -> RankedPartition:
    constrained = [g for g in groups if g.kind in (GroupKind.CONTRACTION, GroupKind.ATTENTION)] or groups
    unconstrained = replace(constraints, op_class=None, tiles=())
    results = [
        rank_units(group, hw, top_k, constraints if group in constrained else unconstrained, cache.footprints) for group in groups
    ]
    return RankedPartition(
        groups, tuple(candidates for candidates, _ in results), tuple(construction for _, construction in results)
    )


def best_plans(candidates_by_group: tuple[tuple[Candidate, ...], ...], top_k: int) -> tuple[Plan, ...]:
    """Return the `top_k` fastest combinations of one candidate per group, by best-first search.

    A group that runs once has its best candidate in all of them: no other one makes calls faster.
    """
    candidates_by_group = tuple(own[:1] if own[0].runs_once else own for own in candidates_by_group)

    def ranking_seconds(indices: tuple[int, ...]) -> float:
        return Plan(tuple(candidates[i] for candidates, i in zip(candidates_by_group, indices, strict=True))).ranking_seconds

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
    """Return the `count` best plans of all partitions that may be the fastest within the model's uncertainty."""
    contenders = [ranked for number, ranked in enumerate(partitions) if _within_uncertainty(partitions, number)]
    plans = [GroupedPlan(plan, ranked.groups) for ranked in contenders for plan in best_plans(ranked.candidates, count)]
    return tuple(heapq.nsmallest(count, plans, key=_ranking_seconds))


def select_for_measurement(plans: tuple[GroupedPlan, ...], partitions: RankedPartitions, count: int) -> tuple[GroupedPlan, ...]:
    """Select `count` of the merged plans to measure, with some diversity.

    Low-ranked plans that differ only in tile sizes give way to the best plan of every missing partition that may be the
    fastest. Up to a third of the list explores: the other partitions, whose estimates may be off by more than their
    uncertainty, then other kinds of units and algorithms for a kernel. Winograd convolutions take several times as long
    to compile: few of them are measured, and the list may be shorter.
    """
    selected = _limit_winograd_plans(plans[:count])
    features = {feature for plan in selected for feature in _features(plan, partitions)}
    contenders, others, units = (
        [plan for feature, plan in sorted(group, key=lambda pair: _ranking_seconds(pair[1])) if feature not in features]
        for group in (*_other_partitions(partitions), _other_kernels(partitions[0]))
    )
    for plan in (*contenders, *[*others, *units][: count // EXPLORATION_DIVISOR])[: count - 1]:
        if len(selected) == count:
            index = _replaceable_index(selected, partitions)
            if index is None:
                break
            del selected[index]
        selected.append(plan)
    return tuple(sorted(selected, key=_ranking_seconds))


def _limit_winograd_plans(plans: Sequence[GroupedPlan]) -> list[GroupedPlan]:
    """Return the plans with only the first few of those that have a Winograd convolution."""
    winograd = [plan for plan in plans if any(choice.program.space.winograd_tile for choice in plan.plan.choices)]
    dropped = {id(plan) for plan in winograd[MAX_WINOGRAD_PLANS:]}
    return [plan for plan in plans if id(plan) not in dropped]


def _ranking_seconds(grouped: GroupedPlan) -> float:
    return grouped.plan.ranking_seconds


def _other_partitions(partitions: RankedPartitions) -> tuple[list[FeaturedPlan], list[FeaturedPlan]]:
    """Return the best plans of the other partitions: those within the uncertainty of the first, and the rest."""
    contenders: list[FeaturedPlan] = []
    others: list[FeaturedPlan] = []
    for number, ranked in enumerate(partitions[1:], 1):
        (contenders if _within_uncertainty(partitions, number) else others).append(
            ((number,), GroupedPlan(_best_plan(ranked), ranked.groups))
        )
    return contenders, others


def _other_kernels(best: RankedPartition) -> Iterator[FeaturedPlan]:
    """Yield the best plan of a partition with one kernel on another kind of unit, or by another algorithm.

    Another kind of unit must be within the uncertainty. Of each algorithm one plan is measured whatever its estimate.
    """
    first = _best_plan(best).choices
    for g, candidates in enumerate(best.candidates):
        if candidates[0].runs_once:
            continue
        features = {_kernel_feature(0, g, candidates[0])}
        for candidate in candidates:
            feature = _kernel_feature(0, g, candidate)
            is_explored = _is_other_algorithm(candidate, candidates[0]) or _may_be_faster(
                candidate.estimate, candidates[0].estimate
            )
            if feature not in features and is_explored:
                yield feature, GroupedPlan(Plan((*first[:g], candidate, *first[g + 1 :])), best.groups)
            features.add(feature)


def _is_other_algorithm(candidate: Candidate, best: Candidate) -> bool:
    return candidate.program.space.winograd_tile != best.program.space.winograd_tile


def _best_plan(ranked: RankedPartition) -> Plan:
    return Plan(tuple(candidates[0] for candidates in ranked.candidates))


def _within_uncertainty(partitions: RankedPartitions, number: int) -> bool:
    return _may_be_faster(_best_plan(partitions[number]).estimate, _best_plan(partitions[0]).estimate)


def _may_be_faster(candidate: Estimate, best: Estimate) -> bool:
    """Whether the uncertainties of two estimates allow the candidate to be faster."""
    return candidate.seconds <= best.seconds * candidate.uncertainty * best.uncertainty


def _features(grouped: GroupedPlan, partitions: RankedPartitions) -> tuple[PlanFeature, ...]:
    number = next(i for i, ranked in enumerate(partitions) if ranked.groups is grouped.groups)
    return ((number,), *(_kernel_feature(number, g, choice) for g, choice in enumerate(grouped.plan.choices)))


def _kernel_feature(number: int, g: int, candidate: Candidate) -> PlanFeature:
    return number, g, candidate.program.unit.kind, candidate.program.space.winograd_tile


def _replaceable_index(selected: list[GroupedPlan], partitions: RankedPartitions) -> int | None:
    """Return the index of the lowest-ranked plan that differs from the others only in tile sizes."""
    features = [_features(plan, partitions) for plan in selected]
    counts = Counter(feature for plan_features in features for feature in plan_features)
    return next((i for i in range(len(selected) - 1, 0, -1) if all(counts[f] > 1 for f in features[i])), None)
