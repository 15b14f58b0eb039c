"""A persistent kernel: one cooperative launch whose blocks execute all operators and wait for events in between."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.codegen.cuda.persistent import SYNC, build_persistent
from roller_svc.errors import require
from roller_svc.graph.lowerings.joined import (
    JoinedSteps,
    find_refusal,
    join_steps,
    occupancy_factors,
    refuse_device,
    run_kernel,
    table_seconds,
)
from roller_svc.graph.lowerings.lowering import (
    LoadTasks,
    Lowering,
    LoweringEstimate,
    Refusal,
    UnrolledPlan,
    kernel_seconds,
    step_seconds,
)
from roller_svc.graph.memory import align
from roller_svc.graph.rammer.ranges import schedule_by_ranges
from roller_svc.graph.rammer.wavefront import find_waves
from roller_svc.graph.weights import Weights
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.model_plan import ARENA, Address, KernelStep, ModelPlan
from roller_svc.ir.vdevice import VDevicePlan, executes

KIND = "persistent"
BLOCKS_PER_CORE = 1


def refuse(hw: HardwareSpec) -> Refusal | None:
    """Return why a device cannot run persistent kernels; None if it can."""
    limits = hw.limits
    if limits.cooperative_launch_s is None or limits.signal_s is None or limits.wait_s is None:
        return refuse_device(hw) or Refusal(f"limits of {hw.id} have no cooperative_launch_s, signal_s or wait_s")
    return refuse_device(hw)


def estimate(unrolled: UnrolledPlan, hw: HardwareSpec) -> LoweringEstimate | Refusal:
    """Return the seconds of the kernels with one block a core, of a signal and a wait between waves, and of the launch.

    Operators of a wave count one after the other: how well they share a device is not modelled.
    """
    refused = find_refusal(unrolled, hw)
    if refused is not None:
        return refused
    limits = hw.limits
    cooperative_s, signal_s, wait_s = (
        require(each, "time in the limits of a device") for each in (limits.cooperative_launch_s, limits.signal_s, limits.wait_s)
    )
    waves = len(find_waves(unrolled.predecessors))
    seconds = kernel_seconds(unrolled, hw, occupancy_factors(unrolled, hw, BLOCKS_PER_CORE))
    seconds += table_seconds(waves, hw) + (waves - 1) * (signal_s + wait_s)
    seconds += cooperative_s + limits.launch_overhead_s  # the fill of the events with zeros
    return LoweringEstimate(seconds, 2)


def build(unrolled: UnrolledPlan, hw: HardwareSpec, load_tasks: LoadTasks, weights: Weights, seconds: float) -> ModelPlan:
    """Return the plan whose step is the kernel. Its events lie behind the arena, and are zero before each call."""
    joined = join_steps(unrolled, load_tasks)
    device = _schedule(unrolled, joined, hw)
    kernel = build_persistent("roller_persistent", joined.operators, joined.predecessors, device, joined.slots, hw)
    events = Address(ARENA, align(unrolled.plan.arena_bytes))
    (launch,) = kernel.source.launches
    (state,) = (each for each in kernel.source.buffers if each.symbol in launch.args and each.name == SYNC)
    source = replace(kernel.source, launches=(replace(launch, zeroed=(state.symbol,)),))
    kernel = replace(kernel, source=source)
    nodes = ", ".join(dict.fromkeys(step.node for step in unrolled.steps))
    plan = run_kernel(unrolled.plan, kernel, joined, [nodes], seconds, weights, {state.symbol: events})
    (step,) = plan.steps
    arrivals = _nodes_of_events(unrolled, device)
    counted = replace(step, zeroed=((events, state.bytes),), events=arrivals) if isinstance(step, KernelStep) else step
    return replace(plan, steps=(counted,), arena_bytes=events.offset_bytes + align(state.bytes))


def _schedule(unrolled: UnrolledPlan, joined: JoinedSteps, hw: HardwareSpec) -> VDevicePlan:
    tasks = [each.function.tasks for each in joined.operators]
    task_s = [step_seconds(unrolled, step, hw) / count for step, count in zip(unrolled.steps, tasks, strict=True)]
    return schedule_by_ranges(tasks, joined.predecessors, BLOCKS_PER_CORE * hw.num_cores, task_s)


def _nodes_of_events(unrolled: UnrolledPlan, device: VDevicePlan) -> tuple[str, ...]:
    """Return the node whose rTasks arrive at each event."""
    found = {each.arrives: each.operator for _, _, each in executes(device) if each.arrives is not None}
    return tuple(unrolled.steps[found[event]].node for event in range(len(device.events)))


PERSISTENT = Lowering(KIND, refuse, estimate, build)
