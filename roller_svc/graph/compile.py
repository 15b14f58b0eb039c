"""Graph → compiled model. Read second: after compiler/pipeline.py, which builds each kernel.

import → passes → classes → build each kernel once → plan (memory, steps) → emit → link → load
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from roller_svc.codegen.c.model import kernel_prefix, kernel_unit, model_unit
from roller_svc.compiler.artifact import package_kernel
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.compiler.pipeline import StageTimer, build_kernel
from roller_svc.errors import ArgumentError, InputError, UnsupportedModelError, UnsupportedNode
from roller_svc.graph.classes import NodeClass, find_classes
from roller_svc.graph.costs import CostTable
from roller_svc.graph.passes import PassReport, run_passes
from roller_svc.graph.plan import plan_model
from roller_svc.graph.weights import Weights
from roller_svc.ir.constraints import WinogradMode
from roller_svc.ir.graph import Graph
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import KernelSource, Language
from roller_svc.ir.model_plan import ModelKernel, ModelPlan
from roller_svc.ir.report import BuildRequest, SelectionMode
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.toolchain import compile_object, link_model

MAX_EXPRESSION_SHOWN = 120  # characters of a node that no kernel can compute

Progress = Callable[[str, int, int], None]  # stage, done, of how many


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to build a model."""

    hardware: HardwareSpec
    select: SelectionMode = SelectionMode.MEASURE
    top_k: int = 10
    allow_tf32: bool = False
    fuse: bool = True
    winograd: WinogradMode = WinogradMode.AUTO
    share_memory: bool = True  # between tensors that are not needed at the same time


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A linked model, with what explains it."""

    plan: ModelPlan
    binary: bytes
    graph: Graph  # after the passes
    classes: tuple[NodeClass, ...]
    kernels: tuple[KernelBundle, ...]  # one for each class
    passes: tuple[PassReport, ...]
    stage_seconds: tuple[tuple[str, float], ...]
    cache_hits: int


def no_progress(_: str, __: int, ___: int) -> None:
    """Show nothing."""


def build_model(
    graph: Graph, weights: Weights, options: ModelOptions, cache: KernelCache, progress: Progress = no_progress
) -> BuiltModel:
    """Compile a graph to one shared object.

    Raises BuildError if a kernel does not compile, ArgumentError for a target that is not a CPU.
    """
    hw = options.hardware
    if hw.family is not TargetKind.CPU:
        raise ArgumentError(f"models are compiled for CPUs; {hw.id} is not one", code="unsupported-target")
    clock = StageTimer()
    costs = CostTable(hw, options.winograd, cache.load_costs(hw, options.winograd))
    known = len(costs.stored)
    graph, passes = run_passes(graph, weights, costs, fuse=options.fuse)
    if len(costs.stored) > known:
        cache.save_costs(hw, options.winograd, costs.stored)
    clock.record("passes")
    classes = find_classes(graph)
    bundles, hits = _build_kernels(classes, [_request(each, options) for each in classes], cache, progress)
    clock.record("kernels")
    kernels = [
        ModelKernel(bundle.compiled.source, _seconds(bundle), len(each.nodes))
        for bundle, each in zip(bundles, classes, strict=True)
    ]
    kernel_of = {node: i for i, each in enumerate(classes) for node in each.nodes}
    plan = plan_model(graph, kernels, kernel_of, graph.name, hw.id, share_memory=options.share_memory)
    clock.record("plan")
    binary = _link(plan, cache, hw, progress)
    clock.record("link")
    return BuiltModel(plan, binary, graph, classes, tuple(bundles), passes, clock.stages, hits)


def _request(each: NodeClass, options: ModelOptions) -> BuildRequest:
    return BuildRequest(
        each.expression, each.inputs, options.hardware.id, each.outputs, options.top_k, options.select,
        allow_tf32=options.allow_tf32, hardware=options.hardware, constants=each.constants,
        winograd=options.winograd,
    )  # fmt: skip


def _build_kernels(
    classes: Sequence[NodeClass], requests: Sequence[BuildRequest], cache: KernelCache, progress: Progress
) -> tuple[list[KernelBundle], int]:
    """Return the kernel of each request, and how many the cache had.

    Kernels that are measured are built one after the other: each build uses all cores, and measures alone.
    Raises UnsupportedModelError with every node that no kernel can compute.
    """
    found = [cache.load(request) for request in requests]
    hits = sum(bundle is not None for bundle in found)
    done = hits
    progress("kernels", done, len(requests))

    def build(request: BuildRequest) -> KernelBundle | InputError:
        nonlocal done
        try:
            bundle = package_kernel(build_kernel(request))
        except InputError as error:
            return error
        cache.save(request, bundle)
        done += 1
        progress("kernels", done, len(requests))
        return bundle

    measures = any(request.select is SelectionMode.MEASURE for request in requests)
    with ThreadPoolExecutor(1 if measures else len(os.sched_getaffinity(0))) as pool:
        built = list(pool.map(lambda pair: pair[0] or build(pair[1]), zip(found, requests, strict=True)))
    unsupported = [
        UnsupportedNode(each.expression[:MAX_EXPRESSION_SHOWN], node.removeprefix("/"), result.message)
        for each, result in zip(classes, built, strict=True)
        if isinstance(result, InputError)
        for node in each.nodes
    ]
    if unsupported:
        raise UnsupportedModelError(tuple(unsupported))
    return [result for result in built if isinstance(result, KernelBundle)], hits


def _seconds(bundle: KernelBundle) -> float:
    seconds = (bundle.estimate or {}).get("seconds", 0.0)
    return float(seconds)


def _link(plan: ModelPlan, cache: KernelCache, hw: HardwareSpec, progress: Progress) -> bytes:
    """Compile the kernels' objects on all cores, and link them."""
    sources = {kernel_prefix(kernel.source): kernel.source for kernel in plan.kernels}

    def compiled(named: tuple[str, KernelSource]) -> tuple[str, bytes]:
        name, source = named
        content = cache.load_object(source.key)
        if content is None:
            content = compile_object(source, kernel_unit(source))
            cache.save_object(source.key, content)
        return name, content

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = {}
        for name, content in pool.map(compiled, sources.items()):
            objects[name] = content
            progress("objects", len(objects), len(sources))
    runner = KernelSource(plan.name, Language.C, hw.arch, "", (), (), options=("-fopenmp",))
    return link_model(runner, model_unit(plan), objects)
