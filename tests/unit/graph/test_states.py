"""States of models: nodes see them in program order, updates write their memory, and no array of a call overlaps them."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_models import call, graph, tensor
from onnx import helper
from onnx_models import model as onnx_model

from roller_svc import hardware
from roller_svc.errors import ArgumentError, IndexRangeError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.passes.updates import update_states
from roller_svc.graph.states import pair_states
from roller_svc.graph.weights import Weights
from roller_svc.model import Model, compile_model, load_model
from roller_svc.runtime import binding
from roller_svc.settings import read_settings, use

ROWS, COLUMNS = 4, 6
MATRIX, ROW, WHERE = tensor(ROWS, COLUMNS), tensor(1, COLUMNS), tensor(1, dtype="int32")
WRITE = "T[p[n], j] = x[n, j] where n in 1"
ADD = "T[p[n], j] +=. x[n, j] where n in 1"
JOIN = "C[i, j] = A[i, j] * 0.5 + B[i, j]"
TAKE = "C[n, j] = A[p[n], j] where n in 1"


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


def node(name: str, expression: str, *, updates: str | None = None, **inputs: str) -> dict[str, Any]:
    result = expression[0]
    entry = {"name": name, "expression": expression, "inputs": inputs, "outputs": {result: name}}
    return entry if updates is None else entry | {"updates": {result: updates}}


def with_states(
    inputs: dict[str, Any], states: dict[str, Any], nodes: list[dict[str, Any]], *outputs: str, **options: Any
) -> dict[str, Any]:
    return graph(inputs, {}, nodes, *outputs, **options) | {"states": states}


def cached(old: str = "old", *more: dict[str, Any]) -> dict[str, Any]:
    """Return a model that reads a cache, writes a row of it, and reads it again."""
    nodes = [
        node("old", "C[j] +=! A[i, j]", A="k"),
        node("write", WRITE, updates="k", T="k", p="p", x="x"),
        node("new", "C[j] +=! A[i, j]", A="k"),
        *more,
    ]
    return with_states({"x": ROW, "p": WHERE}, {"k": MATRIX}, nodes, old, "new")


def compiled(source: Any, target: str = "local", **options: Any) -> Model:
    given = {"select": "model", "top_k": 1, "threads": 1} | options
    return compile_model(source, target, **given)


def copies(model: Model) -> list[str]:
    return [step["node"] for step in model.plan["steps"] if "copy" in step]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_readers_see_the_value_of_their_place_in_the_program() -> None:
    model = compiled(cached())
    cache, x = numbers(ROWS, COLUMNS), numbers(1, COLUMNS, seed=1)
    assert [info.name for info in model.states] == ["k"]
    assert [info.name for info in model.inputs] == ["x", "p"]
    for row in (2, 0):
        before, memory = cache.copy(), cache.ctypes.data
        results = model.run({"x": x, "p": np.array([row], np.int32)}, states={"k": cache})
        want = before.copy()
        want[row] = x
        np.testing.assert_array_equal(cache, want)
        assert cache.ctypes.data == memory
        assert list(results) == ["old", "new"]
        np.testing.assert_allclose(results["old"], before.sum(0), rtol=1e-5)
        np.testing.assert_allclose(results["new"], want.sum(0), rtol=1e-5)


def test_an_update_copies_nothing() -> None:
    model = compiled(cached())
    assert copies(model) == []
    assert model.plan["arena"]["bytes"] == 0
    assert all(step["arguments"].count([7, 0]) == 1 for step in model.plan["steps"])  # the slot of the state


def test_a_later_reader_of_the_old_value_gets_it() -> None:
    """A view before the update keeps its value, so the update cannot be in its memory."""
    nodes = [
        call("before", "reshape", "k", shape=[COLUMNS, ROWS]),
        node("write", WRITE, updates="k", T="k", p="p", x="x"),
        node("row", TAKE, A="k", p="p"),
        node("late", "C[i, j] = A[i, j] * r[0, 0]", A="before", r="row"),
    ]
    model = compiled(with_states({"x": ROW, "p": WHERE}, {"k": MATRIX}, nodes, "late", "before"))
    cache, x = numbers(ROWS, COLUMNS), numbers(1, COLUMNS, seed=1)
    before = cache.copy()
    results = model.run({"x": x, "p": np.array([1], np.int32)}, states={"k": cache})
    np.testing.assert_array_equal(results["before"], before.reshape(COLUMNS, ROWS))
    np.testing.assert_allclose(results["late"], before.reshape(COLUMNS, ROWS) * x[0, 0], rtol=1e-6)
    np.testing.assert_array_equal(cache[1], x[0])


def test_a_reader_after_the_update_in_order_but_not_in_data_moves_before_it() -> None:
    nodes = [
        call("before", "reshape", "k", shape=[COLUMNS, ROWS]),
        node("write", WRITE, updates="k", T="k", p="p", x="x"),
        node("sums", "C[i] +=! A[i, j]", A="before"),
    ]
    model = compiled(with_states({"x": ROW, "p": WHERE}, {"k": MATRIX}, nodes, "sums"))
    assert [step["node"] for step in model.plan["steps"]] == ["sums", "write"]
    cache = numbers(ROWS, COLUMNS)
    want = cache.reshape(COLUMNS, ROWS).sum(1)
    results = model.run({"x": numbers(1, COLUMNS), "p": np.array([1], np.int32)}, states={"k": cache})
    np.testing.assert_allclose(results["sums"], want, rtol=1e-5)


def test_states_that_exchange_their_values_do() -> None:
    nodes = [
        call("first", "identity", "a"),
        call("second", "identity", "b") | {"updates": {"y": "a"}},
        call("third", "identity", "first") | {"updates": {"y": "b"}},
    ]
    model = compiled(with_states({}, {"a": MATRIX, "b": MATRIX, "c": MATRIX}, nodes) | {"outputs": {"new": "a"}})
    a, b, c = (numbers(ROWS, COLUMNS, seed=seed) for seed in range(3))
    want = b.copy(), a.copy(), c.copy()
    results = model.run({}, states={"a": a, "b": b, "c": c})
    for got, expected in zip((a, b, c), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(results["new"], want[0])


class _Program:
    """A random program over states, and what it computes in program order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.nodes: list[dict[str, Any]] = []
        self.states = ["a", "b"]
        self.matrices = ["m"]
        self.rows = ["x"]
        for number in range(self.rng.randint(4, 8)):
            self._add(f"n{number}")
        self.outputs = self.rng.sample([*self.matrices[1:], *self.rows[1:], *self.states], 2)

    @property
    def source(self) -> dict[str, Any]:
        named = {f"out{number}": name for number, name in enumerate(self.outputs)}
        inputs = {"m": MATRIX, "x": ROW, "p": WHERE, "q": WHERE}
        return with_states(inputs, dict.fromkeys(self.states, MATRIX), self.nodes) | {"outputs": named}

    def _add(self, name: str) -> None:
        matrix, state = self.rng.choice([*self.matrices, *self.states]), self.rng.choice(self.states)
        match self.rng.choice(["write", "write", "add", "take", "join", "update", "view"]):
            case "write" | "add" as kind:
                text = WRITE if kind == "write" else ADD
                target = state if self.rng.random() < 0.8 else matrix
                updates = {"T": state, "p": self.rng.choice("pq"), "x": self.rng.choice(self.rows)} | {"T": target}
                self.nodes.append(node(name, text, updates=state, **updates))
            case "take":
                self.nodes.append(node(name, TAKE, A=matrix, p=self.rng.choice("pq")))
                self.rows.append(name)
            case "view":
                self.nodes += [
                    call(f"{name}.flat", "reshape", matrix, shape=[ROWS * COLUMNS]),
                    call(name, "reshape", f"{name}.flat", shape=[ROWS, COLUMNS]),
                ]
                self.matrices.append(name)
            case kind:
                other = self.rng.choice([*self.matrices, *self.states])
                self.nodes.append(node(name, JOIN, updates=state if kind == "update" else None, A=matrix, B=other))
                self.matrices.append(name)

    def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs and states, by numpy, one node after the other."""
        values = {name: array.copy() for name, array in arrays.items()}
        for each in self.nodes:
            names = each["inputs"]
            if isinstance(names, list):
                values[each["name"]] = values[names[0]].reshape(each["parameters"]["shape"]).copy()
                continue
            given = {operand: values[name] for operand, name in names.items()}
            if each["expression"] in (WRITE, ADD):
                result = given["T"].copy()
                row = result[given["p"][0]]
                row[:] = given["x"][0] + (row if each["expression"] == ADD else 0)
            elif each["expression"] == TAKE:
                result = given["A"][given["p"]].copy()
            else:
                result = given["A"] * np.float32(0.5) + given["B"]
            values[each["name"]] = result
            for state in each.get("updates", {}).values():
                values[state] = result.copy()
        results = {f"out{number}": values[name] for number, name in enumerate(self.outputs)}
        return results | {name: values[name] for name in self.states}


def sample(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {name: numbers(ROWS, COLUMNS, seed=seed + i) for i, name in enumerate("abm")}
    return arrays | {"x": numbers(1, COLUMNS, seed=seed)} | {n: rng.integers(0, ROWS, 1).astype(np.int32) for n in "pq"}


@pytest.mark.parametrize("seed", range(60))
def test_random_updates_keep_the_meaning_of_the_graph(seed: int) -> None:
    program, weights = _Program(seed), Weights()
    loaded = load_graph(program.source, weights)
    arrays = sample(seed)
    want = program.run(arrays)
    for each in (loaded, update_states(loaded)):
        got = interpret(each, weights, arrays)
        assert list(got) == list(want)
        for name, value in want.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def check_runs(program: _Program, model: Model, seed: int) -> None:
    arrays = sample(seed)
    want = program.run(arrays)
    states = {name: arrays.pop(name) for name in program.states}
    results = model.run(arrays, states=states)
    for name, value in want.items():
        np.testing.assert_allclose({**results, **states}[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


RUNS = [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 16))]


@pytest.mark.parametrize("seed", RUNS)
def test_random_updates_run_as_the_program_says(seed: int) -> None:
    program = _Program(seed)
    plans = ("serial", "eager", "parallel", "rammer")
    plan = plans[seed % len(plans)]
    check_runs(program, compiled(program.source, plan=plan, threads=1 if plan in ("serial", "eager") else 2), seed)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("seed", range(4))
def test_random_updates_run_on_gpus(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    load = hardware.load
    monkeypatch.setattr(hardware, "load", lambda target: dataclasses.replace(load(target), num_cores=8))
    program = _Program(seed)
    plan = ("launches", "graph", "waves", "persistent")[seed % 4]
    model = compiled(program.source, "nvidia-a100-sxm-80gb", threads=None, runtime="emulator", plan=plan)
    for call_seed in (seed, seed + 1):
        check_runs(program, model, call_seed)


def test_arrays_of_a_call_do_not_overlap_a_state() -> None:
    model, cache = compiled(cached()), numbers(ROWS, COLUMNS)
    inputs = {"x": numbers(1, COLUMNS), "p": np.array([1], np.int32)}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("state-aliased", {"arrays": inputs | {"x": cache[1:2]}, "states": {"k": cache}}),
        ("state-aliased", {"arrays": inputs, "states": {"k": cache}, "out": {"new": cache[0]}}),
        ("missing-state", {"arrays": inputs}),
        ("missing-state", {"arrays": inputs, "states": {}}),
        ("unknown-state", {"arrays": inputs, "states": {"k": cache, "v": cache}}),
        ("unknown-output", {"arrays": inputs, "states": {"k": cache}, "out": {"k": cache}}),
        ("shape-mismatch", {"arrays": inputs, "states": {"k": cache[1:]}}),
        ("dtype-mismatch", {"arrays": inputs, "states": {"k": cache.astype(np.float64)}}),
        ("not-an-array", {"arrays": inputs, "states": {"k": cache.tolist()}}),
        ("not-an-array", {"arrays": inputs, "states": cache}),
    ]
    before = cache.copy()
    for code, given in refused:
        with pytest.raises(ArgumentError) as error:
            model.run(**given)
        assert error.value.code == code
    fixed = cache.copy()
    fixed.flags.writeable = False
    with pytest.raises(ArgumentError, match="read-only"):
        model.run(inputs, states={"k": fixed})
    np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize(
    ("shape", "strides", "overlap"),
    [
        ((4, 6), (24, 4), False),
        ((4, 6), (-48, 8), False),
        ((4, 6), (0, 4), True),
        ((4, 6), (24, 0), True),
        ((4, 6), (20, 4), True),
        ((4, 6), (24, 2), True),
        ((1, 6), (0, 4), False),
        ((0, 6), (0, 0), False),
        ((), (), False),
        ((2, 3), (12, 8), False),  # 0, 8, 16 and 12, 20, 28
        ((2, 3), (8, 8), True),
        ((2, 3), (-8, 8), True),
        ((2, 3), (10, 8), True),  # 2 bytes of elements of 4
    ],
)
def test_elements_that_share_memory_are_found(shape: tuple[int, ...], strides: tuple[int, ...], *, overlap: bool) -> None:
    assert binding.overlap(shape, strides, 4) == overlap


def test_a_state_whose_elements_share_memory_is_refused() -> None:
    model, inputs = compiled(cached()), {"x": numbers(1, COLUMNS), "p": np.array([1], np.int32)}
    row = np.zeros(COLUMNS, np.float32)
    with pytest.raises(ArgumentError, match="elements of state 'k' share memory") as error:
        model.run(inputs, states={"k": np.lib.stride_tricks.as_strided(row, (ROWS, COLUMNS), (0, 4))})
    assert error.value.code == "state-aliased"
    assert not row.any()
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentError, match="elements of state 'k' share memory"):
        model.run(inputs, states={"k": torch.zeros(COLUMNS).expand(ROWS, COLUMNS)})
    with pytest.raises(ArgumentError, match="state 'k' requires a gradient"):
        model.run(inputs, states={"k": torch.zeros(ROWS, COLUMNS, requires_grad=True)})


def test_two_states_in_one_array_are_refused() -> None:
    nodes = [node("write", WRITE, updates="a", T="a", p="p", x="x"), node("sum", "C[j] +=! A[i, j]", A="b")]
    model = compiled(with_states({"x": ROW, "p": WHERE}, {"a": MATRIX, "b": MATRIX}, nodes, "sum"))
    memory = numbers(2 * ROWS, COLUMNS)
    inputs = {"x": numbers(1, COLUMNS), "p": np.array([1], np.int32)}
    with pytest.raises(ArgumentError, match="state 'b' shares memory with 'a'"):
        model.run(inputs, states={"a": memory[:ROWS], "b": memory[1 : 1 + ROWS]})
    model.run(inputs, states={"a": memory[:ROWS], "b": memory[ROWS:]})


def test_a_state_with_gaps_is_updated() -> None:
    model, memory = compiled(cached()), numbers(ROWS, 2 * COLUMNS)
    before, x = memory.copy(), numbers(1, COLUMNS, seed=1)
    model.run({"x": x, "p": np.array([3], np.int32)}, states={"k": memory[:, ::2]})
    before[3, ::2] = x
    np.testing.assert_array_equal(memory, before)


def test_an_index_out_of_range_is_reported() -> None:
    model, inputs = compiled(cached()), {"x": numbers(1, COLUMNS), "p": np.array([ROWS], np.int32)}
    with pytest.raises(IndexRangeError, match="node 'write': index 4"):
        model.run(inputs, states={"k": numbers(ROWS, COLUMNS)})


def test_a_saved_model_updates_its_states(tmp_path: Path) -> None:
    model = compiled(cached())
    folder = model.save(tmp_path / "saved", launcher="ctypes")
    assert "outputs[2]: state k float32[4, 6], updated in place" in (folder / "model.h").read_text()
    x, where = numbers(1, COLUMNS), np.array([2], np.int32)
    loaded = load_model(folder)
    assert loaded.states == model.states
    cache = numbers(ROWS, COLUMNS)
    want = cache.copy()
    want[2] = x
    loaded.run({"x": x, "p": where}, states={"k": cache})
    np.testing.assert_array_equal(cache, want)
    script = (
        "import numpy as np, launch\nk, x = np.load('k.npy'), np.load('x.npy')\nmodel = launch.Model()\n"
        "results = model.run({'x': x, 'p': np.array([2], np.int32)}, states={'k': k})\n"
        "assert list(results) == ['old', 'new']\nnp.save('k.npy', k)\n"
        "try:\n    model.run({'x': x, 'p': np.array([2], np.int32)})\nexcept TypeError as error:\n    print(error)\n"
    )
    np.save(folder / "k.npy", numbers(ROWS, COLUMNS))
    np.save(folder / "x.npy", x)
    printed = subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, capture_output=True, text=True)
    assert printed.stdout == "expected the states ['k'], got []\n"
    np.testing.assert_array_equal(np.load(folder / "k.npy"), want)


def test_malformed_states_are_refused() -> None:
    def changed(**fields: Any) -> dict[str, Any]:
        return cached() | fields

    write = cached()["nodes"][1]
    body = with_states({}, {"k": MATRIX}, [], name="body") | {"outputs": {"k": "k"}}
    loop = {"name": "loop", "loop": {"steps": 2, "carried": 1, "scanned": [], "stacked": [], "body": body}}
    inner = graph({"k": MATRIX}, {}, [call("twice", "relu", "k")], "twice", name="inner")
    plain = {"name": "loop", "loop": loop["loop"] | {"body": inner}}
    wrong = {
        "an input and a state are called 'x'": changed(states={"x": MATRIX}),
        "an output and a state are called 'k'": changed(outputs={"k": "new"}),
        "updates 'v', which is not a state": changed(nodes=[write | {"updates": {"T": "v"}}], outputs={}),
        "updates a state by 'Q', and its results are T": changed(nodes=[write | {"updates": {"Q": "k"}}], outputs={}),
        "a name must be text of 1 to .* got \\['k'\\]": changed(nodes=[write | {"updates": {"T": ["k"]}}], outputs={}),
        "'loop' is a loop, which has no updates: give them to a node `identity`": changed(
            nodes=[plain | {"inputs": ["k"], "outputs": ["last"], "updates": {"k": "k"}}], outputs={}
        ),
        "by a result of another type": changed(nodes=[cached()["nodes"][0] | {"updates": {"C": "k"}}], outputs={}),
        "unknown field 'states'": changed(nodes=[loop | {"inputs": ["k"], "outputs": ["last"]}], outputs={}),
    }
    for message, source in wrong.items():
        with pytest.raises(ArgumentError, match=message) as error:
            load_graph(source, Weights())
        assert error.value.code == "invalid-model"


def decoder() -> onnx.ModelProto:
    nodes = [
        helper.make_node("ScatterND", ["past_0", "at", "x"], ["present_0"]),
        helper.make_node("ReduceSum", ["present_0"], ["y"], keepdims=0),
    ]
    proto = onnx_model(nodes, {"past_0": (ROWS, COLUMNS), "x": (1, COLUMNS)}, {"present_0": (ROWS, COLUMNS), "y": ()})
    proto.graph.input.append(helper.make_tensor_value_info("at", onnx.TensorProto.INT64, (1, 1)))
    return proto


@pytest.mark.parametrize("states", [{"past_0": "present_0"}, {"past_*": "present_*"}])
def test_inputs_and_outputs_of_onnx_become_states(states: dict[str, str]) -> None:
    model, cache = compiled(decoder(), states=states), numbers(ROWS, COLUMNS)
    want, x = cache.copy(), numbers(1, COLUMNS, seed=1)
    want[2] = x
    results = model.run({"x": x, "at": np.array([[2]])}, states={"past_0": cache})
    assert copies(model) == []
    assert list(results) == ["y"]
    np.testing.assert_array_equal(cache, want)
    np.testing.assert_allclose(results["y"], want.sum(), rtol=1e-4)


def test_wrong_pairs_are_refused() -> None:
    loaded = load_graph(decoder(), Weights())
    wrong: dict[str, dict[Any, Any]] = {
        "no input is called 'cache'": {"cache": "present_0"},
        "no input is called 'cache_\\*'": {"cache_*": "present_*"},
        "no output is called 'next_0'": {"past_*": "next_*"},
        "'y' must have the type of 'past_0', whose new value it is, float32\\[4, 6\\], got float32\\[\\]": {"past_0": "y"},
        "'past_0' is paired with 'present_0', and is a state already": {"past_0": "present_0", "past_*": "present_*"},
        "'present_0' is the new value of 'past_0', and cannot be that of 'x' too": {"past_0": "present_0", "x": "present_0"},
        "both with at most one \\*": {"past_*": "present_0"},
        "got 1": {1: "present_0"},
    }
    for message, pairs in wrong.items():
        with pytest.raises(ArgumentError, match=message):
            pair_states(loaded, pairs)
    with pytest.raises(ArgumentError, match="states must map inputs to outputs"):
        compiled(decoder(), states=["past_0"])


def test_a_state_is_paired_once() -> None:
    with pytest.raises(ArgumentError, match="'k' is paired with 'k', and is a state already"):
        pair_states(load_graph(cached(), Weights()), {"k": "k"})


def test_a_bucket_may_differ_in_states_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        helper.make_node("Add", ["past_0", "x"], ["present_0"]),
        helper.make_node("ReduceSum", ["present_0"], ["y"], keepdims=0),
    ]
    proto = onnx_model(nodes, {"past_0": ("n", COLUMNS), "x": (1, COLUMNS)}, {"present_0": ("n", COLUMNS), "y": ()})
    model = compiled(proto, dims={"n": [4, 8]}, states={"past_*": "present_*"})
    folder = model.save(tmp_path / "saved", launcher="ctypes")
    spec = importlib.util.spec_from_file_location("saved_states", folder / "launch.py")
    assert spec is not None
    assert spec.loader is not None
    launch = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "saved_states", launch)  # where dataclasses look for its types
    spec.loader.exec_module(launch)
    x = numbers(1, COLUMNS)
    for rows in (8, 4):
        for called in (model, load_model(folder), launch.Model()):
            state = np.ones((rows, COLUMNS), np.float32)
            result = called.run({"x": x}, states={"past_0": state})["y"]
            np.testing.assert_array_equal(state, np.ones((rows, 1), np.float32) + x)
            np.testing.assert_allclose(result, state.sum(), rtol=1e-5)
    state = np.ones((8, COLUMNS), np.float32)
    assert [step.operator for step in model.profile({"x": x}, {"past_0": state})]
    np.testing.assert_array_equal(state, np.ones((8, 1), np.float32) + x)
    with pytest.raises(ArgumentError, match=r"no bucket has the shapes x\[1, 6\], past_0\[5, 6\]; buckets are n=4; n=8"):
        model.run({"x": x}, states={"past_0": state[:5]})
    with pytest.raises(ArgumentError, match="missing state: past_0"):
        model.run({"x": x})
    with pytest.raises(ValueError, match=r"no variant for .* x\[1, 6\], past_0\[5, 6\]; there are x\[1, 6\], past_0\[4, 6\]"):
        launch.Model().run({"x": x}, states={"past_0": state[:5]})
    with pytest.raises(TypeError, match="expected past_0 in states alone, got it in out too"):
        launch.Model().run({"x": x}, out={"past_0": state}, states={"past_0": state})


def check_new_value(source: dict[str, Any], inputs: dict[str, Any], old: Any, new: Any) -> Model:
    """Check the new value of the only state of a model, and return it."""
    model, state = compiled(source), old.copy()
    model.run(inputs, states={"k": state})
    np.testing.assert_allclose(state, new, rtol=1e-6)
    return model


@pytest.mark.parametrize("is_view", [False, True])
def test_an_update_that_reads_what_it_overwrites_is_not_in_place(*, is_view: bool) -> None:
    view = [call("view", "reshape", "k", shape=[ROWS, COLUMNS])]
    turn = node("turn", "T[3 - n, j] = x[n, j] where n in 4", updates="k", T="k", x="view" if is_view else "k")
    old = numbers(ROWS, COLUMNS)
    check_new_value(with_states({}, {"k": MATRIX}, [*(view if is_view else []), turn]), {}, old, old[::-1])


def test_a_scatter_of_a_transposed_state_is_not_in_place() -> None:
    nodes = [node("turn", "T[i, j] = k[j, i]; T[p[n], j] = x[n, j] where n in 1", updates="k", k="k", p="p", x="x")]
    source = with_states({"p": WHERE, "x": tensor(1, ROWS)}, {"k": tensor(ROWS, ROWS)}, nodes)
    old, x = numbers(ROWS, ROWS), numbers(1, ROWS, seed=1)
    new = old.T.copy()
    new[1] = x
    check_new_value(source, {"p": np.array([1], np.int32), "x": x}, old, new)


def test_a_scatter_of_a_copied_state_is_in_place() -> None:
    nodes = [node("write", "T[i, j] = k[i, j]; T[p[n], j] = x[n, j] where n in 1", updates="k", k="k", p="p", x="x")]
    old, x = numbers(ROWS, COLUMNS), numbers(1, COLUMNS, seed=1)
    new = old.copy()
    new[1] = x
    inputs = {"p": np.array([1], np.int32), "x": x}
    model = check_new_value(with_states({"p": WHERE, "x": ROW}, {"k": MATRIX}, nodes), inputs, old, new)
    assert copies(model) == []
    assert len(model.plan["steps"]) == 1


def test_a_result_that_is_the_old_value_keeps_it() -> None:
    nodes = [call("before", "reshape", "k", shape=[COLUMNS, ROWS]), cached()["nodes"][1]]
    model, cache = compiled(with_states({"x": ROW, "p": WHERE}, {"k": MATRIX}, nodes, "before")), numbers(ROWS, COLUMNS)
    want = cache.reshape(COLUMNS, ROWS).copy()
    results = model.run({"x": numbers(1, COLUMNS, seed=1), "p": np.array([1], np.int32)}, states={"k": cache})
    np.testing.assert_array_equal(results["before"], want)


SEQUENCES, PAGES, PAGE, SHARED, FEATURES = 2, 3, 4, 1, 8


def paged() -> dict[str, Any]:
    """Return a decode step: new keys and values go to the slots of their tokens, and queries read pages up to a length."""
    write = "T[s[t] // 4, s[t] % 4, h, d] = x[t, h, d] where t in 2"
    cache, row = tensor(SEQUENCES * PAGES, PAGE, SHARED, FEATURES), tensor(SEQUENCES, SHARED, FEATURES)
    nodes = [
        node("keys", write, updates="k", T="k", s="slots", x="new_k"),
        node("values", write, updates="v", T="v", s="slots", x="new_v"),
        call("mixed", "paged_attention", "q", "k", "v", "pages", "lengths"),
    ]
    inputs = {"q": tensor(SEQUENCES, 2, FEATURES), "new_k": row, "new_v": row, "slots": tensor(SEQUENCES, dtype="int32")}
    inputs |= {"pages": tensor(SEQUENCES, PAGES, dtype="int32"), "lengths": tensor(SEQUENCES, dtype="int32")}
    return with_states(inputs, {"k": cache, "v": cache}, nodes, "mixed")


GPU = ("nvidia-a100-sxm-80gb", {"threads": None, "runtime": "emulator"})


@pytest.mark.parametrize(("target", "options"), [("local", {}), pytest.param(*GPU, marks=[pytest.mark.slow, pytest.mark.emulator])])
def test_a_paged_cache_grows_by_a_row_a_call(target: str, options: dict[str, Any]) -> None:
    model, rng = compiled(paged(), target, **options), np.random.default_rng(3)
    assert copies(model) == []
    pages = rng.permutation(SEQUENCES * PAGES).reshape(SEQUENCES, PAGES).astype(np.int32)
    states = {name: np.zeros((SEQUENCES * PAGES, PAGE, SHARED, FEATURES), np.float32) for name in "kv"}
    rows: dict[str, list[Any]] = {"k": [], "v": []}
    for number in range(PAGE + 2):
        new = {name: rng.standard_normal((SEQUENCES, SHARED, FEATURES)).astype(np.float32) for name in "kv"}
        query = rng.standard_normal((SEQUENCES, 2, FEATURES)).astype(np.float32)
        slots = pages[:, number // PAGE] * PAGE + number % PAGE
        inputs = {"q": query, "new_k": new["k"], "new_v": new["v"], "slots": slots, "pages": pages}
        inputs["lengths"] = np.full(SEQUENCES, number + 1, np.int32)
        mixed = model.run(inputs, states=states)["mixed"]
        for name in "kv":
            rows[name].append(new[name][:, 0])
        keys, values = (np.stack(rows[name], 1) for name in "kv")
        weights = np.exp(np.einsum("shd,snd->shn", query, keys) / np.sqrt(FEATURES))
        want = np.einsum("shn,snd->shd", weights / weights.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(mixed, want, rtol=2e-4, atol=2e-5)
