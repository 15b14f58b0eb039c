"""Results of the performance model and of construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from roller_svc.ir.canonical import OMIT_DEFAULT, Key
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.search import Search


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one stage by itself: compute, a memory level by its name, launch, ..."""

    name: str
    seconds: float


class Combines(Enum):
    """How a term is part of the seconds of a kernel: see `combine_terms`."""

    OVERLAPS = "overlaps"  # the longest of these counts
    SUMS = "sums"  # the sum of these is one of the times that overlap
    ADDS = "adds"
    FLOOR = "floor"  # the seconds are at least this, before launches
    AFTER = "after"


class RateSource(Enum):
    """Whether the rate of a term rests on measured fields of the spec."""

    MEASURED = "measured"  # fields of the spec that are measured or published
    ASSUMED = "assumed"  # a field that the spec marks as assumed


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the estimate of a kernel: the time of an amount at a rate."""

    name: str
    seconds: float
    combines: Combines
    amount: float
    unit: str  # "B", "operations", "cycles" or "launches"
    rate: float  # of the amount per second, as far as the kernel reaches it
    source: RateSource
    fraction: Annotated[float, OMIT_DEFAULT] = 1.0  # of the seconds, which counts


def combine_terms(terms: Iterable[Term]) -> float:
    """Return the seconds of a kernel from its terms.

    The longest of the terms that overlap, and of the sum of those that sum, counts. Terms that add follow. The result
    is at least the floor. Terms after that are added last.
    """
    overlaps = summed = added = floor = after = 0.0
    for term in terms:
        seconds = term.fraction * term.seconds
        match term.combines:
            case Combines.OVERLAPS:
                overlaps = max(overlaps, seconds)
            case Combines.SUMS:
                summed += seconds
            case Combines.ADDS:
                added += seconds
            case Combines.FLOOR:
                floor = max(floor, seconds)
            case Combines.AFTER:
                after += seconds
    return max(max(overlaps, summed) + added, floor) + after


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


def add_estimates(parts: Sequence[Estimate]) -> Estimate:
    """Return the sum of estimates, stage by stage, of kernels that run one after the other."""
    seconds = sum(p.seconds for p in parts)
    stages: dict[str, float] = {}
    for part in parts:
        for stage in part.stages:
            stages[stage.name] = stages.get(stage.name, 0.0) + stage.seconds
    weight = [p.seconds / seconds for p in parts]
    return Estimate(
        seconds=seconds,
        stages=tuple(StageCost(name, cost) for name, cost in stages.items()),
        occupancy=sum(w * p.occupancy for w, p in zip(weight, parts, strict=True)),
        waves=max(p.waves for p in parts),
        uncertainty=math.prod(p.uncertainty**w for w, p in zip(weight, parts, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The sensitivity of an estimate to one resource."""

    resource: str
    time_saved_fraction: Annotated[float, Key("saved")]  # of the seconds, with 10 % more of the resource; of a latency, 10 % less


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
    # terms that combine to the seconds of the estimate; operations that are executed, without padding
    terms: tuple[Term, ...] = field(default=(), compare=False)
    operations: int = field(default=0, compare=False)

    @property
    def ranking_seconds(self) -> float:
        """Return the seconds by which candidates are ranked."""
        return self.estimate.seconds * self.tie_break_factor


@dataclass(frozen=True, slots=True)
class Construction:
    """The result of construction for one group on one device."""

    programs: tuple[RProgram, ...]  # unranked
    searches: tuple[Search, ...]
    tiles_visited: int
    rejections: tuple[tuple[str, int], ...] = ()
    unsupported_units: tuple[str, ...] = ()  # "unit: reason" of matrix units that cannot compute the group
    roofline: tuple[RooflineBound, ...] = ()  # arithmetic, then memory levels from the outermost
    seconds: tuple[float, ...] = ()  # of each program, by the model, where they were ranked
