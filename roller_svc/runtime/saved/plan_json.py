"""ModelPlan ↔ JSON, without the kernels' sources. The JSON is untrusted: every field is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from roller_svc.analysis.happens_before import check_plan
from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.model_plan import (
    FIRST_INPUT,
    WEIGHTS,
    Address,
    CopyStep,
    KernelStep,
    LoopStep,
    ModelKernel,
    ModelPlan,
    Parameter,
    ROperator,
    SlotUpdate,
    Step,
    VDeviceStep,
)
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import Barrier, Execute, Instruction, VDevicePlan
from roller_svc.runtime.saved.json_fields import CorruptKernelError, count, string

MAX_BYTES = 1 << 46
MAX_STEPS = 1 << 20
MAX_RKERNEL = 1
_MAX_LOOP_STEPS = 1 << 31
_MAX_DEPTH = 16
_MAX_VEUS = 1024
_MAX_RANK = 16
_MAX_NAME = 1024
_MAX_ARGUMENTS = 1 << 12


def plan_to_json(plan: ModelPlan) -> dict[str, Any]:
    """Return the plan as JSON-compatible values. An address is [slot, offset in bytes]."""
    return {
        "name": plan.name,
        "target": plan.target,
        "inputs": [[name, *_type_json(type_)] for name, type_ in plan.inputs],
        "outputs": [[name, *_type_json(type_)] for name, type_ in plan.outputs],
        "prepack": [_step_json(step) for step in plan.prepack],
        "steps": [_step_json(step) for step in plan.steps],
        "weights": [[*_type_json(each.type), each.digest, each.offset_bytes] for each in plan.weights],
        "weights_bytes": plan.weights_bytes,
        "read_weights_bytes": plan.read_weights_bytes,
        "packed_bytes": plan.packed_bytes,
        "arena_bytes": plan.arena_bytes,
        "tensor_bytes": plan.tensor_bytes,
        "num_slots": plan.num_slots,
    }


def plan_from_json(document: object, kernels: Sequence[ModelKernel]) -> ModelPlan:
    """Return the plan with its kernels. Raises CorruptKernelError for a field that `plan_to_json` does not write."""
    fields = _fields(document, _PLAN_FIELDS)
    reader = _Reader(kernels, count(fields["num_slots"], FIRST_INPUT, MAX_STEPS))
    weights_bytes = count(fields["weights_bytes"], 0, MAX_BYTES)
    inputs, outputs = (tuple(map(_tensor, _list(fields[key], MAX_STEPS))) for key in ("inputs", "outputs"))
    for tensors in (inputs, outputs):
        if len({name for name, _ in tensors}) != len(tensors):
            raise CorruptKernelError("two inputs or outputs have one name")
    if FIRST_INPUT + len(inputs) + len(outputs) > reader.num_slots:
        raise CorruptKernelError("there are fewer slots than inputs and outputs")
    return ModelPlan(
        string(fields["name"], _MAX_NAME), string(fields["target"], _MAX_NAME), inputs, outputs, tuple(kernels),
        reader.steps(fields["prepack"], 0), reader.steps(fields["steps"], 0),
        tuple(_parameter(each, weights_bytes) for each in _list(fields["weights"], MAX_STEPS)), weights_bytes,
        count(fields["read_weights_bytes"], 0, weights_bytes), count(fields["packed_bytes"], 0, MAX_BYTES),
        count(fields["arena_bytes"], 0, MAX_BYTES), count(fields["tensor_bytes"], 0, MAX_BYTES), reader.num_slots,
    )  # fmt: skip


_PLAN_FIELDS = frozenset(
    {"name", "target", "inputs", "outputs", "prepack", "steps", "weights", "weights_bytes", "read_weights_bytes",
     "packed_bytes", "arena_bytes", "tensor_bytes", "num_slots"}
)  # fmt: skip


def _type_json(type_: TensorType) -> list[Any]:
    return [type_.dtype.value, list(type_.shape)]


def _step_json(step: Step) -> dict[str, Any]:
    match step:
        case KernelStep():
            return {
                "node": step.node,
                "kernel": step.kernel,
                "launch": step.launch,
                "arguments": [None if at is None else _address_json(at) for at in step.arguments],
                "zeroed": [[*_address_json(at), size] for at, size in step.zeroed],
                **({"rkernel": step.rkernel} if step.rkernel else {}),
            }
        case CopyStep():
            target, source = _address_json(step.target), _address_json(step.source)
            return {"node": step.node, "copy": [target, source], "bytes": step.bytes}
        case LoopStep():
            updates = [
                [update.slot, *_address_json(update.start), update.stride_bytes, update.alternate_bytes]
                for update in step.updates
            ]
            return {
                "node": step.node,
                "steps": step.steps,
                "updates": updates,
                "body": [_step_json(each) for each in step.body],
            }
        case VDeviceStep():
            return {
                "node": step.node,
                "steps": [_step_json(each) for each in step.steps],
                "operators": [[operator.step, operator.phase] for operator in step.operators],
                "vdevice": vdevice_plan_to_json(step.plan),
            }


def vdevice_plan_to_json(plan: VDevicePlan) -> dict[str, Any]:
    """Return {"num_tasks": rTasks of each rOperator, "programs": instructions of each vEU}.

    An instruction is {"execute": [rOperator, first rTask, rTasks]} or {"wait": [[vEU, order], ...]}.
    """
    return {
        "num_tasks": list(plan.num_tasks),
        "programs": [[_instruction_json(each) for each in program] for program in plan.programs],
    }


def vdevice_plan_from_json(document: object) -> VDevicePlan:
    """Return the plan. Raises CorruptKernelError for a field that `vdevice_plan_to_json` does not write."""
    fields = _fields(document, {"num_tasks", "programs"})
    num_tasks = tuple(count(each, 1, MAX_STEPS) for each in _list(fields["num_tasks"], MAX_STEPS))
    programs = tuple(
        tuple(_instruction(each, num_tasks) for each in _list(program, MAX_STEPS))
        for program in _list(fields["programs"], _MAX_VEUS, 1)
    )
    return VDevicePlan(num_tasks, programs)


def _instruction_json(instruction: Instruction) -> dict[str, Any]:
    if isinstance(instruction, Execute):
        return {"execute": [instruction.operator, instruction.first, instruction.count]}
    return {"wait": [list(each) for each in instruction.waits]}


def _instruction(value: object, num_tasks: Sequence[int]) -> Instruction:
    if isinstance(value, dict) and "execute" in value:
        number, first, tasks = _list(_fields(value, {"execute"})["execute"], 3, 3)
        operator = count(number, 0, len(num_tasks) - 1)
        begin = count(first, 0, num_tasks[operator] - 1)
        return Execute(operator, begin, count(tasks, 1, num_tasks[operator] - begin))
    waits = (_list(each, 2, 2) for each in _list(_fields(value, {"wait"})["wait"], MAX_STEPS, 1))
    return Barrier(tuple((count(veu, 0, _MAX_VEUS - 1), count(order, 0, MAX_STEPS)) for veu, order in waits))


def _address_json(at: Address) -> list[int]:
    return [at.slot, at.offset_bytes]


class _Reader:
    def __init__(self, kernels: Sequence[ModelKernel], num_slots: int) -> None:
        self.kernels = kernels
        self.num_slots = num_slots
        self.count = 0

    def steps(self, value: object, depth: int) -> tuple[Step, ...]:
        if depth > _MAX_DEPTH:
            raise CorruptKernelError(f"loops are nested more than {_MAX_DEPTH} deep")
        listed = _list(value, MAX_STEPS)
        self.count += len(listed)
        if self.count > MAX_STEPS:
            raise CorruptKernelError(f"there are more than {MAX_STEPS} steps")
        return tuple(self.step(each, depth) for each in listed)

    def step(self, value: object, depth: int) -> Step:
        if isinstance(value, dict) and "kernel" in value:
            optional = {"rkernel"} & set(value)
            return self.kernel(_fields(value, {"node", "kernel", "launch", "arguments", "zeroed", *optional}))
        if isinstance(value, dict) and "copy" in value:
            fields = _fields(value, {"node", "copy", "bytes"})
            target, source = (self.address(at) for at in _list(fields["copy"], 2, 2))
            return CopyStep(_name(fields["node"]), target, source, count(fields["bytes"], 0, MAX_BYTES))
        if isinstance(value, dict) and "vdevice" in value:
            return self.vdevice(_fields(value, {"node", "steps", "operators", "vdevice"}))
        fields = _fields(value, {"node", "steps", "updates", "body"})
        updates = tuple(self.update(each) for each in _list(fields["updates"], MAX_STEPS))
        body = self.steps(fields["body"], depth + 1)
        return LoopStep(_name(fields["node"]), count(fields["steps"], 1, _MAX_LOOP_STEPS), updates, body)

    def vdevice(self, fields: dict[str, Any]) -> VDeviceStep:
        steps = self.steps(fields["steps"], _MAX_DEPTH)
        inner = tuple(step for step in steps if isinstance(step, KernelStep | CopyStep))
        if len(inner) < len(steps):
            raise CorruptKernelError("a virtual device has a step that is neither a launch nor a copy")
        plan = vdevice_plan_from_json(fields["vdevice"])
        operators = tuple(self.operator(each, inner) for each in _list(fields["operators"], MAX_STEPS))
        step = VDeviceStep(_name(fields["node"]), inner, operators, plan)
        try:
            check_plan(step.plan)
        except InvariantError as error:
            raise CorruptKernelError(error.message) from error
        return step

    def operator(self, value: object, steps: Sequence[KernelStep | CopyStep]) -> ROperator:
        number, phase = _list(value, 2, 2)
        step = steps[count(number, 0, len(steps) - 1)]
        if phase is None or not isinstance(step, KernelStep):
            return ROperator(number)
        phases = self.kernels[step.kernel].source.launches[step.launch].phases
        return ROperator(number, count(phase, 0, len(phases) - 1))

    def kernel(self, fields: dict[str, Any]) -> KernelStep:
        kernel = count(fields["kernel"], 0, len(self.kernels) - 1)
        launches = self.kernels[kernel].source.launches
        launch = count(fields["launch"], 0, len(launches) - 1)
        number = len(launches[launch].args)
        arguments = tuple(None if at is None else self.address(at) for at in _list(fields["arguments"], number, number))
        zeroed = []
        for each in _list(fields["zeroed"], _MAX_ARGUMENTS):
            slot, offset, size = _list(each, 3, 3)
            zeroed.append((self.address([slot, offset]), count(size, 0, MAX_BYTES)))
        rkernel = count(fields.get("rkernel", 0), 0, MAX_RKERNEL)
        return KernelStep(_name(fields["node"]), kernel, launch, arguments, tuple(zeroed), rkernel)

    def update(self, value: object) -> SlotUpdate:
        slot, start, offset, stride, alternate = _list(value, 5, 5)
        strides = count(stride, -MAX_BYTES, MAX_BYTES), count(alternate, -MAX_BYTES, MAX_BYTES)
        return SlotUpdate(count(slot, WEIGHTS, self.num_slots - 1), self.address([start, offset]), *strides)

    def address(self, value: object) -> Address:
        slot, offset = _list(value, 2, 2)
        return Address(count(slot, WEIGHTS, self.num_slots - 1), count(offset, 0, MAX_BYTES))


def _fields(value: object, names: frozenset[str] | set[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != names:
        raise CorruptKernelError(f"expected the fields {sorted(names)}")
    return value


def _list(value: object, most: int, least: int = 0) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise CorruptKernelError(f"expected a list of {least} to {most} items")
    return value


def _name(value: object) -> str:
    return string(value, _MAX_NAME)


def _tensor(value: object) -> tuple[str, TensorType]:
    name, dtype, shape = _list(value, 3, 3)
    return _name(name), _type(dtype, shape, least=0)


def _type(dtype: object, shape: object, least: int = 1) -> TensorType:
    extents = tuple(count(extent, least, MAX_BYTES) for extent in _list(shape, _MAX_RANK))
    if math.prod(extents) > MAX_BYTES:
        raise CorruptKernelError(f"shape {extents} is too large")
    return TensorType(DType(dtype), extents)


def _parameter(value: object, weights_bytes: int) -> Parameter:
    dtype, shape, digest, offset = _list(value, 4, 4)
    type_ = _type(dtype, shape)
    return Parameter(type_, _name(digest), count(offset, 0, weights_bytes - type_.bytes))
