"""Models for GPUs without a device: in the emulator they compute what the interpreter does, in memory of the plan."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_models import MODELS
from onnx import helper, numpy_helper

from roller_svc import hardware
from roller_svc.analysis.step_order import find_early_starts, find_predecessors
from roller_svc.errors import ArgumentError, InputError, InvariantError, LaunchError, UnsupportedModelError
from roller_svc.graph.estimate import UNCOMPILED
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.lowerings import LOWERING_KINDS, MARGIN, choose_lowering, cuda_graph
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Constant
from roller_svc.ir.model_plan import PACKED, WEIGHTS, CopyStep, KernelStep, LoopStep, ModelPlan, unroll_steps
from roller_svc.model import Model, compile_model, estimate_model, load_model
from roller_svc.runtime.graphs.cpu import weights_block
from roller_svc.runtime.graphs.cuda import CudaModel
from roller_svc.runtime.graphs.emulated import EmulatedModel
from roller_svc.settings import read_settings, use
from roller_svc.toolchain import compile_cxx

H200, A100 = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


def compiled(name: str, target: str = H200, **options: Any) -> Model:
    given = {"select": "model", "top_k": 1, "runtime": "emulator"} | options
    return compile_model(copy.deepcopy(MODELS[name]), target, **given)


@cache
def expected(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return inputs of a model, and what the interpreter makes of them."""
    weights, rng = Weights(), np.random.default_rng(1)
    graph = load_graph(copy.deepcopy(MODELS[name]), weights)
    arrays = {
        tensor: rng.integers(0, 7, type_.shape).astype(np.int32)
        if type_.dtype.value == "int32"
        else rng.standard_normal(type_.shape).astype(type_.dtype.value)
        for tensor, type_ in graph.inputs
    }
    return arrays, interpret(graph, weights, arrays)


def check(name: str, results: dict[str, Any]) -> None:
    for output, want in expected(name)[1].items():
        tolerance = 4e-3 if want.dtype == np.float16 else 1e-5
        assert results[output].dtype == want.dtype
        np.testing.assert_allclose(results[output], want, rtol=tolerance, atol=tolerance, err_msg=output)


def plan_of(model: Model) -> ModelPlan:
    return model._variants[0].plan


def steps_of(model: Model) -> list[KernelStep | CopyStep]:
    return list(unroll_steps(plan_of(model).steps))


@pytest.mark.parametrize("target", [H200, A100])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_what_the_interpreter_does(name: str, target: str) -> None:
    model = compiled(name, target)
    check(name, model.run(expected(name)[0]))
    assert set(model.report["lowerings"]) == set(LOWERING_KINDS)


@pytest.mark.parametrize("name", ["branches", "pieces", "views", "slices", "lookups"])
def test_steps_may_run_in_any_order_that_hazards_allow(name: str) -> None:
    model = compiled(name, plan="graph")
    weights = Weights()
    load_graph(copy.deepcopy(MODELS[name]), weights)
    plan = plan_of(model)
    arrays = [(p.type, p.offset_bytes, weights.array(Constant(p.type, p.digest))) for p in plan.weights]
    kernels = [bundle.compiled for bundle in model._kernel_bundles]
    block = weights_block(arrays, plan.weights_bytes)
    for seed in range(3):
        emulated = EmulatedModel(plan, kernels, block, compile_cxx, seed=seed)
        check(name, emulated.run(expected(name)[0]))


def test_operands_that_overlap_in_a_launch_are_refused() -> None:
    """A launch that reads what it writes has right values in the emulator, and none on a device."""
    model = compiled("branches", plan="launches")
    plan, kernels = plan_of(model), [bundle.compiled for bundle in model._kernel_bundles]
    block = weights_block([], plan.weights_bytes)
    left, soft = (next(step for step in plan.steps if step.node == node) for node in ("left", "soft"))
    assert isinstance(soft, KernelStep)
    read, written = soft.arguments
    assert read in left.arguments
    moved = replace(read, offset_bytes=read.offset_bytes + 16)
    for other, is_refused in ((written, False), (read, True), (moved, True)):
        wrong = replace(soft, arguments=(read, other))
        steps = tuple(wrong if step is soft else step for step in plan.steps)
        changed = replace(plan, steps=steps, arena_bytes=plan.arena_bytes + 16)
        for make in (
            lambda plan: EmulatedModel(plan, kernels, block, compile_cxx),
            lambda plan: CudaModel(plan, kernels, block, as_graph=False),
        ):
            if not is_refused:
                make(changed)
                continue
            with pytest.raises(InvariantError, match="node 'soft' of small writes bytes of another operand"):
                make(changed)


def test_races_of_a_model_are_looked_for() -> None:
    model = compiled("branches", plan="launches")
    weights = Weights()
    load_graph(copy.deepcopy(MODELS["branches"]), weights)
    plan = plan_of(model)
    arrays = [(p.type, p.offset_bytes, weights.array(Constant(p.type, p.digest))) for p in plan.weights]
    kernels = [bundle.compiled for bundle in model._kernel_bundles]
    emulated = EmulatedModel(plan, kernels, weights_block(arrays, plan.weights_bytes), compile_cxx, races=True)
    check("branches", emulated.run(expected("branches")[0]))


@pytest.mark.parametrize("name", MODELS)
def test_kernels_get_addresses_that_they_may_load_in_vectors(name: str) -> None:
    vector_bytes = hardware.load(H200).vector_bytes
    for step in steps_of(compiled(name, plan="launches")):
        if isinstance(step, KernelStep):
            assert all(at is not None and at.offset_bytes % vector_bytes == 0 for at in step.arguments), step.node


@pytest.mark.parametrize("name", MODELS)
def test_kernels_start_early_behind_kernels_and_have_their_constants_in_weights(name: str) -> None:
    model = compiled(name, plan="graph")
    plan, steps = plan_of(model), steps_of(model)
    predecessors = find_predecessors(plan, steps)
    starts_early = find_early_starts(plan, steps, predecessors)
    for step, before, is_early in zip(steps, predecessors, starts_early, strict=True):
        if not isinstance(step, KernelStep):
            assert not is_early
            assert step.target.slot not in (WEIGHTS, PACKED)
            continue
        assert is_early == (bool(before) and all(isinstance(steps[n], KernelStep) for n in before) and not step.zeroed)
        source = plan.kernels[step.kernel].source
        constants = {buffer.symbol for buffer in source.buffers if buffer.name in source.constants}
        for symbol, place in zip(source.launches[step.launch].operands, step.arguments, strict=True):
            assert place is not None
            assert symbol not in constants or place.slot in (WEIGHTS, PACKED), (step.node, symbol)


@pytest.mark.parametrize("name", ["pieces", "views", "slices"])
def test_parts_of_tensors_that_begin_elsewhere_are_copied(name: str) -> None:
    copies_on_gpu = [s for s in steps_of(compiled(name, plan="launches")) if isinstance(s, CopyStep)]
    unaligned = [s for s in copies_on_gpu if (s.source.offset_bytes | s.target.offset_bytes) % 16]
    assert unaligned
    on_cpu = compile_model(copy.deepcopy(MODELS[name]), "cpu-x86-avx2", select="model", top_k=1, threads=1)
    copies = sum(isinstance(step, CopyStep) for step in steps_of(on_cpu))
    assert copies < len(copies_on_gpu)


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    model = compiled("lookups")
    plan = plan_of(model)
    (prepack,) = plan.prepack
    assert isinstance(prepack, KernelStep)
    written = [at for at in prepack.arguments if at is not None and at.slot == PACKED]
    assert written
    (step,) = steps_of(model)
    assert isinstance(step, KernelStep)
    assert set(written) <= set(step.arguments)
    for _ in range(2):
        check("lookups", model.run(expected("lookups")[0]))


def test_a_saved_model_runs_in_the_emulator(tmp_path: Path) -> None:
    for name in ("lookups", "slices"):
        model = compiled(name)
        saved = model.save(tmp_path / name)
        assert {each.name for each in saved.iterdir()} == {"kernels", "metadata.json", "weights.bin"}
        loaded = load_model(saved, runtime="emulator")
        assert (loaded.digest, loaded.report["lowerings"]) == (model.digest, model.report["lowerings"])
        arrays = expected(name)[0]
        for output, value in model.run(arrays).items():
            np.testing.assert_array_equal(loaded.run(arrays)[output], value)
        with pytest.raises(LaunchError) as raised:
            load_model(saved).run(arrays)
        assert raised.value.code == "no-device"
    (saved / "weights.bin").write_bytes(bytes((saved / "weights.bin").stat().st_size))
    with pytest.raises(ArgumentError, match=r"weights\.bin"):
        load_model(saved)


def test_metadata_with_another_weight_is_refused(tmp_path: Path) -> None:
    saved = compiled("slices").save(tmp_path)
    metadata = json.loads((saved / "metadata.json").read_text())
    metadata["variants"][0]["plan"]["weights_bytes"] += 64
    (saved / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ArgumentError) as raised:
        load_model(saved)
    assert raised.value.code == "damaged-kernel"


DAMAGE: dict[str, Any] = {
    "no object": ("report", {"lowerings": []}),
    "nothing": ("report", {"lowerings": {"graph": None}}),
    "no seconds": ("report", {"lowerings": {"graph": {"launches": 1, "measured": False}}}),
    "no text": ("report", {"plan": [1]}),
    "threads": ("report", {"threads": "two"}),
    "buckets": ("report", {"buckets": [{"dims": {}, "plan": "graph", "lowerings": {}}] * 2}),
    "passes": ("report", {"passes": [1]}),
    "padding": ("report", {"padding": [{}, {}]}),
    "arena": ("plan", {"arena_bytes": 0}),
    "lowering": ("plan", {"lowering": "foo"}),
    "no lowering": ("plan", {"lowering": ""}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_metadata_is_refused(damage: str, tmp_path: Path) -> None:
    saved = compiled("slices", plan="graph").save(tmp_path)
    metadata = json.loads((saved / "metadata.json").read_text())
    part, change = DAMAGE[damage]
    (metadata["report"] if part == "report" else metadata["variants"][0]["plan"]).update(change)
    (saved / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ArgumentError, match="is not a saved model") as raised:
        load_model(saved)
    assert raised.value.code == "damaged-kernel"
    assert raised.value.hint


def test_the_model_chooses_the_lowering_and_says_why() -> None:
    single, loop = compiled("attention"), compiled("slices")
    assert (single.report["plan"], loop.report["plan"]) == ("launches", "graph")
    operations = sum(1 + len(step.zeroed) if isinstance(step, KernelStep) else 1 for step in steps_of(loop))
    by_launches, by_graph = loop.report["lowerings"]["launches"], loop.report["lowerings"]["graph"]
    assert (by_launches["launches"], by_graph["launches"]) == (operations, 1)
    assert by_graph["seconds"] <= MARGIN * by_launches["seconds"]
    assert loop.plan["launches"] == 1
    assert not by_graph["measured"]
    limits = hardware.load(H200).limits
    assert limits.graph_node_s is not None
    saved_s = operations * (limits.launch_overhead_s - limits.graph_node_s) - limits.launch_overhead_s
    assert by_launches["seconds"] - by_graph["seconds"] == pytest.approx(saved_s)


def test_a_kind_may_be_named() -> None:
    assert compiled("attention", plan="graph").report["plan"] == "graph"
    assert compiled("slices", plan="launches").report["plan"] == "launches"
    assert compiled("slices", plan="serial").report["plan"] == "launches"


def chain(rows: str) -> bytes:
    """Return an ONNX model of six products in a row: launches of few rows cost more than the products."""
    weights = [numpy_helper.from_array(np.zeros((64, 64), np.float32), f"w{i}") for i in range(6)]
    nodes = [helper.make_node("MatMul", [f"h{i}" if i else "x", f"w{i}"], [f"h{i + 1}"]) for i in range(6)]
    given = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, 64])
    result = helper.make_tensor_value_info("h6", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "chain", [given], [result], weights)
    content: bytes = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    return content


@pytest.mark.parametrize("extents", [[1, 65536], [65536, 1]])
def test_each_bucket_has_its_lowering(extents: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compile_model(chain("n"), H200, dims={"n": extents}, select="model", top_k=1)
    kinds = {65536: "launches", 1: "graph"}
    wanted = [kinds[each] for each in extents]
    as_graphs: list[bool] = []
    monkeypatch.setattr("roller_svc.modes.loading.CudaModel", lambda *_, as_graph: as_graphs.append(as_graph))
    for each in (model, load_model(model.save(tmp_path))):
        assert [bucket["kind"] for bucket in each.plan["buckets"]] == wanted
        assert [bucket["launches"] for bucket in each.plan["buckets"]] == [6 if kind == "launches" else 1 for kind in wanted]
        for kind, bucket in zip(wanted, each.report["buckets"], strict=True):
            assert bucket["plan"] == kind
            results = bucket["lowerings"]
            assert (results["graph"]["seconds"] <= MARGIN * results["launches"]["seconds"]) == (kind == "graph")
        as_graphs.clear()
        for variant in each._variants:
            assert variant.loaded.runner is None
        assert as_graphs == [kind == "graph" for kind in wanted]


def test_the_digest_depends_on_the_lowering() -> None:
    graph, launches = (compiled("attention", plan=kind) for kind in ("graph", "launches"))
    assert graph.digest != launches.digest
    assert compiled("attention").digest == launches.digest


def test_an_eager_plan_has_launches_and_fills_with_zeros() -> None:
    eager, launches = compiled("attention", plan="eager"), compiled("attention", plan="launches")
    assert (eager.plan["kind"], eager.plan["lowering"]) == ("eager", "launches")
    for model in (eager, launches):
        assert model.plan["launches"] == model.report["lowerings"]["launches"]["launches"]


def test_a_graph_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(compiled("slices"))
    for kind in ("graph", "waves", "persistent"):
        with pytest.raises(ArgumentError, match=f"plan '{kind}': .* on NVIDIA devices"):
            estimate_model(copy.deepcopy(MODELS["slices"]), "amd-mi300x", plan=kind)
    refused = choose_lowering(None, [(plan, ())], hardware.load("amd-mi300x"))
    assert refused.kind == "launches"
    assert "NVIDIA" in refused.to_json()["graph"]["refused"]
    monkeypatch.setattr(cuda_graph, "MAX_NODES", 3)
    with pytest.raises(ArgumentError, match="nodes, at most 3") as raised:
        compiled("slices", plan="graph")
    assert raised.value.code == "refused-plan"
    report = compiled("slices").report
    assert report["plan"] in {"launches", "persistent"}
    assert "at most 3" in report["lowerings"]["graph"]["refused"]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (H200, {"plan": "rammer"}, "'launches', 'graph'"),
        (H200, {"plan": {"steps": []}}, "plans by hand are for CPUs"),
        (H200, {"plan": 3}, "a kind of plans"),
        (H200, {"threads": 4}, "threads are for CPUs"),
        (H200, {"runtime": "device"}, "'emulator'"),
        ("cpu-x86-avx2", {"plan": "graph", "runtime": "auto"}, "'rammer'"),
        ("cpu-x86-avx2", {}, "runs CUDA and HIP kernels only"),
        ("graphcore-mk2", {"runtime": "auto"}, "CPUs and GPUs"),
    ],
)
def test_options_that_do_not_fit_a_device_are_refused(target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled("views", target, **options)


def test_nodes_without_a_kernel_are_named() -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        compiled("lookups", max_workspace_bytes=1)
    assert [node.name for node in raised.value.nodes] == ["rows+out"]


def test_an_estimate_is_that_of_the_kernels() -> None:
    estimate = estimate_model(copy.deepcopy(MODELS["branches"]), H200)
    assert estimate["target"] == H200
    assert 0 < estimate["seconds"] < 1e-4


@pytest.mark.parametrize("plan", ["launches", "graph", "eager"])
@pytest.mark.parametrize("name", ["slices", "lookups", "pieces"])
def test_an_estimate_is_that_of_the_lowering(name: str, plan: str) -> None:
    model, estimate = compiled(name, plan=plan), estimate_model(copy.deepcopy(MODELS[name]), H200, plan=plan)
    kind = "launches" if plan == "eager" else plan
    assert estimate["plan"] == kind
    for seconds in (estimate["seconds"], model.estimate.seconds):
        assert seconds == pytest.approx(model.report["lowerings"][kind]["seconds"])
    for each in ("launches", "graph"):
        wanted = model.report["lowerings"][each]
        assert estimate["lowerings"][each] == wanted | {"seconds": pytest.approx(wanted["seconds"])}


def test_an_estimate_has_the_refusals_of_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="'waves' is not estimated without a compiler") as raised:
        estimate_model(copy.deepcopy(MODELS["branches"]), H200, plan="waves")
    assert raised.value.code == "refused-plan"
    for name in ("branches", "pieces"):  # copies of the second can join, and no kernel is known
        refused = estimate_model(copy.deepcopy(MODELS[name]), H200)["lowerings"]
        assert [refused[kind]["refused"] for kind in ("waves", "persistent")] == [UNCOMPILED] * 2
    monkeypatch.setattr(cuda_graph, "MAX_NODES", 3)
    with pytest.raises(ArgumentError, match="nodes, at most 3"):
        estimate_model(copy.deepcopy(MODELS["slices"]), H200, plan="graph")


def test_a_model_is_saved_and_not_pickled() -> None:
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ArgumentError, match="cannot be pickled") as raised:
            action(compiled("views"))
        assert raised.value.code == "not-picklable"


def stacking(*, backward: bool, passes_on: bool) -> dict[str, Any]:
    """Return a loop that stacks its state. `passes_on`: the next state is a slice that no kernel writes."""
    model = copy.deepcopy(MODELS["states"])
    loop = model["nodes"][0]["loop"]
    loop["stacked"] = [backward]
    if passes_on:
        loop["body"]["outputs"] = {"next": "x", "each": "x"}
        loop["body"]["nodes"] = []
    return model


@pytest.mark.parametrize("target", [A100, "local"])
@pytest.mark.parametrize(("backward", "passes_on"), [(False, False), (True, False), (False, True)])
def test_states_that_a_loop_stacks_lie_in_the_stack(target: str, backward: bool, passes_on: bool) -> None:
    """No step copies its state: one reads a slice and writes the next one."""
    source, weights = stacking(backward=backward, passes_on=passes_on), Weights()
    graph = load_graph(copy.deepcopy(source), weights)
    arrays = {name: np.random.default_rng(3).standard_normal(type_.shape).astype(np.float32) for name, type_ in graph.inputs}
    runtime = {"runtime": "emulator", "plan": "launches"} if target == A100 else {"plan": "serial"}
    model = compile_model(source, target, select="model", top_k=1, **runtime)
    (loop,) = (step for step in plan_of(model).steps if isinstance(step, LoopStep))
    copies = [step for step in loop.body if isinstance(step, CopyStep)]
    assert len(copies) == passes_on
    results = model.run(arrays)
    for name, wanted in interpret(graph, weights, arrays).items():
        np.testing.assert_allclose(results[name], wanted, rtol=1e-5, atol=1e-5)


def test_profiles_are_of_cpus() -> None:
    with pytest.raises(ArgumentError, match="profiles are of CPUs"):
        compiled("views").profile(expected("views")[0])
