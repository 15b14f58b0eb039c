"""Lowerings: ways to run the plan of a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.model_plan import CopyStep, KernelStep, ModelPlan


@dataclass(frozen=True, slots=True)
class UnrolledPlan:
    """A plan with the steps of a call in order."""

    plan: ModelPlan
    steps: tuple[KernelStep | CopyStep, ...]


@dataclass(frozen=True, slots=True)
class LoweringEstimate:
    """The cost of a call by a lowering, by the performance model."""

    seconds: float
    launches: int  # by the host


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a lowering cannot run a plan."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lowering:
    """A kind of plans of GPUs. `estimate` returns what a call costs, or why the device or the plan cannot have it."""

    kind: str
    estimate: Callable[[UnrolledPlan, HardwareSpec], LoweringEstimate | Refusal]


def kernel_seconds(unrolled: UnrolledPlan, hw: HardwareSpec) -> float:
    """Return the seconds of all work of a call on the device, without overheads of launches."""
    overhead_s, memory = hw.limits.launch_overhead_s, hw.levels[0]
    seconds = 0.0
    for step in unrolled.steps:
        if isinstance(step, CopyStep):
            seconds += 2 * step.bytes / memory.bandwidth_bytes_per_s
            continue
        kernel = unrolled.plan.kernels[step.kernel]
        launches = sum(not launch.is_prepack for launch in kernel.source.launches)
        seconds += max(0.0, kernel.estimate_s / launches - overhead_s)
        seconds += sum(size for _, size in step.zeroed) / memory.bandwidth_bytes_per_s
    return seconds


def count_operations(unrolled: UnrolledPlan) -> int:
    """Return how many kernels, copies and fills with zeros a call has."""
    return sum(1 + len(step.zeroed) if isinstance(step, KernelStep) else 1 for step in unrolled.steps)
