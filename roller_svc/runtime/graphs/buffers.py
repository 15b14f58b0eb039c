"""The tensors that a caller of a model gives and gets, as buffers of a call."""

from __future__ import annotations

from roller_svc.ir.kernel import Buffer, Role
from roller_svc.ir.model_plan import ModelPlan


def call_buffers(plan: ModelPlan) -> tuple[Buffer, ...]:
    """Return the inputs, then the outputs, in the order of their slots."""
    return (
        *(Buffer(name, f"input{i}", Role.INPUT, t.dtype, t.shape) for i, (name, t) in enumerate(plan.inputs)),
        *(Buffer(name, f"output{i}", Role.OUTPUT, t.dtype, t.shape) for i, (name, t) in enumerate(plan.outputs)),
    )
