"""Models over several devices: rows 40 to 48 of the features of graph execution. The emulator is the GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_models import constant, graph, node, tensor
from onnx import helper
from onnx_models import mlp, model

import roller_svc
from roller_svc.cli.command import main
from roller_svc.errors import ArgumentError, InputError, InvariantError, RollerWarning
from roller_svc.graph import python_ops
from roller_svc.graph.devices.labels import place_nodes
from roller_svc.graph.devices.plan import (
    HOST,
    LINK_LATENCY_S,
    MERGED,
    SPLIT,
    Copy,
    MixedPlan,
    Subgraph,
    check_mixed_plan,
    cut_graph,
    plan_parts,
)
from roller_svc.graph.load import load_graph
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.weights import Weights
from roller_svc.hardware import load
from roller_svc.ir.graph import Effects, Graph
from roller_svc.model import Model, compile_model, estimate_model
from roller_svc.modes.mixed import MixedModel
from roller_svc.settings import read_settings, settings, use

H200 = "nvidia-h200-sxm"
RNG = np.random.default_rng(44)
FLOATS = ("float32", (4, 8))


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use(read_settings(cache=tmp_path_factory.mktemp("cache")))
    yield
    use(read_settings())


@pytest.fixture
def settings_again() -> Iterator[None]:
    folder = settings().cache
    yield
    use(read_settings(cache=folder))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(python_ops, "_registered", {})
    return roller_svc.python_op


def compiled(source: Any, target: str = "local", **options: Any) -> Model:
    given: dict[str, Any] = {"select": "model", "top_k": 1, "threads": 1, "runtime": "emulator"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RollerWarning)  # copies of small arrays take longer than kernels
        return compile_model(source, target, **given)


def host(name: str, *inputs: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "device": f"python:{name}", "inputs": list(inputs), "outputs": [name]} | fields


def numbers(*shape: int) -> Any:
    return RNG.uniform(-1, 1, shape).astype(np.float32)


ADD, SUB, MUL = ("C[i, j] = A[i, j] " + each + " B[i, j]" for each in "+-*")
MATRIX = tensor(4, 8)


def diamond(**labels: str) -> dict[str, Any]:
    """Return a model whose two branches meet: a product with weights, and sums."""
    nodes = [
        node("a", ADD, A="x", B="y"),
        node("b", "C[i, j] +=! A[i, k] * B[k, j]", A="a", B="w"),
        node("c", SUB, A="a", B="y"),
        node("d", MUL, A="b", B="c"),
    ]
    labelled = [each | ({"device": labels[each["name"]]} if each["name"] in labels else {}) for each in nodes]
    return graph({"x": MATRIX, "y": MATRIX}, {"w": constant(8, 8)}, labelled, "d", "c")


def test_row_42_a_model_on_one_cpu_is_one_submission(register: Callable[..., None]) -> None:
    model = compiled(diamond(), runtime="auto", sink="require")
    assert model.report["sinks"] == {"submissions": 1, "outside": []}
    register("twice", lambda a: 2 * a, {"a": FLOATS}, {"b": FLOATS})
    nodes = [node("a", ADD, A="x", B="y"), host("twice", "a"), node("z", MUL, A="twice", B="x")]
    source = graph({"x": MATRIX, "y": MATRIX}, {}, nodes, "z")
    model = compiled(source)
    assert model.report["sinks"] == {"submissions": 2, "outside": [{"node": "twice", "reason": "it is python:twice"}]}
    assert model.plan["copies"] == []
    x, y = numbers(4, 8), numbers(4, 8)
    np.testing.assert_allclose(model(x=x, y=y)["z"], 2 * (x + y) * x, rtol=1e-6)
    with pytest.raises(ArgumentError, match="2 submissions: twice: it is python:twice") as refusal:
        compiled(source, sink="require")
    assert refusal.value.code == "not-sunk"


def test_row_43_add_on_a_cpu_sub_on_a_gpu_and_a_function_of_python(register: Callable[..., None]) -> None:
    register("negate", lambda a: -a, {"a": FLOATS}, {"b": FLOATS})
    nodes = [node("add", ADD, A="x", B="y"), node("sub", SUB, A="add", B="y"), host("negate", "sub")]
    source = graph({"x": MATRIX, "y": MATRIX}, {}, nodes, "negate", "sub")
    model = compiled(source, devices={"add": "cpu", "su*": H200})
    assert [each["device"] for each in model.plan["subgraphs"]] == [model.target, H200, "python:negate"]
    assert [(c["tensor"], c["from"], c["to"]) for c in model.plan["copies"]] == [
        ("add", HOST, H200), ("y", HOST, H200), ("sub", H200, HOST)
    ]  # fmt: skip
    ones = np.ones((4, 8), np.float32)
    results = model(x=ones, y=ones)
    np.testing.assert_array_equal(results["sub"], ones)
    np.testing.assert_array_equal(results["negate"], -ones)
    for fused in (False, True):
        events = list(model.step({"x": ones, "y": ones}, fused=fused))
        assert [(event.node, event.device) for event in events] == [
            ("add", model.target), ("sub", H200), ("negate", "python:negate")
        ]  # fmt: skip
        np.testing.assert_array_equal(events[-1].outputs["negate"], -ones)
    profile = model.profile({"x": ones, "y": ones})
    assert {(each.operator, each.kernel) for each in profile} == {
        ("add", model.target), ("sub", H200), ("negate", "python:negate"), ("copy add", f"{HOST} to {H200}"),
        ("copy y", f"{HOST} to {H200}"), ("copy sub", f"{H200} to {HOST}"),
    }  # fmt: skip


def test_a_model_over_several_devices_is_saved_and_loaded(
    register: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register("scale", lambda a, k: a * k, {"a": FLOATS, "k": FLOATS}, {"b": FLOATS}, writes=["log"])
    source = diamond(b=H200)
    source["constants"]["k"] = constant(4, 8)
    source["nodes"] += [host("scale", "c", "k"), node("e", ADD, A="scale", B="s") | {"updates": {"C": "s"}}]
    source["outputs"] |= {"scale": "scale", "k": "k"}
    source["states"] = {"s": MATRIX}
    x, y, s = numbers(4, 8), numbers(4, 8), np.ones((4, 8), np.float32)
    built = compiled(source, order="serial")
    folder = built.save(tmp_path / "first")
    loaded = roller_svc.load_model(folder, "emulator")
    assert (loaded.digest, loaded.name, loaded.plan) == (built.digest, built.name, built.plan)
    assert [each.uses for each in loaded.kernels] == [each.uses for each in built.kernels]
    assert loaded.estimate == built.estimate
    assert [each.name for each in built.estimate.stages] == [each.digest for each in built.kernels]
    assert all(each.seconds > 0 for each in built.estimate.stages)
    assert f"{len(built.kernels)} kernels" in built._repr_html_()
    assert loaded.report["passes"][0]["nodes_before"] == 5
    assert sum(len(each["nodes"]) for each in loaded.report["classes"]) == loaded.report["passes"][-1]["nodes_after"]
    results = loaded.run({"x": x, "y": y}, states={"s": s})
    w, k = (np.array(source["constants"][name]["values"], np.float32) for name in "wk")
    c = (x + y) - y
    for name, want in (("c", c), ("scale", c * k), ("k", k)):
        np.testing.assert_array_equal(results[name], want)
    np.testing.assert_array_equal(s, c * k + 1)
    np.testing.assert_allclose(results["d"], (x + y) @ w * c, rtol=1e-5, atol=1e-6)
    again = roller_svc.load_model(loaded.save(tmp_path / "again"))
    assert (again.digest, again.plan) == (built.digest, built.plan)
    with pytest.raises(ArgumentError) as refusal:
        roller_svc.load_model(folder).run({"x": x, "y": y}, states={"s": s})
    assert refusal.value.code == "unsupported-target"
    with pytest.raises(ArgumentError, match="launchers are of models for one device"):
        built.save(tmp_path / "other", launcher="ctypes")
    part = roller_svc.load_model(folder / "part.0")  # each subgraph is a model
    assert [info.name for info in part.inputs] == ["x", "y"]

    def refuse(code: str) -> None:
        with pytest.raises(ArgumentError) as refusal:
            roller_svc.load_model(folder, "emulator")
        assert refusal.value.code == code

    monkeypatch.setattr(python_ops, "_registered", {})
    refuse("unknown-python-op")
    register("scale", lambda a, k: (a, k), {"a": FLOATS, "k": FLOATS}, {"b": FLOATS, "c": FLOATS})
    refuse("shape-mismatch")
    monkeypatch.setattr(python_ops, "_registered", {})
    register("scale", lambda a, k: a * k, {"a": FLOATS, "k": FLOATS}, {"b": FLOATS})
    damage = json.loads((folder / "metadata.json").read_text())
    for change in (
        {"order": "random"}, {"parts": damage["parts"][:-1]}, {"outputs": damage["outputs"][1:]},
        {"plan": damage["plan"] | {"steps": damage["plan"]["steps"][1:], "before": damage["plan"]["before"][1:]}},
        {"hosts": []}, {"format": "roller-mixed-model/0"}, {"target": "cpu-arm-neon"}, *damaged_plans(damage["plan"]),
    ):  # fmt: skip
        (folder / "metadata.json").write_text(json.dumps(damage | change))
        refuse("damaged-kernel")
    (folder / "metadata.json").write_text(json.dumps(damage))
    content = bytearray((folder / "constants.bin").read_bytes())
    content[0] ^= 1
    (folder / "constants.bin").write_bytes(content)
    refuse("damaged-kernel")


def damaged_plans(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield changes of a saved plan, each with one fault."""
    steps, before = plan["steps"], plan["before"]
    copy = next(i for i, step in enumerate(steps) if "tensor" in step)
    part = next(i for i, step in enumerate(steps) if step.get("device") == H200)
    call = next(i for i, step in enumerate(steps) if step.get("device", "").startswith("python:"))
    for number, fault in (
        (part, {"nodes": []}), (call, {"nodes": []}), (copy, {"bytes": -1}), (copy, {"bytes": 1 << 60}),
        (copy, {"bytes": steps[copy]["bytes"] + 1}), (part, {"device": "zzz"}), (part, {"device": "local"}),
        (part, {"memory": HOST}), (call, {"device": "python:other"}), (part, {"inputs": steps[part]["inputs"] * 2}),
    ):  # fmt: skip
        yield {"plan": plan | {"steps": [*steps[:number], steps[number] | fault, *steps[number + 1 :]]}}
    yield {"plan": plan | {"across": "zzz"}}
    yield {"plan": plan | {"before": before[:-1]}}
    yield {"plan": plan | {"before": [*before[:-1], [-1]]}}


CODE = [
    {"device": "python:os.system"}, {"device": "python:"}, {"device": "python:__import__('os')"}, {"device": "python:lambda x: x"},
    {"device": "python:exec"}, {"device": "python:a b"}, {"device": "python:../x"}, {"device": "python:nms\n"},
    {"device": ["python:nms"]}, {"device": {"python": "nms"}}, {"device": 1}, {"device": "python:" + "n" * 5000},
    {"code": "def f(x): return x"}, {"source": "import os"}, {"pickle": "gASV"}, {"module": "os"}, {"function": "system"},
    {"effects": {"read": "x"}}, {"effects": {"execute": ["x"]}}, {"parameters": {"code": "1"}},
]  # fmt: skip


@pytest.mark.parametrize("fields", CODE)
def test_row_43_code_in_place_of_a_name_is_refused(fields: dict[str, Any], register: Callable[..., None]) -> None:
    register("nms", lambda a: a, {"a": FLOATS}, {"b": FLOATS})
    good = graph({"x": MATRIX}, {}, [host("nms", "x")], "nms")
    load_graph(good, Weights())
    with pytest.raises(InputError) as refusal:
        load_graph(graph({"x": MATRIX}, {}, [host("nms", "x") | fields], "nms"), Weights())
    assert refusal.value.code in ("unknown-python-op", "invalid-model")


def test_row_43_a_function_is_checked(register: Callable[..., None]) -> None:
    source = graph({"x": MATRIX}, {}, [host("f", "x")], "f")
    returned: list[Any] = []
    register("f", lambda _: returned[-1], {"a": FLOATS}, {"b": FLOATS})
    model = compiled(source)
    for result, message in (
        (np.zeros((8, 4), np.float32), r"b is float32\[8, 4\], expected float32\[4, 8\]"),
        (np.zeros((4, 8)), r"b is float64"),
        ([0.0], "b is a list"),
        ((np.zeros((4, 8), np.float32),) * 2, "2 results, expected 1"),
    ):
        returned.append(result)
        with pytest.raises(ArgumentError, match=message) as refusal:
            model(x=numbers(4, 8))
        assert refusal.value.code == "python-op-result"
    for arguments, message in (
        (("f", abs, {}, {}), "called 'f' already"),
        (("f g", abs, {}, {}), "has letters, digits"),
    ):
        with pytest.raises(ArgumentError, match=message):
            register(*arguments)
    with pytest.raises(ArgumentError, match="takes float32") as refusal:
        compiled(graph({"x": tensor(2)}, {}, [host("f", "x")], "f"))
    assert refusal.value.code == "shape-mismatch"


def test_row_43_a_function_that_fails_leaves_states_and_may_not_write_its_inputs(register: Callable[..., None]) -> None:
    def write(a: Any) -> Any:
        a += 1
        return a

    register("write", write, {"a": FLOATS}, {"b": FLOATS})
    nodes = [node("new", ADD, A="s", B="x") | {"updates": {"C": "s"}}, host("write", "s")]
    model = compiled(graph({"x": MATRIX}, {}, nodes, "write") | {"states": {"s": MATRIX}})
    s = np.zeros((4, 8), np.float32)
    with pytest.raises(ValueError, match="read-only") as failure:
        model.run({"x": numbers(4, 8)}, states={"s": s})
    assert failure.value.__notes__ == ["in the Python operator 'write' of node 'write'"]
    assert not s.any()


def test_row_43_labels_of_onnx_and_torch_reach_the_graph() -> None:
    proto = model(
        [helper.make_node("Relu", ["x"], ["h"], "first"), helper.make_node("Neg", ["h"], ["y"], "second")], {"x": (4,)}, {"y": (4,)}
    )
    entry = proto.graph.node[1].metadata_props.add()
    entry.key, entry.value = "roller.device", H200
    read = load_graph(onnx.shape_inference.infer_shapes(proto), Weights())
    assert read.devices == {"second": H200}
    torch = pytest.importorskip("torch")

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.neg(torch.relu(x))

    program = torch.export.export(Module(), (torch.zeros(4),))
    for each in program.graph.nodes:
        if each.name == "neg":
            each.meta["custom"] = {"roller_device": H200}
    assert load_graph(program, Weights()).devices == {"neg": H200}


def test_row_43_labels_are_checked() -> None:
    for options, code in (
        ({"devices": {"none*": H200}}, "unknown-argument"),
        ({"devices": {"a": "gpu"}}, "unknown-device"),
        ({"devices": {"a": "python:none"}}, "unknown-python-op"),
        ({"devices": [H200]}, "invalid-option"),
        ({"devices": {"a": H200}, "across": "sideways"}, "invalid-option"),
        ({"devices": {"a": H200}, "order": "random"}, "invalid-option"),
        ({"runtime": "emulator"}, "emulator-unavailable"),
    ):
        with pytest.raises(ArgumentError) as refusal:
            compiled(diamond(), **options)
        assert refusal.value.code == code, options
    with pytest.raises(ArgumentError) as refusal:
        compiled(diamond(a=H200), runtime="auto")(x=numbers(4, 8), y=numbers(4, 8))
    assert refusal.value.code == "unsupported-target"
    assert place_nodes(load_graph(diamond(a="cpu"), Weights()), {}, load("local")) is None
    with pytest.raises(roller_svc.errors.UnknownHardwareError):
        compiled(diamond(a="nvidia-h20000"))


def test_row_43_a_label_is_first_the_name_of_a_node() -> None:
    nodes = [node(name, "C[i, j] = A[i, j]", A="x") for name in ("h[0]", "h0", "h1", "h*")]
    loaded = load_graph(graph({"x": MATRIX}, {}, nodes, "h[0]", "h0", "h1", "h*"), Weights())
    for label, expected in (("h[0]", {"h[0]"}), ("h*", {"h*"}), ("h?", {"h0", "h1", "h*"}), ("h[01]", {"h0", "h1"})):
        placed = place_nodes(loaded, {label: H200}, load("local"))
        assert placed is not None
        assert {name for name, device in placed.devices.items() if device == H200} == expected


def test_row_47_an_impure_function_that_names_no_writes_writes_everything(register: Callable[..., None]) -> None:
    calls: list[str] = []

    def log(value: Any) -> Any:
        calls.append("log")
        return value

    register("log", log, {"v": FLOATS}, {"o": FLOATS}, reads=["x"], pure=False)
    register("write", lambda v: calls.append("write") or v, {"v": FLOATS}, {"o": FLOATS}, writes=["y"])
    register("named", log, {"v": FLOATS}, {"o": FLOATS}, writes=["z"], pure=False)
    assert python_ops.find_python_op("log").effects == Effects(frozenset({"x"}), frozenset({"*"}))
    assert python_ops.find_python_op("named").effects == Effects(frozenset(), frozenset({"z"}))
    source = graph({"x": MATRIX}, {}, [host("log", "x"), host("write", "x"), node("c", "C[i, j] = A[i, j]", A="x")], "c")
    compiled(source)(x=numbers(4, 8))
    assert calls == ["log", "write"]


def sample(**labels: str) -> tuple[Model, dict[str, Any]]:
    return compiled(diamond(**labels)), {"x": numbers(4, 8), "y": numbers(4, 8)}


def test_row_45_and_46_four_combinations_are_equal_and_merged_is_never_slower(register: Callable[..., None]) -> None:
    register("twice", lambda a: 2 * a, {"a": FLOATS}, {"b": FLOATS})
    source = diamond(b=H200)
    source["nodes"] += [host("twice", "c"), node("e", ADD, A="twice", B="d") | {"device": H200}]
    source["outputs"]["e"] = "e"
    arrays = {"x": numbers(4, 8), "y": numbers(4, 8)}
    models = {
        (across, order): compiled(source, across=across, order=order)
        for across, order in itertools.product((SPLIT, MERGED), ("serial", "dataflow"))
    }
    want = models[SPLIT, "serial"].run(arrays)
    for built in models.values():
        assert [each["tensor"] for each in built.plan["copies"]] == ["a", "b", "twice", "d", "e"]
        for _ in range(5):
            got = built.run(arrays)
            assert list(got) == list(want)
            for name, array in want.items():
                np.testing.assert_array_equal(got[name], array)
    assert models[MERGED, "serial"].estimate.seconds < models[SPLIT, "serial"].estimate.seconds
    assert models[SPLIT, "serial"].estimate.seconds > 5 * LINK_LATENCY_S


def test_row_41_ten_serial_calls_have_one_trace(register: Callable[..., None]) -> None:
    register("one", lambda a: a + 1, {"a": FLOATS}, {"b": FLOATS})
    register("two", lambda a: a + 2, {"a": FLOATS}, {"b": FLOATS})
    nodes = [host("one", "x"), host("two", "x"), node("sum", ADD, A="one", B="two")]
    built = compiled(graph({"x": MATRIX}, {}, nodes, "sum"), order="serial")
    x = numbers(4, 8)
    traces = {tuple(each.operator for each in built.profile({"x": x})) for _ in range(10)}
    assert traces == {("one", "two", "sum")}
    single = compiled(diamond(), runtime="auto", order="serial")
    assert single.plan["kind"] == "serial"
    traces = {tuple(each.operator for each in single.profile({"x": x, "y": x})) for _ in range(10)}
    assert len(traces) == 1


@pytest.mark.two_cores
def test_row_40_operators_that_do_not_depend_on_each_other_overlap() -> None:
    large = tensor(512, 2048)
    nodes = [
        node("product", "C[i, j] = A[i, j] * sin(B[i, j])", A="x", B="y"),
        node("rest", "C[i, j] = A[i, j] - cos(B[i, j])", A="x", B="y"),
    ]
    built = compiled(graph({"x": large, "y": large}, {}, nodes, "product", "rest"), runtime="auto", threads=2, plan="parallel")
    assert len({each.operator for each in built.profile({"x": numbers(512, 2048), "y": numbers(512, 2048)})}) == 2
    arrays = {"x": numbers(512, 2048), "y": numbers(512, 2048)}
    for _ in range(100):  # where another process has the second core, one thread may run both
        first, second = built.profile(arrays)
        if second.start_s < first.end_s:
            break
    assert second.start_s < first.end_s
    assert first.veu != second.veu


def random_graph(rng: random.Random) -> dict[str, Any]:
    names = ["x", "y"]
    nodes = []
    for i in range(rng.randint(2, 9)):
        device = {"device": rng.choice([H200, "nvidia-a100-sxm-80gb", "cpu"])}
        nodes.append(node(f"n{i}", rng.choice([ADD, SUB, MUL]), A=rng.choice(names), B=rng.choice(names)) | device)
        names.append(f"n{i}")
    return graph({"x": MATRIX, "y": MATRIX}, {}, nodes, *rng.sample(names[2:], rng.randint(1, len(names) - 2)))


def planned(rng: random.Random, across: str) -> tuple[MixedPlan, Graph] | None:
    read = remove_dead_nodes(load_graph(random_graph(rng), Weights()))
    placed = place_nodes(read, {}, load("local"))
    if placed is None:
        return None
    memories = {spec: spec for spec in placed.specs if spec != load("local").id}
    parts = cut_graph(placed.graph, placed.devices)
    seconds = {part.nodes: rng.uniform(0, 1e-4) for part in parts}
    return plan_parts(placed.graph, parts, memories, lambda part: seconds[part.nodes], across), placed.graph


def ancestors(plan: MixedPlan, steps: tuple[int, ...]) -> set[int]:
    """Return the steps and all that come before them."""
    return set(steps).union(*(ancestors(plan, plan.before[step]) for step in steps))


def test_row_45_faults_in_plans_are_refused() -> None:
    """Drop a copy, swap its ends, let it come too early, drop an edge, drop or repeat a subgraph."""
    refused: dict[str, int] = {}
    for seed in range(60):
        if (made := planned(random.Random(seed), MERGED)) is None:
            continue
        plan, read = made
        check_mixed_plan(plan, read)

        def refuse(kind: str, plan: MixedPlan, read: Graph = read) -> None:
            with pytest.raises(InvariantError):
                check_mixed_plan(plan, read)
            refused[kind] = refused.get(kind, 0) + 1

        def edited(number: int, step: Any, plan: MixedPlan = plan) -> MixedPlan:
            return dataclasses.replace(plan, steps=(*plan.steps[:number], step, *plan.steps[number + 1 :]))

        for number, step in enumerate(plan.steps):
            if isinstance(step, Copy):
                refuse("swapped", edited(number, dataclasses.replace(step, source=step.target, target=step.source)))
                refuse("dropped", edited(number, Subgraph("none", HOST, (), (), ())))
            else:
                refuse("not run", edited(number, Subgraph("none", HOST, (), (), ())))
                refuse("run twice", edited(number, dataclasses.replace(step, nodes=step.nodes * 2)))
            for each in plan.before[number]:
                others = tuple(before for before in plan.before[number] if before != each)
                if each not in ancestors(plan, others):
                    before = (*plan.before[:number], others, *plan.before[number + 1 :])
                    refuse("edge", dataclasses.replace(plan, before=before))
            if plan.before[number]:
                late = (*plan.before[:number], (len(plan.steps) - 1,), *plan.before[number + 1 :])
                refuse("early", dataclasses.replace(plan, before=late))
    assert len(refused) == 6
    assert sum(refused.values()) > 300


def test_row_45_a_call_without_a_copy_fails() -> None:
    built = compiled(diamond(b=H200), order="serial")
    arrays = {"x": numbers(4, 8), "y": numbers(4, 8)}
    built.run(arrays)
    loaded = built._variants[0].loaded
    assert isinstance(loaded, MixedModel)
    plan = loaded._mixed
    for copy in plan.copies:
        loaded._mixed = dataclasses.replace(plan, steps=tuple(step for step in plan.steps if step is not copy))
        with pytest.raises(InvariantError, match=f"{copy.tensor} is not in the memory of {copy.target}"):
            built.run(arrays)


def test_row_46_merged_is_never_estimated_slower() -> None:
    for seed in range(100):
        merged, split = planned(random.Random(seed), MERGED), planned(random.Random(seed), SPLIT)
        if merged is not None and split is not None:
            assert merged[0].seconds <= split[0].seconds
            assert len(merged[0].copies) == len(split[0].copies)


def test_row_47_functions_with_effects_run_in_program_order(register: Callable[..., None]) -> None:
    memory: dict[str, Any] = {}

    def assign(value: Any) -> Any:
        memory["x"] = value.copy()
        return value

    def subtract(y: Any) -> Any:
        return memory["x"] - y

    register("assign_y", assign, {"v": FLOATS}, {"o": FLOATS}, writes=["x"])
    register("assign_z", assign, {"v": FLOATS}, {"o": FLOATS}, writes=["x"])
    register("sub", subtract, {"y": FLOATS}, {"r": FLOATS}, reads=["x"])
    # z takes longer than y to compute, and nothing reads what the assignments return
    nodes = [node("z", ADD, A="a", B="b"), host("assign_y", "y"), host("assign_z", "z"), host("sub", "y")]
    source = graph({"a": MATRIX, "b": MATRIX, "y": MATRIX}, {}, nodes, "sub")
    y, a, b = (np.full((4, 8), each, np.float32) for each in (0.25, 0.25, 0.125))
    for across, order in itertools.product((SPLIT, MERGED), ("serial", "dataflow")):
        built = compiled(source, across=across, order=order)
        for _ in range(50):
            memory.clear()
            np.testing.assert_array_equal(built(a=a, b=b, y=y)["sub"], np.full((4, 8), 0.125))
            np.testing.assert_array_equal(memory["x"], np.full((4, 8), 0.375))


def test_row_47_states_over_two_devices_have_the_last_value() -> None:
    nodes = [
        node("first", "C[i, j] = A[i, j] + 0", A="y") | {"updates": {"C": "x"}},
        node("second", "C[i, j] = A[i, j] + 0", A="z") | {"updates": {"C": "x"}, "device": H200},
        node("r", SUB, A="x", B="y"),
    ]
    built = compiled(graph({"y": MATRIX, "z": MATRIX}, {}, nodes, "r") | {"states": {"x": MATRIX}})
    x, y, z = numbers(4, 8), numbers(4, 8), numbers(4, 8)
    np.testing.assert_array_equal(built.run({"y": y, "z": z}, states={"x": x})["r"], z - y)
    np.testing.assert_array_equal(x, z)
    with pytest.raises(ArgumentError) as refusal:
        built.run({"y": y, "z": z}, states={"x": y})
    assert refusal.value.code == "state-aliased"


def test_states_that_exchange_their_values(register: Callable[..., None]) -> None:
    register("same", lambda a: a, {"a": FLOATS}, {"b": FLOATS})
    source = graph({"a": MATRIX, "b": MATRIX}, {}, [host("same", "a")], "same")
    source["outputs"] |= {"old": "a", "p": "b", "q": "a"}
    built = compiled(source, states={"a": "p", "b": "q"})
    a, b = numbers(4, 8), numbers(4, 8)
    before = a.copy(), b.copy()
    results = built.run({}, states={"a": a, "b": b})
    np.testing.assert_array_equal(a, before[1])
    np.testing.assert_array_equal(b, before[0])
    np.testing.assert_array_equal(results["same"], before[0])
    np.testing.assert_array_equal(results["old"], before[0])
    *_, last = built.step({}, {"a": a, "b": b})
    assert last.node == "same"
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])


def test_nodes_that_nothing_needs_do_not_run(register: Callable[..., None]) -> None:
    register("fails", lambda a: a / None, {"a": FLOATS}, {"b": FLOATS})
    nodes = [node("dead", ADD, A="x", B="y") | {"device": H200}, host("fails", "dead"), node("z", SUB, A="x", B="y")]
    built = compiled(graph({"x": MATRIX, "y": MATRIX}, {"k": constant(4, 8)}, nodes, "z", "x", "k"))
    assert [each["nodes"] for each in built.plan["subgraphs"]] == [["z"]]
    x, y = numbers(4, 8), numbers(4, 8)
    results = built(x=x, y=y)
    np.testing.assert_array_equal(results["z"], x - y)
    np.testing.assert_array_equal(results["x"], x)
    assert not np.may_share_memory(results["x"], x)
    assert results["k"].shape == (4, 8)


def test_row_48_open_shapes_are_refused_or_bucketed() -> None:
    with pytest.raises(ArgumentError) as refusal:
        compiled(mlp("batch"), runtime="auto")
    assert refusal.value.code == "open-shape"
    built = compiled(mlp("batch"), runtime="auto", dims={"batch": [1, 2]})
    assert [built(x=numbers(n, 8))["y"].shape for n in (1, 2)] == [(1, 4), (2, 4)]
    with pytest.raises(ArgumentError, match="one bucket") as refused:
        compiled(mlp("batch"), dims={"batch": [1, 2]}, devices={"fc0": H200})
    assert refused.value.hint is not None
    assert "compile a model for each extent" in refused.value.hint


@pytest.mark.parametrize("across", ["merged", "split"])
def test_an_estimate_over_several_devices_has_its_copies(register: Callable[..., None], across: str) -> None:
    register("e", abs, {"a": ("float32", (4, 8))}, {"b": ("float32", (4, 8))})
    source = diamond(b=H200)
    source["nodes"].append(host("e", "d"))
    source["outputs"] = {"e": "e", "c": "c"}
    estimate = estimate_model(source, threads=1, across=across, devices={"c": H200})
    model = compiled(source, across=across, devices={"c": H200})
    steps = [*estimate["subgraphs"], *estimate["copies"]]
    assert [each["nodes"] for each in estimate["subgraphs"]] == [each["nodes"] for each in model.plan["subgraphs"]]
    assert estimate["copies"] == model.plan["copies"]
    total_s = sum(each["seconds"] for each in steps)
    assert estimate["seconds"] == pytest.approx(total_s) if across == "split" else estimate["seconds"] <= total_s
    kernels_s = sum(each["seconds"] for each in estimate["kernels"])
    assert 0 < kernels_s <= 1.001 * sum(each["seconds"] for each in estimate["subgraphs"])
    assert estimate["seconds"] == pytest.approx(model.estimate.seconds, rel=0.5)  # registers of GPU kernels are known to a build
    assert all(each["seconds"] == 0 for each in estimate["subgraphs"] if each["device"].startswith("python:"))


def test_copies_that_take_long_are_a_warning() -> None:
    with pytest.warns(RollerWarning, match=r"copies between devices take .* a makes it in the memory of host, b reads it"):
        compile_model(diamond(b=H200), select="model", top_k=1, threads=1, runtime="emulator")


def test_the_setting_registers_functions(
    register: Callable[..., None], settings_again: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_ops.py").write_text(
        "import roller_svc\n\n\ndef add_all():\n"
        '    roller_svc.python_op("halve", lambda a: a / 2, {"a": ("float32", (4, 8))}, {"b": ("float32", (4, 8))})\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = graph({"x": MATRIX}, {}, [host("halve", "x")], "halve")
    with pytest.raises(ArgumentError, match="no Python operator is called 'halve'"):
        compiled(source)
    folder = settings().cache
    use(read_settings(cache=folder, python_ops="own_ops:add_all"))
    x = numbers(4, 8)
    np.testing.assert_array_equal(compiled(source)(x=x)["halve"], x / 2)
    for wrong in ("own_ops", "own_ops:none", "no_such_module_here:f"):
        use(read_settings(cache=folder, python_ops=wrong))
        with pytest.raises(ArgumentError) as refusal:
            compiled(source)
        assert refusal.value.code == "invalid-setting"


def test_the_command_line_places_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(diamond()))
    words = [str(file), "--select", "model", "--top-k", "1", "--threads", "1", "--device", f"b={H200}", "--emulate"]
    assert main(["model", "run", *words, "--check", "--across", "split", "--order", "serial"]) == 0
    assert "agrees with the interpreter" in capsys.readouterr().out
    assert main(["model", "plan", *words[:-1]]) == 0
    out = capsys.readouterr().out
    assert "a makes it in the memory of host" in out
    assert H200 in out
    assert "4 operators in 3 nodes, 3 kernels" in out
    assert out.index("C[i, j] +=! A[i, k] * B[k, j]") < out.index("nvidia-h200-sxm  ")  # in the table of kernels
    assert main(["model", "estimate", *words[:-1], "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["copies"]) == 2
    assert main(["model", "plan", str(file), "--device", "b"]) == 2
    assert "expected NODE=ID" in capsys.readouterr().err
