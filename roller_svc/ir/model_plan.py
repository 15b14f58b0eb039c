"""A model as a program: kernels, memory, and steps in order. Code generation makes one shared object of it.

The marks are the form that saved models have, and the limits of what is read (ir/canonical.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from roller_svc.ir.canonical import FLAT, OMIT_DEFAULT, UNTAGGED, Key, Limit, as_array
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import VDevicePlan

# Slots that every model has, before those of its inputs, outputs and states and of loops. A slot is a pointer.
WEIGHTS, PACKED, ARENA, FIRST_INPUT = range(4)
AS_GRAPH = "graph"  # the lowering whose calls launch a CUDA graph of the steps
MAX_BYTES = 1 << 46
MAX_STEPS = 1 << 20

Name = Annotated[str, Limit(0, 1024)]
Bytes = Annotated[int, Limit(0, MAX_BYTES)]
Distance = Annotated[int, Limit(-MAX_BYTES, MAX_BYTES)]
Index = Annotated[int, Limit(0, MAX_STEPS)]


@as_array
@dataclass(frozen=True, slots=True)
class Address:
    """Memory at an offset from a slot's pointer."""

    slot: Index
    offset_bytes: Bytes = 0


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One launch of a kernel."""

    node: Name  # of the graph, for profiles and errors
    kernel: Index  # in ModelPlan.kernels
    launch: Index  # in the kernel's launches
    arguments: tuple[Address | None, ...]  # in the order of the launch's operands; None: the status record
    zeroed: tuple[tuple[Annotated[Address, FLAT], Bytes], ...] = ()  # memory to fill with zeros before, and its bytes
    # 0: the fastest one of the node on all workers, 1: the most efficient one
    rkernel: Annotated[int, Limit(0, 1), OMIT_DEFAULT] = 0
    events: Annotated[tuple[Name, ...], OMIT_DEFAULT] = ()  # of a cooperative launch: the node that arrives at each event


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A copy of dense memory."""

    node: Name
    target: Annotated[Address, Key("copy")]
    source: Annotated[Address, Key("copy")]
    bytes: Bytes
    # among the copies of its node, in the order in which the planner makes them
    number: Annotated[int, Limit(0, MAX_STEPS), OMIT_DEFAULT] = 0


@as_array
@dataclass(frozen=True, slots=True)
class SlotUpdate:
    """The pointer of a slot in each step of a loop: start + step * stride + (step & 1) * alternate."""

    slot: Index
    start: Annotated[Address, FLAT]
    stride_bytes: Distance = 0
    alternate_bytes: Distance = 0


@dataclass(frozen=True, slots=True)
class LoopStep:
    """Steps that run a fixed number of times."""

    node: Name
    steps: Annotated[int, Limit(1, 1 << 31)]
    updates: tuple[SlotUpdate, ...]
    body: tuple[Step, ...]


@as_array
@dataclass(frozen=True, slots=True)
class ROperator:
    """The rTasks of a step: the tasks of a phase of its launch, or the whole step as one rTask."""

    step: Index
    phase: Index | None = None


@dataclass(frozen=True, slots=True)
class VDeviceStep:
    """Steps that the vEUs of a virtual device execute. One vEU after the other, or all of them, may have a thread."""

    node: Name
    # in an order in which they could run one after the other
    steps: tuple[Annotated[KernelStep | CopyStep, UNTAGGED], ...]
    operators: tuple[ROperator, ...]  # in the order of the plan's
    plan: Annotated[VDevicePlan, Key("vdevice")]


Step = Annotated[KernelStep | CopyStep | LoopStep | VDeviceStep, UNTAGGED]


@dataclass(frozen=True, slots=True)
class ModelKernel:
    """A kernel of a model, used by all nodes of one class."""

    source: KernelSource
    estimate_s: float
    uses: int


@as_array
@dataclass(frozen=True, slots=True)
class Parameter:
    """A constant that steps read, or that prepacking reads."""

    type: Annotated[TensorType, FLAT]
    digest: Name
    offset_bytes: Bytes  # in the weights


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything that determines the code of a model, and the memory that it needs."""

    name: Name
    target: Name
    inputs: tuple[tuple[Name, Annotated[TensorType, FLAT]], ...]
    outputs: tuple[tuple[Name, Annotated[TensorType, FLAT]], ...]
    kernels: tuple[ModelKernel, ...]
    prepack: tuple[Step, ...]  # run once: read weights, write packed weights
    steps: tuple[Step, ...]
    weights: tuple[Parameter, ...]
    weights_bytes: Bytes
    read_weights_bytes: Bytes  # of the first weights, which steps read; only prepacking reads the others
    packed_bytes: Bytes
    arena_bytes: Bytes
    tensor_bytes: Bytes  # of all tensors between nodes, if each had memory of its own
    num_slots: Annotated[int, Limit(FIRST_INPUT, MAX_STEPS)]
    states: Annotated[tuple[tuple[Name, Annotated[TensorType, FLAT]], ...], OMIT_DEFAULT] = ()  # that a call updates
    lowering: Annotated[Name, OMIT_DEFAULT] = ""  # of a GPU: how a call runs the steps, of graph/lowerings/
    # a call without cooperative launches, for a device that holds fewer blocks at once: as a CUDA graph
    fallback: Annotated[tuple[Step, ...], OMIT_DEFAULT] = ()

    @property
    def tensors(self) -> tuple[tuple[str, TensorType], ...]:
        """Return the caller's tensors in the order of their slots: inputs, outputs, states."""
        return (*self.inputs, *self.outputs, *self.states)


def iter_steps(steps: tuple[Step, ...]) -> Iterator[Step]:
    """Yield every step, a loop before its body, and a virtual device before its steps."""
    for step in steps:
        yield step
        if isinstance(step, LoopStep):
            yield from iter_steps(step.body)
        elif isinstance(step, VDeviceStep):
            yield from step.steps


def map_addresses(step: Step, moved: Callable[[Address], Address]) -> Step:
    """Return a step whose addresses are results of a function."""
    match step:
        case KernelStep():
            return replace(
                step,
                arguments=tuple(None if at is None else moved(at) for at in step.arguments),
                zeroed=tuple((moved(at), size) for at, size in step.zeroed),
            )
        case CopyStep():
            return replace(step, target=moved(step.target), source=moved(step.source))
        case LoopStep():
            updates = tuple(replace(update, start=moved(update.start)) for update in step.updates)
            return replace(step, updates=updates, body=tuple(map_addresses(each, moved) for each in step.body))
        case VDeviceStep():
            inner = (map_addresses(each, moved) for each in step.steps)
            return replace(step, steps=tuple(each for each in inner if isinstance(each, KernelStep | CopyStep)))


def unroll_steps(steps: tuple[Step, ...], slots: Mapping[int, Address] | None = None) -> Iterator[KernelStep | CopyStep]:
    """Yield the kernels and copies of a call in order, each step of a loop apart.

    `slots` has the places of a loop's slots; addresses become relative to the slots of the model.
    """
    known = slots or {}

    def resolve(address: Address) -> Address:
        base = known.get(address.slot)
        return address if base is None else Address(base.slot, base.offset_bytes + address.offset_bytes)

    for step in steps:
        match step:
            case LoopStep():
                for number in range(step.steps):
                    moved = {each.slot: _moved(resolve(each.start), each, number) for each in step.updates}
                    yield from unroll_steps(step.body, {**known, **moved})
            case VDeviceStep():
                yield from unroll_steps(step.steps, known)
            case CopyStep():
                yield replace(step, target=resolve(step.target), source=resolve(step.source))
            case KernelStep():
                yield replace(
                    step,
                    arguments=tuple(None if each is None else resolve(each) for each in step.arguments),
                    zeroed=tuple((resolve(address), size) for address, size in step.zeroed),
                )


def count_unrolled(steps: tuple[Step, ...]) -> int:
    """Return how many kernels and copies a call has."""
    return sum(
        step.steps * count_unrolled(step.body)
        if isinstance(step, LoopStep)
        else len(step.steps)
        if isinstance(step, VDeviceStep)
        else 1
        for step in steps
    )


def _moved(start: Address, update: SlotUpdate, number: int) -> Address:
    """Return the place of a loop's slot in one of its steps."""
    return Address(start.slot, start.offset_bytes + number * update.stride_bytes + (number & 1) * update.alternate_bytes)
