"""Plans with the times that they took, and their form in files: what judges the ranking and fits the constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roller_svc.compiler.lower_and_emit import Groups
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.families import model_of
from roller_svc.families.matching import group_views
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram, RTile

Json = dict[str, Any]
# JSON key → field of RProgram, without its space, unit and tiles.
_WAYS = {
    "lanes": "reduce_threads", "split_k": "split_k", "stages": "stages", "raster": "raster",
    "stream_k": "stream_k_blocks", "streamed": "nontemporal",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan for a program's kernel groups, the seconds that a call of its kernel takes, and these by each half of its
    samples alone, where they were kept."""

    plan: Plan
    groups: Groups
    seconds: float
    half_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class FitCase:
    """One program of class `cls`: plans of it that were measured in turns, and can be compared therefore."""

    id: str
    cls: str
    plans: tuple[MeasuredPlan, ...]


def candidate_of(program: RProgram, group: KernelGroup, hw: HardwareSpec) -> Candidate:
    """An rProgram of a group, or of a reading of it as a convolution, with what the model says of it."""
    return Candidate(program, model_of(group, program, hw).estimate(program))


def tiles_of(plan: Plan, groups: Groups, hw: HardwareSpec) -> list[Json]:
    """What a plan chose, a group after the other: enough for `plan_of`."""
    return [_program_json(c.program, group, hw) for c, group in zip(plan.choices, groups, strict=True)]


def plan_of(tiles: list[Json], groups: Groups, hw: HardwareSpec) -> Plan:
    """The plan that has those tiles, with the estimates of today's model; ArgumentError where they fit the groups no
    more."""
    try:
        programs = [_program_of(kernel, group, hw) for kernel, group in zip(tiles, groups, strict=True)]
    except (KeyError, IndexError, StopIteration, TypeError, ValueError, InvariantError) as problem:
        raise ArgumentError(f"measured tiles that do not fit the program: {problem}", code="stale-measurements",
                            hint="the generator has changed: measure again") from problem  # fmt: skip
    return Plan(tuple(candidate_of(p, group, hw) for p, group in zip(programs, groups, strict=True)))


def _program_json(program: RProgram, group: KernelGroup, hw: HardwareSpec) -> Json:
    spaces = [view.space for view in group_views(group, hw)]
    return {
        "reading": spaces.index(program.space),  # of the group: as it is, or as a convolution
        "unit": program.unit.name,
        "block": program.block.as_dict(),
        "thread": program.thread.as_dict(),
        **{key: getattr(program, field) for key, field in _WAYS.items()},
    }


def _program_of(kernel: Mapping[str, Any], group: KernelGroup, hw: HardwareSpec) -> RProgram:
    space = group_views(group, hw)[kernel["reading"]].space
    unit = next(unit for unit in hw.units if unit.name == kernel["unit"])
    block, thread = (RTile(tuple((a.name, kernel[level][a.name]) for a in space.axes)) for level in ("block", "thread"))
    return RProgram(space, unit, block, thread, **{field: kernel[key] for key, field in _WAYS.items()})
