"""A CUDA graph: a node for every step, an edge for every hazard, one launch for a call.

A node behind programmatic edges starts while the nodes before it run, and waits for them itself (ADR 0076).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from roller_svc.analysis.step_order import find_early_starts
from roller_svc.codegen.cuda.instructions import HOPPER
from roller_svc.errors import require
from roller_svc.graph.lowerings.joined import launch_needs, page_use_of
from roller_svc.graph.lowerings.lowering import (
    Lowering,
    LoweringEstimate,
    OverlapEstimate,
    Refusal,
    UnrolledPlan,
    count_operations,
    kernel_seconds,
    moved_bytes,
    operations_of,
    step_seconds,
)
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.index import ceil_div
from roller_svc.ir.model_plan import AS_GRAPH, KernelStep
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, can_share_core

KIND = AS_GRAPH
MAX_NODES = 1 << 16  # about 0.5 KB of device memory each


def refuse(hw: HardwareSpec) -> Refusal | None:
    """Return why a device cannot run CUDA graphs; None if it can."""
    if hw.family is not TargetKind.CUDA:
        return Refusal(f"a CUDA graph runs on NVIDIA devices, and {hw.id} is not one")
    return Refusal(f"limits.graph_node_s is missing in the spec of {hw.id}") if hw.limits.graph_node_s is None else None


def has_programmatic_edges(hw: HardwareSpec) -> bool:
    """Return whether nodes of a graph come sooner behind programmatic edges: from sm_90 on, where the spec says so."""
    if hw.family is not TargetKind.CUDA or hw.arch < HOPPER:
        return False
    node_s, early_s = hw.limits.graph_node_s, hw.limits.pdl_node_s
    return node_s is not None and early_s is not None and early_s < node_s


def find_early_nodes(unrolled: UnrolledPlan, hw: HardwareSpec) -> tuple[int, ...]:
    """Return the steps whose nodes come sooner, behind programmatic edges."""
    if not has_programmatic_edges(hw):
        return ()
    starts = find_early_starts(unrolled.plan, unrolled.steps, unrolled.predecessors)
    return tuple(number for number, is_early in enumerate(starts) if is_early)


def node_seconds(unrolled: UnrolledPlan, hw: HardwareSpec) -> tuple[float, ...]:
    """Return the seconds that the nodes of each step take beside its work, less those that it saves by an early start."""
    node_s = require(hw.limits.graph_node_s, "limits.graph_node_s")
    seconds = [operations_of(step) * node_s for step in unrolled.steps]
    for number, hidden_s in _hidden_seconds(unrolled, find_early_nodes(unrolled, hw), hw).items():
        seconds[number] = require(hw.limits.pdl_node_s, "limits.pdl_node_s") - hidden_s
    return tuple(seconds)


def estimate(unrolled: UnrolledPlan, hw: HardwareSpec) -> LoweringEstimate | Refusal:
    """Return the seconds of the kernels, with the overhead of a node for each operation, and of one launch.

    Nodes that may run side by side count one after the other: how well they share a device is not modelled.
    """
    node_s = require(hw.limits.graph_node_s, "limits.graph_node_s")
    nodes = count_operations(unrolled)
    if nodes > MAX_NODES:
        return Refusal(f"the graph would have {nodes} nodes, at most {MAX_NODES}")
    seconds = kernel_seconds(unrolled, hw) + hw.limits.launch_overhead_s + nodes * node_s
    early = find_early_nodes(unrolled, hw)
    if not early:
        return LoweringEstimate(seconds, 1)
    early_s = require(hw.limits.pdl_node_s, "limits.pdl_node_s")
    hidden_s = sum(_hidden_seconds(unrolled, early, hw).values())
    seconds -= len(early) * (node_s - early_s) + hidden_s
    return LoweringEstimate(seconds, 1, overlap=OverlapEstimate(len(early), hidden_s))


def _hidden_seconds(unrolled: UnrolledPlan, early: Sequence[int], hw: HardwareSpec) -> dict[int, float]:
    """Return the seconds that each of the nodes that come sooner takes less, because first pages of weights arrive early."""
    hidden: dict[int, float] = {}
    busy: defaultdict[int, float] = defaultdict(float)  # seconds of a node in which memory fetches first pages
    for number in early:
        last = unrolled.predecessors[number][-1]
        saved_s = hidden[number] = _saved_seconds(unrolled, number, last, busy[last], hw)
        busy[number] += saved_s
        busy[last] += max(0.0, saved_s - require(hw.limits.pdl_node_s, "limits.pdl_node_s"))
    return hidden


def _saved_seconds(unrolled: UnrolledPlan, number: int, last: int, busy_s: float, hw: HardwareSpec) -> float:
    """Return the seconds that a node takes less because its first pages of weights arrive before it may begin.

    Memory fetches them between the nodes, and while the last node before it leaves memory idle. A core must have room
    for the blocks of both. `busy_s`: seconds of that node in which memory fetches first pages already.
    """
    step, before = unrolled.steps[number], unrolled.steps[last]
    use = page_use_of(unrolled, step)
    if use is None or not isinstance(step, KernelStep) or not isinstance(before, KernelStep):
        return 0.0
    if not can_share_core([_resident(unrolled, each, hw) for each in (before, step)], hw):
        return 0.0
    bandwidth = hw.levels[0].bandwidth_bytes_per_s
    idle_s = max(0.0, step_seconds(unrolled, before, hw) - moved_bytes(unrolled, before) / bandwidth - busy_s)
    idle_s += require(hw.limits.pdl_node_s, "limits.pdl_node_s")
    first_bytes = min(use.bytes, use.tasks * use.pages_in_flight * use.page_bytes)
    saved_s = max(0.0, step_seconds(unrolled, step, hw) - use.busy_s)
    return min(idle_s, first_bytes / bandwidth, saved_s)


def _resident(unrolled: UnrolledPlan, step: KernelStep, hw: HardwareSpec) -> tuple[BlockResources, int]:
    """Return the needs of a block of a step, and how many blocks of it a core has at once."""
    needs = launch_needs(unrolled, step)
    tasks = math.prod(unrolled.plan.kernels[step.kernel].source.launches[step.launch].grid)
    return needs, min(blocks_per_core(needs, hw), ceil_div(tasks, hw.num_cores))


CUDA_GRAPH = Lowering(KIND, refuse, estimate, overlaps=True)
