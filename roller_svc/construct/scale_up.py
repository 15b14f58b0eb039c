"""Scale-up (ROLLER §3.2): grow aligned tiles of one memory level from a base, by data reuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from roller_svc.ir.estimate import TraceStep
from roller_svc.perf.footprint import Tile

ACCEPTED = "accepted"


class TileMetrics(NamedTuple):
    """Footprint, traffic and broken rules of one tile."""

    footprint_bytes: int
    traffic: float  # bytes moved per point of the iteration space
    too_large: str = ""  # the broken rule that growth cannot repair; '' if none
    misaligned: str = ""  # the broken rule that growth may repair; '' if none


@dataclass(frozen=True, slots=True)
class ScaleUpLevel:
    """One memory level of scale-up."""

    level: str
    names: tuple[str, ...]
    steps: tuple[Tile, ...]  # aligned extents of each axis, ascending
    axis_rank: Tile  # breaks ties between axes, smaller first
    evaluate: Callable[[Tile], TileMetrics]
    is_saturated: Callable[[Tile], bool]  # compute time covers memory time: ROLLER's test for "large enough"


@dataclass(slots=True)
class SearchTrace:
    """Tiles that construction visited and why it rejected some; becomes the trace of a report."""

    budget: int
    steps: list[TraceStep] = field(default_factory=list)
    rejections: dict[str, int] = field(default_factory=dict)
    tiles_visited: int = 0


@dataclass(frozen=True, slots=True)
class ScaleUpResult:
    """Aligned tiles of one level by ascending traffic: those that saturate it, and the `border` ones."""

    saturated: tuple[Tile, ...]
    border: tuple[Tile, ...]


def reuse_score(tile: TileMetrics, larger: TileMetrics) -> float:
    """Return traffic saved per byte of footprint spent, (Q(T) - Q(T')) / (F(T') - F(T)) (ROLLER §3.3)."""
    saved = tile.traffic - larger.traffic
    if saved <= 0:
        return 0.0
    spent = larger.footprint_bytes - tile.footprint_bytes
    return saved / spent if spent > 0 else math.inf


def scale_up(
    level: ScaleUpLevel, trace: SearchTrace, max_visits: int, cache: dict[Tile, TileMetrics] | None = None
) -> ScaleUpResult:
    """Grow tiles depth first, the axis of best data reuse first, until capacity stops every axis.

    Args:
        cache: Metrics of tiles from levels with the same `evaluate`. Grows.
    """
    search = _Search(level, trace, min(trace.tiles_visited + max_visits, trace.budget), {} if cache is None else cache)
    base = tuple([steps[0] for steps in level.steps])
    search.visit(base, search.looks.get(base) or search.evaluate(base))
    by_traffic = sorted(search.accepted, key=lambda t: search.looks[t].traffic)
    large: list[Tile] = []
    border: list[Tile] = []
    for tile in by_traffic:
        (large if level.is_saturated(tile) else border).append(tile)
    return ScaleUpResult(tuple(large), tuple(border))


class _Search:
    """State of one scale-up: metrics of tiles, visited tiles, accepted tiles."""

    def __init__(self, stage: ScaleUpLevel, log: SearchTrace, last_visit: int, looks: dict[Tile, TileMetrics]) -> None:
        self.stage = stage
        self.log = log
        self.last_visit = last_visit
        self.looks = looks
        self.visited: set[Tile] = set()
        self.accepted: list[Tile] = []
        self.following = [
            (axis, dict(pairwise(steps)), stage.axis_rank[axis]) for axis, steps in enumerate(stage.steps) if len(steps) > 1
        ]

    def visit(self, tile: Tile, look: TileMetrics) -> None:
        """Accept or reject a tile by its metrics, then visit those one step larger."""
        log = self.log
        self.visited.add(tile)
        log.tiles_visited += 1
        growths = [] if look.too_large else self._growths(tile, look)
        if not look.too_large and not look.misaligned:
            self.accepted.append(tile)
            decision = ACCEPTED
        elif growths:
            decision = f"grown {self.stage.names[growths[0][2]]}"
        else:
            decision = look.too_large or look.misaligned
            log.rejections[decision] = log.rejections.get(decision, 0) + 1
        reuse = -growths[0][0] if growths else 0.0
        log.steps.append(TraceStep(self.stage.level, self.stage.names, tile, look.footprint_bytes, reuse, decision))
        for _, _, _, larger in growths:
            if log.tiles_visited >= self.last_visit:
                return
            if larger not in self.visited:
                self.visit(larger, self.looks[larger])

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
