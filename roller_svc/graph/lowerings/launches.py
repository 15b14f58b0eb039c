"""Launches: every step is an operation of the host in a stream, one after the other."""

from __future__ import annotations

from roller_svc.graph.lowerings.lowering import Lowering, LoweringEstimate, UnrolledPlan, count_operations, launch_seconds
from roller_svc.ir.hardware import HardwareSpec

KIND = "launches"


def refuse(_: HardwareSpec) -> None:
    """Return None: every GPU has launches."""


def estimate(unrolled: UnrolledPlan, hw: HardwareSpec) -> LoweringEstimate:
    """Return the seconds of the kernels, with the overhead of a launch for each operation."""
    return LoweringEstimate(launch_seconds(unrolled, hw), count_operations(unrolled))


LAUNCHES = Lowering(KIND, refuse, estimate)
