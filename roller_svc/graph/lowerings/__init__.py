"""Lowerings of plans to GPUs: the table of them, and the choice of one.

A lowering is a module with an estimate. The simplest comes first in the table, and wins within a margin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from roller_svc.errors import ArgumentError
from roller_svc.graph.lowerings import cuda_graph, launches, persistent, waves
from roller_svc.graph.lowerings.joined import find_hungriest
from roller_svc.graph.lowerings.lowering import (
    JoinedKernel,
    LoadTasks,
    Lowering,
    LoweringEstimate,
    Refusal,
    UnrolledPlan,
)
from roller_svc.graph.weights import Weights
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Resources
from roller_svc.ir.model_plan import ModelKernel, ModelPlan, count_unrolled, unroll_steps

LOWERINGS: tuple[Lowering, ...] = (launches.LAUNCHES, cuda_graph.CUDA_GRAPH, waves.WAVES, persistent.PERSISTENT)
LOWERING_KINDS = tuple(lowering.kind for lowering in LOWERINGS)
MAX_OPERATIONS = 1 << 18  # of a call
# A lowering has this fraction of the seconds of a simpler one, or less, if it is chosen.
MARGIN = 0.9


@dataclass(frozen=True, slots=True)
class ChosenLowering:
    """A kind, and the estimate or the refusal of each."""

    kind: str
    results: Mapping[str, LoweringEstimate | Refusal]
    unrolled: UnrolledPlan
    plan_number: int  # of the plan that it runs

    @property
    def seconds(self) -> float:
        """The seconds of a call."""
        return _seconds(self.results[self.kind])

    @property
    def makes_kernel(self) -> bool:
        """Whether the plan that runs a call has a kernel of its own, the last one."""
        return _lowering_of(self.kind).build is not None

    def without_hungriest(self, hw: HardwareSpec) -> tuple[JoinedKernel, ...] | None:
        """Return what is known of the kernels, where the one that takes most registers joins no others.

        None if this kind then cannot run the plan, or has no launches beside its kernel.
        """
        lowering, unrolled = _lowering_of(self.kind), self.unrolled
        if not lowering.is_partial:
            return None
        hungriest = find_hungriest(unrolled.select(persistent.find_joined_steps(unrolled, hw)))
        if hungriest is None:
            return None
        kernels = list(unrolled.kernels)
        kernels[hungriest] = replace(kernels[hungriest], refused=persistent.TOO_HUNGRY)
        relieved = replace(unrolled, kernels=tuple(kernels))
        return None if isinstance(lowering.estimate(relieved, hw), Refusal) else relieved.kernels

    def with_others_of(self, first: ChosenLowering) -> ChosenLowering:
        """Return this choice with what `first` has found of the kinds that make one kernel of all, or none."""
        partial = {kind: result for kind, result in self.results.items() if _lowering_of(kind).is_partial}
        return replace(self, results={**first.results, **partial})

    def to_json(self) -> dict[str, Any]:
        """Return each kind's seconds and launches, or the reason why it cannot run the model."""
        return {
            kind: {"refused": each.reason, "code": each.code} if isinstance(each, Refusal) else each.to_json()
            for kind, each in self.results.items()
        }

    def build(self, hw: HardwareSpec, load_tasks: LoadTasks, weights: Weights) -> ModelPlan:
        """Return the plan that runs a call."""
        lowering, cost = _lowering_of(self.kind), self.results[self.kind]
        plan = self.unrolled.plan
        if lowering.build is not None and isinstance(cost, LoweringEstimate):
            plan = lowering.build(self.unrolled, hw, load_tasks, weights, cost.seconds)
        return replace(plan, lowering=self.kind)


def needs_compiled(kind: str | None, joins: Sequence[bool]) -> bool:
    """Return whether the estimate of a kind of lowering depends on the resources of compiled kernels.

    `joins`: which kernels can join others. Without enough of them the lowering is refused anyway.
    """
    lowering = next((each for each in LOWERINGS if each.kind == kind and each.build is not None), None)
    return lowering is not None and (any(joins) if lowering.is_partial else all(joins))


def check_lowering(kind: str, hw: HardwareSpec) -> None:
    """Raise ArgumentError, of the refusal's code, for a kind of lowering that the device cannot have."""
    refused = next((each.refuse(hw) for each in LOWERINGS if each.kind == kind), None)
    if refused is not None:
        raise ArgumentError(f"plan {kind!r}: {refused.reason}", code=refused.code)


def may_use_slower(kind: str | None, plan: ModelPlan, kernels: Sequence[JoinedKernel], hw: HardwareSpec) -> bool:
    """Return whether slower kernels that can join may change the choice, where the fastest ones cannot.

    Args:
        kind: the kind; None: the one that the performance model prefers. Each kernel that cannot join is then taken to
            join as fast as it is, with the least resources. A slower one has more of both.
        plan: the plan of the fastest kernels.
        kernels: what is known of them.
        hw: the device.

    Raises ArgumentError as `choose_lowering` does.
    """
    if all(each.refused is None for each in kernels):
        return False
    if kind is None:
        least = [
            (each, known) if known.refused is None else _least(each, known)
            for each, known in zip(plan.kernels, kernels, strict=True)
        ]
        bound = replace(plan, kernels=tuple(kernel for kernel, _ in least))
        kind = choose_lowering(None, [(bound, [known for _, known in least])], hw).kind
    return _lowering_of(kind).build is not None


def _least(kernel: ModelKernel, known: JoinedKernel) -> tuple[ModelKernel, JoinedKernel]:
    """Return a kernel as if it could join with the least resources."""
    launches = tuple(replace(launch, block=(1, 1, 1)) for launch in kernel.source.launches)
    resources = tuple(Resources(1, 0, 0) for _ in known.resources)
    return replace(kernel, source=replace(kernel.source, launches=launches)), JoinedKernel(resources)


def choose_lowering(
    kind: str | None,
    plans: Sequence[tuple[ModelPlan, Sequence[JoinedKernel]]],
    hw: HardwareSpec,
    refused: Mapping[str, Refusal] = MappingProxyType({}),
) -> ChosenLowering:
    """Return a kind of lowering for a model; None: the one that the performance model prefers.

    Args:
        kind: the kind.
        plans: plans of the model, each with what is known of its kernels. The first has the fastest kernels, others ones
            that can join. A lowering that makes one kernel of many takes the plan that costs least.
        hw: the device.
        refused: kinds that the caller refuses, with the reasons.

    Raises ArgumentError if no plan can have that kind (the refusal's code), or one has too many operations (refused-plan).
    """
    for plan, _ in plans:
        operations = count_unrolled(plan.steps)
        if operations > MAX_OPERATIONS:
            raise ArgumentError(
                f"a call of the model has {operations} operations, at most {MAX_OPERATIONS} on a GPU",
                code="refused-plan",
                hint="its loops have many steps: compile the body of the loop as a model",
            )
    unrolled = [UnrolledPlan(plan, tuple(unroll_steps(plan.steps)), tuple(kernels)) for plan, kernels in plans]
    estimates = {
        lowering.kind: [
            lowering.refuse(hw) or refused.get(lowering.kind) or lowering.estimate(each, hw) for each in lowering.select(unrolled)
        ]
        for lowering in LOWERINGS
    }
    numbers = {name: min(range(len(each)), key=[*map(_seconds, each)].__getitem__) for name, each in estimates.items()}
    results = {name: each[numbers[name]] for name, each in estimates.items()}
    if kind is not None:
        result = results[kind]
        if isinstance(result, Refusal):
            raise ArgumentError(f"plan {kind!r} cannot run this model: {result.reason}", code=result.code)
        return ChosenLowering(kind, results, unrolled[numbers[kind]], numbers[kind])
    best, best_s = "", float("inf")
    for name, each in results.items():
        if isinstance(each, LoweringEstimate) and each.seconds < (MARGIN * best_s if best else best_s):
            best, best_s = name, each.seconds
    return ChosenLowering(best, results, unrolled[numbers[best]], numbers[best])


def makes_kernel(kind: str) -> bool:
    """Return whether a kind of lowering runs a kernel of its own. A CPU's plan has no lowering, an empty word."""
    return any(each.kind == kind and each.build is not None for each in LOWERINGS)


def _lowering_of(kind: str) -> Lowering:
    return next(each for each in LOWERINGS if each.kind == kind)


def _seconds(result: LoweringEstimate | Refusal) -> float:
    return result.seconds if isinstance(result, LoweringEstimate) else float("inf")
