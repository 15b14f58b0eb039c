"""Tell what a model's plan does: the times that the performance model predicts for it, and the memory that it has.

The plan is the one that runs: it is placed again as it is, and each instruction starts when what it waits for has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add

from roller_svc.analysis.happens_before import Access
from roller_svc.errors import InvariantError
from roller_svc.graph.classes import NodeClass
from roller_svc.graph.lowerings import makes_kernel
from roller_svc.graph.lowerings.cuda_graph import CUDA_GRAPH, node_seconds
from roller_svc.graph.lowerings.lowering import JoinedKernel, UnrolledPlan, operations_of, step_seconds
from roller_svc.graph.passes import PassReport
from roller_svc.graph.plan import Launch, PlannedModel, PlannedStep, kernel_key, plan_model
from roller_svc.graph.rammer.by_hand import schedule_by_hand
from roller_svc.graph.rammer.check import accesses_of
from roller_svc.graph.rammer.replay import replay
from roller_svc.graph.rammer.schedules import StepTimes, model_times, operator_of
from roller_svc.graph.rammer.wavefront import RKernel
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.graph import Graph, OpNode
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.model_plan import KernelStep, ModelPlan, VDeviceStep, count_unrolled, iter_steps, unroll_steps
from roller_svc.ir.model_schedule import ModelSchedule, ScheduledLaunch, ScheduledOperator
from roller_svc.ir.model_story import (
    SYNCHRONIZE,
    ModelStory,
    StoryBuffer,
    StoryEdge,
    StoryInstruction,
    StoryModelKernel,
    StoryNode,
    StoryPass,
    StoryStepOfModel,
)
from roller_svc.ir.program import TensorType
from roller_svc.runtime.saved.plan_json import plan_to_json

ROUNDING = 1e-9  # by which sums of the same seconds may differ


@dataclass(frozen=True, slots=True)
class StorySource:
    """A built model, for its story."""

    graph: Graph  # after the passes
    classes: tuple[NodeClass, ...]
    digests: tuple[str, ...]  # of the classes' kernels
    floors_s: tuple[float | None, ...]  # of the classes' programs; None where the kernel does not say it
    plan: ModelPlan
    kind: str
    passes: tuple[PassReport, ...]
    hardware: HardwareSpec
    seconds: float | None = None  # of a GPU: of a call by the lowering, with launches, signals and waits
    joined: tuple[JoinedKernel, ...] = ()  # of a GPU: what lowerings know of the plan's kernels


def tell_schedule(source: StorySource) -> ModelSchedule | None:
    """Return the launches of a model for a CPU, to check edited ones; None if no virtual device executes any.

    Tensors share no memory there: what an edited plan has to order is what computes the same tensor. Where they lie is
    decided again when it is compiled.
    """
    has_plan = any(isinstance(step, VDeviceStep) for step in source.plan.steps)
    if source.hardware.family is not TargetKind.CPU or not has_plan:
        return None
    planned = _place(source, share_memory=False)
    return _schedule(planned, model_times(planned.steps, planned.plan.kernels, source.hardware), source.hardware.num_cores)


def tell_model_story(source: StorySource) -> ModelStory:
    """Return the story of a model."""
    planned = _place_again(source)
    is_cpu = source.hardware.family is TargetKind.CPU
    times = model_times(planned.steps, planned.plan.kernels, source.hardware) if is_cpu else _gpu_times(source, planned)
    instructions, seconds = replay(_schedule(planned, times, source.hardware.num_cores))
    if source.seconds is not None:
        if source.seconds > seconds * (1 + ROUNDING):
            instructions.append(StoryInstruction(SYNCHRONIZE, seconds, source.seconds))
        seconds = source.seconds
    numbers = {node.name: number for number, node in enumerate(source.graph.nodes)}
    kernel_of = _kernels_of(source.classes)
    steps = tuple(
        StoryStepOfModel(step.node, _kind(step), times.launch_s[i], numbers.get(step.node), step.kernel)
        for i, step in enumerate(planned.steps)
    )
    return ModelStory(
        name=source.graph.name,
        target=source.hardware.id,
        device=source.hardware.name,
        plan=source.kind,
        seconds=seconds,
        veus=max((each.plan.num_veus for each in planned.launches if each.plan is not None), default=1),
        passes=tuple(StoryPass(each.name, each.nodes_before, each.nodes_after) for each in source.passes),
        kernels=tuple(_tell_kernels(source)),
        nodes=_tell_nodes(source.graph, kernel_of, steps),
        edges=_tell_edges(source.graph, numbers),
        steps=steps,
        instructions=tuple(sorted(instructions, key=lambda each: each.start_s)),
        buffers=_tell_buffers(planned, instructions),
        arena_bytes=source.plan.arena_bytes,
        tensor_bytes=planned.plan.tensor_bytes,
    )


def _kernels_of(classes: Sequence[NodeClass]) -> dict[str, int]:
    return {node: number for number, each in enumerate(classes) for node in each.nodes}


def _place_again(source: StorySource) -> PlannedModel:
    """Place the tensors of a plan again. A lowering with a kernel of its own has the story of the plan before it.

    A persistent kernel has the steps of that plan as its fallback, and waves have its arena.

    Raises InvariantError if another plan results.
    """
    plan = source.plan
    steps = plan.fallback or plan.steps
    for share_memory in (True, False):
        planned = _place(source, share_memory=share_memory)
        is_in_waves = makes_kernel(plan.lowering) and not plan.fallback
        if planned.plan.arena_bytes == plan.arena_bytes if is_in_waves else planned.plan.steps == steps:
            return planned
    raise InvariantError(f"{plan.name}: the plan is not one of its graph")


def _place(source: StorySource, *, share_memory: bool) -> PlannedModel:
    """Return the plan of the model's own launches."""
    plan, is_cpu = source.plan, source.hardware.family is TargetKind.CPU
    kernel_of = _kernels_of(source.classes)
    others = (each for each in iter_steps(plan.fallback or plan.steps) if isinstance(each, KernelStep) and each.rkernel)
    return plan_model(
        source.graph,
        plan.kernels[: len(source.classes)],
        kernel_of,
        plan.name,
        plan.target,
        share_memory=share_memory,
        schedule=schedule_by_hand(plan_to_json(plan)) if is_cpu else None,
        efficient={kernel_of[f"/{each.node}"]: plan.kernels[each.kernel] for each in others},
        alignment_bytes=1 if is_cpu else source.hardware.vector_bytes,
    )


def _gpu_times(source: StorySource, planned: PlannedModel) -> StepTimes:
    """Return the seconds of steps on a GPU, with the overhead of a launch, or of a node of a CUDA graph, for each.

    A node that starts early takes less by the seconds in which its first pages of weights arrive before.
    """
    hw, lowering = source.hardware, source.plan.lowering
    unrolled = UnrolledPlan(planned.plan, tuple(unroll_steps(planned.plan.steps)), source.joined)
    overheads_s: tuple[float, ...] = (0.0,) * len(unrolled.steps)
    if lowering == "launches":
        overheads_s = tuple(operations_of(each) * hw.limits.launch_overhead_s for each in unrolled.steps)
    elif lowering == CUDA_GRAPH.kind:
        overheads_s = node_seconds(unrolled, hw)
    works_s = (step_seconds(unrolled, each, hw) for each in unrolled.steps)
    each_s = map(add, works_s, overheads_s)
    seconds = tuple(sum(islice(each_s, count_unrolled((step,)))) for step in planned.plan.steps)
    if source.seconds is not None and (total_s := sum(seconds)) > source.seconds:  # a kernel of all steps overlaps them
        seconds = tuple(each * source.seconds / total_s for each in seconds)
    return StepTimes(seconds, seconds, is_measured=False)


def _kind(step: PlannedStep) -> str:
    return "loop" if step.is_loop else "copy" if step.kernel is None else "kernel"


# ---------------------------------------------------------------- times


def _schedule(planned: PlannedModel, times: StepTimes, num_veus: int) -> ModelSchedule:
    """Return the launches of a plan with their times. rOperators have the memory of `planned`."""
    placed = iter([step for step in planned.plan.steps if isinstance(step, VDeviceStep)])
    launches = []
    for launch in planned.launches:
        if launch.plan is None:
            launches.append(ScheduledLaunch(tuple((step, times.launch_s[step]) for step in launch.steps)))
            continue
        step = next(placed, None)
        accesses = [] if step is None else accesses_of(step, planned.plan.kernels)
        launches.append(_schedule_launch(planned, launch, times, num_veus, accesses))
    return ModelSchedule(tuple(launches))


def _schedule_launch(
    planned: PlannedModel, launch: Launch, times: StepTimes, num_veus: int, accesses: Sequence[Access]
) -> ScheduledLaunch:
    operators = []
    for place, operator in enumerate(launch.operators):
        step = launch.steps[operator.step]
        rkernel = _rkernel_of(planned, launch, place, times, num_veus)
        used = tuple((each.slot, each.first, each.end, each.is_write) for each in accesses if each.operator == place)
        at = operator.step, -1 if operator.phase is None else operator.phase
        shape = rkernel.tasks, rkernel.task_s, rkernel.alone_s
        operators.append(ScheduledOperator(planned.steps[step].node, step, operator.phase, at, *shape, used))
    return ScheduledLaunch((), tuple(operators), launch.plan)


def _rkernel_of(planned: PlannedModel, launch: Launch, number: int, times: StepTimes, num_veus: int) -> RKernel:
    """Return the rKernel of an rOperator: a phase of its step, or the whole step as one rTask."""
    operator = launch.operators[number]
    step = launch.steps[operator.step]
    choice = launch.rkernels[operator.step] if launch.rkernels else 0
    phases = [rkernels[choice] for rkernels in operator_of(planned.steps[step], times, step, num_veus).roperators]
    if operator.phase is not None:
        return phases[operator.phase]
    seconds = sum(each.alone_s for each in phases)
    return RKernel(1, seconds, seconds)


# ---------------------------------------------------------------- nodes and memory


def _tell_kernels(source: StorySource) -> Iterator[StoryModelKernel]:
    for each, digest, floor_s, kernel in zip(source.classes, source.digests, source.floors_s, source.plan.kernels, strict=False):
        inputs = tuple((name, type_.dtype.value, type_.shape) for name, type_ in each.inputs)
        yield StoryModelKernel(digest, each.expression, inputs, each.outputs, each.constants, kernel.estimate_s, floor_s)


def _tell_nodes(graph: Graph, kernel_of: Mapping[str, int], steps: Sequence[StoryStepOfModel]) -> tuple[StoryNode, ...]:
    seconds = [0.0] * len(graph.nodes)
    for step in steps:
        if step.node is not None:
            seconds[step.node] += step.seconds
    return tuple(
        StoryNode(
            node.name,
            node.operator,
            (isinstance(node, OpNode) and node.members) or (node.name,),
            seconds[number],
            _text(node.output_types[0]) if node.output_types else "",
            kernel_of.get(kernel_key("", node)) if isinstance(node, OpNode) else None,
            view_offset_elements(node) is not None,
        )
        for number, node in enumerate(graph.nodes)
    )


def _text(type_: TensorType) -> str:
    return f"{type_.dtype.value}[{', '.join(map(str, type_.shape))}]"


def _tell_edges(graph: Graph, numbers: Mapping[str, int]) -> tuple[StoryEdge, ...]:
    types, producers = graph.types, graph.producers
    return tuple(
        StoryEdge(numbers[producers[tensor].name], target, types[tensor].bytes)
        for target, node in enumerate(graph.nodes)
        for tensor in dict.fromkeys(node.inputs)
        if tensor in producers
    )


def _tell_buffers(planned: PlannedModel, instructions: Sequence[StoryInstruction]) -> tuple[StoryBuffer, ...]:
    """Return the buffers that steps use, in order of their first use."""
    starts = [float("inf")] * len(planned.steps)
    ends = [0.0] * len(planned.steps)
    for each in instructions:
        if each.step is not None:
            starts[each.step] = min(starts[each.step], each.start_s)
            ends[each.step] = max(ends[each.step], each.end_s)
    buffers = [
        StoryBuffer(
            each.name,
            each.offset_bytes,
            each.bytes,
            min(starts[step] for step in (*each.read_by, *each.written_by)),
            max(ends[step] for step in (*each.read_by, *each.written_by)),
            each.read_by,
            each.written_by,
        )
        for each in planned.buffers
        if each.read_by or each.written_by
    ]
    return tuple(sorted(buffers, key=lambda each: (each.start_s, each.offset_bytes)))
