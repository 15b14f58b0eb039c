"""Estimate a model by the performance model: no compiler, no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from roller_svc.compiler.lower_and_emit import emit_plan, find_plan_refusal
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import TargetEstimate, estimate_program
from roller_svc.errors import ArgumentError, InputError, UnsupportedModelError, UnsupportedNode
from roller_svc.graph.classes import NodeClass, find_classes
from roller_svc.graph.compile import MAX_EXPRESSION_SHOWN, ModelOptions, check_device, check_plan_kind, lowering_kind
from roller_svc.graph.costs import CostTable
from roller_svc.graph.lowerings import LOWERING_KINDS, ChosenLowering, choose_lowering, needs_compiled
from roller_svc.graph.lowerings.cuda_graph import has_programmatic_edges
from roller_svc.graph.lowerings.lowering import JoinedKernel, Refusal
from roller_svc.graph.passes import run_passes
from roller_svc.graph.plan import kernel_key, plan_model
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, LoopNode
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.model_plan import ModelKernel
from roller_svc.ir.program import TensorProgram

UNCOMPILED = "it depends on the registers of the kernels"


@dataclass(frozen=True, slots=True)
class ClassEstimate:
    """The estimate of the kernel of equal nodes."""

    expression: str
    nodes: tuple[str, ...]
    runs: int  # in one call of the model
    seconds: float  # of one run


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """The estimate of a model, and of a GPU its lowering."""

    classes: tuple[ClassEstimate, ...]
    lowering: ChosenLowering | None

    @property
    def seconds(self) -> float:
        """Return the seconds of a call: of its kernels, and on a GPU also of launches, copies and fills."""
        if self.lowering is None:
            return sum(each.runs * each.seconds for each in self.classes)
        return self.lowering.seconds


def estimate_graph(graph: Graph, weights: Weights, options: ModelOptions) -> GraphEstimate:
    """Return the estimate of a model with the best program of each class of nodes.

    Raises UnsupportedModelError with every node that no kernel can compute, and ArgumentError for another target
    than CPUs and GPUs, or for a plan that it cannot have.
    """
    hw = options.hardware
    check_device(hw)
    check_plan_kind(options.plan, hw)
    graph, _ = run_passes(graph, weights, CostTable(hw, options.winograd), fuse=options.fuse)
    runs = dict(_runs(graph, "", 1))
    estimates: list[ClassEstimate] = []
    kernels: list[_Kernel] = []
    unsupported: list[UnsupportedNode] = []
    classes = find_classes(graph)
    for each in classes:
        names = tuple(node.removeprefix("/") for node in each.nodes)
        try:
            program = replace(each.program, constants=each.constants, programmatic=has_programmatic_edges(hw))
            estimate = estimate_program(PartitionCache(program), hw, 1, options.constraints)
            seconds = estimate.plans[0].estimate.seconds
            if hw.family is not TargetKind.CPU:
                kernels.append(_make_kernel(program, estimate, len(names)))
        except InputError as error:
            shown = each.expression[:MAX_EXPRESSION_SHOWN]
            unsupported += [UnsupportedNode(shown, name, error.message) for name in names]
        else:
            number = sum(runs[node] for node in each.nodes)
            estimates.append(ClassEstimate(each.expression, names, number, seconds))
    if unsupported:
        raise UnsupportedModelError(tuple(unsupported))
    lowering = None if hw.family is TargetKind.CPU else _choose_lowering(graph, classes, kernels, options)
    return GraphEstimate(tuple(estimates), lowering)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel that is not compiled, and why it cannot join others."""

    kernel: ModelKernel
    refused: str | None


def _make_kernel(program: TensorProgram, estimate: TargetEstimate, uses: int) -> _Kernel:
    plan, groups, hw = estimate.plans[0], estimate.ranked.groups, estimate.spec
    source = emit_plan(plan, program, groups, hw)
    refused = find_plan_refusal(plan, program, groups, hw) if hw.family is TargetKind.CUDA else None
    return _Kernel(ModelKernel(source, plan.estimate.seconds, uses), refused)


def _choose_lowering(
    graph: Graph, classes: Sequence[NodeClass], kernels: Sequence[_Kernel], options: ModelOptions
) -> ChosenLowering:
    """Return the lowering among those whose estimate needs no compiler.

    Raises ArgumentError as a build does, and for a kind whose estimate needs the registers of the kernels.
    """
    kind = lowering_kind(options)
    plan = plan_model(
        graph,
        [each.kernel for each in kernels],
        {node: number for number, each in enumerate(classes) for node in each.nodes},
        graph.name,
        options.hardware.id,
        share_memory=options.share_memory,
        alignment_bytes=options.hardware.vector_bytes,
    ).plan
    joins = [each.refused is None for each in kernels]
    uncompiled = {each: Refusal(UNCOMPILED) for each in LOWERING_KINDS if needs_compiled(each, joins)}
    if kind in uncompiled:
        raise ArgumentError(
            f"plan {kind!r} is not estimated without a compiler: {UNCOMPILED}",
            code="refused-plan",
            hint='roller_svc.compile_model needs no device, and its report["lowerings"] has the seconds',
        )
    known = [JoinedKernel((), each.refused) for each in kernels]
    return choose_lowering(kind, [(plan, known)], options.hardware, uncompiled)


def _runs(graph: Graph, path: str, times: int) -> Iterator[tuple[str, int]]:
    """Yield the key of each node, with the number of times that a call of the model runs it."""
    for node in graph.nodes:
        key = kernel_key(path, node)
        yield key, times
        if isinstance(node, LoopNode):
            yield from _runs(node.body, key, times * node.steps)
