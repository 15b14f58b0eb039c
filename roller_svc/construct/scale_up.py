"""Scale-up (ROLLER §3.2): grow aligned tiles of one memory level from a base, by data reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from roller_svc.ir.search import BrokenRule, Search, SearchKind, TileMetrics, Visit, reuse_score
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class ScaleUpLevel:
    """One memory level of scale-up."""

    level: str
    points: int  # of the iteration space, to which traffic refers: multiply-adds, or results
    steps: tuple[Tile, ...]  # aligned extents of each axis, ascending
    axis_rank: Tile  # breaks ties between axes, smaller first
    evaluate: Callable[[Tile], TileMetrics]
    is_saturated: Callable[[Tile], bool]  # compute time covers memory time: ROLLER's test for "large enough"
    capacity_bytes: float | None = None  # that footprints may fill; None where they do not stay in a level


@dataclass(slots=True)
class SearchTrace:
    """Searches for tiles of one space on one unit, and why they rejected some."""

    budget: int
    workload: Workload[Any]
    family: str
    searches: list[Search] = field(default_factory=list)
    rejections: dict[str, int] = field(default_factory=dict)
    tiles_visited: int = 0

    def record_blocks(self, kind: SearchKind, points: int, visits: Sequence[Visit], reduce_threads: int = 1) -> None:
        """Add tiles of blocks that scale-up did not find. Each visit has its base."""
        level = self.workload.machine.hw.block_level.name
        self.record(kind, level, points, visits, reduce_threads=reduce_threads)

    def record_each(self, kind: SearchKind, points: int, visits: Sequence[tuple[int, Visit]]) -> None:
        """Add tiles of blocks, each with the threads that share a reduction: a search for each number of these."""
        for lanes in dict.fromkeys(lanes for lanes, _ in visits):
            self.record_blocks(kind, points, [visit for own, visit in visits if own == lanes], lanes)

    def record_threads(self, points: int, visits: Sequence[Visit], reduce_threads: int = 1) -> None:
        """Add tiles of threads that scale-up did not find; none without tiles."""
        if visits:
            level = self.workload.machine.hw.thread_level.name
            self.record(SearchKind.ENUMERATION, level, points, visits, reduce_threads=reduce_threads)

    def record(self, kind: SearchKind, level: str, points: int, visits: Sequence[Visit], **details: Any) -> None:
        """Add a search."""
        p = self.workload
        search = Search(kind, p.machine.unit.name, self.family, p.space, level, tuple(visits), points, **details)
        self.searches.append(search)

    def reject(self, rule: BrokenRule) -> None:
        """Count a rejected tile."""
        self.rejections[rule.rule] = self.rejections.get(rule.rule, 0) + 1


@dataclass(frozen=True, slots=True)
class ScaleUpResult:
    """Aligned tiles of one level by ascending traffic: those that saturate it, and the `border` ones."""

    saturated: tuple[Tile, ...]
    border: tuple[Tile, ...]


def scale_up(
    level: ScaleUpLevel,
    trace: SearchTrace,
    max_visits: int,
    base: Tile | None = None,
    *,
    reduce_threads: int = 1,
    epsilon: float | None = None,
    cache: dict[Tile, TileMetrics] | None = None,
) -> ScaleUpResult:
    """Grow tiles depth first, the axis of best data reuse first, until capacity stops every axis.

    Args:
        base: The thread's tile that all tiles are made of; None for tiles of threads.
        epsilon: Bound on padding, for the trace.
        cache: Metrics of tiles from levels with the same `evaluate`. Grows.
    """
    search = _Search(level, trace, min(trace.tiles_visited + max_visits, trace.budget), {} if cache is None else cache)
    first = tuple([steps[0] for steps in level.steps])
    search.visit(first, search.looks.get(first) or search.evaluate(first), None)
    by_traffic = sorted(search.accepted, key=lambda t: search.looks[t].traffic)
    large: list[Tile] = []
    border: list[Tile] = []
    for tile in by_traffic:
        (large if level.is_saturated(tile) else border).append(tile)
    trace.record(
        *(SearchKind.SCALE_UP, level.level, level.points, search.visits),
        base=base,
        reduce_threads=reduce_threads,
        epsilon=epsilon,
        steps=level.steps,
        metrics=search.looks,
        saturated=frozenset(large),
        capacity_bytes=level.capacity_bytes,
    )
    return ScaleUpResult(tuple(large), tuple(border))


class _Search:
    """State of one scale-up: metrics of tiles, visited tiles, accepted tiles."""

    def __init__(self, stage: ScaleUpLevel, log: SearchTrace, last_visit: int, looks: dict[Tile, TileMetrics]) -> None:
        self.stage = stage
        self.log = log
        self.last_visit = last_visit
        self.looks = looks
        self.visited: set[Tile] = set()
        self.visits: list[Visit] = []
        self.accepted: list[Tile] = []
        self.following = [
            (axis, dict(pairwise(steps)), stage.axis_rank[axis]) for axis, steps in enumerate(stage.steps) if len(steps) > 1
        ]

    def visit(self, tile: Tile, look: TileMetrics, parent: int | None) -> None:
        """Accept or reject a tile by its metrics, then visit those one step larger."""
        log, position = self.log, len(self.visits)
        self.visited.add(tile)
        self.visits.append(Visit(tile, parent, look))
        log.tiles_visited += 1
        growths = [] if look.too_large else self._growths(tile, look)
        broken = look.too_large or look.misaligned
        if broken is None:
            self.accepted.append(tile)
        elif not growths:
            log.reject(broken)
        for _, _, _, larger in growths:
            if log.tiles_visited >= self.last_visit:
                return
            if larger not in self.visited:
                self.visit(larger, self.looks[larger], position)

    def _growths(self, tile: Tile, look: TileMetrics) -> list[tuple[float, int, int, Tile]]:
        """Return (-reuse score, axis rank, axis, tile) of every tile one step larger, best first."""
        found, looks = [], self.looks
        for axis, following, place in self.following:
            extent = following.get(tile[axis])
            if extent is not None:
                larger = (*tile[:axis], extent, *tile[axis + 1 :])
                grown = looks.get(larger) or self.evaluate(larger)
                found.append((-reuse_score(look, grown), place, axis, larger))
        found.sort()
        return found

    def evaluate(self, tile: Tile) -> TileMetrics:
        """Evaluate a tile that has no metrics yet."""
        look = self.looks[tile] = self.stage.evaluate(tile)
        return look
