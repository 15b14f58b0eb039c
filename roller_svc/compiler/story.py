"""Explain how a program's kernels were found and what they cost, without building them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from roller_svc.compiler.sensitivity import analyze_sensitivity
from roller_svc.compiler.serialize import floor_json, interpret_space, program_json, roofline_json
from roller_svc.ir.estimate import Candidate, Construction, ProgramFloor
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Explored, GroupedPlan
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.search import BrokenRule, Extents, Search, SearchKind, Visit, reuse_score
from roller_svc.ir.story import (
    Story,
    StoryAxis,
    StoryConstruction,
    StoryDevice,
    StoryFound,
    StoryGrowth,
    StoryKernel,
    StoryLevel,
    StoryLimit,
    StoryOperations,
    StoryProgram,
    StorySearch,
    StoryStep,
)
from roller_svc.perf.roofline import add_rooflines


def tell_story(
    program: TensorProgram,
    hw: HardwareSpec,
    explored: Sequence[Explored],
    plans: Sequence[GroupedPlan],
    floor: ProgramFloor | None,
    notes: tuple[str, ...],
    *,
    limits: bool = True,
) -> Story:
    """Return the story of ranked plans.

    Args:
        explored: Partitions of the plans, with the constructions of their groups; that of the first plan comes first.
        plans: Best first.
        limits: Whether to say what limits the first plan.
    """
    books = [_Searches() for _ in explored]
    searches: list[StorySearch] = []
    for partition, book in zip(explored, books, strict=True):
        for group, construction in zip(partition.groups, partition.constructions, strict=True):
            book.add(construction, len(searches))
            searches += _search_stories(group, construction)
    by_groups = {id(partition.groups): book for partition, book in zip(explored, books, strict=True)}
    programs = [_program_story(each, by_groups[id(each.groups)], hw) for each in plans]
    if limits:
        programs[0] = replace(programs[0], limited_by=analyze_sensitivity(plans[0].plan, plans[0].groups, hw))
    first = explored[0]
    return Story(
        expression=text(program),
        target=hw.id,
        device=_device(hw),
        constructions=tuple(_construction(*pair) for pair in zip(first.groups, first.constructions, strict=True)),
        searches=tuple(searches),
        programs=tuple(programs),
        roofline=roofline_json(add_rooflines(tuple(c.roofline for c in first.constructions))),
        floor=None if floor is None else floor_json(floor),
        notes=notes,
    )


@dataclass(slots=True)
class _Searches:
    """Where each tile of a partition was found.

    Keys are the unit, the space, the threads that share a reduction, the thread's tile, and the block's tile.
    """

    found: dict[tuple[object, ...], StoryFound] = field(default_factory=dict)

    def add(self, construction: Construction, first: int) -> None:
        """Add the searches of a group, which get numbers from `first`."""
        for number, search in enumerate(construction.searches, first):
            for step, visit in enumerate(search.visits):
                self.found.setdefault(_key_of_visit(search, visit), StoryFound(number, step))

    def find(self, program: RProgram) -> tuple[StoryFound, ...]:
        """Return where the thread's tile and the block's tile of a program were found."""
        return tuple(self.found[key] for key in _keys_of_program(program) if key in self.found)


def _key_of_visit(search: Search, visit: Visit) -> tuple[object, ...]:
    base = visit.base or search.base
    tiles = (visit.tile,) if base is None else (base, visit.tile)
    return (search.unit, id(search.space), search.reduce_threads, *tiles)


def _keys_of_program(program: RProgram) -> tuple[tuple[object, ...], tuple[object, ...]]:
    names = [axis.name for axis in program.space.axes]
    block, thread = (tuple([tile[name] for name in names]) for tile in (program.block, program.thread))
    where = (program.unit.name, id(program.space), program.reduce_threads)
    return (*where, thread), (*where, thread, block)


def _search_stories(group: KernelGroup, construction: Construction) -> Iterator[StorySearch]:
    """Yield the searches of a group, each tile with the fastest estimate of a program made of it."""
    fastest: dict[tuple[object, ...], float] = {}
    for program, seconds in zip(construction.programs, construction.seconds, strict=True):
        for key in _keys_of_program(program):
            fastest[key] = min(seconds, fastest.get(key, seconds))
    views: dict[int, str] = {}
    for search in construction.searches:
        view = views.get(id(search.space)) or views.setdefault(id(search.space), interpret_space(group, search.space))
        yield _search_story(group, view, search, fastest)


def _search_story(group: KernelGroup, view: str, search: Search, fastest: dict[tuple[object, ...], float]) -> StorySearch:
    axes = search.space.axes
    return StorySearch(
        kind=search.kind.value,
        group=group.name,
        unit=search.unit,
        family=search.family,
        view=view,
        level=search.level,
        axes=tuple([axis.name for axis in axes]),
        roles=tuple([axis.role.value for axis in axes]),
        extents=tuple([axis.extent for axis in axes]),
        steps=tuple([_step(search, visit, fastest.get(_key_of_visit(search, visit))) for visit in search.visits]),
        base=search.base,
        reduce_threads=search.reduce_threads,
        epsilon=search.epsilon,
        capacity_bytes=search.capacity_bytes,
    )


def _step(search: Search, visit: Visit, seconds: float | None) -> StoryStep:
    look, growth = visit.metrics, tuple(_growths(search, visit))
    decision = "accepted" if visit.limit is None else "grown" if growth else "rejected"
    if search.kind is SearchKind.FALLBACK and look.too_large is None:
        decision = "accepted"  # though it may be misaligned
    return StoryStep(
        tile=visit.tile,
        footprint_bytes=look.footprint_bytes,
        traffic_bytes=round(look.traffic * search.points),
        decision=decision,
        parent=visit.parent,
        axis=None if visit.parent is None else _changed_axis(search.visits[visit.parent].tile, visit.tile),
        base=visit.base,
        saturated=visit.tile in search.saturated,
        limit=_limit(visit.limit),
        seconds=seconds,
        growth=growth,
    )


def _changed_axis(before: Extents, after: Extents) -> int | None:
    """Return the axis along which two tiles differ; None if there are several."""
    axes = [axis for axis, extents in enumerate(zip(before, after, strict=True)) if extents[0] != extents[1]]
    return axes[0] if len(axes) == 1 else None


def _growths(search: Search, visit: Visit) -> list[StoryGrowth]:
    """Return the tiles one step larger than a visited one, which scale-up compared: the best data reuse first."""
    if search.metrics is None or visit.metrics.too_large is not None:
        return []
    found = []
    for axis, steps in enumerate(search.steps):
        extent = next((step for step in steps if step > visit.tile[axis]), None)
        if extent is not None:
            look = search.metrics[(*visit.tile[:axis], extent, *visit.tile[axis + 1 :])]
            reuse, limit = reuse_score(visit.metrics, look), _limit(look.too_large or look.misaligned)
            known, traffic_bytes = reuse if math.isfinite(reuse) else None, round(look.traffic * search.points)
            growth = StoryGrowth(axis, extent, known, look.footprint_bytes, traffic_bytes, limit)
            found.append((-reuse, axis, growth))
    found.sort(key=lambda each: each[:2])
    return [growth for _, _, growth in found]


def _limit(broken: BrokenRule | None) -> StoryLimit | None:
    return None if broken is None else StoryLimit(*broken)


def _program_story(grouped: GroupedPlan, searches: _Searches, hw: HardwareSpec) -> StoryProgram:
    plan, estimate = grouped.plan, grouped.plan.estimate
    kernels = tuple(_kernel(*pair, searches, hw) for pair in zip(grouped.groups, plan.choices, strict=True))
    return StoryProgram(estimate.seconds, estimate.bound, estimate.uncertainty, kernels)


def _kernel(group: KernelGroup, choice: Candidate, searches: _Searches, hw: HardwareSpec) -> StoryKernel:
    program, estimate = choice.program, choice.estimate
    return StoryKernel(
        group=group.name,
        kind=group.kind.value,
        view=interpret_space(group, program.space),
        family=program.family,
        axes=tuple([StoryAxis(axis.name, axis.role.value, axis.extent) for axis in group.space.axes]),
        stored=tuple([name for name, _ in group.stored]),
        program=program_json(program, hw.tile_levels),
        seconds=estimate.seconds,
        bound=estimate.bound,
        occupancy=estimate.occupancy,
        waves=estimate.waves,
        uncertainty=estimate.uncertainty,
        operations=StoryOperations(group.space.flops, choice.operations),
        found=searches.find(program),
        terms=choice.terms,
        runs_once=choice.runs_once,
    )


def _construction(group: KernelGroup, construction: Construction) -> StoryConstruction:
    rejections, refusals = dict(construction.rejections), construction.unsupported_units
    return StoryConstruction(group.name, construction.tiles_visited, len(construction.programs), rejections, refusals)


def _device(hw: HardwareSpec) -> StoryDevice:
    levels = [
        StoryLevel(
            *(level.name, level.scope.value, level.capacity_bytes, level.bandwidth_bytes_per_s, level.latency_s),
            assumed=hw.is_assumed(f"levels.{level.name}.bandwidth_bytes_per_s"),
        )
        for level in hw.levels
    ]
    return StoryDevice(hw.id, hw.name, str(hw.arch), hw.num_cores, hw.clock_hz, tuple(levels), hw.tile_levels)
