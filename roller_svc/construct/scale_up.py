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
    footprint: Callable[[Tile], int]
    traffic: Callable[[Tile], float]  # bytes moved for one point of the iteration space
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
    """Tiles of one stage: `large` saturate their level, `border` are the largest that do not."""

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
    return Grown(tuple(search.large), tuple(search.border))


class _Search:
    """State of one scale-up. Positions index into the steps of each axis; `seen` says whether the tile there fits."""

    def __init__(self, stage: Stage, log: Log, last_visit: int) -> None:
        self.stage = stage
        self.log = log
        self.last_visit = last_visit
        self.seen: dict[Tile, bool] = {}
        self.large: list[Tile] = []
        self.border: list[Tile] = []

    def visit(self, position: Tile) -> None:
        """Look at a tile, then at those one step larger."""
        stage, log = self.stage, self.log
        tile = tuple([s[i] for s, i in zip(stage.steps, position, strict=True)])
        self.seen[position] = True
        log.visited += 1
        footprint = stage.footprint(tile)
        if rule := stage.too_large(tile):
            log.rejections[rule] += 1
            log.steps.append(TraceStep(stage.level, self._named(tile), footprint, 0.0, rule))
            self.seen[position] = False
            return
        growths = self._growths(position, tile, footprint)
        lacking = stage.misaligned(tile)
        accepted = not lacking and stage.saturates(tile)
        reuse, axis, _ = growths[0] if growths else (0.0, -1, position)
        outcome = ACCEPTED if accepted else f"grown {stage.names[axis]}" if growths else lacking or ACCEPTED
        log.steps.append(TraceStep(stage.level, self._named(tile), footprint, reuse, outcome))
        if accepted:
            self.large.append(tile)
        for _, _, larger in growths:
            if log.visited >= self.last_visit:
                break
            if larger not in self.seen:
                self.visit(larger)
        if not accepted and not any(self.seen.get(larger, False) for _, _, larger in growths):
            if lacking:
                log.rejections[lacking] += 1
            else:
                self.border.append(tile)

    def _growths(self, position: Tile, tile: Tile, footprint: int) -> list[tuple[float, int, Tile]]:
        """(reuse score, axis, position) of every tile one step larger, best first."""
        stage = self.stage
        traffic = stage.traffic(tile)
        found = []
        for axis, at in enumerate(position):
            if at + 1 < len(stage.steps[axis]):
                grown = tile[:axis] + (stage.steps[axis][at + 1],) + tile[axis + 1 :]
                score = reuse_score(traffic, footprint, stage.traffic(grown), stage.footprint(grown))
                found.append((score, axis, position[:axis] + (at + 1,) + position[axis + 1 :]))
        found.sort(key=lambda g: (-g[0], stage.rank[g[1]]))
        return found

    def _named(self, tile: Tile) -> tuple[tuple[str, int], ...]:
        return tuple(zip(self.stage.names, tile, strict=True))
