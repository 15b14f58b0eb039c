"""The price of a schedule by hand: what its launches do, and the estimates of their time."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.estimate import Estimate, ProgramFloor, RooflineBound, add_estimates
from roller_svc.ir.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """The price of one launch."""

    name: str
    operations: int  # that run, with those of values that are computed again
    stored_bytes: int  # written by statements, to tiles too
    moved_bytes: tuple[tuple[str, int], ...]  # that each memory level delivers or takes, the outermost first
    tile_bytes: int  # allocated by a thread of a CPU or a block of a GPU
    threads: int  # of a CPU that have work, of all blocks of a GPU
    vector_fraction: float  # of the operations, in vector loops
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class ScheduleCost:
    """The price of a schedule: of its launches, one after the other."""

    launches: tuple[LaunchCost, ...]

    @property
    def estimate(self) -> Estimate:
        return add_estimates([launch.estimate for launch in self.launches])

    @property
    def seconds(self) -> float:
        return sum(launch.estimate.seconds for launch in self.launches)

    @property
    def operations(self) -> int:
        return sum(launch.operations for launch in self.launches)

    @property
    def stored_bytes(self) -> int:
        return sum(launch.stored_bytes for launch in self.launches)

    @property
    def tile_bytes(self) -> int:
        """The most bytes of tiles in a launch."""
        return max((launch.tile_bytes for launch in self.launches), default=0)


@dataclass(frozen=True, slots=True)
class ScheduledEstimate:
    """The price of a schedule on a device, and the least time of its program."""

    spec: HardwareSpec
    cost: ScheduleCost
    roofline: tuple[RooflineBound, ...]  # of construction's first plan
    floor: ProgramFloor
    notes: tuple[str, ...] = ()
