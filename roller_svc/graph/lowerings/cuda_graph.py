"""A CUDA graph: a node for every step, an edge for every hazard, one launch for a call."""

from __future__ import annotations

from roller_svc.errors import require
from roller_svc.graph.lowerings.lowering import (
    Lowering,
    LoweringEstimate,
    Refusal,
    UnrolledPlan,
    count_operations,
    kernel_seconds,
)
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.model_plan import AS_GRAPH

KIND = AS_GRAPH
MAX_NODES = 1 << 16  # about 0.5 KB of device memory each


def refuse(hw: HardwareSpec) -> Refusal | None:
    """Return why a device cannot run CUDA graphs; None if it can."""
    if hw.family is not TargetKind.CUDA:
        return Refusal(f"a CUDA graph runs on NVIDIA devices, and {hw.id} is not one")
    return Refusal(f"limits.graph_node_s is missing in the spec of {hw.id}") if hw.limits.graph_node_s is None else None


def estimate(unrolled: UnrolledPlan, hw: HardwareSpec) -> LoweringEstimate | Refusal:
    """Return the seconds of the kernels, with the overhead of a node for each operation, and of one launch.

    Nodes that may run side by side count one after the other: how well they share a device is not modelled.
    """
    node_s = require(hw.limits.graph_node_s, "limits.graph_node_s")
    nodes = count_operations(unrolled)
    if nodes > MAX_NODES:
        return Refusal(f"the graph would have {nodes} nodes, at most {MAX_NODES}")
    overhead_s = hw.limits.launch_overhead_s + nodes * node_s
    return LoweringEstimate(kernel_seconds(unrolled, hw) + overhead_s, 1)


CUDA_GRAPH = Lowering(KIND, refuse, estimate)
