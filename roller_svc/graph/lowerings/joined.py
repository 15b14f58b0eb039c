"""Steps as rTasks of one kernel: whether they can be, what they cost there, and the plan that runs the kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.codegen.cuda.copy_task import copy_function
from roller_svc.codegen.cuda.function import TaskFunction
from roller_svc.codegen.cuda.persistent import static_bytes
from roller_svc.codegen.cuda.ring import WARP, PageUse, Ring, plan_ring
from roller_svc.codegen.cuda.task_kernel import MAX_ARGUMENTS, MAX_SLOTS, Table, TaskKernel, TaskOperator
from roller_svc.errors import require
from roller_svc.graph.lowerings.lowering import LoadTasks, Refusal, UnrolledPlan
from roller_svc.graph.memory import align
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.index import ceil_div
from roller_svc.ir.kernel import Buffer, Resources, Role
from roller_svc.ir.model_plan import (
    ARENA,
    FIRST_INPUT,
    PACKED,
    WEIGHTS,
    Address,
    CopyStep,
    KernelStep,
    ModelKernel,
    ModelPlan,
    Parameter,
    Step,
)
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, exceeded_limits

NOT_JOINABLE_CODE = "not-joinable"
TOO_LARGE_CODE = "persistent-too-large"
MAX_OPERATORS = 1 << 14  # of a call
MAX_NODE_CHARACTERS = 1024  # of a step's name
TABLE_READS = 2  # one after the other
COPY_ARGUMENTS = 2


def refuse_device(hw: HardwareSpec) -> Refusal | None:
    """Return why a device cannot run one kernel of many operators; None if it can."""
    if hw.family is not TargetKind.CUDA:
        return Refusal(f"one kernel of many operators runs on NVIDIA devices, and {hw.id} is not one", NOT_JOINABLE_CODE)
    return None


def find_refusal(unrolled: UnrolledPlan, hw: HardwareSpec) -> Refusal | None:
    """Return why the steps of a call cannot be rTasks of one kernel; None if they can."""
    unfit = refuse_device(hw)
    if unfit is not None:
        return unfit
    unfit = refuse_number(len(unrolled.steps))
    if unfit is not None:
        return unfit
    for step in unrolled.steps:
        refused = find_step_refusal(unrolled, step)
        if refused is not None:
            return Refusal(f"node {step.node!r} cannot join a kernel of others: {refused}", NOT_JOINABLE_CODE)
    tensors = unrolled.plan.tensors
    if FIRST_INPUT + len(tensors) > MAX_SLOTS:
        return Refusal(
            f"there are {len(tensors)} inputs, outputs and states, at most {MAX_SLOTS - FIRST_INPUT} in one kernel",
            NOT_JOINABLE_CODE,
        )
    empty = next((name for name, type_ in tensors if not type_.bytes), None)
    if empty is not None:
        return Refusal(f"tensor {empty!r} has no elements", NOT_JOINABLE_CODE)
    exceeded = exceeded_limits(_joint_needs(unrolled), hw)
    return Refusal(f"no core holds a block: {'; '.join(exceeded)}", TOO_LARGE_CODE) if exceeded else None


def refuse_number(operations: int) -> Refusal | None:
    """Return why this number of steps cannot be rTasks of one kernel; None if they can."""
    if 0 < operations <= MAX_OPERATORS:
        return None
    return Refusal(f"{operations} operations of a call would join, expected 1 to {MAX_OPERATORS} in one kernel", NOT_JOINABLE_CODE)


def find_step_refusal(unrolled: UnrolledPlan, step: KernelStep | CopyStep) -> str | None:
    """Return why a step cannot be rTasks of a kernel with others; None if it can."""
    if isinstance(step, CopyStep):
        return None if step.bytes else "it copies nothing"
    if step.kernel >= len(unrolled.kernels):
        return "its kernel is not known"
    if len(step.arguments) > MAX_ARGUMENTS:
        return f"it has {len(step.arguments)} operands, at most {MAX_ARGUMENTS}"
    return unrolled.kernels[step.kernel].refused


def page_use_of(unrolled: UnrolledPlan, step: KernelStep | CopyStep) -> PageUse | None:
    """Return how a step streams weights through the pages of a ring; None if it does not."""
    if isinstance(step, CopyStep) or step.kernel >= len(unrolled.kernels):
        return None
    if not (uses := unrolled.kernels[step.kernel].page_uses):
        return None
    launches = unrolled.plan.kernels[step.kernel].source.launches
    use = uses[sum(not launch.is_prepack for launch in launches[: step.launch])]
    if use is None:
        return None
    places = (step.arguments[number] for number in use.parameters)
    return use if all(place is not None and place.slot in (WEIGHTS, PACKED) for place in places) else None


def ring_of(unrolled: UnrolledPlan, hw: HardwareSpec) -> Ring | None:
    """Return the ring through which the weights of steps stream in a kernel of all; None if nothing streams.

    There is none if the block, with one more warp, does not fit a core.
    """
    uses = [use for step in unrolled.steps if (use := page_use_of(unrolled, step)) is not None]
    if not uses:
        return None
    others = _joint_needs(unrolled, is_streamed=True)
    static = _static_bytes(unrolled)
    ring = plan_ring(uses, others.shared_bytes - static, static, hw)
    return None if ring is None or exceeded_limits(_with_ring(others, ring, static), hw) else ring


def _with_ring(others: BlockResources, ring: Ring, static_bytes: int) -> BlockResources:
    """Return the needs of a block with a ring, and with the warp that fills it."""
    threads = ceil_div(others.threads, WARP) * WARP + WARP
    return BlockResources(threads, others.registers_per_thread, ring.end_bytes + static_bytes)


def find_hungriest(unrolled: UnrolledPlan) -> int | None:
    """Return the kernel without which a block of all others has the fewest registers; None if there is no other one."""
    needs: dict[int, list[BlockResources]] = {}
    for step in unrolled.steps:
        if isinstance(step, KernelStep):
            needs.setdefault(step.kernel, []).append(launch_needs(unrolled, step))
    if len(needs) < 2:
        return None

    def registers_without(kernel: int) -> int:
        others = [each for other, listed in needs.items() if other != kernel for each in listed]
        return max(each.threads for each in others) * max(each.registers_per_thread for each in others)

    return min(needs, key=registers_without)


def occupancy_factors(unrolled: UnrolledPlan, hw: HardwareSpec, most: int | None = None, ring: Ring | None = None) -> list[float]:
    """Return how many times as long each step takes in a kernel of all.

    A block of that kernel has the threads, registers and shared memory of the hungriest step, so a core holds fewer. A
    step that alone had more blocks on a core takes longer in proportion. One that streams takes longer where the ring has
    fewer pages than it would fetch at a time alone.

    Args:
        unrolled: the steps.
        hw: the device.
        most: blocks of a core, if they are limited. One, if there is a ring.
        ring: the ring of the kernel.
    """
    joint = 1 if ring is not None else blocks_per_core(_joint_needs(unrolled), hw)
    resident = joint if most is None else min(most, joint)
    factors = []
    for step in unrolled.steps:
        if isinstance(step, CopyStep):
            factors.append(1.0)
            continue
        tasks = math.prod(unrolled.plan.kernels[step.kernel].source.launches[step.launch].grid)
        alone = blocks_per_core(launch_needs(unrolled, step), hw)
        use = page_use_of(unrolled, step) if ring is not None else None
        fetched = 1.0 if use is None or ring is None else use.pages_in_flight / ring.pages
        factors.append(max(1.0, fetched, min(alone, ceil_div(tasks, hw.num_cores)) / resident))
    return factors


def table_seconds(waves: int, hw: HardwareSpec) -> float:
    """Return the seconds that blocks wait for their tables: each time for the row of an rTask, then for its arguments."""
    return waves * TABLE_READS * hw.levels[0].latency_s


def _joint_needs(unrolled: UnrolledPlan, *, is_streamed: bool = False) -> BlockResources:
    """Return the most of any step. `is_streamed`: steps that stream have no pages, and no addresses of their copies."""
    needs = [launch_needs(unrolled, step, is_streamed=is_streamed) for step in unrolled.steps if isinstance(step, KernelStep)]
    shared = max((each.shared_bytes for each in needs), default=0) + _static_bytes(unrolled)
    threads = max((each.threads for each in needs), default=1)
    return BlockResources(threads, max((each.registers_per_thread for each in needs), default=1), shared)


def _static_bytes(unrolled: UnrolledPlan) -> int:
    """Return the bytes of shared memory of a kernel of all beside its rTasks."""
    numbers = [len(step.arguments) if isinstance(step, KernelStep) else COPY_ARGUMENTS for step in unrolled.steps]
    return static_bytes(FIRST_INPUT + len(unrolled.plan.tensors), max(numbers, default=0))


def launch_needs(unrolled: UnrolledPlan, step: KernelStep, *, is_streamed: bool = False) -> BlockResources:
    """Return what a block of a launch takes. `is_streamed`: as rTasks whose pages are those of a ring."""
    launch = unrolled.plan.kernels[step.kernel].source.launches[step.launch]
    used: Resources = unrolled.kernels[step.kernel].resources[step.launch]
    use = page_use_of(unrolled, step) if is_streamed else None
    threads = math.prod(launch.block)
    if use is not None:
        return BlockResources(threads, use.registers, use.shared_bytes)
    return BlockResources(threads, max(1, used.registers_per_thread), used.shared_bytes)


@dataclass(frozen=True, slots=True)
class JoinedSteps:
    """The steps of a call as rOperators, and the memory that they use."""

    operators: tuple[TaskOperator, ...]
    predecessors: tuple[tuple[int, ...], ...]
    slots: tuple[Buffer, ...]
    places: tuple[Address, ...]  # of the slots in the model


def join_steps(unrolled: UnrolledPlan, load_tasks: LoadTasks) -> JoinedSteps:
    """Return the steps of a call as rOperators of one kernel, with only the slots that they use."""
    functions = _load_functions(unrolled, load_tasks)
    operators = [_operator(step, functions) for step in unrolled.steps]
    used = sorted({argument.slot for _, arguments in operators for argument in arguments})
    numbers = {slot: number for number, slot in enumerate(used)}
    return JoinedSteps(
        tuple(
            TaskOperator(function, tuple(Address(numbers[each.slot], each.offset_bytes) for each in arguments))
            for function, arguments in operators
        ),
        unrolled.predecessors,
        tuple(_slot(unrolled.plan, slot) for slot in used),
        tuple(map(Address, used)),
    )


def _load_functions(unrolled: UnrolledPlan, load_tasks: LoadTasks) -> dict[tuple[int, int], TaskFunction]:
    """Return the function of each launch, by kernel and number."""
    functions: dict[tuple[int, int], TaskFunction] = {}
    checks = 0
    for kernel in sorted({step.kernel for step in unrolled.steps if isinstance(step, KernelStep)}):
        tasks = [each.function for each in load_tasks(kernel, checks)]
        launches = unrolled.plan.kernels[kernel].source.launches
        numbers = [number for number, launch in enumerate(launches) if not launch.is_prepack]
        functions |= {(kernel, number): function for number, function in zip(numbers, tasks, strict=True)}
        checks += sum(len(function.checks) for function in tasks)
    return functions


def _operator(
    step: KernelStep | CopyStep, functions: Mapping[tuple[int, int], TaskFunction]
) -> tuple[TaskFunction, tuple[Address, ...]]:
    if isinstance(step, KernelStep):
        arguments = tuple(require(each, f"address of an argument of {step.node}") for each in step.arguments)
        return functions[step.kernel, step.launch], arguments
    alignment = math.gcd(step.source.offset_bytes, step.target.offset_bytes)
    return copy_function(step.bytes, alignment), (step.source, step.target)


def _slot(plan: ModelPlan, slot: int) -> Buffer:
    """Return the memory behind a slot of the model, which a call reads or, in the arena, outputs and states, writes."""
    tensors = [type_.bytes for _, type_ in plan.tensors]
    sizes = {WEIGHTS: plan.read_weights_bytes, PACKED: plan.packed_bytes, ARENA: plan.arena_bytes}
    size = sizes[slot] if slot in sizes else tensors[slot - FIRST_INPUT]
    name = f"slot{slot}"
    if slot == ARENA:
        return Buffer(name, name, Role.WORKSPACE, DType.UINT8, (size,))
    is_output = slot >= FIRST_INPUT + len(plan.inputs)
    return Buffer(name, name, Role.OUTPUT if is_output else Role.INPUT, DType.UINT8, (size,))


def add_tables(plan: ModelPlan, tables: Mapping[str, Table], weights: Weights) -> tuple[ModelPlan, dict[str, Address]]:
    """Return the plan with constant tables, and their addresses.

    They are weights that packing copies behind the packed ones, so a model is saved and loaded with them.
    """
    parameters: list[Parameter] = []
    copies: list[Step] = []
    places: dict[str, Address] = {}
    end, packed_end = align(plan.weights_bytes), align(plan.packed_bytes)
    for name, table in tables.items():
        constant = weights.add(table)
        parameters.append(Parameter(constant.type, constant.digest, end))
        places[name] = Address(PACKED, packed_end)
        copies.append(CopyStep(name, places[name], Address(WEIGHTS, end), table.nbytes))
        end, packed_end = end + align(table.nbytes), packed_end + align(table.nbytes)
    whole = replace(
        plan,
        prepack=(*plan.prepack, *copies),
        weights=(*plan.weights, *parameters),
        weights_bytes=end,
        packed_bytes=packed_end,
    )
    return whole, places


def run_kernel(
    plan: ModelPlan,
    kernel: TaskKernel,
    joined: JoinedSteps,
    nodes: Sequence[str],
    seconds: float,
    weights: Weights,
    more: Mapping[str, Address] | None = None,
) -> ModelPlan:
    """Return the plan whose call is the launches of one kernel.

    Args:
        plan: the plan of the kernel's operators.
        kernel: the kernel.
        joined: its operators and slots.
        nodes: what each launch does.
        seconds: the estimate of a call.
        weights: get the tables of the kernel.
        more: addresses of other arguments by symbol.
    """
    whole, places = add_tables(plan, kernel.tables, weights)
    places |= more or {}
    places |= {slot.symbol: place for slot, place in zip(joined.slots, joined.places, strict=True)}
    steps = tuple(
        KernelStep(node[:MAX_NODE_CHARACTERS], len(plan.kernels), number, tuple(places[symbol] for symbol in launch.operands))
        for number, (node, launch) in enumerate(zip(nodes, kernel.source.launches, strict=True))
    )
    return replace(whole, kernels=(*plan.kernels, ModelKernel(kernel.source, seconds, 1)), steps=steps)
