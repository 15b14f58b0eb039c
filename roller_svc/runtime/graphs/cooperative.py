"""Cooperative launches of a model: where their events are, and the waits that reached a deadline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from roller_svc.errors import KernelTimeoutError
from roller_svc.ir.event_state import find_reached_deadline
from roller_svc.ir.model_plan import Address, CopyStep, KernelStep, ModelPlan


def find_cooperative(plan: ModelPlan, steps: Sequence[KernelStep | CopyStep]) -> Iterator[tuple[KernelStep, Address]]:
    """Yield the cooperative launches of a call, with the memory of their events, which is zero before each."""
    for step in steps:
        if isinstance(step, KernelStep) and plan.kernels[step.kernel].source.launches[step.launch].cooperative:
            ((events, _),) = step.zeroed
            yield step, events


def raise_reached_deadline(step: KernelStep, state: NDArray[np.uint32]) -> None:
    """Raise KernelTimeoutError for a wait that ended a launch, by the first words of its events after it."""
    reached = find_reached_deadline(state)
    if reached is None:
        return
    node = step.events[reached.event] if reached.event < len(step.events) else f"of event {reached.event}"
    raise KernelTimeoutError(
        f"vEU {reached.veu} waited too long for node {node!r} in row {reached.row}: "
        f'{reached.seen} of {reached.target} rTasks have arrived; plan="graph" runs the model without waits in a kernel',
        code="kernel-timeout",
    )
