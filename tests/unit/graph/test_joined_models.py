"""Models as one kernel, launched once a wave or persistent: the bits of separate launches, refusals, estimates."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_models import DECODE_MODELS, MODELS, PARTIAL, RAMMER_MODELS, constant, graph, node, tensor
from joined_models import MODELS as LARGE_MODELS
from joined_models import check_case, make_case

from roller_svc import hardware
from roller_svc.compiler import joinable
from roller_svc.compiler.explain import parse_request, rank_request
from roller_svc.compiler.joinable import cut_seconds, find_joinable
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.compiler.lower_and_emit import find_plan_refusal
from roller_svc.compiler.plans import merge_ranked_plans
from roller_svc.compiler.request import build_request
from roller_svc.compiler.rtasks import SPILLS, find_bundle_refusal
from roller_svc.errors import ArgumentError, InvariantError, LaunchError, RollerWarning
from roller_svc.graph import compile as graph_compile
from roller_svc.graph import lowerings
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.lowerings import LOWERING_KINDS, MARGIN, joined, may_use_slower, persistent, programs, waves
from roller_svc.graph.lowerings.joined import NOT_JOINABLE_CODE, find_refusal, occupancy_factors, table_seconds
from roller_svc.graph.lowerings.lowering import JoinedKernel, LoweringEstimate, Refusal, UnrolledPlan
from roller_svc.graph.lowerings.stored import lowering_digest
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, Resources
from roller_svc.ir.model_plan import PACKED, CopyStep, KernelStep, ModelKernel, ModelPlan, unroll_steps
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import CandidateResult
from roller_svc.ir.vdevice import VDevicePlan, WaitEvent
from roller_svc.model import Model, compile_model, load_model
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.runtime.graphs.emulated import EmulatedModel
from roller_svc.runtime.saved.serialization import KernelBundle
from roller_svc.settings import read_settings, use
from roller_svc.toolchain import compile_cxx

H200, A100 = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb"
CORES = 8  # as many blocks as the emulator runs together
ALL = {**{name: MODELS[name] for name in ("branches", "pieces", "views", "slices", "lookups", "images")}, **RAMMER_MODELS}
KNOWN = {**ALL, **DECODE_MODELS, "partial": PARTIAL}
load_spec = hardware.load


def spec(target: str, cores: int = CORES) -> HardwareSpec:
    return dataclasses.replace(load_spec(target), num_cores=cores)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "load", spec)


def compiled(name: str, target: str = A100, **options: Any) -> Model:
    given = {"select": "model", "top_k": 1, "runtime": "emulator"} | options
    return compile_model(copy.deepcopy(KNOWN[name]), target, **given)


@cache
def expected(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs of a model, and what the interpreter makes of them."""
    weights, rng = Weights(), np.random.default_rng(1)
    loaded = load_graph(copy.deepcopy(KNOWN[name]), weights)
    arrays = {
        each: rng.integers(0, 7, type_.shape).astype(np.int32)
        if type_.dtype.value == "int32"
        else rng.standard_normal(type_.shape).astype(type_.dtype.value)
        for each, type_ in loaded.inputs
    }
    return arrays, interpret(loaded, weights, arrays)


def plan_of(model: Model) -> ModelPlan:
    return model._variants[0].plan


def unrolled_of(model: Model) -> UnrolledPlan:
    known = tuple(JoinedKernel(bundle.compiled.resources) for bundle in model._kernel_bundles)
    return UnrolledPlan(plan_of(model), tuple(unroll_steps(plan_of(model).steps)), known)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize(("name", "target"), [*((name, A100) for name in ALL), *((name, H200) for name in RAMMER_MODELS)])
def test_one_kernel_has_the_bits_of_separate_launches(name: str, target: str) -> None:
    arrays, wanted = expected(name)
    launches = compiled(name, target, plan="launches").run(arrays)
    for kind in (waves.KIND, persistent.KIND):
        model = compiled(name, target, plan=kind)
        assert model.report["plan"] == kind
        results = model.run(arrays)
        for output, value in wanted.items():
            np.testing.assert_allclose(results[output], value, rtol=2e-5, atol=2e-5, err_msg=f"{kind} {output}")
            np.testing.assert_array_equal(results[output], launches[output], err_msg=f"{kind} {output}")
        assert len(plan_of(model).steps) == (1 if kind == persistent.KIND else model.report["lowerings"][kind]["launches"])
        assert model.plan["launches"] == model.report["lowerings"][kind]["launches"]


LENGTH = 19  # keys
BEYOND = 8  # pages, of a tile of keys
SEEDS = 8


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [A100, H200])
@pytest.mark.parametrize("name", DECODE_MODELS)
def test_a_decode_layer_with_a_paged_cache_is_one_kernel(name: str, target: str) -> None:
    """Pages of tiles beyond the length are not read: their numbers are no pages."""
    rng = np.random.default_rng(1)
    weights = Weights()
    loaded = load_graph(copy.deepcopy(DECODE_MODELS[name]), weights)
    given: dict[str, Any] = {
        each: rng.standard_normal(type_.shape).astype(ml_dtypes.bfloat16 if type_.dtype is DType.BFLOAT16 else type_.dtype.value)
        for each, type_ in loaded.inputs
        if type_.dtype is not DType.INT32
    }
    pages = dict(loaded.inputs)["pages"].shape[1]
    given |= {"position": np.array([LENGTH - 1], np.int32), "lengths": np.array([LENGTH], np.int32)}
    given |= {"pages": np.arange(pages, 0, -1, dtype=np.int32).reshape(1, pages)}
    wanted = interpret(loaded, weights, given)
    given["pages"][:, BEYOND:] = 1 << 20

    def check(run: Callable[[Any, Any], dict[str, Any]], seed: int = 0) -> dict[str, Any]:
        states = {state: given[state].copy() for state in loaded.states}
        found = run({each: array for each, array in given.items() if each not in states}, states) | states
        for output, value in wanted.items():
            got, want = np.float32(found[output]), np.float32(value)
            np.testing.assert_allclose(got, want, rtol=2e-2, atol=1e-2 * abs(want).max(), err_msg=f"{output}, seed {seed}")
        return found

    launches = compiled(name, target, plan="launches")
    plain = check(lambda arrays, states: launches.run(arrays, states=states))
    model = compiled(name, target, plan=persistent.KIND)
    plan = plan_of(model)
    assert len(plan.steps) == 1
    kernels, block = [bundle.compiled for bundle in model._kernel_bundles], model._variants[0].loaded.weights
    assert all(used.spill_bytes == 0 for used in kernels[-1].resources)
    first = None
    for seed in range(SEEDS):
        found = check(EmulatedModel(plan, kernels, block, compile_cxx, seed=seed, races=seed >= SEEDS - 2).run, seed)
        first = first or found
        for output, value in first.items():
            np.testing.assert_array_equal(found[output], value)
    for state in loaded.states:
        np.testing.assert_array_equal(found[state], plain[state])


@pytest.mark.slow
@pytest.mark.emulator
def test_a_large_model_is_one_kernel_with_the_bits_of_launches_graph_and_waves() -> None:
    """RAMMER's example of 1024 x 1024. tests/support/joined_models.py runs more models, orders and targets."""
    is_right, line = check_case(make_case(LARGE_MODELS["sigmoid"]()), H200, orders=1)
    assert is_right, line
    assert "in 1 launches" in line


@pytest.fixture
def no_joinable(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[None]:
    """No kernel is sought for a node whose fastest one cannot join. Kernels of such a build are kept apart."""
    monkeypatch.setattr(graph_compile, "find_joinable", lambda *_, **__: None)
    use(read_settings(cache=folder / "without"))
    yield
    use(read_settings(cache=folder))


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.usefixtures("no_joinable")
def test_a_node_that_cannot_join_is_a_launch_between_two_of_the_kernel(tmp_path: Path) -> None:
    arrays, wanted = expected("partial")
    launches = compiled("partial", H200, plan="launches").run(arrays)
    model = compiled("partial", H200, plan=persistent.KIND)
    plan, refused = plan_of(model), model.report["lowerings"][waves.KIND]
    assert "node 'product' cannot join" in refused["refused"]
    cooperative = [plan.kernels[step.kernel].source.launches[step.launch].cooperative for step in plan.steps]
    assert (cooperative, plan.steps[1].node) == ([True, False, True], "product")
    assert plan.steps[0].kernel == plan.steps[2].kernel  # two launches of one function
    assert plan.steps[0].zeroed != plan.steps[2].zeroed
    assert [step.node for step in plan.fallback] == [
        step.node for step in plan_of(compiled("partial", H200, plan="launches")).steps
    ]
    assert model.plan["launches"] == model.report["lowerings"][persistent.KIND]["launches"] == 5
    loaded = load_model(model.save(tmp_path), runtime="emulator")
    assert plan_of(loaded) == plan
    results = loaded.run(arrays)
    for output, value in wanted.items():
        np.testing.assert_allclose(results[output], value, rtol=2e-3, atol=1e-3)
        np.testing.assert_array_equal(results[output], launches[output])


@pytest.mark.slow
@pytest.mark.emulator
def test_a_slower_kernel_that_joins_is_taken_where_a_cut_costs_more() -> None:
    arrays, wanted = expected("partial")
    model = compiled("partial", H200, plan=persistent.KIND)
    plan, fastest = plan_of(model), plan_of(compiled("partial", H200, plan="launches"))
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    assert plan.kernels[step.kernel].source.launches[step.launch].cooperative
    number = next(each.kernel for each in fastest.steps if each.node == "product" and isinstance(each, KernelStep))
    product, slower = fastest.kernels[number], plan.kernels[number]
    assert product.source.launches[-1].tensor_maps
    assert not slower.source.launches[-1].tensor_maps
    assert slower.estimate_s < product.estimate_s + cut_seconds(spec(H200))
    results = model.run(arrays)
    for output, value in wanted.items():
        np.testing.assert_allclose(results[output], value, rtol=2e-3, atol=1e-3)
    # a warm build has the second kernel too
    again = compiled("partial", H200, plan=persistent.KIND)
    assert (again.digest, again.report["cache"]["misses"]) == (model.digest, 0)


@pytest.mark.parametrize(
    ("target", "shape", "dtype", "limit", "is_sought"),
    [(H200, (256, 256), "float16", None, True), (H200, (4096, 4096), "float16", None, False),
     (A100, (256, 256), "float16", None, False), (H200, (256, 256), "float32", None, False),
     (H200, (256, 256), "float16", 0, True), (H200, (128, 4096), "float16", None, True),
     (H200, (128, 4096), "float16", 0, False)],  # the products of parts of k would be stored
)  # fmt: skip
def test_a_kernel_that_joins_is_sought_where_the_fastest_cannot_and_a_cut_costs_more(
    target: str, shape: tuple[int, int], dtype: str, limit: int | None, is_sought: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "load", load_spec)
    inputs = {"A": TensorType(DType(dtype), shape), "B": TensorType(DType(dtype), shape[::-1])}
    options: dict[str, Any] = {"target": target, "select": "model", "top_k": 1, "max_workspace_bytes": limit}
    request = build_request("C[i, j]: float32 +=! A[i, k] * B[k, j]", inputs, **options)
    forms, hw = parse_request(request), load_spec(target)
    program, ranked = forms[0], rank_request(request, forms, hw)
    (best,) = merge_ranked_plans(ranked, 1)
    winner = CandidateResult(best.plan, best.groups, None, None, None, None)
    monkeypatch.setattr(joinable, "build_alone", lambda grouped, *_: dataclasses.replace(winner, plan=grouped.plan))
    can_join = find_plan_refusal(best.plan, program, best.groups, hw) is None
    found = None if can_join else find_joinable(request, best.plan, is_cut=True)
    assert (found is not None) == is_sought
    if found is not None:
        assert find_plan_refusal(found.plan, program, found.groups, hw) is None
        assert found.plan.estimate.seconds <= best.plan.estimate.seconds + cut_seconds(hw)


@pytest.mark.usefixtures("no_joinable")
def test_a_segment_that_costs_more_than_its_launches_stays_launches() -> None:
    unrolled, hw = unrolled_of(compiled("partial", H200, plan="launches")), spec(H200)
    kernels = tuple(JoinedKernel(each.resources, "tensor maps" if i == 2 else None) for i, each in enumerate(unrolled.kernels))
    unrolled = dataclasses.replace(unrolled, kernels=kernels)

    def joined_steps(launch_s: float) -> list[tuple[int, ...]]:
        limits = dataclasses.replace(hw.limits, launch_overhead_s=launch_s)
        segments = persistent._cut(unrolled, dataclasses.replace(hw, limits=limits))
        assert not isinstance(segments, Refusal)
        return [each.steps for each in segments if each.is_joined]

    # two or three launches against a cooperative one, a fill, and waits between the steps
    assert joined_steps(12e-6) == [(0, 1), (3, 4, 5)]
    assert joined_steps(7e-6) == [(3, 4, 5)]
    assert joined_steps(1e-6) == [(0, 1), (3, 4, 5)]  # none pays: its seconds tell that


@pytest.mark.emulator
@pytest.mark.parametrize("kind", [waves.KIND, persistent.KIND])
@pytest.mark.parametrize("name", ["branches", "pieces", "lstm"])
def test_no_order_of_threads_changes_a_result(name: str, kind: str) -> None:
    model = compiled(name, plan=kind)
    plan, block = plan_of(model), model._variants[0].loaded.weights
    kernels = [bundle.compiled for bundle in model._kernel_bundles]
    arrays, wanted = expected(name)
    for seed in range(6):
        emulated = EmulatedModel(plan, kernels, block, compile_cxx, seed=seed, races=seed > 2)
        for _ in range(2):  # the events of a call are zero again in the next one
            results = emulated.run(arrays)
            for output, value in wanted.items():
                np.testing.assert_allclose(results[output], value, rtol=2e-5, atol=2e-5)


@pytest.mark.emulator
@pytest.mark.parametrize("kind", [waves.KIND, persistent.KIND])
def test_a_saved_model_has_its_kernel_and_tables(kind: str, tmp_path: Path) -> None:
    model = compiled("lookups", plan=kind)
    saved = model.save(tmp_path)
    assert {each.name for each in saved.iterdir()} == {"kernels", "metadata.json", "weights.bin"}
    loaded = load_model(saved, runtime="emulator")
    assert (loaded.digest, loaded.report["plan"], len(loaded.kernels)) == (model.digest, kind, 2)
    arrays = expected("lookups")[0]
    np.testing.assert_array_equal(loaded.run(arrays)["out"], model.run(arrays)["out"])
    metadata = json.loads((saved / "kernels" / "1" / "metadata.json").read_text())
    cooperative = [launch.get("cooperative", False) for launch in metadata["launches"]]
    assert cooperative == [kind == persistent.KIND] * len(cooperative)
    other = json.loads((saved / "kernels" / "0" / "metadata.json").read_text())
    assert all("cooperative" not in launch for launch in other["launches"])  # as saved before
    assert [launch.cooperative for launch in loaded._kernel_bundles[1].compiled.source.launches] == cooperative


def test_a_cooperative_launch_without_its_events_is_refused(tmp_path: Path) -> None:
    saved = compiled("lookups", plan=persistent.KIND).save(tmp_path)
    metadata = json.loads((saved / "metadata.json").read_text())
    (step,) = metadata["variants"][0]["plan"]["steps"]
    step["zeroed"] = []
    (saved / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ArgumentError, match="has no events that are zero before it"):
        load_model(saved)


def test_a_cooperative_kernel_is_launched_by_its_model_alone(tmp_path: Path) -> None:
    model = compiled("lookups", plan=persistent.KIND)
    kernel = model.kernels[-1]
    kernel.save(tmp_path / "plain")
    with pytest.raises(ArgumentError, match="has a cooperative launch") as raised:
        kernel.save(tmp_path / "launcher", launcher="ctypes")
    assert raised.value.code == "unknown-launcher"
    with pytest.raises(LaunchError, match="which only its model makes"):
        CudaModule(model._kernel_bundles[-1].compiled)


def test_a_kernel_of_many_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled("branches", plan=persistent.KIND)

    def refuse(_: object) -> CompiledKernel:
        raise AssertionError("the cache has this kernel")

    monkeypatch.setattr(graph_compile, "compile_source", refuse)
    assert compiled("branches", plan=persistent.KIND).digest == first.digest


def test_what_a_lowering_made_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    use(read_settings(cache=folder / "lowered"))
    first = compiled("branches", plan=persistent.KIND)
    build = lowerings.ChosenLowering.build
    built: list[str] = []

    def noted(self: lowerings.ChosenLowering, *arguments: Any) -> ModelPlan:
        built.append(self.kind)
        return build(self, *arguments)

    monkeypatch.setattr(lowerings.ChosenLowering, "build", noted)
    again = compiled("branches", plan=persistent.KIND)
    assert (again.digest, plan_of(again), built) == (first.digest, plan_of(first), [])
    for each in plan_of(first).weights:
        at = slice(each.offset_bytes, each.offset_bytes + each.type.bytes)
        np.testing.assert_array_equal(*(model._variants[0].loaded.weights[at] for model in (first, again)))
    (kept,) = (folder / "lowered" / "lowerings").iterdir()
    content = kept.read_bytes()
    digest = hashlib.sha256(b"no arrays").hexdigest().encode()
    for damaged in (content[:-1], b"", digest + b"\nno arrays"):
        kept.write_bytes(damaged)
        assert compiled("branches", plan=persistent.KIND).digest == first.digest
        assert kept.read_bytes() == content
    assert built == [persistent.KIND] * 3
    assert compiled("branches", plan=waves.KIND).digest != first.digest  # of another key
    use(read_settings(cache=folder))


def test_a_lowering_of_other_kernels_resources_or_devices_has_another_key() -> None:
    unrolled = unrolled_of(compiled("branches", plan="launches"))
    (first, *others), (kernel, *more) = unrolled.kernels, unrolled.plan.kernels
    hungry = tuple(dataclasses.replace(each, registers_per_thread=each.registers_per_thread + 1) for each in first.resources)
    slower = dataclasses.replace(unrolled.plan, kernels=(dataclasses.replace(kernel, estimate_s=2 * kernel.estimate_s), *more))
    keys = [
        lowering_digest(waves.KIND, unrolled, "device"),
        lowering_digest(persistent.KIND, unrolled, "device"),
        lowering_digest(waves.KIND, unrolled, "another"),
        lowering_digest(waves.KIND, dataclasses.replace(unrolled, kernels=(JoinedKernel(hungry), *others)), "device"),
        lowering_digest(waves.KIND, dataclasses.replace(unrolled, kernels=(JoinedKernel(first.resources, "x"), *others)), "device"),
        lowering_digest(waves.KIND, dataclasses.replace(unrolled, plan=slower), "device"),
    ]
    assert len(set(keys)) == len(keys)


def test_a_kernel_that_spills_registers_joins_no_other() -> None:
    bundle = compiled("lstm", plan="launches")._kernel_bundles[0]
    assert find_bundle_refusal(bundle) is None
    used = tuple(dataclasses.replace(each, spill_bytes=8) for each in bundle.compiled.resources)
    spilled = dataclasses.replace(bundle, compiled=dataclasses.replace(bundle.compiled, resources=used))
    assert find_bundle_refusal(spilled) == SPILLS


@pytest.mark.parametrize("spilling", [1, 2, 99])
def test_kernels_become_launches_until_that_of_all_spills_no_register(spilling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    build = graph_compile._build_joint_kernel
    joined_counts: list[int] = []

    def spilled(joint: ModelKernel, *arguments: Any) -> KernelBundle:
        bundle = build(joint, *arguments)
        joined_counts.append(joint.source.text.count("__device__ __noinline__ void rtask_"))
        if len(joined_counts) > spilling:
            return bundle
        used = tuple(dataclasses.replace(each, spill_bytes=8) for each in bundle.compiled.resources)
        return dataclasses.replace(bundle, compiled=dataclasses.replace(bundle.compiled, resources=used))

    monkeypatch.setattr(KernelCache, "load_lowering", nothing)
    monkeypatch.setattr(graph_compile, "_build_joint_kernel", spilled)
    plan = plan_of(compiled("encoder", plan=persistent.KIND))
    assert len(joined_counts) == min(spilling, graph_compile.MAX_LEFT_OUT) + 1
    assert all(later < earlier for earlier, later in itertools.pairwise(joined_counts))
    alone = {step.kernel for step in plan.steps if isinstance(step, KernelStep)} - {len(plan.kernels) - 1}
    assert len(alone) >= min(spilling, graph_compile.MAX_LEFT_OUT)


def test_a_slower_kernel_is_sought_only_for_a_lowering_that_may_use_it() -> None:
    unrolled, hw = unrolled_of(compiled("lstm", plan="launches")), spec(A100)
    plan, cannot = unrolled.plan, tuple(JoinedKernel(each.resources, "clusters") for each in unrolled.kernels)
    kinds = (*LOWERING_KINDS, None)
    assert [may_use_slower(kind, plan, unrolled.kernels, hw) for kind in kinds] == [False] * 5  # all join as they are
    free = dataclasses.replace(hw.limits, cooperative_launch_s=0.0, signal_s=0.0, wait_s=0.0)
    slow = dataclasses.replace(hw.limits, cooperative_launch_s=1.0, launch_overhead_s=0.1, graph_node_s=1e-9)
    for limits, wins in ((free, True), (slow, False)):
        device = dataclasses.replace(hw, limits=limits)
        assert [may_use_slower(kind, plan, cannot, device) for kind in kinds] == [False, False, True, True, wins]


def test_the_report_has_every_lowering_and_auto_takes_the_simplest_within_a_margin() -> None:
    for name in ("branches", "lstm", "sigmoid"):
        report = compiled(name).report
        assert tuple(report["lowerings"]) == LOWERING_KINDS
        seconds = {kind: each["seconds"] for kind, each in report["lowerings"].items()}
        chosen = LOWERING_KINDS.index(report["plan"])
        assert all(seconds[report["plan"]] <= MARGIN * seconds[kind] for kind in LOWERING_KINDS[:chosen])
        assert all(seconds[kind] >= MARGIN * seconds[report["plan"]] for kind in LOWERING_KINDS[chosen + 1 :])


def test_estimates_have_the_terms_of_the_spec() -> None:
    model, hw = compiled("lstm", plan="launches"), spec(A100)
    unrolled = unrolled_of(model)
    by_waves, by_events = waves.estimate(unrolled, hw), persistent.estimate(unrolled, hw)
    assert isinstance(by_waves, LoweringEstimate)
    assert isinstance(by_events, LoweringEstimate)
    limits, count = hw.limits, by_waves.launches
    assert None not in (limits.cooperative_launch_s, limits.signal_s, limits.wait_s)
    assert occupancy_factors(unrolled, hw, 1) == [1.0] * len(unrolled.steps)
    events_s = (count - 1) * (limits.signal_s + limits.wait_s) + limits.cooperative_launch_s + limits.launch_overhead_s
    tables_s = (count - 1) * table_seconds(1, hw)  # which arrive while blocks wait for events
    assert by_events.seconds - by_waves.seconds == pytest.approx(events_s - tables_s - count * limits.launch_overhead_s)
    before_ampere = dataclasses.replace(hw, arch=Arch("sm_", 75))
    later = persistent.estimate(unrolled, before_ampere)
    assert isinstance(later, LoweringEstimate)
    assert later.seconds - by_events.seconds == pytest.approx(tables_s)
    slow = dataclasses.replace(hw, limits=dataclasses.replace(limits, signal_s=0.0, wait_s=0.0))
    assert persistent.gap_seconds(slow) == hw.levels[0].latency_s  # of the arguments
    without = dataclasses.replace(hw, limits=dataclasses.replace(limits, wait_s=None))
    refused = persistent.refuse(without)
    assert isinstance(refused, Refusal)
    assert "wait_s" in refused.reason


def test_a_step_takes_longer_where_a_hungrier_one_leaves_fewer_blocks_on_a_core() -> None:
    unrolled, hw = unrolled_of(compiled("encoder", plan="launches")), spec(A100, 1)
    hungry = max(range(len(unrolled.kernels)), key=lambda i: unrolled.plan.kernels[i].source.launches[-1].grid)
    kernels = tuple(
        JoinedKernel(tuple(Resources(255 if i == hungry else 16, 0, 0) for _ in each.resources))
        for i, each in enumerate(unrolled.kernels)
    )
    factors = occupancy_factors(dataclasses.replace(unrolled, kernels=kernels), hw)
    assert all(factor >= 1 for factor in factors)
    limited = occupancy_factors(dataclasses.replace(unrolled, kernels=kernels), hw, 1)
    assert max(limited) > 1
    assert all(a <= b for a, b in zip(factors, limited, strict=True))
    assert occupancy_factors(unrolled, spec(A100, 10_000), 1) == [1.0] * len(unrolled.steps)


# refusals -------------------------------------------------------------------------------------------------------------

LARGE = graph(
    {"x": tensor(4096, 4096, dtype="float16")},
    {},
    [
        node("product", "C[i, j] +=! A[i, k] * B[k, j]", A="x", B="x"),
        node("out", "C[i] >=! A[i, j]", A="product"),
    ],
    "out",
    name="large",
)


def test_a_node_that_cannot_join_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "load", load_spec)
    model = compile_model(copy.deepcopy(LARGE), H200, select="model", top_k=1, runtime="emulator")
    own = "its blocks are in clusters of 2"
    reasons = {
        waves.KIND: f"node 'product' cannot join a kernel of others: {own}",
        # the other one can, but is alone
        persistent.KIND: "no two operations of a call can join in one kernel before or behind the same launches, "
        f"and 'product' cannot: {own}",
    }
    for kind, reason in reasons.items():
        refused = model.report["lowerings"][kind]
        assert refused["code"] == NOT_JOINABLE_CODE
        assert refused["refused"] == reason
        with pytest.raises(ArgumentError, match=f"'product' cannot.*: {own}") as raised:
            compile_model(copy.deepcopy(LARGE), H200, select="model", top_k=1, plan=kind)
        assert raised.value.code == NOT_JOINABLE_CODE


def test_devices_and_plans_that_cannot_have_one_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    unrolled, hw = unrolled_of(compiled("branches", plan="launches")), spec(A100)
    assert find_refusal(unrolled, hw) is None

    def reason(plan: UnrolledPlan, device: HardwareSpec) -> tuple[str, str]:
        refused = find_refusal(plan, device)
        assert refused is not None
        return refused.reason, refused.code

    assert "NVIDIA" in reason(unrolled, load_spec("amd-mi300x"))[0]
    assert "not known" in reason(dataclasses.replace(unrolled, kernels=()), hw)[0]
    small = dataclasses.replace(hw, limits=dataclasses.replace(hw.limits, shared_bytes_per_block=8))
    message, code = reason(unrolled, small)
    assert ("bytes of shared memory in a block" in message, code) == (True, "persistent-too-large")
    empty = dataclasses.replace(unrolled.plan, inputs=(("x", dataclasses.replace(unrolled.plan.inputs[0][1], shape=(0,))),))
    assert "no elements" in reason(dataclasses.replace(unrolled, plan=empty), hw)[0]
    monkeypatch.setattr(joined, "MAX_OPERATORS", 3)
    assert "4 operations" in reason(unrolled, hw)[0]
    monkeypatch.setattr(persistent, "cut_into_segments", None)  # the number is known before they are cut
    too_many = persistent.estimate(unrolled, hw)
    assert isinstance(too_many, Refusal)
    assert too_many.code == NOT_JOINABLE_CODE
    assert too_many.reason.startswith("4 operations of a call would join, expected 1 to 3")
    monkeypatch.setattr(joined, "MAX_OPERATORS", 99)
    monkeypatch.setattr(joined, "MAX_SLOTS", 4)
    assert "inputs, outputs and states" in reason(unrolled, hw)[0]


def test_a_kernel_that_fits_no_core_is_refused_before_it_is_compiled() -> None:
    little = dataclasses.replace(spec(A100).limits, max_threads_per_block=16)
    unrolled = unrolled_of(compiled("encoder", plan="launches"))
    refused = persistent.estimate(unrolled, dataclasses.replace(spec(A100), limits=little))
    assert isinstance(refused, Refusal)
    assert refused.code == "persistent-too-large"


def test_a_kernel_with_too_many_registers_for_the_others_is_a_launch() -> None:
    unrolled, hw = unrolled_of(compiled("encoder", plan="launches")), spec(A100)
    hungry = unrolled.steps[0].kernel
    used = [Resources(250 if number == hungry else 32, 0, 0) for number in range(len(unrolled.kernels))]
    known = tuple(JoinedKernel((each,) * len(kernel.resources)) for each, kernel in zip(used, unrolled.kernels, strict=True))
    unrolled = dataclasses.replace(unrolled, kernels=known)
    few = dataclasses.replace(hw, limits=dataclasses.replace(hw.limits, registers_per_core=100 * 256))
    assert joined.find_hungriest(unrolled) == hungry
    steps = persistent.find_joined_steps(unrolled, few)
    assert steps
    assert all(unrolled.steps[step].kernel != hungry for step in steps)
    assert any(unrolled.steps[step].kernel == hungry for step in persistent.find_joined_steps(unrolled, hw))


def test_the_emulator_runs_few_blocks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "load", load_spec)
    model = compiled("branches", plan=persistent.KIND)
    arrays, wanted = expected("branches")
    with pytest.warns(RollerWarning, match="108 blocks that run together.* runs as launches"):
        found = model.run(arrays)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
    plan = dataclasses.replace(plan_of(model), fallback=())
    with pytest.raises(LaunchError, match="108 blocks that run together") as raised:
        EmulatedModel(plan, (), np.zeros(0, np.uint8), compile_cxx)
    assert raised.value.code == "persistent-too-large"


# faults ---------------------------------------------------------------------------------------------------------------


def nothing(*_: object) -> None:
    """Return nothing: a cache that has no lowering."""


def test_a_plan_without_a_wait_is_found_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = persistent.schedule_by_ranges
    dropped = 0

    def without_wait(*arguments: Any) -> VDevicePlan:
        plan: VDevicePlan = schedule(*arguments)
        at = [(veu, i) for veu, program in enumerate(plan.programs) for i, e in enumerate(program) if isinstance(e, WaitEvent)]
        veu, i = at[dropped]
        programs = list(plan.programs)
        programs[veu] = (*programs[veu][:i], *programs[veu][i + 1 :])
        return dataclasses.replace(plan, programs=tuple(programs))

    def refuse(_: object) -> CompiledKernel:
        raise AssertionError("a wrong plan is compiled")

    monkeypatch.setattr(KernelCache, "load_lowering", nothing)
    monkeypatch.setattr(persistent, "schedule_by_ranges", without_wait)
    monkeypatch.setattr(graph_compile, "compile_source", refuse)
    for number in range(3):
        dropped = number
        with pytest.raises(InvariantError, match="depends on"):
            compiled("encoder", plan=persistent.KIND)


def test_programs_of_veus_are_read_back_from_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = persistent.schedule_by_ranges
    noted: list[VDevicePlan] = []

    def note(*arguments: Any) -> VDevicePlan:
        noted.append(schedule(*arguments))
        return noted[-1]

    monkeypatch.setattr(KernelCache, "load_lowering", nothing)
    monkeypatch.setattr(persistent, "schedule_by_ranges", note)
    model = compiled("encoder", plan=persistent.KIND)
    ((step,), (device,)) = plan_of(model).steps, noted
    nodes = [each.node for each in unroll_steps(plan_of(model).fallback)]
    assert isinstance(step, KernelStep)

    def shown(each: Any) -> dict[str, list[Any]]:
        if isinstance(each, WaitEvent):
            return {"wait": [step.events[each.event]]}
        return {"execute": [nodes[each.operator], each.first, each.count]}

    expected_programs = [[shown(each) for each in program] for program in device.programs]
    assert model.programs() == [expected_programs]
    assert load_model(model.save(tmp_path), runtime="emulator").programs() == [expected_programs]
    assert compiled("encoder", plan=waves.KIND).programs() == []


@pytest.mark.parametrize(
    ("text", "names", "nodes"),
    [
        ("a, b, c", "a|b|c", ["a", "b", "c"]),
        ("a, b, c, d", "a, b|d|c", ["a, b", "c", "d"]),
        ("a, b, c, d", "a|b, c, d|b", ["a", "b, c, d"]),
        ("a, b", "a|b|a, b", []),  # it may be two nodes, or one
        ("a, b, c", "a, b", []),
    ],
)
def test_names_of_nodes_may_have_commas(text: str, names: str, nodes: list[str]) -> None:
    plan: Any = SimpleNamespace(fallback=tuple(KernelStep(name, 0, 0, ()) for name in names.split("|")))
    assert programs._split_nodes(text, plan) == nodes


def test_waves_that_overlap_dependent_nodes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def merged(predecessors: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(range(len(predecessors)))]

    monkeypatch.setattr(KernelCache, "load_lowering", nothing)
    monkeypatch.setattr(waves, "find_waves", merged)
    with pytest.raises(InvariantError, match="which is not in an earlier wave"):
        compiled("branches", plan=waves.KIND)


def test_tables_lie_behind_the_packed_weights() -> None:
    model = compiled("lookups", plan=waves.KIND)
    plan, plain = plan_of(model), plan_of(compiled("lookups", plan="launches"))
    copies = [step for step in plan.prepack if isinstance(step, CopyStep)]
    assert plan.prepack[: len(plain.prepack)] == plain.prepack
    assert all(copy.target.slot == PACKED and copy.target.offset_bytes >= plain.packed_bytes for copy in copies)
    assert plan.read_weights_bytes == plain.read_weights_bytes
    (step,) = plan.steps
    assert isinstance(step, KernelStep)
    weights = model._variants[0].loaded.weights
    assert weights.nbytes == plan.weights_bytes > plain.weights_bytes


# weights that stream --------------------------------------------------------------------------------------------------

STREAMING = "streaming"
KNOWN[STREAMING] = graph(
    {"x": tensor(1, 256, dtype="float16")},
    {name: constant(*shape, dtype="float16") for name, shape in (("a", (1024, 256)), ("b", (1024, 256)), ("d", (256, 1024)))},
    [
        node("gate", "C[m, n] +=! A[m, k] * B[n, k]", A="x", B="a"),
        node("up", "P[m, n] +=! A[m, k] * B[n, k]; C[m, n] = P[m, n] * relu(G[m, n]) * 0.05", A="x", B="b", G="gate"),
        node("down", "P[m, n] +=! A[m, k] * B[n, k]; C[m, n] = P[m, n] * 0.05 + X[m, n]", A="up", B="d", X="x"),
    ],
    "down",
    name=STREAMING,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [A100, H200])
def test_weights_of_a_model_stream_across_barriers(target: str, tmp_path: Path) -> None:
    """Two products of one x share pages. A graph starts the second one early."""
    arrays, wanted = expected(STREAMING)
    model = compiled(STREAMING, target, plan=persistent.KIND)
    ring = model.report["lowerings"][persistent.KIND]["ring"]
    assert ring["streamed_bytes"] >= 3 * 1024 * 256 * 2
    text = plan_of(model).kernels[-1].source.text
    assert f"RING_PAGES = {ring['pages']}, RING_PAGE_BYTES = {ring['page_bytes']}" in text
    assert text.count("ring_claim(ring_page_)") == 2
    assert load_model(model.save(tmp_path / "saved")).report["lowerings"] == model.report["lowerings"]
    assert model.report["lowerings"]["graph"].get("overlap", {"nodes": 0})["nodes"] == (target == H200)
    as_graph = compiled(STREAMING, target, plan="graph")
    np.testing.assert_allclose(as_graph.run(arrays)["down"], wanted["down"], rtol=5e-3, atol=5e-3)
    np.testing.assert_allclose(model.run(arrays)["down"], wanted["down"], rtol=5e-3, atol=5e-3)


def test_a_ring_hides_what_arrives_during_waits() -> None:
    stream, none = persistent.WaveStream(1000, 1.0), persistent.WaveStream(0, 0.0)
    hidden = persistent.hidden_seconds
    assert hidden([stream], [0.5], 10_000, 1000.0) == pytest.approx(0.5)  # the wait
    assert hidden([stream], [5.0], 10_000, 1000.0) == pytest.approx(1.0)  # all bytes
    assert hidden([stream], [5.0], 300, 1000.0) == pytest.approx(0.3)  # the ring
    assert hidden([persistent.WaveStream(1000, 0.2)], [5.0], 10_000, 1000.0) == pytest.approx(0.2)  # what the wave gains
    assert hidden([none, none, stream], [0.1, 0.2, 0.3], 10_000, 1000.0) == pytest.approx(0.6)  # waits of earlier waves
    assert hidden([stream, stream], [0.4, 0.4], 10_000, 1000.0) == pytest.approx(0.8)
    assert hidden([stream, none], [0.0, 5.0], 10_000, 1000.0) == 0.0  # nothing streams later
    idle = persistent.WaveStream(0, 0.0, idle_s=0.6)  # memory has nothing to do for a part of the wave
    assert hidden([idle, stream], [0.0, 0.3], 10_000, 1000.0) == pytest.approx(0.9)
    assert hidden([idle, stream], [0.0, 0.3], 500, 1000.0) == pytest.approx(0.5)  # the ring
    assert hidden([stream, idle], [0.0, 0.3], 10_000, 1000.0) == 0.0
    # It gains 0.5 s less than what is there. Of what is left, memory has been idle for that time.
    busy = persistent.WaveStream(1000, 0.5, idle_s=0.1)
    assert hidden([busy, stream], [2.0, 0.0], 10_000, 1000.0) == pytest.approx(1.5)
    assert hidden([busy, stream], [1.0, 0.0], 10_000, 1000.0) == pytest.approx(0.5 + 0.6)
