"""Tiles that construction tried, and why it went no further: searches as trees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from roller_svc.ir.group import TileSpace

Extents = tuple[int, ...]  # of a tile, one for each axis of the space


class BrokenRule(NamedTuple):
    """A rule that a tile breaks: it needs more of something than there is."""

    rule: str
    needs: int | float
    has: int | float


class TileMetrics(NamedTuple):
    """Footprint, traffic and broken rules of one tile."""

    footprint_bytes: int
    traffic: float  # bytes moved per point of the iteration space
    too_large: BrokenRule | None = None  # that growth cannot repair
    misaligned: BrokenRule | None = None  # that growth may repair


class Visit(NamedTuple):
    """A tile that a search visited."""

    tile: Extents
    parent: int | None  # position of the visit from which the tile was made; None: a first tile
    metrics: TileMetrics
    base: Extents | None = None  # the thread's tile, where it is not the search's

    @property
    def limit(self) -> BrokenRule | None:
        """The rule that rejects the tile."""
        return self.metrics.too_large or self.metrics.misaligned


class SearchKind(Enum):
    """How a search makes tiles of other tiles."""

    SCALE_UP = "scale-up"  # grown along the axis of best data reuse (ROLLER §3.2)
    SCALE_OUT = "scale-out"  # halved until every core has a tile (ROLLER §3.4)
    ENUMERATION = "enumeration"  # listed by the family
    PREFILTER = "prefilter"  # changed to fill whole waves, or for other pipelines
    FALLBACK = "fallback"  # small tiles that fit nearly everywhere
    CONSTRAINT = "constraint"  # demanded by the caller


@dataclass(frozen=True, slots=True)
class Search:
    """One search for tiles of a memory level: the tiles visited, in order, each with the one that it was made of."""

    kind: SearchKind
    unit: str
    family: str
    space: TileSpace
    level: str
    visits: tuple[Visit, ...]
    points: int  # of the iteration space, to which the traffic of metrics refers
    base: Extents | None = None  # thread's tile that all visited tiles are made of; None at the thread's level
    reduce_threads: int = 1  # that share a reduction
    epsilon: float | None = None  # bound on padding
    steps: tuple[Extents, ...] = ()  # of scale-up: aligned extents of each axis, ascending
    metrics: Mapping[Extents, TileMetrics] | None = None  # of scale-up: of visited tiles and those one step larger
    saturated: frozenset[Extents] = frozenset()  # tiles whose compute time covers memory time
    capacity_bytes: float | None = None  # that footprints may fill; None where they do not stay in a level


def check_limit(rule: str, needs: float, has: float) -> BrokenRule | None:
    """Return the rule if a tile needs more than there is."""
    return BrokenRule(rule, needs, has) if needs > has else None


def reuse_score(tile: TileMetrics, larger: TileMetrics) -> float:
    """Return traffic saved per byte of footprint spent, (Q(T) - Q(T')) / (F(T') - F(T)) (ROLLER §3.3)."""
    saved = tile.traffic - larger.traffic
    if saved <= 0:
        return 0.0
    spent = larger.footprint_bytes - tile.footprint_bytes
    return saved / spent if spent > 0 else math.inf
