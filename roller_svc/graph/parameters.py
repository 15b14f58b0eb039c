"""The order of parameters in the weights: those that steps read come first, those that prepacking alone reads last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

from roller_svc.graph.memory import align
from roller_svc.ir.model_plan import (
    WEIGHTS,
    Address,
    CopyStep,
    KernelStep,
    LoopStep,
    ModelPlan,
    Step,
    iter_steps,
    map_addresses,
)


def order_parameters(plan: ModelPlan) -> ModelPlan:
    """Return the plan with its parameters in that order. A saved model needs only the first part of the weights."""
    starts = [parameter.offset_bytes for parameter in plan.weights]
    needed = {bisect_right(starts, at.offset_bytes) - 1 for at in _addresses(plan.steps) if at.slot == WEIGHTS}
    order = sorted(range(len(starts)), key=lambda i: (i not in needed, i))
    offsets: dict[int, int] = {}
    total = read = 0
    for i in order:
        offsets[i] = total
        total += align(plan.weights[i].type.bytes)
        read = total if i in needed else read

    def moved(at: Address) -> Address:
        if at.slot != WEIGHTS:
            return at
        i = bisect_right(starts, at.offset_bytes) - 1
        return Address(WEIGHTS, offsets[i] + at.offset_bytes - starts[i])

    return replace(
        plan,
        prepack=tuple(map_addresses(step, moved) for step in plan.prepack),
        steps=tuple(map_addresses(step, moved) for step in plan.steps),
        weights=tuple(replace(plan.weights[i], offset_bytes=offsets[i]) for i in order),
        read_weights_bytes=read,
    )


def _addresses(steps: tuple[Step, ...]) -> Iterator[Address]:
    for step in iter_steps(steps):
        match step:
            case KernelStep():
                yield from (at for at in step.arguments if at is not None)
            case CopyStep():
                yield step.source
            case LoopStep():
                yield from (update.start for update in step.updates)
