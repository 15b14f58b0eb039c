"""Lowerings: ways to run the plan of a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from roller_svc.analysis.step_order import find_predecessors
from roller_svc.codegen.cuda.ring import PageUse
from roller_svc.codegen.kernel import Tasks
from roller_svc.graph.weights import Weights
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Resources
from roller_svc.ir.model_plan import CopyStep, KernelStep, ModelPlan


@dataclass(frozen=True, slots=True)
class JoinedKernel:
    """A kernel for the lowerings that make one of many: its resources, and why it cannot join others."""

    resources: tuple[Resources, ...]  # of each launch
    refused: str | None = None
    page_uses: tuple[PageUse | None, ...] = ()  # of each launch that does not prepack; empty: none can stream


@dataclass(frozen=True)
class UnrolledPlan:
    """A plan with the steps of a call in order."""

    plan: ModelPlan
    steps: tuple[KernelStep | CopyStep, ...]
    kernels: tuple[JoinedKernel, ...] = ()  # those of the plan

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The steps that have to finish before each one."""
        return find_predecessors(self.plan, self.steps)

    def select(self, numbers: Sequence[int]) -> UnrolledPlan:
        """Return the plan with some of its steps."""
        return replace(self, steps=tuple(self.steps[number] for number in numbers))


@dataclass(frozen=True, slots=True)
class RingEstimate:
    """A ring of a persistent kernel, and what it gains in a call."""

    pages: int  # of a core
    page_bytes: int
    streamed_bytes: int  # weights of a call that come through the rings of all cores
    hidden_s: float  # of waits, during which weights arrive


@dataclass(frozen=True, slots=True)
class OverlapEstimate:
    """The nodes of a graph that start before those before them end, and what they gain by fetching weights early."""

    nodes: int
    hidden_s: float  # of a call, during which the first pages of weights arrive


@dataclass(frozen=True, slots=True)
class LoweringEstimate:
    """The cost of a call by a lowering, by the performance model."""

    seconds: float
    launches: int  # by the host
    ring: RingEstimate | None = None
    overlap: OverlapEstimate | None = None

    def to_json(self) -> dict[str, Any]:
        ring = {} if self.ring is None else {"ring": asdict(self.ring)}
        overlap = {} if self.overlap is None else {"overlap": asdict(self.overlap)}
        return {"seconds": self.seconds, "launches": self.launches, "measured": False, **ring, **overlap}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a lowering cannot run a plan."""

    reason: str
    code: str = "refused-plan"


# With a kernel's number and the number of its first run-time check: its launches as rTasks, without those that prepack.
LoadTasks = Callable[[int, int], tuple[Tasks, ...]]


@dataclass(frozen=True, slots=True)
class Lowering:
    """A kind of plans of GPUs."""

    kind: str
    # why no plan for the device can have it
    refuse: Callable[[HardwareSpec], Refusal | None]
    # what a call costs on a device that is not refused, or why the plan cannot have it
    estimate: Callable[[UnrolledPlan, HardwareSpec], LoweringEstimate | Refusal]
    # the plan that runs a kernel of its own, its last one, with the estimate of a call; None: the plan as it is
    build: Callable[[UnrolledPlan, HardwareSpec, LoadTasks, Weights, float], ModelPlan] | None = None
    is_partial: bool = False  # whether steps that cannot join its kernel are launches of their own
    overlaps: bool = False  # whether kernels that stream weights may fetch them before their step begins

    def select(self, plans: Sequence[UnrolledPlan]) -> Sequence[UnrolledPlan]:
        """Return the plans that this kind may run: the first one, or all if slower kernels may be better for it."""
        return plans if self.build is not None or self.overlaps else plans[:1]


def kernel_seconds(unrolled: UnrolledPlan, hw: HardwareSpec, factors: Sequence[float] | None = None) -> float:
    """Return the seconds of all work of a call on the device, without overheads of launches.

    `factors`: how many times as long each step takes as alone.
    """
    scales = factors or [1.0] * len(unrolled.steps)
    return sum(scale * step_seconds(unrolled, step, hw) for scale, step in zip(scales, unrolled.steps, strict=True))


def step_seconds(unrolled: UnrolledPlan, step: KernelStep | CopyStep, hw: HardwareSpec) -> float:
    """Return the seconds of a step on the device, without the overhead of its launch."""
    bandwidth = hw.levels[0].bandwidth_bytes_per_s
    if isinstance(step, CopyStep):
        return 2 * step.bytes / bandwidth
    kernel = unrolled.plan.kernels[step.kernel]
    launches = sum(not launch.is_prepack for launch in kernel.source.launches)
    seconds = max(0.0, kernel.estimate_s / launches - hw.limits.launch_overhead_s)
    return seconds + sum(size for _, size in step.zeroed) / bandwidth


def moved_bytes(unrolled: UnrolledPlan, step: KernelStep | CopyStep) -> int:
    """Return the bytes that a step moves between memory and device, each operand once."""
    if isinstance(step, CopyStep):
        return 2 * step.bytes
    source = unrolled.plan.kernels[step.kernel].source
    sizes = {buffer.symbol: buffer.bytes for buffer in source.buffers}
    return sum(sizes[symbol] for symbol in source.launches[step.launch].operands)


def count_operations(unrolled: UnrolledPlan) -> int:
    """Return how many kernels, copies and fills with zeros a call has."""
    return sum(map(operations_of, unrolled.steps))


def operations_of(step: KernelStep | CopyStep) -> int:
    """Return how many kernels, copies and fills with zeros a step has."""
    return 1 + len(step.zeroed) if isinstance(step, KernelStep) else 1


def launch_seconds(unrolled: UnrolledPlan, hw: HardwareSpec) -> float:
    """Return the seconds of all work of a call, with the overhead of a launch for each operation."""
    return kernel_seconds(unrolled, hw) + count_operations(unrolled) * hw.limits.launch_overhead_s
