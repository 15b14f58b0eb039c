"""Whole models through the Python API: calls, reports, profiles, saved models, a C program that runs one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import branching, mlp, model

import roller_svc
from roller_svc.errors import ArgumentError, InputError, UnknownKernelError, UnsupportedModelError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.model import Model, compile_model
from roller_svc.runtime import binding
from roller_svc.runtime.binding import aligned_empty
from roller_svc.runtime.graphs import cpu
from roller_svc.settings import read_settings, settings, use
from roller_svc.toolchain import gcc, link
from roller_svc.toolchain.confined import compile_sandboxed
from roller_svc.toolchain.gcc import native_compiler

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
MLP = mlp()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


@contextmanager
def use_cache(folder: Path) -> Iterator[None]:
    before = settings()
    use(read_settings(cache=folder))
    yield
    use(before)


def compiled(source: object = MLP, **options: Any) -> Model:
    return compile_model(source, **{"select": "model", "top_k": 1} | options)


@pytest.fixture(scope="module")
def built(cache: Path) -> Model:
    return compiled()


def expected(source: object, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    weights = Weights()
    return interpret(load_graph(source, weights), weights, arrays)


def test_a_model_computes_what_the_interpreter_does(built: Model) -> None:
    for result in (built(x=X), built.run({"x": X})):
        np.testing.assert_allclose(result["y"], expected(MLP, x=X)["y"], rtol=1e-5, atol=1e-6)
    out = np.zeros((2, 4), np.float32)
    assert built(x=X, out={"y": out})["y"] is out
    np.testing.assert_array_equal(out, built(x=X)["y"])


def test_arrays_with_the_alignment_of_their_elements_are_used_in_place(built: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.zeros(64 + 16 + 8, np.float32)
    first = next(i for i in range(1, 16) if memory[i:].ctypes.data % 64)
    x, out = memory[first : first + 16].reshape(2, 8), memory[40 + first : 48 + first].reshape(2, 4)
    x[...] = X
    monkeypatch.setattr(binding, "aligned_empty", None)  # for copies
    assert built(x=x, out={"y": out})["y"] is out
    np.testing.assert_allclose(out, expected(MLP, x=X)["y"], rtol=1e-5, atol=1e-6)


def test_plain_arrays_take_a_short_way(built: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    want = built(x=X, out={"y": np.zeros((2, 4), np.float32)})["y"]
    others = {"fortran": np.asfortranarray(X), "reversed": X[::-1].copy()[::-1], "subclass": X.view(np.recarray)}
    for array in others.values():
        np.testing.assert_array_equal(built(x=array)["y"], want)
    monkeypatch.setattr(cpu, "bind_call", None)
    for offset in (0, 4):
        results = [built(x=place_at(X, offset))["y"] for _ in range(2)]
        assert not np.may_share_memory(*results)
        for result in results:
            np.testing.assert_array_equal(result, want)
    read_only = X.copy()
    read_only.flags.writeable = False
    np.testing.assert_array_equal(built(x=read_only)["y"], want)


def place_at(array: np.ndarray, offset_bytes: int) -> np.ndarray:
    """Return a copy that begins that many bytes behind a multiple of 64."""
    memory = aligned_empty((array.nbytes + offset_bytes,), np.dtype(np.uint8))[offset_bytes:]
    placed = memory.view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def test_a_model_describes_itself(built: Model) -> None:
    assert built.inputs == (("x", "float32", (2, 8)),)
    assert built.outputs == (("y", "float32", (2, 4)),)
    assert sum(kernel.uses for kernel in built.kernels) == len(built.plan["steps"])
    assert built.estimate.seconds == pytest.approx(sum(stage.seconds for stage in built.estimate.stages))
    assert {"passes", "seconds", "classes", "cache"} <= built.report.keys()
    assert json.loads(json.dumps([built.plan, built.report]))
    assert built.plan["launches"] == 2


def test_wrong_arrays_and_options_are_refused(built: Model) -> None:
    for arrays in ({}, {"x": X, "z": X}, {"x": X[:1]}, {"x": X.astype(np.float64)}, {"x": [1.0]}):
        with pytest.raises(InputError):
            built.run(arrays)
    with pytest.raises(ArgumentError, match="keyword"):
        built(X)
    options: list[dict[str, Any]] = [
        {"plan": 1}, {"plan": {}}, {"plan": "fast"}, {"winograd": "on"}, {"winograd": 1}, {"threads": 0},
        {"threads": 4096}, {"select": "guess"}, {"dims": {"n": 0}}, {"dims": {"n": [2, 2]}}, {"dims": {"n": 2}},
        {"dims": 3}, {"inputs": {"z": ("float32", (1,))}}, {"target": "graphcore-mk2"}, {"target": "abacus"},
        {"speed": 11}, {"allow_tf32": "yes"}, {"inputs": {"x": ("float33", (2, 8))}},
    ]  # fmt: skip
    for each in options:
        with pytest.raises(InputError):
            compiled(**each)


def test_an_eager_plan_keeps_every_tensor() -> None:
    eager = compiled(plan="eager", threads=1)
    np.testing.assert_allclose(eager(x=X)["y"], expected(MLP, x=X)["y"], rtol=1e-5, atol=1e-6)
    assert eager.plan["kind"] == "eager"
    assert eager.plan["launches"] == 4
    assert eager.plan["arena"]["bytes"] >= sum(4 * 2 * n for n in (16, 16, 4))


def test_a_second_compile_takes_kernels_from_the_cache(built: Model) -> None:
    again = compiled()
    assert again.report["cache"] == {"hits": len(again.report["classes"]), "misses": 0}
    assert again.digest == built.digest
    assert compiled(mlp()).digest != built.digest


def test_no_text_is_compiled_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def record(what: str, command: list[str], output: Path, *more: Any, **named: Any) -> str:
        if (output.parent / "kernel.c").exists() and "kernel.c" in command:
            texts.append((output.parent / "kernel.c").read_text())
        return compile_sandboxed(what, command, output, *more, **named)

    monkeypatch.setattr(gcc, "compile_sandboxed", record)
    monkeypatch.setattr(link, "compile_sandboxed", record)
    with use_cache(tmp_path):
        model = compiled(mlp(), threads=1)
        model(x=X)
        assert len(texts) == len(model.kernels) + 1  # and the plan
        compiled(mlp(), threads=1, name="other")
        assert len(texts) == len(model.kernels) + 1  # other weights and another name have the same objects


def test_the_workspace_of_each_kernel_is_limited(built: Model) -> None:
    def most_bytes(model: Model) -> int:
        return max(kernel.parts.compiled.source.workspace_bytes for kernel in model.kernels)

    assert most_bytes(built) > 0
    assert most_bytes(compiled(max_workspace_bytes=0)) == 0


def test_every_unsupported_node_is_listed() -> None:
    nodes = [helper.make_node(op, ["x"], [name], name) for op, name in (("NonZero", "n"), ("Frobnicate", "f"))]
    source = model(nodes, {"x": (2,)}, {"n": (1, 2), "f": (2,)})
    with pytest.raises(UnsupportedModelError) as refusal:
        compiled(source)
    assert [(node.operator, node.name) for node in refusal.value.nodes] == [("NonZero", "n"), ("Frobnicate", "f")]
    assert refusal.value.code == "unsupported-model"


def test_a_profile_has_every_step_in_order(built: Model, tmp_path: Path) -> None:
    profile = built.profile({"x": X})
    assert [step.operator for step in profile] == [step["node"] for step in built.plan["steps"]]
    digests = {kernel.digest for kernel in built.kernels}
    end = 0.0
    for operator, kernel, start_s, end_s, veu in profile:
        assert operator
        assert kernel in digests
        assert veu == 0
        assert end <= start_s <= end_s
        end = end_s
    trace = json.loads(profile.save_trace(tmp_path / "trace.json").read_text())
    assert [event["name"] for event in trace["traceEvents"]] == [step.operator for step in profile]
    assert sum(profile.seconds_by_operator().values()) == pytest.approx(sum(s.end_s - s.start_s for s in profile))


def test_a_profile_counts_the_steps_of_loops(tmp_path: Path) -> None:
    body = helper.make_graph(
        [helper.make_node("Mul", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["z"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in ("s", "x")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, (3,)) for name in ("t", "z")],
    )
    node = helper.make_node("Scan", ["s0", "xs"], ["last", "y"], body=body, num_scan_inputs=1)
    source = model([node], {"s0": (3,), "xs": (5, 3)}, {"last": (3,), "y": (5, 3)})
    arrays = {"s0": np.array([1, 2, 3], np.float32), "xs": np.full((5, 3), 2, np.float32)}
    looped = compiled(source)
    for each in (looped, roller_svc.load_model(looped.save(tmp_path / "loop"))):
        np.testing.assert_array_equal(each(**arrays)["last"], arrays["s0"] * 32)
        assert len([s for s in each.profile(arrays) if s.kernel != "copy"]) == 5


def test_a_saved_model_runs_without_a_compiler(built: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = built.save(tmp_path / "saved")
    built.save(folder)  # again, over it
    monkeypatch.setenv("PATH", "")
    loaded = roller_svc.load_model(folder)
    np.testing.assert_array_equal(loaded(x=X)["y"], built(x=X)["y"])
    for name in ("digest", "target", "inputs", "outputs", "plan", "estimate", "report"):
        assert getattr(loaded, name) == getattr(built, name), name
    assert [(k.digest, k.uses) for k in loaded.kernels] == [(k.digest, k.uses) for k in built.kernels]
    again = loaded.save(tmp_path / "again")
    for name in ("model.so", "model.h", "weights.bin", "packed.bin", "metadata.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_a_saved_model_that_changed_is_refused(built: Model, tmp_path: Path) -> None:
    folder = built.save(tmp_path / "saved")
    with pytest.raises(UnknownKernelError):
        roller_svc.load_model(tmp_path)
    for name in ("model.so", "weights.bin", "kernels/0/kernel.c"):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(InputError):
            roller_svc.load_model(copy)
        shutil.rmtree(copy)


def test_a_saved_model_leaves_out_weights_that_only_packing_reads(tmp_path: Path) -> None:
    source = mlp(64, sizes=(32, 64, 48))
    packed = compiled(source)
    assert packed.plan["read_weights_bytes"] < packed.plan["weights_bytes"]
    folder = packed.save(tmp_path / "saved")
    assert (folder / "weights.bin").stat().st_size == packed.plan["read_weights_bytes"]
    assert (folder / "packed.bin").stat().st_size == packed.plan["packed_bytes"] > 0
    x = np.linspace(-1, 1, 64 * 32, dtype=np.float32).reshape(64, 32)
    for each in (packed, roller_svc.load_model(folder)):
        np.testing.assert_allclose(each(x=x)["y"], expected(source, x=x)["y"], rtol=1e-4, atol=1e-5)


def test_calls_from_several_threads_overlap(built: Model) -> None:
    inputs = [X * factor for factor in range(8)]
    wanted = [built(x=x)["y"] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for result, array in zip(pool.map(lambda x: built(x=x)["y"], inputs * 20), wanted * 20, strict=True):
            np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), "roller-model/1"),
        (("name",), "not-a-name"),
        (("kernels",), []),
        (("kernels", 0), "sha256:0"),
        (("uses", 0), [-1.0, 1]),
        (("variants",), []),
        (("variants", 0, "kernels", 0), 99),
        (("variants", 0, "files", "weights"), "../weights.bin"),
        (("variants", 0, "files", "weights"), "packed.bin"),
        (("variants", 0, "plan", "weights_bytes"), 1),
        (("variants", 0, "plan", "read_weights_bytes"), 64),
        (("variants", 0, "plan", "packed_bytes"), 64),
        (("variants", 0, "plan", "arena_bytes"), -1),
        (("variants", 0, "plan", "num_slots"), 3),
        (("variants", 0, "plan", "inputs"), [["x", "float32", [2, -1]]]),
        (("variants", 0, "plan", "inputs"), [["x", "float31", [2, 8]]]),
        (("variants", 0, "plan", "steps", 0, "kernel"), 7),
        (("variants", 0, "plan", "steps", 0, "launch"), 9),
        (("variants", 0, "plan", "steps", 0, "arguments"), []),
        (("variants", 0, "plan", "steps", 0, "more"), 1),
        (("variants", 0, "plan", "steps"), 3),
        (("report",), []),
    ],
)
def test_metadata_that_no_save_writes_is_refused(built: Model, tmp_path: Path, path: tuple[Any, ...], value: object) -> None:
    folder = built.save(tmp_path / "saved")
    document = json.loads((folder / "metadata.json").read_text())
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (folder / "metadata.json").write_text(json.dumps(document))
    with pytest.raises(ArgumentError) as refusal:
        roller_svc.load_model(folder)
    assert refusal.value.code == "damaged-kernel"


C_PROGRAM = """
#include "model.h"
static _Alignas(64) float x[2 * 8], y[2 * 4];
int main(int argc, char **argv) {
  struct NAME model;
  const void *inputs[NAME_INPUTS] = {x};
  void *outputs[NAME_OUTPUTS] = {y};
  if (argc < 2 || NAME_open(&model, argv[1])) return 1;
  if (fread(x, sizeof x, 1, stdin) != 1) return 2;
  if (NAME_call(&model, inputs, outputs) >= 0) return 3;
  fwrite(y, sizeof y, 1, stdout);
  NAME_close(&model);
  return 0;
}
"""


@pytest.mark.skipif("clang" in native_compiler()[0], reason="kernels of clang use its OpenMP runtime")
def test_a_model_has_the_thread_pool_in_place_of_libgomp(built: Model, tmp_path: Path) -> None:
    binary = (built.save(tmp_path / "saved") / "model.so").read_bytes()
    assert f"{built.name}_use_pool".encode() in binary
    assert b"libgomp" not in binary


def test_a_c_program_runs_a_saved_model(built: Model, tmp_path: Path) -> None:
    folder = built.save(tmp_path / "saved")
    (tmp_path / "main.c").write_text(C_PROGRAM.replace("NAME", built.name))
    command = [
        "gcc",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(folder),
        "main.c",
        str(folder / "model.so"),
        "-o",
        "main",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "main", folder], input=X.tobytes(), capture_output=True, check=True)
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32).reshape(2, 4), built(x=X)["y"])
    assert subprocess.run([tmp_path / "main", tmp_path], input=X.tobytes(), check=False).returncode == 1


def test_buckets_are_chosen_by_the_shapes_of_a_call(tmp_path: Path) -> None:
    source = mlp("batch")
    buckets = compiled(source, dims={"batch": [2, 3]})
    for each in (buckets, roller_svc.load_model(buckets.save(tmp_path / "saved"))):
        assert each.buckets == ({"batch": 2}, {"batch": 3})
        for batch in (3, 2):
            x = np.resize(X, (batch, 8))
            weights = Weights()
            graph = load_graph(source, weights, dims={"batch": batch})
            wanted = interpret(graph, weights, {"x": x})["y"]
            np.testing.assert_allclose(each(x=x)["y"], wanted, rtol=1e-5, atol=1e-6)
        with pytest.raises(ArgumentError, match="batch=3") as refusal:
            each(x=np.resize(X, (4, 8)))
        assert refusal.value.code == "shape-mismatch"
        for arrays, code in (({"x": X.tolist()}, "not-an-array"), ({}, "missing-argument")):
            with pytest.raises(ArgumentError) as refusal:
                each(**arrays)
            assert refusal.value.code == code
    header = (tmp_path / "saved" / "model.1.h").read_text()
    assert f"long {buckets.name}_1_run(" in header
    command = ["nm", "-D", "--defined-only", "-P", tmp_path / "saved" / "model.1.so"]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert all(symbol.startswith(f"{buckets.name}_1_") for symbol in symbols)


def test_a_model_without_kernels_runs(tmp_path: Path) -> None:
    constant = numpy_helper.from_array(np.array([3, 4], np.float32), "c")
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Identity", ["c"], ["z"])]
    moved = compiled(model(nodes, {"x": (3,)}, {"y": (3,), "z": (2,)}, [constant]))
    for each in (moved, roller_svc.load_model(moved.save(tmp_path / "saved"))):
        result = each(x=np.arange(3, dtype=np.float32))
        assert result["y"].tolist() == [0, 1, 2]
        assert result["z"].tolist() == [3, 4]


def test_an_index_out_of_range_names_its_node() -> None:
    source = model(
        [helper.make_node("Gather", ["w", "i"], ["y"], "pick")],
        {"i": (2,)},
        {"y": (2,)},
        [numpy_helper.from_array(np.arange(4, dtype=np.int64), "w")],
        dtype=TensorProto.INT64,
    )
    gather = compiled(source)
    assert gather(i=np.array([3, -1], np.int64))["y"].tolist() == [3, 3]
    with pytest.raises(InputError, match="pick"):
        gather(i=np.array([0, 9], np.int64))


def test_a_constant_is_no_input_of_the_model() -> None:
    x = np.array([1, -2, 3, 0.5], np.float32)
    high, low = (compiled(branching(), constants={"rate": rate}) for rate in (16000, np.array(8000)))
    assert [info.name for info in high.inputs] == ["x"]
    np.testing.assert_array_equal(high(x=x)["y"], 2 * x)
    np.testing.assert_array_equal(low(x=x)["y"], x + 8000)
    assert high.digest != low.digest
    with pytest.raises(ArgumentError, match="unknown argument 'rate'"):
        high(x=x, rate=np.array(16000))
    assert roller_svc.model.estimate_model(branching(), constants={"rate": 16000}, select="model")["seconds"] > 0


@pytest.mark.parametrize(
    ("source", "constants", "message"),
    [
        (branching(), [16000], "constants must map names of inputs to values"),
        (branching(), {1: 16000}, "constants must map names of inputs to values"),
        (branching(), {"rat": 16000}, "the model has no input 'rat'"),
        ({"format": "roller-graph/1"}, {"x": 1}, "inputs, dims and constants are for ONNX models"),
    ],
)
def test_constants_that_do_not_fit_are_refused(source: object, constants: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiled(source, constants=constants)


def test_tensors_without_elements_are_inputs_and_outputs(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["past", "x"], ["y"], axis=1), helper.make_node("Identity", ["past"], ["z"])]
    source = model(nodes, {"past": (2, "length", 3), "x": (2, 4, 3)}, {"y": None, "z": None})
    built = compiled(source, dims={"length": [0, 1]})
    x = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    built.save(tmp_path / "saved")
    for each in (built, roller_svc.load_model(tmp_path / "saved")):
        assert [info.shape for info in each.inputs] == [(2, 0, 3), (2, 4, 3)]
        for length in (0, 1):
            past = np.full((2, length, 3), 7, np.float32)
            got = each(past=past, x=x)
            np.testing.assert_array_equal(got["y"], np.concatenate([past, x], 1))
            np.testing.assert_array_equal(got["z"], past)
    alone = compiled(source, dims={"length": 0})
    assert "inputs[0]: past float32[2, 0, 3]" in (alone.save(tmp_path / "alone") / "model.h").read_text()
    with pytest.raises(ArgumentError, match="missing argument: past"):
        alone(x=x)
    with pytest.raises(ArgumentError, match="expected"):
        alone(x=x, past=np.zeros((2, 1, 3), np.float32))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 torch", "this is a torch pickle, not an ONNX file: export it, or pass"),
        (b"\x80\x02 pickle", "this is a torch pickle, not an ONNX file: export it, or pass"),
        (b"\x00\x00\x00\x00ORTM", "onnxruntime's own format, .*; use the .onnx file"),
        (b"\x20\x00\x00\x00TFL3", "TensorFlow Lite"),
        (b"\x89HDF\r\n", "Keras"),
        (b"GGUF\x03", "weights without a program"),
        (b'\x10\x00\x00\x00\x00\x00\x00\x00{"a": {}}', "safetensors"),
    ],
)
def test_a_file_of_another_program_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    for source in (tmp_path / "model.pt", content):
        with pytest.raises(ArgumentError) as refusal:
            compiled(source)
        assert re.search(message, refusal.value.reason)
