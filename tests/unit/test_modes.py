"""Ways to run a graph: rows 39 to 48 of the features of graph execution."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_models import MODELS, call, graph, node, recurrent, tensor
from onnx_models import mlp

import roller_svc
from roller_svc.cli.command import main
from roller_svc.cli.stepping import read_reference
from roller_svc.errors import ArgumentError, IndexRangeError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph
from roller_svc.model import Model, compile_model, load_model
from roller_svc.modes import stepping
from roller_svc.settings import read_settings, use

RNG = np.random.default_rng(39)


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use(read_settings(cache=tmp_path_factory.mktemp("cache")))
    yield
    use(read_settings())


def compiled(source: Any, target: str = "local", **options: Any) -> Model:
    given: dict[str, Any] = {"select": "model", "top_k": 1, "threads": 1} | options
    return compile_model(source, target, **given)


def drawn(model: Model) -> dict[str, Any]:
    return {each.name: RNG.uniform(-1, 1, each.shape).astype(each.dtype) for each in model.inputs}


def every_tensor(source: Any, arrays: dict[str, Any]) -> dict[str, Any]:
    """Return every tensor of a graph, by the interpreter."""
    weights = Weights()
    read = load_graph(source, weights)
    whole = Graph(read.name, read.inputs, read.constants, read.nodes, tuple((t, t) for each in read.nodes for t in each.outputs))
    return interpret(whole, weights, arrays)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("source_name", ["mlp", "pieces", "recurrent"])
def test_row_39_step_gives_every_tensor(source_name: str) -> None:
    source = {"mlp": mlp(), "recurrent": recurrent(8)}.get(source_name) or MODELS[source_name]
    model = compiled(source)
    arrays = drawn(model)
    want = every_tensor(source, arrays)
    seen: dict[str, Any] = {}
    steps = model.step(arrays)
    while True:
        try:
            event = next(steps)
        except StopIteration as end:
            results = end.value
            break
        assert event.device == model.target
        assert event.seconds > 0
        for name, array in event.inputs.items():
            assert array is seen.get(name, array)
        seen |= event.outputs
    assert seen.keys() == want.keys()
    for name, array in seen.items():
        close(array, want[name])
    called = model.run(arrays)
    assert results.keys() == called.keys()
    for name, array in called.items():
        close(results[name], array)


def test_row_39_replace_changes_what_follows_and_nothing_before() -> None:
    # `flat` is a view of `a`, which `b` reads after it
    nodes = [
        node("a", "C[i, j] = A[i, j] + 1", A="x"),
        call("flat", "reshape", "a", shape=[6]),
        node("s", "C[i] = A[i] * 2", A="flat"),
        node("b", "C[i, j] = A[i, j] * 3", A="a"),
    ]
    model = compiled(graph({"x": tensor(2, 3)}, {}, nodes, "s", "b", "flat"))
    x = np.zeros((2, 3), np.float32)
    results: dict[str, Any] = {}
    for event in model.step({"x": x}):
        if event.node == "flat":
            event.replace({"flat": np.arange(6, dtype=np.float32)})
        results |= event.outputs
    np.testing.assert_array_equal(results["s"], 2 * np.arange(6))
    np.testing.assert_array_equal(results["flat"], np.arange(6))
    np.testing.assert_array_equal(results["a"], np.ones((2, 3)))
    np.testing.assert_array_equal(results["b"], np.full((2, 3), 3))


@pytest.mark.parametrize(
    ("arrays", "code"),
    [
        ({"b": np.zeros((2, 3), np.float32)}, "unknown-output"),
        ({"a": np.zeros((3, 2), np.float32)}, "shape-mismatch"),
        ({"a": np.zeros((2, 3))}, "dtype-mismatch"),
        ({"a": [0.0]}, "not-an-array"),
        ([1], "not-an-array"),
    ],
)
def test_row_39_a_replacement_that_does_not_fit_is_refused(arrays: Any, code: str) -> None:
    model = compiled(graph({"x": tensor(2, 3)}, {}, [node("a", "C[i, j] = A[i, j] + 1", A="x")], "a"))
    event = next(model.step({"x": np.zeros((2, 3), np.float32)}))
    with pytest.raises(ArgumentError) as refusal:
        event.replace(arrays)
    assert refusal.value.code == code


def test_row_39_members_of_a_fused_node_are_its_operators() -> None:
    source = mlp()
    model = compiled(source)
    arrays = drawn(model)
    want = every_tensor(source, arrays)
    events = list(model.step(arrays, fused=True))
    assert len(events) < len(list(model.step(arrays)))
    members = [member for event in events for member in event.members()]
    assert [member.node for member in members] == ["fc0", "relu0", "fc1", "relu1"]
    for member in members:
        for name, array in member.outputs.items():
            close(array, want[name])


def test_row_39_fused_nodes_run_the_kernels_of_the_model() -> None:
    model = compiled(mlp(), plan="serial")
    arrays = drawn(model)
    *_, last = model.step(arrays, fused=True)
    (result,) = model.run(arrays).values()
    np.testing.assert_array_equal(next(iter(last.outputs.values())), result)


@pytest.mark.parametrize("fused", [False, True])
def test_row_39_a_state_is_updated_after_the_last_node(fused: bool) -> None:
    write = {"name": "write", "expression": "T[p[n], j] = x[n, j] where n in 1", "inputs": {"T": "k", "p": "p", "x": "x"},
             "outputs": {"T": "new"}, "updates": {"T": "k"}}  # fmt: skip
    source = graph(
        {"x": tensor(1, 3), "p": tensor(1, dtype="int32")}, {}, [write, node("sum", "C[j] +=! A[i, j]", A="k")], "sum"
    ) | {"states": {"k": tensor(4, 3)}}
    model = compiled(source)
    arrays = {"x": np.ones((1, 3), np.float32), "p": np.array([2], np.int32)}
    k, before = np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)
    steps = model.step(arrays, {"k": k}, fused=fused)
    first = next(steps)
    np.testing.assert_array_equal(k, before)
    *_, last = steps
    np.testing.assert_array_equal(last.outputs["sum"], np.ones(3))
    np.testing.assert_array_equal(k[2], np.ones(3))
    np.testing.assert_array_equal(first.inputs["k"], before)
    with pytest.raises(IndexRangeError, match="node 'write'"):
        list(model.step(arrays | {"p": np.array([9], np.int32)}, {"k": k}, fused=fused))


def test_row_39_results_are_no_views_of_inputs() -> None:
    source = graph({"x": tensor(2, 3)}, {}, [call("flat", "reshape", "x", shape=[6])], "flat")
    source["outputs"]["x"] = "flat"  # an output with the name of an input
    model = compiled(source)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    steps = model.step({"x": x})
    next(steps)
    with pytest.raises(StopIteration) as end:
        next(steps)
    for result in end.value.value.values():
        np.testing.assert_array_equal(result, np.arange(6))
        assert not np.may_share_memory(result, x)


def test_row_39_a_saved_model_has_no_steps(tmp_path: Any) -> None:
    compiled(mlp()).save(tmp_path)
    with pytest.raises(ArgumentError) as refusal:
        load_model(tmp_path).step({"x": np.zeros((2, 8), np.float32)}).__next__()
    assert refusal.value.code == "not-steppable"
    assert refusal.value.hint is not None


@pytest.mark.slow
def test_row_39_a_gpu_model_steps_in_the_emulator() -> None:
    model = compiled(MODELS["branches"], "nvidia-h200-sxm", runtime="emulator", threads=None)
    arrays = drawn(model)
    want = every_tensor(MODELS["branches"], arrays)
    for event in model.step(arrays):
        for name, array in event.outputs.items():
            close(array, want[name])


def test_row_39_operators_are_functions_of_arrays() -> None:
    a, b = RNG.uniform(-1, 1, (3, 4)).astype(np.float32), RNG.uniform(-1, 1, (4, 5)).astype(np.float32)
    with roller_svc.eager() as e:
        y = e.matmul(a, b)
        close(e.relu(y), np.maximum(a @ b, 0))
        close(e.softmax(y, axis=0), np.exp(y) / np.exp(y).sum(0))
        close(e.softmax(y, axis=1), np.exp(y) / np.exp(y).sum(1, keepdims=True))
        assert len(e._kernels) == 4
        close(e.relu(y + 1), np.maximum(y + 1, 0))
        assert len(e._kernels) == 4
        with pytest.raises(ArgumentError, match=r"parameters are keywords|argument 1 of softmax"):
            e.softmax(y, 1)
        with pytest.raises(roller_svc.errors.UnknownOpError):
            _ = e.no_such_operator


def run_steps(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    code = main(("model", "run", *words, "--step", "--select", "model", "--top-k", "1", "--threads", "1"))
    out, err = capsys.readouterr()
    return code, json.loads(out) if "--json" in words and out else out, err


@pytest.mark.parametrize("source_name", ["branches", "pieces", "recurrent", "chain", "states"])
def test_row_39_bisect_names_the_wrong_kernel(
    source_name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = graph(
        {"x": tensor(3, 4)}, {}, [node(f"n{i}", "C[i, j] = sin(A[i, j]) + 1", A=f"n{i - 1}" if i else "x") for i in range(6)], "n5"
    )
    counter = graph({"x": tensor(4)}, {}, [
        node("add", "C[i] = A[i] + B[i]", A="s", B="x") | {"updates": {"C": "s"}},
        node("out", "C[i] = A[i] * 2", A="s"),
    ], "out") | {"states": {"s": tensor(4)}}  # fmt: skip
    sources = {"recurrent": recurrent(8), "chain": chain, "states": counter}
    wrong = {"branches": "right", "pieces": "b", "recurrent": "scan", "chain": "n3", "states": "out"}[source_name]
    file, dump = tmp_path / "model.json", tmp_path / "dump"
    file.write_text(json.dumps(sources.get(source_name) or MODELS[source_name]))
    code, facts, _ = run_steps(capsys, str(file), "--dump", str(dump), "--check", "--json")
    assert code == 0
    assert json.loads((dump / "steps.json").read_text()) == facts["nodes"]
    code, text, _ = run_steps(capsys, str(file), "--bisect", str(dump / "values.npz"))
    assert code == 0
    assert "tensors agree" in text

    def break_calls(name: str) -> None:
        original = getattr(stepping, name)

        def call(*arguments: Any) -> stepping.Call:
            run = original(*arguments)
            broken = any(getattr(each, "name", None) == wrong for each in arguments)

            def run_broken(values: Mapping[str, Any]) -> Sequence[Any]:
                return [array + array.dtype.type(0.25) for array in run(values)] if broken else run(values)

            return run_broken

        monkeypatch.setattr(stepping, name, call)

    break_calls("_call_kernel")
    break_calls("_call_loop")
    for check in (("--bisect", str(dump / "values.npz")), ("--check",)):
        code, _, err = run_steps(capsys, str(file), *check)
        assert code == 1
        assert f"node {wrong} " in err


def test_row_39_steps_stop_at_the_first_nan_and_at_a_node(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    nodes = [node("a", "C[i] = A[i] - 9", A="x"), node("b", "C[i] = sqrt(A[i])", A="a"), node("c", "C[i] = A[i] + 1", A="b")]
    file.write_text(json.dumps(graph({"x": tensor(4)}, {}, nodes, "c")))
    code, facts, _ = run_steps(capsys, str(file), "--stop-at-nan", "--json")
    assert code == 0
    assert [each["node"] for each in facts["nodes"]] == ["a", "b"]
    assert facts["stopped"] == "stopped after b: 4 values are NaN"
    code, text, _ = run_steps(capsys, str(file), "--break", "a")
    assert code == 0
    assert "stopped after a" in text
    assert "input" in text
    for words, message in (
        (("--break", "z"), "no node is called 'z'; the first are a, b, c"),
        (("--bisect", str(tmp_path / "none.npz")), "cannot read"),
    ):
        code, _, err = run_steps(capsys, str(file), *words)
        assert code == 2
        assert message in err
    assert main(("model", "run", str(file), "--dump", str(tmp_path))) == 2
    assert "--dump needs --step" in capsys.readouterr().err


def test_row_39_dump_has_what_ran_until_a_difference_and_any_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, dump = tmp_path / "model.json", tmp_path / "dump"
    nodes = [node("file", "C[i] = A[i] + 1", A="x"), node("b", "C[i] = A[i] * 2", A="file"), node("c", "C[i] = A[i]", A="b")]
    file.write_text(json.dumps(graph({"x": tensor(4)}, {}, nodes, "c")))
    reference = tmp_path / "reference.npz"
    np.savez(reference, b=np.full(4, 9, np.float32))
    code, _, err = run_steps(capsys, str(file), "--dump", str(dump), "--bisect", str(reference))
    assert code == 1
    assert "node b " in err
    with np.load(dump / "values.npz") as values:
        assert sorted(values.files) == ["b", "file"]
        np.testing.assert_array_equal(values["b"], 2 * values["file"])
    assert [row["node"] for row in json.loads((dump / "steps.json").read_text())] == ["file", "b"]


def test_row_39_bisect_refuses_files_that_are_damaged_or_have_no_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good, bad, model = tmp_path / "good.npz", tmp_path / "bad.npz", tmp_path / "model.json"
    np.savez_compressed(good, a=np.arange(400.0))
    whole = good.read_bytes()
    header = io.BytesIO()
    np.save(header, np.arange(4.0))
    contents = [b"", whole[:200], whole[:60] + b"\xff" * 40 + whole[100:], header.getvalue()]
    for old, new in ((b"}", b"("), (b"(4,)", b"(4 4"), (b"'<f8'", b"'|O'  ")):
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as opened:
            opened.writestr("a.npy", header.getvalue().replace(old, new))
        contents.append(archive.getvalue())
    for content in contents:
        bad.write_bytes(content)
        with pytest.raises(ArgumentError) as refusal:
            read_reference(str(bad))
        assert refusal.value.code == "unreadable-file"
    with zipfile.ZipFile(bad, "w") as opened:
        opened.writestr("a.txt", b"text")
    with pytest.raises(ArgumentError, match=r"a.txt in .* is not an array"):
        read_reference(str(bad))
    model.write_text(json.dumps(graph({"x": tensor(4)}, {}, [node("a", "C[i] = A[i] + 1", A="x")], "a")))
    for array in (np.array(["one"] * 4), np.zeros(4, np.complex64), np.zeros(4, "datetime64[s]")):
        np.savez(bad, a=array)
        code, _, err = run_steps(capsys, str(model), "--bisect", str(bad))
        assert code == 2
        assert "--bisect: a has type" in err
