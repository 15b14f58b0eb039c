"""Rank the rPrograms of a kernel group by the performance model, over all units and families that may compute it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Any

from roller_svc.compiler.constraints import ConstrainedPrograms, apply_constraints, unmet_constraints_error
from roller_svc.construct.construct import default_limit
from roller_svc.errors import NoCandidateError
from roller_svc.families import prepare
from roller_svc.families.family import Family
from roller_svc.families.matching import Units, streamed_views, unit_views, units_for
from roller_svc.ir.constraints import NO_CONSTRAINTS, ScheduleConstraints
from roller_svc.ir.estimate import Candidate, Construction, RooflineBound
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.perf.common import launch_overhead_s
from roller_svc.perf.footprint import Footprints
from roller_svc.perf.model import Timed
from roller_svc.perf.roofline import roofline
from roller_svc.perf.workload import Workload

# Units whose estimates differ by less are tied, and the one with the higher rate wins. Small contractions are mostly
# launch overhead and latency, whose assumed values change estimates by more.
TIE_FRACTION = 0.05
MAX_PROGRAMS = 64


def construct(group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit, limit: int = MAX_PROGRAMS) -> Construction:
    """Return aligned rPrograms of a group on a unit, unranked, and how they were found (ROLLER, OSDI 2022, §3)."""
    family, workload = prepare(group, hw, unit)
    return family.construct(group, workload, limit)


def rank(group: KernelGroup, hw: HardwareSpec, unit: ComputeUnit, top_k: int) -> tuple[tuple[Candidate, ...], Construction]:
    """Return the `top_k` rPrograms that the model ranks first, best first, and their construction."""
    family, p = prepare(group, hw, unit)
    construction = family.construct(group, p, default_limit(p))
    model = family.model(p)
    none = TieBreaks({unit.name: 1.0})
    timed = [model.timed(program) for program in construction.programs]
    return none.candidates(none.fastest(top_k, timed)), construction


@dataclass(frozen=True, slots=True)
class _PreparedView:
    """A view of a group on a unit, with a bound of the seconds, as they are ranked, of all that computes it."""

    number: int
    view: KernelGroup
    family: Family[Any]
    workload: Workload[Any]
    least_s: float


@dataclass(frozen=True, slots=True)
class _RankedView:
    construction: Construction
    wanted: ConstrainedPrograms
    timed: list[Timed]


def rank_units(
    group: KernelGroup,
    hw: HardwareSpec,
    top_k: int,
    constraints: ScheduleConstraints = NO_CONSTRAINTS,
    footprints: Footprints | None = None,
) -> tuple[tuple[Candidate, ...], Construction]:
    """Rank the rPrograms of all units that may compute the group, and merge their constructions.

    With several units or views, more than `top_k` candidates may be returned: the best of each unit and algorithm that
    has none among them follows.

    Args:
        footprints: Footprints of the same program's spaces, from other devices. Grows.
    """
    footprints = {} if footprints is None else footprints
    units = units_for(group, hw, constraints)
    tie_breaks = _tie_breaks(group, units)
    ranked: dict[int, _RankedView] = {}
    failures: dict[int, NoCandidateError] = {}
    roofs: list[tuple[RooflineBound, ...]] = []
    prepared: list[_PreparedView] = []
    views = unit_views(group, hw, units, constraints.winograd)
    for number, (unit, view) in enumerate(streamed_views(views, hw) if constraints.streams else views):
        is_nest = bool(view.space.role(AxisRole.INNER)) and not group.space.role(AxisRole.INNER)
        if constraints.tiles and (view.space.transposed or is_nest):
            continue  # a caller's tiles are along the group's m and n
        try:
            family, p = prepare(view, hw, unit, footprints)
        except NoCandidateError as failure:
            failures[number] = failure
            continue
        roofs.append(roofline(p))
        least_s = (p.lower_bound_s + launch_overhead_s(p.machine, 1)) * tie_breaks.of_unit[unit.name]
        prepared.append(_PreparedView(number, view, family, p, least_s))
    if top_k == 1:
        prepared.sort(key=lambda each: each.least_s)  # what may be the fastest is first, so that others are left out
    best: list[Timed] = []
    for each in prepared:
        best_s = tie_breaks.ranked_s(best[-1]) if len(best) == top_k else math.inf
        if best_s < each.least_s or (best_s == each.least_s and top_k > 1):
            continue  # nothing that this unit computes can be among the best
        try:
            construction = each.family.construct(
                each.view, each.workload, default_limit(each.workload), varied=bool(constraints.tiles)
            )
        except NoCandidateError as failure:
            failures[each.number] = failure
            continue
        model = each.family.model(each.workload)
        wanted = apply_constraints(each.view, each.family, model, construction.programs, constraints)
        timed = [model.timed(program) for program in wanted.programs]
        with_seconds = replace(construction, programs=wanted.programs, seconds=tuple([t.seconds for t in timed]))
        ranked[each.number] = _RankedView(with_seconds, wanted, timed)
        best = tie_breaks.fastest(top_k, [t for _, view in sorted(ranked.items()) for t in view.timed])
    if not ranked:
        raise _with_another_unit(failures[min(failures)], group, hw, units)
    in_order = [view for _, view in sorted(ranked.items())]
    if not best:
        raise unmet_constraints_error(group, constraints.tiles, [view.wanted for view in in_order])
    heads = [head for view in in_order for head in tie_breaks.fastest(1, view.timed)]
    candidates = tie_breaks.candidates([*best, *_best_of_absent_views(heads, best, tie_breaks)])
    if group.runs_once:
        candidates = tuple(replace(each, runs_once=True) for each in candidates)
    return candidates, _merge_constructions(
        [view.construction for view in in_order], units.unsupported_units, _fastest_roofline(roofs)
    )


@dataclass(frozen=True, slots=True)
class TieBreaks:
    """Factors by which the plans of each unit, by its name, have to be faster to win a tie."""

    of_unit: Mapping[str, float]

    def ranked_s(self, timed: Timed) -> float:
        return timed.seconds * self.of_unit[timed.program.unit.name]

    def fastest(self, count: int, timed: list[Timed]) -> list[Timed]:
        """Return the `count` fastest; break ties at the roofline bound by the unbounded estimate."""
        return nsmallest(count, timed, key=lambda one: (self.ranked_s(one), one.costs.core_s))

    def candidates(self, timed: list[Timed]) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(t.program, t.estimate(), self.of_unit[t.program.unit.name], terms=t.terms(), operations=t.operations)
            for t in timed
        )


def _tie_breaks(group: KernelGroup, units: Units) -> TieBreaks:
    """Return the factors; memory bounds nests on a GPU's units, so that a higher rate breaks no tie."""
    if group.kind is GroupKind.NEST and any(unit.is_matrix for unit in units.units):
        return TieBreaks({unit.name: 1.0 for unit in units.units})
    highest = max(unit.flops_per_s for unit in units.units)
    return TieBreaks({unit.name: 1.0 if unit.flops_per_s == highest else 1 + TIE_FRACTION for unit in units.units})


def _best_of_absent_views(heads: list[Timed], best: list[Timed], tie_breaks: TieBreaks) -> list[Timed]:
    """Return the best of each view that is not among the best; none where one candidate was requested."""
    known = {id(t) for t in best}
    return tie_breaks.fastest(len(heads), [t for t in heads if id(t) not in known]) if len(best) > 1 else []


def _with_another_unit(failure: NoCandidateError, group: KernelGroup, hw: HardwareSpec, units: Units) -> NoCandidateError:
    """Return the failure with a hint: what the device's FMA or vector unit could compute."""
    plain = hw.unit_for(group.product_sum_dtype)
    if plain in units.units or group.attention is not None:
        return failure
    try:
        (candidate,), _ = rank(group, hw, plain, 1)
    except NoCandidateError:
        return failure
    hint = f"what fits: {candidate.program.tile_text} on {plain.name}"
    return NoCandidateError(failure.message, rejections=failure.rejections, hint=hint)


def _fastest_roofline(rooflines: list[tuple[RooflineBound, ...]]) -> tuple[RooflineBound, ...]:
    """Return the roofline with the fastest arithmetic; memory bounds are the same for all units."""
    return min(rooflines, key=lambda roofs: roofs[0].seconds)


def _merge_constructions(found: list[Construction], refusals: tuple[str, ...], roofline: tuple[RooflineBound, ...]) -> Construction:
    rejections: Counter[str] = Counter()
    for construction in found:
        rejections.update(dict(construction.rejections))
    return Construction(
        tuple(p for c in found for p in c.programs),
        tuple(search for c in found for search in c.searches),
        sum(c.tiles_visited for c in found),
        tuple(sorted(rejections.items())),
        refusals,
        roofline,
        tuple(seconds for c in found for seconds in c.seconds),
    )
