"""ROLLER's construction (OSDI 2022, §3): rules of a kernel family → aligned rPrograms, unranked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from roller_svc.construct.align import EPSILONS
from roller_svc.construct.rules import (
    MIN_MATRIX_STAGES,
    Enumerated,
    Prefiltered,
    Relaxable,
    Rules,
    Shape,
    ThreadTile,
    spatial_grid,
    subsample,
)
from roller_svc.construct.scale_out import shrink, split_k_choices
from roller_svc.construct.scale_up import SearchTrace, scale_up
from roller_svc.errors import NoCandidateError
from roller_svc.fusion.split.reduction import may_split
from roller_svc.ir.estimate import Construction
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions, RProgram
from roller_svc.ir.search import SearchKind, TileMetrics, Visit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.occupancy import BlockResources, exceeded_limits
from roller_svc.perf.workload import Workload

MAX_VISITS = 2000
VISITS_PER_STAGE = 40
MIN_TILES = 8  # tiles from which padding need not grow
MAX_SHRUNK_TILES = 3  # tiles that scale-out starts from
MAX_RANKED = 36  # rPrograms that `rank` passes to the model
MAX_RANKED_MATRIX = 40  # the same for a matrix unit, whose tiles also differ in stages

PredictResources = Callable[[RProgram], BlockResources | None]


def construct_rprograms(
    group: KernelGroup, rules: Rules, needs: PredictResources, limit: int, *, family: str, can_split: bool, varied: bool
) -> Construction:
    """Grow aligned tiles by scale-up, shrink them by scale-out, and split reductions.

    Args:
        needs: Registers and shared memory of a block, as the model of the family assumes them.
        limit: rPrograms at most.
        can_split: Whether the family's reductions may be split over several blocks.
        varied: Keep the tiles of a matrix unit as different as possible, for constraints of a caller.

    Raises:
        NoCandidateError: No tile fits the device.
    """
    p = rules.workload
    prefiltered = rules if isinstance(rules, Prefiltered) and not varied else None
    log = SearchTrace(MAX_VISITS, p, family)
    shapes = _scale_up_shapes(rules, limit, log)
    if not shapes:
        if isinstance(rules, Relaxable):
            rules, log.budget = rules.relax(), log.tiles_visited + MAX_VISITS
            shapes = _scale_up_shapes(rules, limit, log)
        shapes += _fallback(rules, log)
    if not shapes:
        raise _no_tile_error(group, rules, needs, log, family)
    splittable = can_split and may_split(group)
    split = [Shape(s.block, s.base, k) for s in shapes for k in split_k_choices(p, s.block)] if splittable else []
    if prefiltered is not None:
        known = set(shapes)
        shapes = prefiltered.prefilter([*shapes, *split], limit // 2)
        _record_prefiltered(rules, [s for s in shapes if Shape(s.block, s.base) not in known], log)
    elif split:
        shapes = [*subsample(shapes, limit - limit // 2), *subsample(split, limit // 2)]
    shapes = [Shape(s.block, s.base, s.split_k, way) for s in shapes for way in rules.pipeline_choices(s.block, s.base, s.split_k)]
    if group.forbids_split_k:
        shapes = [s for s in shapes if not s.pipeline.stream_k_blocks and s.pipeline.cluster_k == 1]
    chosen = shapes[:limit] if prefiltered is not None else subsample(shapes, limit)
    return _construction(p, list(dict.fromkeys(chosen)), log, family)


def enumerate_rprograms(rules: Enumerated, limit: int, *, family: str) -> Construction:
    """Return the rPrograms of a family that enumerates its shapes itself. Raises NoCandidateError where none fits."""
    p = rules.workload
    log = SearchTrace(MAX_VISITS, p, family)
    shapes = rules.shapes(log, VISITS_PER_STAGE, limit)
    if not shapes:
        hw, rejections = p.machine.hw, dict(log.rejections)
        raise NoCandidateError(f"no tile of {family} fits {hw.id}: {', '.join(sorted(rejections))}", rejections=rejections)
    return _construction(p, shapes, log, family)


def default_limit(p: Workload[Any]) -> int:
    """Return how many rPrograms of a unit are ranked."""
    return MAX_RANKED_MATRIX if p.machine.unit.is_matrix else MAX_RANKED


def _construction(p: Workload[Any], shapes: Sequence[Shape], log: SearchTrace, family: str) -> Construction:
    programs = tuple(rprogram_of(p, shape, family) for shape in shapes)
    return Construction(programs, tuple(log.searches), log.tiles_visited, tuple(sorted(log.rejections.items())))


def _scale_up_shapes(rules: Rules, limit: int, log: SearchTrace) -> list[Shape]:
    """Scale up with growing bounds on padding until there are enough tiles; then scale out."""
    bases = _thread_tiles(rules, log)
    # prefiltered rules keep all tiles: the prefilter chooses those that are estimated
    share = VISITS_PER_STAGE if isinstance(rules, Prefiltered) else max(4, limit * 3 // 4 // max(1, len(bases)))
    found: dict[ThreadTile, list[Tile]] = {}
    steps: dict[ThreadTile, tuple[Tile, ...]] = {}
    looks: dict[ThreadTile, dict[Tile, TileMetrics]] = {base: {} for base in bases}  # independent of epsilon
    for epsilon in EPSILONS:
        for base in bases:
            stage = rules.block_level(base, epsilon)
            if steps.get(base) != stage.steps:
                steps[base] = stage.steps
                grown = scale_up(
                    *(stage, log, VISITS_PER_STAGE, base.tile),
                    reduce_threads=base.reduce_threads,
                    epsilon=epsilon,
                    cache=looks[base],
                )
                found[base] = subsample(grown.saturated or grown.border, share)
        if sum(map(len, found.values())) >= MIN_TILES or log.tiles_visited >= log.budget:
            break
    shapes = [Shape(tile, base) for base, tiles in found.items() for tile in tiles]
    return list(dict.fromkeys([*shapes, *_shrink_idle(rules, shapes, log)]))


def _shrink_idle(rules: Rules, shapes: list[Shape], log: SearchTrace) -> list[Shape]:
    """Scale out the tiles that leave cores idle; a CPU's steps are cuts of the axes and leave none."""
    if not rules.workload.machine.is_gpu:
        return []
    cores = rules.workload.machine.cores
    idle = [s for s in shapes if spatial_grid(rules.workload, s.block) < cores]
    smaller = []
    for shape in subsample(idle, MAX_SHRUNK_TILES):
        # the last tile that leaves cores idle, and the first that does not
        smaller += [Shape(block, base) for block, base in [*shrink(rules, shape.block, shape.base, log)][-2:]]
    return smaller


def _thread_tiles(rules: Rules, log: SearchTrace) -> list[ThreadTile]:
    bases = []
    for lanes in rules.reduce_thread_choices():
        level = rules.thread_level(lanes)
        grown = scale_up(level, log, VISITS_PER_STAGE, reduce_threads=lanes)
        tiles = rules.rank_thread_tiles(grown, lanes)
        added = [tile for tile in tiles if tile not in {*grown.saturated, *grown.border}]
        visits = [Visit(tile, None, level.evaluate(tile)) for tile in added]
        log.record_threads(level.points, visits, lanes)
        bases += [ThreadTile(thread, lanes) for thread in tiles]
    return bases


def _fallback(rules: Rules, log: SearchTrace) -> list[Shape]:
    shapes = []
    for block, base in rules.fallback_tiles():
        log.tiles_visited += 1
        metrics = rules.evaluate(block, base)
        log.record_blocks(SearchKind.FALLBACK, rules.points, [Visit(block, None, metrics, base.tile)], base.reduce_threads)
        if metrics.too_large is not None:
            log.reject(metrics.too_large)
        else:
            shapes.append(Shape(block, base))
    return shapes


def _record_prefiltered(rules: Rules, shapes: Sequence[Shape], log: SearchTrace) -> None:
    """Record the blocks that a prefilter made itself."""
    blocks = dict.fromkeys((shape.block, shape.base) for shape in shapes)
    visits = [(base.reduce_threads, Visit(block, None, rules.evaluate(block, base), base.tile)) for block, base in blocks]
    log.record_each(SearchKind.PREFILTER, rules.points, visits)


def _no_tile_error(group: KernelGroup, rules: Rules, needs: PredictResources, log: SearchTrace, family: str) -> NoCandidateError:
    """Return the error with the limits that the smallest tile exceeds, and by how much."""
    p = rules.workload
    said = ", ".join(sorted(log.rejections))
    least = MIN_MATRIX_STAGES if p.machine.unit.is_matrix else DEFAULT_PIPELINE.stages
    for block, base in rules.fallback_tiles():
        smallest = rprogram_of(p, Shape(block, base, pipeline=PipelineOptions(least)), family)
        taken = needs(smallest)
        if over := exceeded_limits(taken, p.machine.hw) if taken is not None else ():
            said = f"{smallest.tile_text} on {p.machine.unit.name} takes {' and '.join(over)}"
    return NoCandidateError(
        f"no tile of {group.name} fits {p.machine.hw.id}: {said}",
        rejections=dict(log.rejections),
        hint="the device's limits are too small for one warp or vector of work",
    )


def rprogram_of(p: Workload[Any], shape: Shape, family: str) -> RProgram:
    """Name the axes of a shape."""
    block, thread = p.footprint.rtile(shape.block), p.footprint.rtile(shape.base.tile)
    base, unit = shape.base, p.machine.unit
    return RProgram(p.space, unit, block, thread, base.reduce_threads, shape.split_k, shape.pipeline, family)
