"""Measured plans as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roller_svc.compiler.lower_and_emit import Groups
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.families import family_of, model_of
from roller_svc.families.matching import group_views
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile

Json = dict[str, Any]
# JSON key → field of PipelineOptions.
_PIPELINE_FIELDS = {"stages": "stages", "raster": "raster", "stream_k": "stream_k_blocks", "streamed": "nontemporal"}


def candidate_of(program: RProgram, group: KernelGroup, hw: HardwareSpec) -> Candidate:
    """Return an rProgram of a group with its estimate."""
    return Candidate(program, model_of(group, program, hw).estimate(program))


def tiles_of(plan: Plan, groups: Groups, hw: HardwareSpec) -> list[Json]:
    """Return the choices of a plan as JSON, by group; `plan_of` is the inverse."""
    return [_program_json(c.program, group, hw) for c, group in zip(plan.choices, groups, strict=True)]


def plan_of(tiles: list[Json], groups: Groups, hw: HardwareSpec) -> Plan:
    """Return the plan with these tiles and the estimates of today's model.

    Raises ArgumentError if the tiles no longer fit the groups.
    """
    try:
        programs = [_program_of(kernel, group, hw) for kernel, group in zip(tiles, groups, strict=True)]
    except (KeyError, IndexError, StopIteration, TypeError, ValueError, InvariantError) as problem:
        raise ArgumentError(
            f"measured tiles do not fit the program: {problem}",
            code="stale-measurements",
            hint="the generator has changed: measure again",
        ) from problem
    return Plan(tuple(candidate_of(p, group, hw) for p, group in zip(programs, groups, strict=True)))


def _program_json(program: RProgram, group: KernelGroup, hw: HardwareSpec) -> Json:
    spaces = [view.space for view in group_views(group, hw)]
    return {
        "reading": spaces.index(program.space),  # view of the group: as it is, or as a convolution
        "unit": program.unit.name,
        "family": program.family,
        "block": program.block.as_dict(),
        "thread": program.thread.as_dict(),
        "lanes": program.reduce_threads,
        "split_k": program.split_k,
        **{key: getattr(program.pipeline, field) for key, field in _PIPELINE_FIELDS.items()},
    }


def _program_of(kernel: Mapping[str, Any], group: KernelGroup, hw: HardwareSpec) -> RProgram:
    space = group_views(group, hw)[kernel["reading"]].space
    unit = next(unit for unit in hw.units if unit.name == kernel["unit"])
    block, thread = (RTile(tuple((a.name, kernel[level][a.name]) for a in space.axes)) for level in ("block", "thread"))
    pipeline = PipelineOptions(**{field: kernel[key] for key, field in _PIPELINE_FIELDS.items()})
    lanes, split_k = kernel["lanes"], kernel["split_k"]
    program = RProgram(space, unit, block, thread, lanes, split_k, pipeline, kernel.get("family", ""))
    # earlier documents name no family: it is the first that can build the tiles
    return program if program.family else replace(program, family=family_of(group, program, hw).name)
