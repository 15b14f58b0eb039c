"""Waves: one kernel of all operators, launched once for each level of the graph (RAMMER, OSDI 2020)."""

from __future__ import annotations

from roller_svc.codegen.cuda.waves import build_waves
from roller_svc.graph.lowerings.joined import find_refusal, join_steps, occupancy_factors, refuse_device, run_kernel, table_seconds
from roller_svc.graph.lowerings.lowering import (
    LoadTasks,
    Lowering,
    LoweringEstimate,
    Refusal,
    UnrolledPlan,
    kernel_seconds,
)
from roller_svc.graph.rammer.wavefront import find_waves
from roller_svc.graph.weights import Weights
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.model_plan import ModelPlan

KIND = "waves"


def estimate(unrolled: UnrolledPlan, hw: HardwareSpec) -> LoweringEstimate | Refusal:
    """Return the seconds of the kernels at the occupancy of the joint one, with the overhead of a launch for each wave.

    Operators of a wave count one after the other: how well they share a device is not modelled.
    """
    refused = find_refusal(unrolled, hw)
    if refused is not None:
        return refused
    launches = len(find_waves(unrolled.predecessors))
    seconds = kernel_seconds(unrolled, hw, occupancy_factors(unrolled, hw))
    seconds += table_seconds(launches, hw) + launches * hw.limits.launch_overhead_s
    return LoweringEstimate(seconds, launches)


def build(unrolled: UnrolledPlan, hw: HardwareSpec, load_tasks: LoadTasks, weights: Weights, seconds: float) -> ModelPlan:
    """Return the plan whose steps are the waves."""
    joined = join_steps(unrolled, load_tasks)
    waves = find_waves(joined.predecessors)
    kernel = build_waves("roller_waves", joined.operators, joined.predecessors, waves, joined.slots, hw)
    nodes = [", ".join(dict.fromkeys(unrolled.steps[each].node for each in wave)) for wave in waves]
    return run_kernel(unrolled.plan, kernel, joined, nodes, seconds, weights)


WAVES = Lowering(KIND, refuse_device, estimate, build)
