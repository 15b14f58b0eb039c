"""Rank the candidates of a request and explain them, without building any.

Estimate workers load this module: it must import neither code generators nor toolchains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from roller_svc.compiler.donation import donate_targets
from roller_svc.compiler.notes import find_notes, reject_notes
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import (
    RankedPartition,
    RankedPartitions,
    merge_ranked_plans,
    rank_partitions,
    select_for_measurement,
)
from roller_svc.compiler.program_floor import program_floor, reason_above_floor
from roller_svc.compiler.story import tell_story
from roller_svc.errors import ArgumentError
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.estimate import ProgramFloor
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import Forms, TensorProgram
from roller_svc.ir.report import BuildRequest, CandidateResult, Explored, GroupedPlan, Plan
from roller_svc.ir.story import Story
from roller_svc.on_use import OnUse
from roller_svc.perf.roofline import add_rooflines

if TYPE_CHECKING:
    from roller_svc.compiler.workspace import rank_within
    from roller_svc.hardware import load as load_spec
else:
    rank_within = OnUse("roller_svc.compiler.workspace:rank_within")  # which lowers plans
    load_spec = OnUse("roller_svc.hardware:load")  # which reads YAML

# Plans beyond top_k, built only if the ones before them fail to compile or spill registers.
FALLBACK_PLANS = 3


def parse_request(request: BuildRequest) -> Forms:
    """Return the forms of the program of a request. Raises InputError for a wrong one."""
    forms = parse_once(request.expression, request.inputs, request.outputs)
    named = (
        replace(program, constants=request.constants, name=request.name or "", programmatic=request.programmatic)
        for program in forms
    )
    return tuple(donate_targets(program, request.donate) for program in named)


def rank_request(request: BuildRequest, forms: Forms, hw: HardwareSpec, least: int = 0) -> RankedPartitions:
    """Rank the candidates of a request, `least` of them at least. Raises NoCandidateError if there is none."""
    cache, limit = PartitionCache.of_forms(forms), request.max_workspace_bytes
    count = max(least, request.top_k + FALLBACK_PLANS)
    if limit is None:
        return rank_partitions(cache, hw, count, request.constraints)
    return rank_within(cache, hw, count, request.constraints, limit)


def explored_of(plans: Sequence[GroupedPlan | CandidateResult], partitions: RankedPartitions) -> tuple[Explored, ...]:
    """Return the partitions of plans, in the order of the plans."""
    known = {id(ranked.groups): Explored(ranked.groups, ranked.constructions) for ranked in partitions}
    return tuple(known[groups] for groups in dict.fromkeys(id(plan.groups) for plan in plans))


def explain_request(request: BuildRequest) -> Story:
    """Return the story of a request, without building it. Raises as `build_kernel` does before it compiles."""
    if request.schedule is not None:
        raise ArgumentError("a schedule by hand has no candidates to explain", code="invalid-option")
    forms, hw = parse_request(request), request.hardware or load_spec(request.target)
    partitions = rank_request(request, forms, hw)
    plans = select_for_measurement(merge_ranked_plans(partitions, request.top_k), partitions, request.top_k)
    explored = explored_of(plans, partitions)
    first = next(ranked for ranked in partitions if ranked.groups is plans[0].groups)
    floor, notes = assess_plan(forms[0], hw, request.constraints, first, plans[0].plan)
    if request.strict:
        reject_notes(notes)
    return tell_story(forms[0], hw, explored, plans, floor, notes)


def assess_plan(
    program: TensorProgram, hw: HardwareSpec, constraints: ScheduleConstraints, ranked: RankedPartition, plan: Plan
) -> tuple[ProgramFloor, tuple[str, ...]]:
    """Return the floor of a program, and the notes on a plan of a partition."""
    cache, roofline = PartitionCache(program), add_rooflines(tuple(c.roofline for c in ranked.constructions))
    floor = program_floor(cache, hw, constraints, roofline)
    reason = reason_above_floor(floor, plan, ranked.groups, ranked.constructions, roofline)
    return floor, find_notes(cache, hw, constraints, ranked, plan, floor, reason)
