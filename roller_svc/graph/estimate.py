"""Estimate a model by the performance model: no compiler, no device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.errors import InputError, UnsupportedModelError, UnsupportedNode
from roller_svc.graph.classes import NodeClass, find_classes
from roller_svc.graph.compile import MAX_EXPRESSION_SHOWN, ModelOptions, check_device
from roller_svc.graph.costs import CostTable
from roller_svc.graph.passes import run_passes
from roller_svc.graph.plan import kernel_key
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, LoopNode


@dataclass(frozen=True, slots=True)
class ClassEstimate:
    """The estimate of the kernel of equal nodes."""

    expression: str
    nodes: tuple[str, ...]
    runs: int  # in one call of the model
    seconds: float  # of one run


def estimate_graph(graph: Graph, weights: Weights, options: ModelOptions) -> tuple[ClassEstimate, ...]:
    """Return the estimate of the best program of each class of nodes.

    Raises UnsupportedModelError with every node that no kernel can compute, and ArgumentError for another target
    than CPUs and GPUs.
    """
    hw = options.hardware
    check_device(hw)
    graph, _ = run_passes(graph, weights, CostTable(hw, options.winograd), fuse=options.fuse)
    runs = dict(_runs(graph, "", 1))
    estimates: list[ClassEstimate] = []
    unsupported: list[UnsupportedNode] = []
    for each in find_classes(graph):
        names = tuple(node.removeprefix("/") for node in each.nodes)
        try:
            seconds = _seconds(each, options)
        except InputError as error:
            shown = each.expression[:MAX_EXPRESSION_SHOWN]
            unsupported += [UnsupportedNode(shown, name, error.message) for name in names]
        else:
            number = sum(runs[node] for node in each.nodes)
            estimates.append(ClassEstimate(each.expression, names, number, seconds))
    if unsupported:
        raise UnsupportedModelError(tuple(unsupported))
    return tuple(estimates)


def _seconds(each: NodeClass, options: ModelOptions) -> float:
    program = replace(each.program, constants=each.constants)
    plans = estimate_program(PartitionCache(program), options.hardware, 1, options.constraints).plans
    return plans[0].estimate.seconds


def _runs(graph: Graph, path: str, times: int) -> Iterator[tuple[str, int]]:
    """Yield the key of each node, with the number of times that a call of the model runs it."""
    for node in graph.nodes:
        key = kernel_key(path, node)
        yield key, times
        if isinstance(node, LoopNode):
            yield from _runs(node.body, key, times * node.steps)
