"""Graph → compiled model. Read second: after compiler/pipeline.py, which builds each kernel.

import → passes → classes → build each kernel once → plan (memory, steps) → emit → link → load
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from roller_svc.analysis.model_tables import list_functions
from roller_svc.codegen.c.model import MODEL, exported_functions, kernel_unit, model_unit, switchable_unit
from roller_svc.codegen.kernel import Tasks
from roller_svc.collector import pause_collector
from roller_svc.compiler.action import estimate_digest
from roller_svc.compiler.artifact import load_plan, package_candidate, package_kernel, replace_candidate
from roller_svc.compiler.autotune import NOT_SHARED
from roller_svc.compiler.backends import backend_for
from roller_svc.compiler.efficient import find_efficient
from roller_svc.compiler.explain import parse_request
from roller_svc.compiler.joinable import find_joinable
from roller_svc.compiler.kernel_cache import SERIAL, KernelCache, PlanChoice
from roller_svc.compiler.pipeline import CompiledCandidates, StageTimer, compile_candidates, select_candidate
from roller_svc.compiler.rtasks import find_bundle_page_uses, find_bundle_refusal, load_tasks, may_stream, store_tasks
from roller_svc.compiler.serialize import kernel_digest
from roller_svc.errors import (
    ArgumentError,
    BuildError,
    InputError,
    InvariantError,
    NoCandidateError,
    UnsupportedModelError,
    UnsupportedNode,
    require,
)
from roller_svc.frontend.lang.input_types import short_repr
from roller_svc.graph.choose import AUTO, EAGER, PLANS, Link, choose_plan, make_modelled_plans
from roller_svc.graph.classes import NodeClass, find_classes
from roller_svc.graph.costs import CostTable
from roller_svc.graph.lowerings import LOWERING_KINDS, ChosenLowering, check_lowering, choose_lowering, may_use_slower
from roller_svc.graph.lowerings.cuda_graph import CUDA_GRAPH, has_programmatic_edges
from roller_svc.graph.lowerings.launches import LAUNCHES
from roller_svc.graph.lowerings.lowering import JoinedKernel, LoadTasks, LoweringEstimate
from roller_svc.graph.lowerings.persistent import PERSISTENT
from roller_svc.graph.lowerings.stored import lowering_digest, read_lowering, store_lowering
from roller_svc.graph.objects import compile_objects, compile_once, link_kernels, object_key
from roller_svc.graph.passes import PassReport, run_passes
from roller_svc.graph.passes.boundaries import Boundaries
from roller_svc.graph.plan import PlannedStep, Schedule, plan_model
from roller_svc.graph.rammer.residency import check_resident
from roller_svc.graph.weights import Weights, place_weights
from roller_svc.graph.wiring.fusions import MAX_TRIED, Flipped, FusedGraph, FusionChoices
from roller_svc.graph.wiring.kernels import (
    MIN_SHARE,
    Build,
    KernelChoices,
    TuneOptions,
    Tuning,
    build_here,
    find_alternatives,
    load_or_build,
    open_index,
    tune_kernels,
)
from roller_svc.graph.wiring.online import Assignment, OnlineSource
from roller_svc.ir.graph import Graph, HostNode
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.kernel import KernelSource, Language
from roller_svc.ir.model_plan import ModelKernel, ModelPlan
from roller_svc.ir.options import NamedOptions, SearchOptions, SelectionMode, options_of
from roller_svc.ir.report import BuildRequest, CandidateResult
from roller_svc.runtime.graphs.switchable import SwitchableModel
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.toolchain import compile_source, link_model, prepare_model, tool_version

MAX_LEFT_OUT = 4  # kernels that are launches because the kernel of all would spill registers: each takes a compile
CLASSES_AT_ONCE = 4  # for each core: their candidates are compiled before the first is measured
EMITTING_THREADS = 1  # beside those that wait for compilers: Python emits one text after the other
MAX_EXPRESSION_SHOWN = 120  # characters of a node that no kernel can compute
GPU_PLANS = (AUTO, SERIAL, *LOWERING_KINDS)

Progress = Callable[[str, int, int], None]  # stage, done, of how many


@dataclass(frozen=True, slots=True)
class ModelOptions(NamedOptions):
    """How to build a model, for a device."""

    hardware: HardwareSpec
    fuse: bool = True
    share_memory: bool = True  # between tensors that are not needed at the same time
    plan: str | Mapping[str, Any] = AUTO  # of graph.choose.PLANS, or GPU_PLANS, or a plan by hand
    tune: TuneOptions | None = None  # None: kernels are chosen alone
    flipped: Flipped = frozenset()  # boundaries of fusion that are not as the performance model says


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model with its kernels, and with what explains it."""

    plan: ModelPlan
    make_binary: Link
    fused: FusedGraph
    kernels: tuple[KernelBundle, ...]  # of the plan: one for each class, and then other rKernels in use
    stage_seconds: tuple[tuple[str, float], ...]
    cache_hits: int
    choice: PlanChoice
    lowerings: Mapping[str, Any] = field(default_factory=dict)  # of a GPU: what each kind of plans costs, or why not
    tuning: Tuning | None = None
    online: OnlineSource | None = None  # of a model that is tuned while it is called
    joined: tuple[JoinedKernel, ...] = ()  # of a GPU: what lowerings know of the plan's kernels

    @property
    def graph(self) -> Graph:
        """The graph after the passes."""
        return self.fused.graph

    @property
    def classes(self) -> tuple[NodeClass, ...]:
        """The classes of equal nodes."""
        return self.fused.classes

    @property
    def passes(self) -> tuple[PassReport, ...]:
        """The effect of each pass."""
        return self.fused.passes

    @property
    def node_kernels(self) -> dict[tuple[str, str], KernelBundle]:
        """The kernels by a node's key and the text of its program, without those that update states in place."""
        named = zip(self.classes, self.kernels, strict=False)
        return {(each.nodes[0], each.expression): bundle for each, bundle in named if not each.donated}

    def link(self, name: str) -> bytes:
        """Return the shared object of a model of that name. Raises CompileError, ToolchainMissingError."""
        return self.make_binary(self.plan, name)


def no_progress(_: str, __: int, ___: int) -> None:
    """Show nothing."""


def check_device(hw: HardwareSpec) -> None:
    """Raise ArgumentError for a device that models are not compiled for."""
    if hw.family not in (TargetKind.CPU, TargetKind.CUDA, TargetKind.AMD):
        message = f"models are compiled for CPUs and GPUs; {hw.id} is neither"
        raise ArgumentError(message, code="unsupported-target", hint="docs/limits.md lists what is not supported")


def build_model(
    graph: Graph, weights: Weights, options: ModelOptions, cache: KernelCache, progress: Progress = no_progress
) -> BuiltModel:
    """Compile a graph: for a CPU to the objects of one shared object, which `BuiltModel.link` makes.

    Raises BuildError if a kernel does not compile, ArgumentError for another target or a plan that it cannot have.
    """
    hw = options.hardware
    check_device(hw)
    check_plan_kind(options.plan, hw)
    clock = StageTimer()
    if hw.family is TargetKind.CPU:
        prepare_model(_model_source(MODEL, hw))
    fused, boundaries = _fuse_graph(graph, weights, options, cache)
    classes = fused.classes
    clock.record("passes")
    requests = [_request(each, options) for each in classes]
    built, hits = _build_kernels(classes, requests, cache, progress)
    clock.record("kernels")
    kernels = _model_kernels([each.fastest for each in built], classes)
    is_cpu = hw.family is TargetKind.CPU
    efficient = {i: _model_kernel(each.second, 0) for i, each in enumerate(built) if each.second is not None}
    if is_cpu:
        compile_objects([each.source for each in kernels], cache, partial(progress, "objects"))
        clock.record("objects")

    def plan_with(
        kernels: Sequence[ModelKernel],
        schedule: Schedule | None,
        efficient: Mapping[int, ModelKernel],
        *,
        share_memory: bool = options.share_memory,
        fused: FusedGraph = fused,
    ) -> tuple[ModelPlan, tuple[PlannedStep, ...]]:
        planned = plan_model(
            fused.graph,
            kernels,
            fused.kernel_of,
            fused.graph.name,
            hw.id,
            share_memory=share_memory,
            schedule=schedule,
            efficient=efficient,
            alignment_bytes=1 if is_cpu else hw.vector_bytes,
        )
        return planned.plan, planned.steps

    if not is_cpu:
        kind = lowering_kind(options)
        planned = [_plan_for_gpu(plan_with(kernels, None, {})[0], [each.fastest for each in built])]
        is_used = kind in (None, PERSISTENT.kind) or (kind == CUDA_GRAPH.kind and has_programmatic_edges(hw))
        streams = is_used and any(may_stream(each.fastest, hw) for each in built)
        if streams or may_use_slower(kind, planned[0].plan, planned[0].kernels, hw):
            bundles = _replace_by_joinable(planned[0], requests, cache)
            planned.append(_plan_for_gpu(plan_with(_model_kernels(bundles, classes), None, {})[0], bundles))
            clock.record("kernels")
        return _build_for_gpu(planned, options, weights, fused, clock, hits, cache)

    def link(plan: ModelPlan, name: str) -> bytes:
        return _link(plan, name, cache, hw)

    def serial_plan(bundles: Sequence[KernelBundle]) -> ModelPlan:
        return plan_with(_model_kernels(bundles, classes), None, {})[0]

    def open_switchable(plan: ModelPlan, sources: Sequence[KernelSource]) -> SwitchableModel:
        binary = _link_switchable(plan, sources, cache, hw)
        return SwitchableModel(MODEL, binary, plan, sources, place_weights(plan, weights))

    def find_choices(tune: TuneOptions, build: Build, others: Sequence[KernelBundle] = ()) -> KernelChoices:
        fastest = [each.fastest for each in built]
        find = partial(find_alternatives, requests=requests, fastest=fastest, cache=cache, options=tune, build=build)
        sources = [each.compiled.source for each in others]
        return KernelChoices(requests, fastest, serial_plan, open_switchable, find, others=sources, exact=tune.exact)

    tuning = None
    if options.tune is not None and not options.tune.is_online:
        tuned, tuning = tune_kernels(partial(find_choices, options.tune, build_here), cache, options.tune, requests)
        if tuned is not None:
            built = [_replace_fastest(each, bundle) for each, bundle in zip(built, tuned, strict=True)]
            kernels = _model_kernels(tuned, classes)
            efficient = {i: each for i, each in efficient.items() if built[i].second is not None}
        clock.record("tune")

    def make_plan(schedule: Schedule | None) -> tuple[ModelPlan, tuple[PlannedStep, ...]]:
        return plan_with(kernels, schedule, efficient)

    chosen = choose_plan(
        options.plan,
        make_plan,
        open_switchable,
        hw,
        cache,
        measure=options.select is SelectionMode.MEASURE,
        generator=estimate_digest(hw, options.winograd),
    )
    clock.record("plan")
    others = {each.second.compiled.source.key: each.second for each in built if each.second is not None}
    bundles = (
        *(each.fastest for each in built),
        *(others[kernel.source.key] for kernel in chosen.plan.kernels[len(classes) :]),
    )
    online = None
    if options.tune is not None and options.tune.is_online and requests:

        def make_plans(fused: FusedGraph, kernels: Sequence[KernelBundle], *, share_memory: bool) -> dict[str, ModelPlan]:
            tuned = _model_kernels(kernels, fused.classes)
            make = partial(plan_with, tuned, efficient={}, share_memory=share_memory, fused=fused)
            return make_modelled_plans(str(options.plan), make, hw)

        online = OnlineSource(
            options.tune,
            fused,
            partial(_find_fusions, graph, weights, options, cache, fused, [each.fastest for each in built], boundaries),
            partial(find_choices, options.tune),
            lambda plan, samples: open_index(plan, cache, requests[0], require(options.tune, "tune"), samples),
            make_plans,
            chosen.choice.kind,
            shares_memory=options.share_memory,
        )
    return BuiltModel(chosen.plan, link, fused, bundles, clock.stages, hits, chosen.choice, tuning=tuning, online=online)


def rebuild_model(built: BuiltModel, assigned: Assignment, tuning: Tuning) -> BuiltModel:
    """Return a model with another graph, other kernels and another plan, which trials have found."""
    return replace(
        built,
        plan=assigned.plan,
        fused=assigned.graph,
        kernels=tuple(assigned.kernels),
        choice=PlanChoice(assigned.kind, is_measured=True),
        tuning=tuning,
    )


def _fuse_graph(graph: Graph, weights: Weights, options: ModelOptions, cache: KernelCache) -> tuple[FusedGraph, Boundaries]:
    """Return the graph after the passes, with its classes, and the boundaries of fusion that they have met."""
    boundaries = Boundaries(options.flipped)
    after, passes = transform_graph(graph, weights, options, cache, boundaries)
    return FusedGraph(after, passes, find_classes(after), options.flipped), boundaries


def _find_fusions(
    graph: Graph,
    weights: Weights,
    options: ModelOptions,
    cache: KernelCache,
    used: FusedGraph,
    kernels: Sequence[KernelBundle],
    boundaries: Boundaries,
    build: Build,
) -> FusionChoices:
    """Return the boundaries of a graph that the model cannot decide, with kernels for both sides."""
    tune = require(options.tune, "tune")
    call_s = sum(_seconds(kernel) * len(each.nodes) for kernel, each in zip(kernels, used.classes, strict=True))
    unsure = boundaries.list_unsure(MIN_SHARE * call_s, MAX_TRIED) if "fusion" in tune.variables else []

    def flip(flipped: Flipped) -> FusedGraph:
        return _fuse_graph(graph, weights, replace(options, flipped=flipped), cache)[0]

    def find_kernel(each: NodeClass) -> KernelBundle | None:
        try:
            (found,) = load_or_build([_request(each, options)], cache, tune, build)
        except (BuildError, NoCandidateError):
            return None
        return found[0] if found else None

    return FusionChoices(used, kernels, unsure, flip, find_kernel)


def transform_graph(
    graph: Graph, weights: Weights, options: ModelOptions, cache: KernelCache, boundaries: Boundaries | None = None
) -> tuple[Graph, tuple[PassReport, ...]]:
    """Return the graph after the passes, and what each did. The cache keeps the estimates that fusion compares.

    `boundaries` are those of fusion, by default the ones of the options.
    """
    hw = options.hardware
    if hosts := [node.name for node in graph.nodes if isinstance(node, HostNode)]:
        raise InvariantError(f"node {hosts[0]} is a function of Python: a graph is cut before its passes")
    costs = CostTable(hw, options.winograd, cache.load_costs(hw, options.winograd))
    known = dict(costs.stored)
    met = Boundaries(options.flipped) if boundaries is None else boundaries
    with pause_collector():
        graph, passes = run_passes(graph, weights, costs, fuse=options.fuse, boundaries=met)
    if costs.stored != known:
        cache.save_costs(hw, options.winograd, costs.stored)
    return graph, passes


def build_nodes(
    graph: Graph, options: ModelOptions, cache: KernelCache, known: Mapping[tuple[str, str], KernelBundle]
) -> dict[str, KernelBundle]:
    """Return the kernels of a transformed graph's nodes with their binaries, by `kernel_key`. Views and loops have none.

    `known` has kernels by a node's key and the text of its program, which are not built. Raises as `build_model` does.
    """
    classes = find_classes(graph)
    given = {i: known[key] for i, each in enumerate(classes) if (key := (each.nodes[0], each.expression)) in known}
    missing = [i for i in range(len(classes)) if i not in given]
    built, _ = _build_kernels([classes[i] for i in missing], [_request(classes[i], options) for i in missing], cache, no_progress)
    bundles = given | {i: each.fastest for i, each in zip(missing, built, strict=True)}
    bundles = dict(zip(bundles, link_kernels(tuple(bundles.values()), cache), strict=True))
    return {node: bundles[i] for i, each in enumerate(classes) for node in each.nodes}


def check_plan_kind(kind: object, hw: HardwareSpec) -> None:
    """Raise ArgumentError for a kind of plans that the device does not have."""
    is_cpu = hw.family is TargetKind.CPU
    if isinstance(kind, str):
        kinds = PLANS if is_cpu else GPU_PLANS
        if kind in kinds:
            if not is_cpu:
                check_lowering(kind, hw)
            return
        listed = ", ".join(map(repr, (*kinds, EAGER)))
        raise ArgumentError(f"plan must be one of {listed} for {hw.id}, got {short_repr(kind)}", code="invalid-option")
    if not isinstance(kind, Mapping):
        raise ArgumentError(f"plan must be a kind of plans, or a plan, got {short_repr(kind)}", code="invalid-option")
    if not is_cpu:
        raise ArgumentError(f"plan: {hw.id} is a GPU, and plans by hand are for CPUs", code="invalid-option")


def may_tune(options: ModelOptions) -> bool:
    """Return whether trials can be made on this machine, and may change what runs."""
    hw = options.hardware
    can_measure = hw.family is TargetKind.CPU and backend_for(hw).is_present(hw)
    return can_measure and options.fuse and isinstance(options.plan, str)


def check_tuning(options: ModelOptions) -> None:
    """Raise ArgumentError for trials that cannot be made, or would not choose."""
    hw = options.hardware
    if options.tune is None:
        return
    if hw.family is not TargetKind.CPU or not backend_for(hw).is_present(hw):
        raise ArgumentError(
            f"tune: trials are calls on this machine, which is not {hw.id}",
            code="cannot-measure",
            hint='tune="off", or target="local"',
        )
    if options.tune.is_background and options.select is SelectionMode.MEASURE:
        raise ArgumentError('tune="background" begins with select="model", and select="measure" is given', code="invalid-option")
    if not options.tune.is_background and options.select is SelectionMode.MODEL:
        raise ArgumentError('tune measures kernels, and select="model" does not', code="invalid-option")
    if options.tune.is_online and not isinstance(options.plan, str):
        raise ArgumentError(f'tune="{options.tune.kind}" changes the plan, and a plan by hand is given', code="invalid-option")


def lowering_kind(options: ModelOptions) -> str | None:
    """Return the kind of lowering that a plan of a GPU names; None: the fastest by the model."""
    return {AUTO: None, SERIAL: LAUNCHES.kind}.get(str(options.plan), str(options.plan))


@dataclass(frozen=True, slots=True)
class _GpuPlan:
    """A plan of a GPU, with a kernel for each class and what lowerings know of it."""

    plan: ModelPlan
    bundles: tuple[KernelBundle, ...]
    kernels: tuple[JoinedKernel, ...]


def _plan_for_gpu(plan: ModelPlan, bundles: Sequence[KernelBundle]) -> _GpuPlan:
    known = (JoinedKernel(each.compiled.resources, find_bundle_refusal(each), find_bundle_page_uses(each)) for each in bundles)
    return _GpuPlan(plan, tuple(bundles), tuple(known))


def _replace_by_joinable(planned: _GpuPlan, requests: Sequence[BuildRequest], cache: KernelCache) -> tuple[KernelBundle, ...]:
    """Return the kernels of a plan, each replaced by one that streams, or can join others, where that pays."""

    def replace_one(bundle: KernelBundle, known: JoinedKernel, request: BuildRequest) -> KernelBundle:
        others = cache.load_joinable(request)
        if others is None:
            fastest = require(load_plan(bundle), "plan of a kernel")
            other = find_joinable(request, fastest, is_cut=known.refused is not None)
            others = [] if other is None else [_package_joinable(bundle, other, request)]
            cache.save_joinable(request, others)
        return others[0] if others else bundle

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return tuple(pool.map(replace_one, planned.bundles, planned.kernels, requests))


def _package_joinable(bundle: KernelBundle, other: CandidateResult, request: BuildRequest) -> KernelBundle:
    hw = require(request.hardware, "device of a request")
    return store_tasks(replace_candidate(bundle, other), other, parse_request(request)[0], hw)


def _build_for_gpu(
    planned: Sequence[_GpuPlan],
    options: ModelOptions,
    weights: Weights,
    fused: FusedGraph,
    clock: StageTimer,
    hits: int,
    cache: KernelCache,
) -> BuiltModel:
    """Return a model whose binaries are those of its kernels, with the lowering of a kind, or the fastest.

    `planned`: plans with their kernels, of which each lowering takes the better one. Where the kernel of all operators
    spills registers, the operator that takes most of them becomes a launch, and so on.
    """
    hw = options.hardware
    plans = list(planned)
    first: ChosenLowering | None = None
    for tries in range(MAX_LEFT_OUT, -1, -1):
        chosen = choose_lowering(lowering_kind(options), [(each.plan, each.kernels) for each in plans], hw)
        first, number = first or chosen, chosen.plan_number

        def load(kernel: int, first_check: int, of: tuple[KernelBundle, ...] = plans[number].bundles) -> tuple[Tasks, ...]:
            return load_tasks(of[kernel], _request(fused.classes[kernel], options), first_check)

        lowered, joint = _lower(chosen, options, load, weights, cache)
        is_spilled = any(used.spill_bytes for each in joint for used in each.compiled.resources)
        relieved = chosen.without_hungriest(hw) if is_spilled and tries else None
        if relieved is None:
            break
        plans[number] = replace(plans[number], kernels=relieved)
    chosen = chosen.with_others_of(first or chosen)
    bundles = (*plans[number].bundles, *joint)
    clock.record("plan")
    seconds = {kind: each.seconds for kind, each in chosen.results.items() if isinstance(each, LoweringEstimate)}
    choice = PlanChoice(chosen.kind, seconds=seconds)
    lowerings, joined = chosen.to_json(), chosen.unrolled.kernels
    return BuiltModel(lowered, _link_nothing, fused, bundles, clock.stages, hits, choice, lowerings, joined=joined)


def _lower(
    chosen: ChosenLowering, options: ModelOptions, load: LoadTasks, weights: Weights, cache: KernelCache
) -> tuple[ModelPlan, tuple[KernelBundle, ...]]:
    """Return the plan that runs a call and the kernel that the lowering has made, unless the cache has them."""
    hw, unrolled = options.hardware, chosen.unrolled
    if not chosen.makes_kernel:
        return chosen.build(hw, load, weights), ()
    key = lowering_digest(chosen.kind, unrolled, estimate_digest(hw, options.winograd))
    content = cache.load_lowering(key)
    stored = None if content is None else read_lowering(content)
    bundle = None if stored is None else cache.load_joint(stored.joint)
    if stored is not None and bundle is not None:
        restored = stored.restore(unrolled, bundle.compiled.source, chosen.seconds, weights)
        if restored is not None:
            return restored, (bundle,)
    lowered = chosen.build(hw, load, weights)
    joint = lowered.kernels[-1]
    joint_key = _joint_key(joint.source)
    bundle = _build_joint_kernel(joint, joint_key, chosen.kind, hw, cache)
    cache.save_lowering(key, store_lowering(lowered, unrolled, joint_key, weights).to_bytes())
    return lowered, (bundle,)


def _joint_key(source: KernelSource) -> str:
    content = f"{source.key}\n{tool_version(source.language, source.arch)}"
    return hashlib.sha256(content.encode()).hexdigest()


def _build_joint_kernel(kernel: ModelKernel, key: str, kind: str, hw: HardwareSpec, cache: KernelCache) -> KernelBundle:
    """Return the kernel that a lowering has made of others, compiled unless the cache has it."""
    bundle = cache.load_joint(key)
    if bundle is None:
        compiled = compile_source(kernel.source)
        if any(launch.cooperative for launch in kernel.source.launches):
            check_resident(compiled, hw)
        bundle = KernelBundle(compiled, kind, hw.id, kernel_digest(compiled))
        cache.save_joint(key, bundle)
    return bundle


def _link_nothing(_: ModelPlan, __: str) -> bytes:
    """Return no binary: the kernels' own are the code of a GPU's model."""
    return b""


def _model_kernels(bundles: Sequence[KernelBundle], classes: Sequence[NodeClass]) -> list[ModelKernel]:
    return [_model_kernel(bundle, len(each.nodes)) for bundle, each in zip(bundles, classes, strict=True)]


def _model_kernel(bundle: KernelBundle, uses: int) -> ModelKernel:
    return ModelKernel(bundle.compiled.source, _seconds(bundle), uses)


def _request(each: NodeClass, options: ModelOptions) -> BuildRequest:
    search = {name: getattr(options, name) for name in options_of(SearchOptions)}
    return BuildRequest(
        each.expression,
        each.inputs,
        options.hardware.id,
        each.outputs,
        options.hardware,
        constants=each.constants,
        donate=each.donated,
        programmatic=has_programmatic_edges(options.hardware),
        **search,
    )


@dataclass(frozen=True, slots=True)
class _ClassKernels:
    """The kernels of a class: the fastest on all workers, and a second one if there is a use for it."""

    fastest: KernelBundle
    second: KernelBundle | None  # of a CPU the most efficient one


def _build_kernels(
    classes: Sequence[NodeClass], requests: Sequence[BuildRequest], cache: KernelCache, progress: Progress
) -> tuple[list[_ClassKernels], int]:
    """Return the kernels of each request, and how many the cache had.

    Raises UnsupportedModelError with every node that no kernel can compute.
    """
    built: list[_ClassKernels | InputError | None] = [_load_kernels(request, cache) for request in requests]
    missing = [i for i, kernels in enumerate(built) if kernels is None]
    done = len(requests) - len(missing)
    progress("kernels", done, len(requests))
    with pause_collector() if _are_modelled(requests) else nullcontext():  # what is measured may hold much memory
        for i, kernels in zip(missing, _build_missing([requests[i] for i in missing], cache), strict=True):
            built[i] = kernels
            if isinstance(kernels, _ClassKernels):
                done += 1
                progress("kernels", done, len(requests))
    unsupported = [
        UnsupportedNode(each.expression[:MAX_EXPRESSION_SHOWN], node.removeprefix("/"), result.message)
        for each, result in zip(classes, built, strict=True)
        if isinstance(result, InputError)
        for node in each.nodes
    ]
    if unsupported:
        raise UnsupportedModelError(tuple(unsupported))
    return [result for result in built if isinstance(result, _ClassKernels)], len(requests) - len(missing)


def _build_missing(requests: Sequence[BuildRequest], cache: KernelCache) -> Iterator[_ClassKernels | InputError]:
    """Yield the kernels of each request, or why there are none, in order.

    Candidates to measure are compiled on all cores, those of several requests at once, and then measured while nothing
    else runs. Where the model selects, the next text is emitted while compilers run, so that they use all cores; the
    interpreter runs one thread, so that the first text is not delayed by those of other threads.
    """
    cores = len(os.sched_getaffinity(0))
    if _are_modelled(requests):
        printing = Lock()

        def build(request: BuildRequest) -> _ClassKernels | InputError:
            return _select_kernels(_compile_candidates(request, printing), request, cache)

        with ThreadPoolExecutor(cores + EMITTING_THREADS) as pool:
            yield from pool.map(build, requests)
        return
    with ThreadPoolExecutor(cores) as pool:
        for first in range(0, len(requests), CLASSES_AT_ONCE * cores):
            batch = requests[first : first + CLASSES_AT_ONCE * cores]
            compiled = list(pool.map(_compile_candidates, batch))
            for candidates, request in zip(compiled, batch, strict=True):
                yield _select_kernels(candidates, request, cache)


def _are_modelled(requests: Sequence[BuildRequest]) -> bool:
    """Return whether the performance model selects, so that nothing is measured."""
    return all(request.select is SelectionMode.MODEL for request in requests)


def _load_kernels(request: BuildRequest, cache: KernelCache) -> _ClassKernels | None:
    fastest = cache.load(request)
    if fastest is None:
        return None
    return _ClassKernels(fastest, cache.load_efficient(request) if fastest.compiled.source.language is Language.C else None)


def _select_kernels(
    compiled: CompiledCandidates | InputError, request: BuildRequest, cache: KernelCache
) -> _ClassKernels | InputError:
    if isinstance(compiled, InputError):
        return compiled
    report = select_candidate(compiled)
    fastest, second = package_kernel(report), None
    if report.hardware.family is TargetKind.CUDA:
        fastest = store_tasks(fastest, report.winner, report.program, report.hardware)
    elif report.hardware.family is TargetKind.CPU:
        other = find_efficient(compiled, report)
        if other is not None:
            second = package_candidate(other, report)
            cache.save_efficient(request, second)
    for each in (fastest, second) if compiled.backend is None else ():  # objects of measured candidates have all of them
        if each is not None and each.compiled.object_code:
            source = each.compiled.source
            cache.save_object(object_key(source, kernel_unit(source)), each.compiled.object_code)
    cache.save(request, fastest)
    return _ClassKernels(fastest, second)


def _replace_fastest(kernels: _ClassKernels, fastest: KernelBundle) -> _ClassKernels:
    """Return the kernels with another fastest one, which may have a workspace: no efficient one can then replace it."""
    return kernels if fastest is kernels.fastest else _ClassKernels(fastest, None)


def _compile_candidates(
    request: BuildRequest, printing: AbstractContextManager[object] = NOT_SHARED
) -> CompiledCandidates | InputError:
    try:
        return compile_candidates(request, for_model=True, printing=printing)
    except InputError as error:
        return error


def _seconds(bundle: KernelBundle) -> float:
    seconds = (bundle.estimate or {}).get("seconds", 0.0)
    return float(seconds)


def _link(plan: ModelPlan, name: str, cache: KernelCache, hw: HardwareSpec) -> bytes:
    """Link the kernels' objects and the plan's unit to the shared object of a model of that name."""
    sources = [kernel.source for kernel in plan.kernels]  # also of other rKernels than the fastest
    return _link_unit(model_unit(plan), sources, name, cache, hw)


def _link_switchable(plan: ModelPlan, sources: Sequence[KernelSource], cache: KernelCache, hw: HardwareSpec) -> bytes:
    """Link kernels to a shared object whose functions are given the tables of a plan."""
    unit = switchable_unit(plan, list_functions(sources), hw.num_cores)
    return _link_unit(unit, sources, MODEL, cache, hw)


def _model_source(name: str, hw: HardwareSpec) -> KernelSource:
    """Return what determines how the text of a model of that name is compiled and linked."""
    return KernelSource(name, Language.C, hw.arch, "", (), (), options=("-fopenmp",))


def _link_unit(text: str, sources: Sequence[KernelSource], name: str, cache: KernelCache, hw: HardwareSpec) -> bytes:
    objects = compile_objects(sources, cache)
    model = _model_source(name, hw)
    objects[MODEL] = compile_once(model, text, cache, parallel=True)
    return link_model(model, exported_functions(name), objects)
