"""A base tile → the aligned tiles of one memory level, grown axis by axis in the order of their data reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from roller_svc.ir.estimate import TraceStep
from roller_svc.perf.footprint import Tile

ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class Stage:
    """One memory level of scale-up.

    `steps[i]`: aligned extents of axis i, ascending; `rank[i]` breaks ties between axes (smaller first). `too_large`
    names the rule that the tile breaks and that growth cannot mend, `misaligned` one that growth may mend; '' is none.
    `saturates`: the tile's compute time covers its memory time, ROLLER's test for "large enough".
    """

    level: str
    names: tuple[str, ...]
    steps: tuple[Tile, ...]
    rank: Tile
    too_large: Callable[[Tile], str]
    misaligned: Callable[[Tile], str]
    measure: Callable[[Tile], tuple[int, float]]  # footprint in bytes; bytes moved for one point
    saturates: Callable[[Tile], bool]

    @property
    def base(self) -> Tile:
        return tuple([s[0] for s in self.steps])


@dataclass(slots=True)
class Log:
    """What construction has looked at so far; becomes the trace."""

    budget: int
    steps: list[TraceStep] = field(default_factory=list)
    rejections: Counter[str] = field(default_factory=Counter)
    visited: int = 0


@dataclass(frozen=True, slots=True)
class Grown:
    """Aligned tiles of one stage, each set from the least traffic up: `large` saturate their level, `border` do not."""

    large: tuple[Tile, ...]
    border: tuple[Tile, ...]


def reuse_score(traffic: float, footprint: int, grown_traffic: float, grown_footprint: int) -> float:
    """ROLLER §3.3: traffic saved for each byte of footprint spent, (Q(T) - Q(T')) / (F(T') - F(T))."""
    saved = traffic - grown_traffic
    spent = grown_footprint - footprint
    if saved <= 0:
        return 0.0
    return saved / spent if spent > 0 else float("inf")


def scale_up(stage: Stage, log: Log, most_visits: int) -> Grown:
    """Depth first from the base, the axis of best data reuse first, until capacity stops every axis."""
    search = _Search(stage, log, min(log.visited + most_visits, log.budget))
    search.visit(tuple([0] * len(stage.steps)))
    by_traffic = sorted(search.accepted, key=lambda t: search.measured[t][1])
    large = tuple([t for t in by_traffic if stage.saturates(t)])
    return Grown(large, () if large else tuple(by_traffic))


class _Search:
    """State of one scale-up. Positions index into the steps of each axis."""

    def __init__(self, stage: Stage, log: Log, last_visit: int) -> None:
        self.stage = stage
        self.log = log
        self.last_visit = last_visit
        self.seen: set[Tile] = set()
        self.measured: dict[Tile, tuple[int, float]] = {}
        self.accepted: list[Tile] = []
        self.growing = tuple([i for i, steps in enumerate(stage.steps) if len(steps) > 1])

    def visit(self, position: Tile) -> None:
        """Look at a tile, then at those one step larger."""
        stage, log = self.stage, self.log
        tile = tuple([s[i] for s, i in zip(stage.steps, position, strict=True)])
        self.seen.add(position)
        log.visited += 1
        named = tuple(zip(stage.names, tile, strict=True))
        if rule := stage.too_large(tile):
            log.rejections[rule] += 1
            log.steps.append(TraceStep(stage.level, named, self._measure(tile)[0], 0.0, rule))
            return
        growths = self._growths(position, tile)
        lacking = stage.misaligned(tile)
        if not lacking:
            self.accepted.append(tile)
        elif not growths:
            log.rejections[lacking] += 1
        reuse, axis, _ = growths[0] if growths else (0.0, -1, position)
        outcome = ACCEPTED if not lacking else f"grown {stage.names[axis]}" if growths else lacking
        log.steps.append(TraceStep(stage.level, named, self._measure(tile)[0], reuse, outcome))
        for _, _, larger in growths:
            if log.visited >= self.last_visit:
                return
            if larger not in self.seen:
                self.visit(larger)

    def _growths(self, position: Tile, tile: Tile) -> list[tuple[float, int, Tile]]:
        """(reuse score, axis, position) of every tile one step larger, best first."""
        stage = self.stage
        footprint, traffic = self._measure(tile)
        found = []
        for axis in self.growing:
            at = position[axis] + 1
            if at < len(stage.steps[axis]):
                grown = self._measure((*tile[:axis], stage.steps[axis][at], *tile[axis + 1 :]))
                score = reuse_score(traffic, footprint, grown[1], grown[0])
                found.append((score, axis, (*position[:axis], at, *position[axis + 1 :])))
        if len(found) > 1:
            found.sort(key=lambda g: (-g[0], stage.rank[g[1]]))
        return found

    def _measure(self, tile: Tile) -> tuple[int, float]:
        known = self.measured.get(tile)
        if known is None:
            known = self.measured[tile] = self.stage.measure(tile)
        return known
