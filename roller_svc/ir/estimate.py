"""Results of the performance model and of construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.ir.rprogram import RProgram


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one stage by itself: compute, a memory level by its name, launch, ..."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated time of a call of a kernel."""

    seconds: float
    stages: tuple[StageCost, ...]
    occupancy: float  # active warps over the most a core can hold; CPU: fraction of the threads that have work
    waves: int  # times that the grid fills the device
    uncertainty: float  # factor within which the measured time is expected
    once_s: float = 0.0  # of launches that read constants alone and run once, before all calls; not part of `seconds`

    @property
    def bound(self) -> str:
        """Return the name of the longest stage."""
        return max(self.stages, key=lambda s: s.seconds).name


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The sensitivity of an estimate to one resource."""

    resource: str
    time_saved_fraction: float  # of the seconds, with 10 % more of the resource; of a latency, 10 % less


COMPUTE = "compute"  # level of the bound that is not a memory level
LAUNCH = "launch"  # stage of the overheads of launches
FLOOR = " floor"  # suffix of a level's name: stage of an estimate at that level's roofline bound


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The lower bound of a program's time at one level of a device: `amount` at the full rate, for any tiles."""

    level: str
    amount: int  # bytes, each tensor once; operations of `COMPUTE`
    seconds: float


@dataclass(frozen=True, slots=True)
class ProgramFloor:
    """The least time of a program on a device, whichever kernels compute it.

    Inputs and outputs are moved once, arithmetic runs on the fastest units that its types allow, in one launch.
    """

    level: str  # memory level of the traffic
    traffic_bytes: int
    traffic_s: float
    unit: str  # that takes the most time
    operations: int
    arithmetic_s: float
    launch_s: float

    @property
    def seconds(self) -> float:
        return max(self.traffic_s, self.arithmetic_s) + self.launch_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """An rProgram with its estimate."""

    program: RProgram
    estimate: Estimate
    tie_break_factor: float = 1.0  # multiplies the seconds in rankings
    runs_once: bool = False  # its group reads constants alone, so that it is part of no call

    @property
    def ranking_seconds(self) -> float:
        """Return the seconds by which candidates are ranked."""
        return self.estimate.seconds * self.tie_break_factor


class TraceStep(NamedTuple):
    """One step of construction: a tile and the decision about it."""

    level: str
    names: tuple[str, ...]  # axes of the tile
    extents: tuple[int, ...]  # of those axes
    footprint_bytes: int
    reuse_score: float  # ROLLER's data-reuse score
    decision: str  # "grown m", "accepted", or the rule that rejected the tile


@dataclass(frozen=True, slots=True)
class Construction:
    """The result of construction for one group on one device."""

    programs: tuple[RProgram, ...]  # unranked
    trace: tuple[TraceStep, ...]
    tiles_visited: int
    rejections: tuple[tuple[str, int], ...] = ()
    unsupported_units: tuple[str, ...] = ()  # "unit: reason" of matrix units that cannot compute the group
    roofline: tuple[RooflineBound, ...] = ()  # arithmetic, then memory levels from the outermost
