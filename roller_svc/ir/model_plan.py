"""A model as a program: kernels, memory, and steps in order. Code generation makes one shared object of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import VDevicePlan

# Slots that every model has, before those of its inputs, of its outputs and of loops. A slot is a pointer.
WEIGHTS, PACKED, ARENA, FIRST_INPUT = range(4)


@dataclass(frozen=True, slots=True)
class Address:
    """Memory at an offset from a slot's pointer."""

    slot: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelStep:
    """One launch of a kernel."""

    node: str  # of the graph, for profiles and errors
    kernel: int  # in ModelPlan.kernels
    launch: int  # in the kernel's launches
    arguments: tuple[Address | None, ...]  # in the order of the launch's arguments; None: the status record
    zeroed: tuple[tuple[Address, int], ...] = ()  # memory to fill with zeros before, and its bytes
    rkernel: int = 0  # 0: the fastest one of the node on all workers, 1: the most efficient one


@dataclass(frozen=True, slots=True)
class CopyStep:
    """A copy of dense memory."""

    node: str
    target: Address
    source: Address
    bytes: int


@dataclass(frozen=True, slots=True)
class SlotUpdate:
    """The pointer of a slot in each step of a loop: start + step * stride + (step & 1) * alternate."""

    slot: int
    start: Address
    stride_bytes: int = 0
    alternate_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoopStep:
    """Steps that run a fixed number of times."""

    node: str
    steps: int
    updates: tuple[SlotUpdate, ...]
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class ROperator:
    """The rTasks of a step: the tasks of a phase of its launch, or the whole step as one rTask."""

    step: int
    phase: int | None = None


@dataclass(frozen=True, slots=True)
class VDeviceStep:
    """Steps that the vEUs of a virtual device execute. One vEU after the other, or all of them, may have a thread."""

    node: str
    steps: tuple[KernelStep | CopyStep, ...]  # in an order in which they could run one after the other
    operators: tuple[ROperator, ...]  # in the order of the plan's
    plan: VDevicePlan


Step = KernelStep | CopyStep | LoopStep | VDeviceStep


@dataclass(frozen=True, slots=True)
class ModelKernel:
    """A kernel of a model, used by all nodes of one class."""

    source: KernelSource
    estimate_s: float
    uses: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A constant that steps read, or that prepacking reads."""

    type: TensorType
    digest: str
    offset_bytes: int  # in the weights


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything that determines the code of a model, and the memory that it needs."""

    name: str
    target: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[tuple[str, TensorType], ...]
    kernels: tuple[ModelKernel, ...]
    prepack: tuple[Step, ...]  # run once: read weights, write packed weights
    steps: tuple[Step, ...]
    weights: tuple[Parameter, ...]
    weights_bytes: int
    read_weights_bytes: int  # of the first weights, which steps read; only prepacking reads the others
    packed_bytes: int
    arena_bytes: int
    tensor_bytes: int  # of all tensors between nodes, if each had memory of its own
    num_slots: int


def iter_steps(steps: tuple[Step, ...]) -> Iterator[Step]:
    """Yield every step, a loop before its body, and a virtual device before its steps."""
    for step in steps:
        yield step
        if isinstance(step, LoopStep):
            yield from iter_steps(step.body)
        elif isinstance(step, VDeviceStep):
            yield from step.steps
