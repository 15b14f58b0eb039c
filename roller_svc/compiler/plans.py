"""Program, device → kernel groups, their candidates, and whole plans, as the model ranks them. Builds nothing.

What stands here, and all that it imports, is loaded by every process that makes estimates: no compiler, no text.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.compiler.partition_cache import Shared
from roller_svc.construct.construct import rank_units
from roller_svc.errors import NoCandidateError
from roller_svc.ir.constraints import NO_DEMANDS, Demands
from roller_svc.ir.estimate import Candidate, Construction, Estimate, Roof
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import GroupedPlan, Plan
from roller_svc.perf.roofline import together


class Ranked(NamedTuple):
    """One way in which statements become kernels: its groups, for each its candidates best first, and how they were
    constructed."""

    groups: tuple[KernelGroup, ...]
    candidates: tuple[tuple[Candidate, ...], ...]
    constructions: tuple[Construction, ...]


Groupings = tuple[Ranked, ...]  # the one with the model's best plan first
SHARE = 3  # one place in so many may go to other units and groupings out of reach
# What tells plans apart beside their tiles: the grouping's number; or with it a kernel's, and the kind of unit that
# computes it.
Trait = tuple[int] | tuple[int, int, UnitKind]
Telling = tuple[Trait, GroupedPlan]  # a plan, with what tells it from those that the model puts first


@dataclass(frozen=True, slots=True)
class Estimated:
    """What the model says of a program on a device: its plans, best first, and the least that any plan could take."""

    spec: HardwareSpec
    plans: tuple[Plan, ...]
    roofline: tuple[Roof, ...]


def estimate_program(shared: Shared, spec: HardwareSpec, top_k: int = 1, demands: Demands = NO_DEMANDS) -> Estimated:
    """What the model says of the best plans. Builds nothing, opens no device."""
    _, ranked, constructions = ranked_groupings(shared, spec, top_k, demands)[0]
    return Estimated(spec, best_plans(ranked, top_k), together(tuple(c.roofline for c in constructions)))


def ranked_groups(program: TensorProgram, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS) -> Ranked:
    """The grouping that the model expects to be the fastest."""
    return ranked_groupings(Shared(program), hw, top_k, demands)[0]


def ranked_groupings(shared: Shared, hw: HardwareSpec, top_k: int, demands: Demands = NO_DEMANDS) -> Groupings:
    """All of them: attention and pairs of sums are one kernel or several. `shared`: what is known of the program from
    other devices."""
    found: list[Ranked] = []
    failures: list[NoCandidateError] = []
    for groups in shared.groupings(hw):
        try:
            found.append(_ranked(groups, shared, hw, top_k, demands))
        except NoCandidateError as failure:
            failures.append(failure)
    if not found:
        raise failures[-1]
    return tuple(sorted(found, key=_least_seconds))


def _least_seconds(ranked: Ranked) -> float:
    return _first(ranked).ranked_s


def _ranked(groups: tuple[KernelGroup, ...], shared: Shared, hw: HardwareSpec, top_k: int, demands: Demands) -> Ranked:
    addressed = [g for g in groups if g.kind in (GroupKind.CONTRACTION, GroupKind.ATTENTION)] or groups
    others = Demands(demands.allow_tf32)
    found = [
        rank_units(group, hw, top_k, demands if group in addressed else others, shared.footprints) for group in groups
    ]
    return Ranked(
        groups, tuple(candidates for candidates, _ in found), tuple(construction for _, construction in found)
    )


def best_plans(ranked: tuple[tuple[Candidate, ...], ...], top_k: int) -> tuple[Plan, ...]:
    """The `top_k` least sums of one candidate a group, best first."""

    def seconds(at: tuple[int, ...]) -> float:
        return sum(candidates[i].ranked_s for candidates, i in zip(ranked, at, strict=True))

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


def plans_of_all(groupings: Groupings, count: int) -> tuple[GroupedPlan, ...]:
    """The `count` plans that the model puts first, of all groupings whose best may in truth be the fastest."""
    near = [ranked for number, ranked in enumerate(groupings) if _may_win(groupings, number)]
    plans = [GroupedPlan(plan, ranked.groups) for ranked in near for plan in best_plans(ranked.candidates, count)]
    return tuple(heapq.nsmallest(count, plans, key=_seconds))


def shortlisted(plans: tuple[GroupedPlan, ...], groupings: Groupings, count: int) -> tuple[GroupedPlan, ...]:
    """The first `count` of `plans_of_all`, the last of them giving way to the best plan of what is not there: groupings
    that may be the fastest; and, in up to a third of the places, the other groupings, whose estimates may be wrong by
    more than they say, then other kinds of units for a kernel that may be the fastest. So measuring decides these too,
    and not only between tiles."""
    kept = list(plans[:count])
    there = {trait for one in kept for trait in _traits(one, groupings)}
    near, far, units = (
        [one for trait, one in sorted(found, key=lambda pair: _seconds(pair[1])) if trait not in there]
        for found in (*_other_groupings(groupings), _other_units(groupings[0]))
    )
    for one in (*near, *[*far, *units][: count // SHARE])[: count - 1]:
        if len(kept) == count:
            place = _spare_place(kept, groupings)
            if place is None:
                break
            del kept[place]
        kept.append(one)
    return tuple(sorted(kept, key=_seconds))


def _seconds(one: GroupedPlan) -> float:
    return one.plan.ranked_s


def _other_groupings(groupings: Groupings) -> tuple[list[Telling], list[Telling]]:
    """The best plans of groupings that may be faster than the first, and of those that may not."""
    near: list[Telling] = []
    far: list[Telling] = []
    for number, ranked in enumerate(groupings[1:], 1):
        (near if _may_win(groupings, number) else far).append(((number,), GroupedPlan(_first(ranked), ranked.groups)))
    return near, far


def _other_units(best: Ranked) -> Iterator[Telling]:
    """The best plan of the first grouping with a kernel computed by another kind of unit."""
    first = _first(best).choices
    for g, candidates in enumerate(best.candidates):
        known = {_trait(0, g, candidates[0])}
        for candidate in candidates:
            trait = _trait(0, g, candidate)
            if trait not in known and _may_be_faster(candidate.estimate, candidates[0].estimate):
                yield trait, GroupedPlan(Plan((*first[:g], candidate, *first[g + 1 :])), best.groups)
            known.add(trait)


def _first(ranked: Ranked) -> Plan:
    return Plan(tuple(candidates[0] for candidates in ranked.candidates))


def _may_win(groupings: Groupings, number: int) -> bool:
    return _may_be_faster(_first(groupings[number]).estimate, _first(groupings[0]).estimate)


def _may_be_faster(one: Estimate, other: Estimate) -> bool:
    """Whether it may be in truth: each is known within a factor."""
    return one.seconds <= other.seconds * one.uncertainty * other.uncertainty


def _traits(one: GroupedPlan, groupings: Groupings) -> tuple[Trait, ...]:
    number = next(i for i, ranked in enumerate(groupings) if ranked.groups is one.groups)
    return ((number,), *(_trait(number, g, choice) for g, choice in enumerate(one.plan.choices)))


def _trait(number: int, g: int, candidate: Candidate) -> Trait:
    return number, g, candidate.program.unit.kind


def _spare_place(kept: list[GroupedPlan], groupings: Groupings) -> int | None:
    """The last plan behind the first that has nothing that others lack but its tiles."""
    traits = [_traits(one, groupings) for one in kept]
    counts = Counter(trait for found in traits for trait in found)
    return next((i for i in range(len(kept) - 1, 0, -1) if all(counts[trait] > 1 for trait in traits[i])), None)
