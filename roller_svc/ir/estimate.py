"""What the micro performance model says of an rProgram."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.ir.rprogram import RProgram


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds that one stage would take alone: compute, a memory level by its name, launch, ..."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """`seconds` for the whole kernel. `stages` explain it; `occupancy` is active warps over what a core can hold
    (CPU: share of the threads that have work); `waves` how often the device is filled; `uncertainty` the factor within
    which the truth is expected."""

    seconds: float
    stages: tuple[StageCost, ...]
    occupancy: float
    waves: int
    uncertainty: float

    @property
    def bound(self) -> str:
        """The stage that takes longest."""
        return max(self.stages, key=lambda s: s.seconds).name


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """`saved`: share of an estimate's seconds that a tenth more of the resource saves; of a latency, a tenth less."""

    resource: str
    time_saved_fraction: float


COMPUTE = "compute"  # the roof that is no memory level
FLOOR = " floor"  # behind the name of a roof that no tile goes below: a stage of an estimate that it decides


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The least time that a program leaves to one level of a device, whatever its tiles: `amount` at full rate.

    `amount` is bytes, each tensor once, of a memory level; operations of `COMPUTE`.
    """

    level: str
    amount: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """An rProgram with its estimate. `handicap`: by what factor it has to be the fastest to come first."""

    program: RProgram
    estimate: Estimate
    tie_break_factor: float = 1.0

    @property
    def ranking_seconds(self) -> float:
        """The seconds by which it stands among others."""
        return self.estimate.seconds * self.tie_break_factor


class TraceStep(NamedTuple):
    """One step of construction: the tile looked at, at which level, its footprint and data-reuse score, and what
    became of it ('grown m', 'accepted', or the rule that rejected it). `extents` are those of the axes `names`."""

    level: str
    names: tuple[str, ...]
    extents: tuple[int, ...]
    footprint_bytes: int
    reuse_score: float
    decision: str


@dataclass(frozen=True, slots=True)
class Construction:
    """All that construction found for one group on one device, unranked, and how it got there. `refusals` say which
    matrix units cannot compute the group and why: 'unit: reason'. `roofline`: arithmetic first, then the memory levels,
    the outermost first."""

    programs: tuple[RProgram, ...]
    trace: tuple[TraceStep, ...]
    tiles_visited: int
    rejections: tuple[tuple[str, int], ...] = ()
    unsupported_units: tuple[str, ...] = ()
    roofline: tuple[RooflineBound, ...] = ()
