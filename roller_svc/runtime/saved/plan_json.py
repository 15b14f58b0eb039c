"""ModelPlan ↔ JSON, without the kernels' sources. The JSON is untrusted: every field is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from roller_svc.analysis.happens_before import check_plan
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.model_plan import (
    FIRST_INPUT,
    MAX_BYTES,
    MAX_STEPS,
    WEIGHTS,
    Address,
    CopyStep,
    KernelStep,
    LoopStep,
    ModelKernel,
    ModelPlan,
    Step,
    VDeviceStep,
    iter_steps,
)
from roller_svc.ir.program import TensorType

_MAX_DEPTH = 16
_MAX_RANK = 16


def plan_to_json(plan: ModelPlan) -> dict[str, Any]:
    """Return the plan as JSON-compatible values. An address is [slot, offset in bytes]."""
    document: dict[str, Any] = to_json(plan, without=("kernels",))
    return document


def plan_from_json(document: object, kernels: Sequence[ModelKernel]) -> ModelPlan:
    """Return the plan with its kernels. Raises ArgumentError for one that `plan_to_json` does not write."""
    plan = from_json(ModelPlan, document, kernels=tuple(kernels))
    for tensors in ((*plan.inputs, *plan.states), (*plan.outputs, *plan.states)):
        _require(len(dict(tensors)) == len(tensors), "two inputs, outputs or states have one name")
        for name, type_ in tensors:
            _check_type(type_, name, least=0)
    _require(
        FIRST_INPUT + len(plan.tensors) <= plan.num_slots,
        "there are fewer slots than inputs, outputs and states",
    )
    _require(plan.read_weights_bytes <= plan.weights_bytes, "more weights are read than there are")
    for each in plan.weights:
        _check_type(each.type, each.digest, least=1)
        _require(each.offset_bytes + each.type.bytes <= plan.weights_bytes, f"{each.digest} is not in the weights")
    checker = _Checker(plan)
    checker.check(plan.prepack, plan.weights_bytes)
    checker.check(plan.steps, plan.read_weights_bytes)
    checker.check(plan.fallback, plan.read_weights_bytes)
    for step in iter_steps(plan.fallback):
        is_cooperative = isinstance(step, KernelStep) and plan.kernels[step.kernel].source.launches[step.launch].cooperative
        _require(not is_cooperative, f"{step.node} is a cooperative launch of the fallback")
    return plan


def _require(condition: bool, message: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not condition:
        raise _invalid(message)


def _invalid(message: str) -> ArgumentError:
    return ArgumentError(f"a plan cannot be read: {message}", code="invalid-plan")


def _check_type(type_: TensorType, name: str, least: int) -> None:
    fits = len(type_.shape) <= _MAX_RANK and all(least <= extent <= MAX_BYTES for extent in type_.shape)
    _require(fits and type_.bytes <= MAX_BYTES, f"{name}: no tensor has the shape {str(type_.shape)[:80]}")


class _Place(NamedTuple):
    """Where the pointer of a loop's slot may be: in a slot of the model, at the least and the largest offset."""

    slot: int
    least: int
    most: int


class _Checker:
    """Checks that what the steps of a plan name exists."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.count = 0
        sizes = [0, plan.packed_bytes, plan.arena_bytes]
        self.sizes = [*sizes, *(type_.bytes for _, type_ in plan.tensors)]
        self.places: dict[int, _Place] = {}  # of the slots of the loops around a step

    def check(self, steps: Sequence[Step], weights_bytes: int) -> None:
        """Check steps. `weights_bytes` are the weights that they may read."""
        self.sizes[WEIGHTS] = weights_bytes
        self.check_steps(steps, 0)

    def check_steps(self, steps: Sequence[Step], depth: int) -> None:
        _require(depth <= _MAX_DEPTH, f"loops are nested more than {_MAX_DEPTH} deep")
        self.count += len(steps)
        _require(self.count <= MAX_STEPS, f"there are more than {MAX_STEPS} steps")
        for step in steps:
            match step:
                case KernelStep():
                    self.check_kernel(step)
                case CopyStep():
                    self.check_bytes(step.node, step.target, step.bytes)
                    self.check_bytes(step.node, step.source, step.bytes)
                case LoopStep():
                    self.check_loop(step, depth)
                case VDeviceStep():
                    self.check_steps(step.steps, _MAX_DEPTH)
                    self.check_vdevice(step)

    def find_place(self, address: Address) -> _Place:
        """Return where in the model's slots an address may be."""
        _require(address.slot < self.plan.num_slots, "a step reads a slot that does not exist")
        base = self.places.get(address.slot) if address.slot >= len(self.sizes) else _Place(address.slot, 0, 0)
        if base is None:
            raise _invalid(f"slot {address.slot} is read outside of its loop")
        return _Place(base.slot, base.least + address.offset_bytes, base.most + address.offset_bytes)

    def check_bytes(self, node: str, address: Address, size_bytes: int) -> None:
        place = self.find_place(address)
        size, end = self.sizes[place.slot], place.most + size_bytes
        _require(place.least >= 0 and end <= size, f"{node} has bytes {place.least}..{end} of slot {place.slot}, of {size} bytes")

    def check_loop(self, loop: LoopStep, depth: int) -> None:
        """Check the body of a loop. A pointer moves in equal steps of two, so its extremes are at the ends."""
        outer = self.places
        inner = dict(outer)
        for each in loop.updates:
            _require(len(self.sizes) <= each.slot < self.plan.num_slots, f"{loop.node} moves a slot that is not a loop's")
            start = self.find_place(each.start)
            ends = {number for number in (0, 1, loop.steps - 2, loop.steps - 1) if 0 <= number < loop.steps}
            moved = [number * each.stride_bytes + (number & 1) * each.alternate_bytes for number in ends]
            inner[each.slot] = _Place(start.slot, start.least + min(moved), start.most + max(moved))
        self.places = inner
        self.check_steps(loop.body, depth + 1)
        self.places = outer

    def check_kernel(self, step: KernelStep) -> None:
        kernels = self.plan.kernels
        _require(step.kernel < len(kernels), f"{step.node} runs a kernel that does not exist")
        launches = kernels[step.kernel].source.launches
        _require(step.launch < len(launches), f"{step.node} runs a launch that does not exist")
        expected, given = len(launches[step.launch].operands), len(step.arguments)
        _require(given == expected, f"{step.node} has {given} arguments, expected {expected}")
        is_cooperative = launches[step.launch].cooperative
        _require(not is_cooperative or len(step.zeroed) == 1, f"{step.node} has no events that are zero before it")
        buffers = {buffer.symbol: buffer.bytes for buffer in kernels[step.kernel].source.buffers}
        for symbol, at in zip(launches[step.launch].operands, step.arguments, strict=True):
            if at is not None:
                self.check_bytes(step.node, at, buffers[symbol])
        for at, size_bytes in step.zeroed:
            self.check_bytes(step.node, at, size_bytes)

    def check_vdevice(self, device: VDeviceStep) -> None:
        _require(not device.plan.has_events, f"{device.node} has events, which a plan for CPUs cannot have")
        expected, given = len(device.plan.num_tasks), len(device.operators)
        _require(given == expected, f"{device.node} has {given} rOperators, expected {expected}")
        for each in device.operators:
            _require(each.step < len(device.steps), f"{device.node} has a rOperator without a step")
            step = device.steps[each.step]
            if each.phase is not None:
                launches = self.plan.kernels[step.kernel].source.launches if isinstance(step, KernelStep) else ()
                phases = launches[step.launch].phases if isinstance(step, KernelStep) else ()
                _require(each.phase < len(phases), f"{device.node}: {step.node} has no phase {each.phase}")
        try:
            check_plan(device.plan)
        except InvariantError as error:
            raise ArgumentError(f"a plan cannot be read: {error}", code="invalid-plan") from error
