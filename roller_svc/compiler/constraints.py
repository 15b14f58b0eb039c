"""Constraints of a caller on tiles → rPrograms that satisfy them, or the reasons why none does and the nearest one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.errors import NoCandidateError
from roller_svc.families.family import Family, Knob, Nearest, fixed_knob
from roller_svc.fusion.contraction import MIN_K
from roller_svc.fusion.split.reduction import may_split, split_length
from roller_svc.ir.constraints import ScheduleConstraints, tile_value
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.rprogram import PipelineOptions, RProgram
from roller_svc.perf.model import Model

Tiles = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ConstrainedPrograms:
    """rPrograms that satisfy all constraints; if there are none, the nearest one and the reasons."""

    programs: tuple[RProgram, ...]
    nearest: RProgram | None = None
    reasons: tuple[str, ...] = ()


def apply_constraints(
    group: KernelGroup,
    family: Family[Any],
    model: Model[Any],
    programs: Sequence[RProgram],
    constraints: ScheduleConstraints,
) -> ConstrainedPrograms:
    """Return the rPrograms that satisfy the constraints, else those that can be changed to do so."""
    tiles = constraints.tiles
    if not tiles:
        return ConstrainedPrograms(tuple(programs))
    found = tuple(program for program in programs if constraints.is_satisfied_by(program))
    if found or not programs:
        return ConstrainedPrograms(found)
    tried = [_force_constraints(group, family, model, program, dict(tiles)) for program in programs]
    if met := tuple(program for program, reasons in tried if not reasons):
        return ConstrainedPrograms(tuple(dict.fromkeys(met)))
    nearest, reasons = min(tried, key=lambda t: _distance(t[0], tiles))
    return ConstrainedPrograms((), nearest, reasons)


def unmet_constraints_error(group: KernelGroup, tiles: Tiles, found: Iterable[ConstrainedPrograms]) -> NoCandidateError:
    """Return the error that names the nearest rProgram of all units."""
    tried = [(d.nearest, d.reasons) for d in found if d.nearest is not None]
    nearest, reasons = min(tried, key=lambda t: _distance(t[0], tiles))
    wanted = ", ".join(f"{field} = {value}" for field, value in tiles)
    fits = ", ".join(f"{field} = {tile_value(nearest, field)}" for field, _ in tiles)
    return NoCandidateError(
        f"no tiles of {group.name} have {wanted}: {'; '.join(reasons)}",
        rejections={"demanded tiles": 1},
        hint=f"the nearest that fits: {fits}, with {nearest.tile_text} on {nearest.unit.name}",
    )


def _distance(program: RProgram, tiles: Tiles) -> float:
    """Return the sum of relative differences between fields and constraints."""
    return math.fsum(abs(tile_value(program, field) - value) / max(1, value) for field, value in tiles)


def _force_constraints(
    group: KernelGroup, family: Family[Any], model: Model[Any], program: RProgram, tiles: dict[str, int]
) -> tuple[RProgram, tuple[str, ...]]:
    """Set each field to the nearest possible value, and return the reasons for those that differ."""
    reasons = [
        f"{field} is {tile_value(program, field)} here"
        for field, value in tiles.items()
        if field not in _SETTERS and tile_value(program, field) != value
    ]
    # reset fields that exclude a constrained one
    if tiles.get("stream_k"):
        program = replace(program, split_k=1, pipeline=PipelineOptions(program.pipeline.stages))
    elif tiles.get("split_k", 1) > 1 or any(tiles.get(f, 0) > 1 for f in ("blocks", *_CLUSTER)):
        program = program.with_pipeline(stream_k_blocks=0)
    if tiles.get("cluster_k", 1) > 1:
        program = replace(program, split_k=1).with_pipeline(persistent_blocks=0, pingpong=False)
    elif tiles.get("split_k", 1) > 1 or tiles.get("blocks", 0) > 1 or "stages" in tiles:
        program = program.with_pipeline(cluster_k=1)  # whose parts may need more stages
    if any(tiles.get(f, 0) > 1 for f in _CLUSTER):
        program = program.with_pipeline(cluster=(1, 1), cluster_k=1)
    knobs = _DEFAULT_KNOBS | dict(family.knobs)
    for field, with_value in _SETTERS.items():
        if field in tiles:
            near = knobs[field](group, model, program, tiles[field])
            program = with_value(program, near.value)
            if near.reason:
                reasons.append(near.reason)
    return program, tuple(reasons)


def _nearest_split(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    if wanted < 1:
        return Nearest(1, "a reduction has at least 1 part")
    if wanted == 1:
        return Nearest(1)
    if not may_split(group):
        return Nearest(1, "a reduction that others follow cannot be split")
    longest = max(m.extent for axis in program.space.reduced for m in axis.members)
    parts = next(n for n in range(min(wanted, longest), 0, -1) if n == 1 or _parts_have_work(program, n, longest))
    if parts == wanted:
        return Nearest(wanted)
    return Nearest(parts, f"{wanted} parts of {longest} in steps as of {program.tile_text} are too short")


def _parts_have_work(program: RProgram, parts: int, longest: int) -> bool:
    """Return whether no split is empty, and the splits of a contraction are contractions."""
    space = program.space
    length = split_length(space, program.unit, program.block.as_dict(), parts)
    if (parts - 1) * length >= longest:
        return False
    return not space.role(AxisRole.K) or space.role(AxisRole.K)[0].extent // longest * length >= MIN_K


def _nearest_stages(group: KernelGroup, model: Model[Any], program: RProgram, wanted: int) -> Nearest:
    stages = program.pipeline.stages
    return Nearest(stages, "" if stages == wanted else f"stages is {stages} here")


def _clustered(program: RProgram, cluster: tuple[int, int]) -> RProgram:
    """Return the rProgram with its blocks, and its rows of tiles, in whole clusters."""
    way = program.pipeline
    size = math.prod(cluster) * way.cluster_k
    blocks = max(1, way.persistent_blocks // size) * size if way.persistent_blocks else 0
    rows = way.raster if way.raster == 1 else -(-way.raster // cluster[0]) * cluster[0]
    return program.with_pipeline(cluster=cluster, persistent_blocks=blocks, raster=rows)


_CLUSTER = ("cluster_m", "cluster_n", "cluster_k")  # fields with the blocks of a cluster
# For fields that the family has no knob for.
_DEFAULT_KNOBS: dict[str, Knob[Any]] = {
    "split_k": _nearest_split,
    "stream_k": fixed_knob(0, "{unit} has no stream-K"),
    "stages": _nearest_stages,
    "cluster_m": fixed_knob(1, "{unit} has no clusters"),
    "cluster_n": fixed_knob(1, "{unit} has no clusters"),
    "cluster_k": fixed_knob(1, "{unit} has no clusters"),
    "blocks": fixed_knob(0, "{unit} has a block for each tile"),
    "raster": fixed_knob(1, "only tiles of a contraction on a GPU come in another order"),
    "pingpong": fixed_knob(0, "{unit} has no ping-pong schedule"),
}
# Fields that can be set after construction; earlier ones bound later ones.
_SETTERS: dict[str, Callable[[RProgram, int], RProgram]] = {
    "split_k": lambda program, value: replace(program, split_k=value),
    "stream_k": lambda program, value: program.with_pipeline(stream_k_blocks=value),
    "stages": lambda program, value: program.with_pipeline(stages=value),
    "cluster_m": lambda program, value: _clustered(program, (value, program.pipeline.cluster_n)),
    "cluster_n": lambda program, value: _clustered(program, (program.pipeline.cluster_m, value)),
    "cluster_k": lambda program, value: program.with_pipeline(cluster_k=value),
    "blocks": lambda program, value: program.with_pipeline(
        persistent_blocks=value, pingpong=program.pipeline.pingpong and value > 0
    ),
    "raster": lambda program, value: program.with_pipeline(raster=value),
    "pingpong": lambda program, value: program.as_pingpong() if value else program.with_pipeline(pingpong=False),
}
