"""Models over HTTP: blobs are checked as they arrive, models are estimated and built in confined workers."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import onnx.reference
import pytest
from onnx import helper
from onnx_models import branching, mlp, model
from serving import connected, running, served
from waiting import wait_until

from roller_svc import hardware
from roller_svc.cli import main
from roller_svc.client.client import Client
from roller_svc.client.schemas import GraphOptions, TuneOptionsModel
from roller_svc.errors import InputError, UnknownKernelError, UnsupportedModelError
from roller_svc.farm.models import ModelRequest, check_named, leave_out_unused, model_digest
from roller_svc.graph import python_ops
from roller_svc.graph.serialize import FORMAT
from roller_svc.hardware import load
from roller_svc.ir.hardware import TargetKind
from roller_svc.model import device_spec, load_model
from roller_svc.service.app import create_app
from roller_svc.service.routes import models
from roller_svc.settings import Settings, read_settings, use

MAX_BLOB_BYTES = 1 << 16
CPU, H200 = "cpu-x86-avx2", "nvidia-h200-sxm"
OTHER_CPU = CPU if platform.machine() in ("aarch64", "arm64") else "cpu-arm-neon"  # no worker of this machine has it
GRAPH = {
    "format": FORMAT,
    "name": "twice",
    "inputs": {"x": {"dtype": "float32", "shape": [4]}},
    "constants": {},
    "nodes": [{"name": "add", "expression": "y[i] = x[i] + x[i]", "inputs": {"x": "x"}, "outputs": {"y": "y"}}],
    "outputs": {"y": "y"},
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("store")
    with served(create_app(Settings(store=root, max_blob_bytes=MAX_BLOB_BYTES, workers=1))) as client:
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url)) as client:
        yield client


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def problem(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["status"], body["code"]) == (status, status, code)
    return body


def test_a_blob_is_stored_once_and_returned(http: httpx.Client) -> None:
    content = bytes(range(256)) * 9
    path = f"/v1/blobs/{digest_of(content)}"
    first = http.put(path, content=content)
    assert (first.status_code, first.json()) == (201, {"digest": digest_of(content), "bytes": len(content)})
    assert http.put(path, content=content).status_code == 200
    returned = http.get(path)
    assert returned.content == content
    assert returned.headers["content-type"] == "application/octet-stream"
    assert returned.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("damage", ["text", "folder"])
def test_a_damaged_blob_is_replaced(tmp_path: Path, damage: str) -> None:
    content = b"content"
    path = f"/v1/blobs/{digest_of(content)}"
    with served(create_app(Settings(store=tmp_path))) as other:
        assert other.put(path, content=content).status_code == 201
        bare = digest_of(content).removeprefix("sha256:")
        file = tmp_path / "cas" / "sha256" / bare[:2] / bare
        if damage == "text":
            file.write_bytes(b"damaged")
        else:
            file.unlink()
            file.mkdir()
        problem(other.get(path), 404, "unknown-blob")
        assert other.put(path, content=content).is_success
        assert other.get(path).content == content


def test_another_hash_is_rejected_and_nothing_is_stored(http: httpx.Client) -> None:
    path = f"/v1/blobs/{digest_of(b'expected')}"
    assert digest_of(b"given") in problem(http.put(path, content=b"given"), 422, "wrong-digest")["detail"]
    problem(http.get(path), 404, "unknown-blob")


@pytest.mark.parametrize("digest", ["sha256:ab", "md5:" + "0" * 64, "sha256:" + "A" * 64, "0" * 64])
def test_an_invalid_digest_is_rejected(http: httpx.Client, digest: str) -> None:
    problem(http.put(f"/v1/blobs/{digest}", content=b"x"), 422, "invalid-digest")


def test_a_large_blob_is_rejected_by_its_length(http: httpx.Client) -> None:
    content = bytes(MAX_BLOB_BYTES + 1)
    problem(http.put(f"/v1/blobs/{digest_of(content)}", content=content), 413, "body-too-large")


def test_a_large_blob_without_a_length_is_rejected_as_it_arrives(http: httpx.Client) -> None:
    content = bytes(MAX_BLOB_BYTES + 1)
    parts = (content[at : at + 4096] for at in range(0, len(content), 4096))
    problem(http.put(f"/v1/blobs/{digest_of(content)}", content=parts), 413, "body-too-large")
    problem(http.get(f"/v1/blobs/{digest_of(content)}"), 404, "unknown-blob")


def test_a_rejected_blob_leaves_no_file(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path))) as client:
        client.put(f"/v1/blobs/{digest_of(b'expected')}", content=b"given")
        assert not list((tmp_path / "tmp").iterdir())


def test_a_blob_that_does_not_arrive_leaves_no_file(tmp_path: Path) -> None:
    with running(create_app(Settings(store=tmp_path))) as (_, port):
        with connected(port) as connection:
            request = f"PUT /v1/blobs/{digest_of(b'x' * 100)} HTTP/1.1"
            head = f"{request}\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode() + b"x" * 50)
            wait_until(lambda: list((tmp_path / "tmp").iterdir()))
        wait_until(lambda: not list((tmp_path / "tmp").iterdir()))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            problem(client.get(f"/v1/blobs/{digest_of(b'x' * 100)}"), 404, "unknown-blob")


def test_a_full_disk_is_a_transient_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with served(create_app(Settings(store=tmp_path))) as client:
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            problem(client.put(f"/v1/blobs/{digest_of(b'x')}", content=b"x"), 503, "store-error")
        assert client.put(f"/v1/blobs/{digest_of(b'x')}", content=b"x").status_code == 201


def test_a_blob_takes_a_key(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path, api_keys="key"))) as client:
        problem(client.put(f"/v1/blobs/{digest_of(b'x')}", content=b"x"), 401, "unauthorized")


def test_an_estimate_has_every_kernel(client: Client) -> None:
    estimate = client.estimate_model(mlp().SerializeToString(), CPU)
    assert len(estimate.kernels) == 2
    assert estimate.seconds == pytest.approx(sum(each.seconds for each in estimate.kernels))
    assert estimate.seconds > 0


def test_an_estimate_takes_dims(client: Client) -> None:
    content = mlp("batch").SerializeToString()
    small, large = (client.estimate_model(content, CPU, GraphOptions(dims={"batch": n})) for n in (1, 4096))
    assert large.seconds > small.seconds
    with pytest.raises(InputError) as raised:
        client.estimate_model(content, CPU)
    assert raised.value.code == "open-shape"


def test_a_constant_chooses_the_branch(client: Client) -> None:
    content = branching().SerializeToString()
    with pytest.raises(UnsupportedModelError, match=r'constants={"rate": \.\.\.}'):
        client.estimate_model(content, CPU)
    names = []
    for rate in (16000, 8000):
        model = client.compile_model(content, CPU, GraphOptions(constants={"rate": rate}))
        assert model.response is not None
        names.append(model.response.digest)
        assert [each.name for each in model.response.inputs] == ["x"]
    assert len(set(names)) == 2
    with pytest.raises(InputError) as raised:
        client.estimate_model(content, CPU, GraphOptions(constants={"rate": 0.5}))
    assert raised.value.code == "dtype-mismatch"


def test_a_constant_has_any_number_of_dimensions(client: Client, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    content = model(nodes, {"x": (1, 2), "w": (2, 3)}, {"y": (1, 3)}).SerializeToString()
    response = client.compile_model(content, "local", GraphOptions(constants={"w": [[1, 2, 3], [4, 5, 6.5]]})).response
    assert response is not None
    assert [each.name for each in response.inputs] == ["x"]
    zipfile.ZipFile(io.BytesIO(client.file(response.links["bundle"]))).extractall(tmp_path)
    np.testing.assert_array_equal(load_model(tmp_path)(x=np.ones((1, 2), np.float32))["y"], [[5, 7, 9.5]])
    for gap, code in (([[1.0, 2.0], [3.0]], "invalid-option"), ([[1.0], [2.0]], "shape-mismatch")):
        with pytest.raises(InputError) as raised:
            client.estimate_model(content, CPU, GraphOptions(constants={"w": gap}))
        assert raised.value.code == code


def test_unsupported_nodes_are_all_named(client: Client) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["n"], "first"), helper.make_node("Unique", ["x"], ["y"], "second")]
    content = model(nodes, {"x": (4,)}, {"y": (4,)}).SerializeToString()
    for call in (client.estimate_model, client.compile_model):
        with pytest.raises(UnsupportedModelError) as raised:
            call(content, CPU)
        assert {node.name for node in raised.value.nodes} == {"first", "second"}


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08" * 100])
def test_what_is_no_model_is_rejected(client: Client, content: bytes) -> None:
    with pytest.raises(InputError):
        client.estimate_model(content, CPU)


@pytest.mark.parametrize("graph", [{}, {"other": 1}, GRAPH | {"nodes": 1}, GRAPH | {"outputs": {"y": "z"}}])
def test_a_malformed_graph_is_rejected(client: Client, graph: dict[str, Any]) -> None:
    for call in (client.estimate_model, client.compile_model):
        with pytest.raises(InputError) as raised:
            call(graph, CPU)
        assert raised.value.code == "invalid-model"


def test_external_data_is_rejected(client: Client) -> None:
    proto = mlp()
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/hostname")
    with pytest.raises(InputError) as raised:
        client.estimate_model(proto.SerializeToString(), CPU)
    assert raised.value.code == "external-data"


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"target": "no-such"}, 404, "unknown-hardware"),
        ({"target": "graphcore-mk2"}, 422, "unsupported-target"),
        ({"model": {"blob": "sha256:" + "0" * 64}}, 404, "unknown-blob"),
        ({"model": {"blob": "sha256:0"}}, 422, "invalid-body"),
        ({"model": {}}, 422, "invalid-body"),
        ({"options": {"plan": "fastest"}}, 422, "invalid-body"),
        ({"options": {"plan": "graph"}}, 422, "invalid-option"),
        ({"target": "nvidia-h200-sxm", "options": {"plan": "rammer"}}, 422, "invalid-option"),
        ({"target": "amd-mi300x", "options": {"plan": "graph"}}, 422, "refused-plan"),
        ({"target": "amd-mi300x", "options": {"plan": "waves"}}, 422, "not-joinable"),
        ({"options": {"threads": 100_000}}, 422, "invalid-option"),
        ({"options": {"name": "double"}}, 422, "invalid-option"),
        ({"options": {"dims": {"batch": -1}}}, 422, "invalid-body"),
        ({"options": {"constants": {"rate": "16000"}}}, 422, "invalid-body"),
        ({"options": {"constants": {"rate": [[1.0], ["16000"]]}}}, 422, "invalid-body"),
        ({"options": {"constants": {"rate": [[0] * 1000] * 17}}}, 422, "invalid-body"),
        ({"options": {"progress": 1}}, 422, "invalid-body"),
    ],
)
@pytest.mark.parametrize("verb", ["compile", "estimate"])
def test_invalid_requests(http: httpx.Client, verb: str, change: dict[str, Any], status: int, code: str) -> None:
    body = {"model": {"graph": GRAPH}, "target": CPU} | change
    problem(http.post(f"/v1/graphs:{verb}", json=body), status, code)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"options": {"tune": "online"}}, "invalid-body"),
        ({"options": {"tune": "now", "select": "model"}}, "invalid-body"),
        ({"options": {"tune_options": {"exact": True}}}, "invalid-body"),
        ({"options": {"tune": "now", "tune_options": {"budget_s": 0}}}, "invalid-body"),
        ({"options": {"tune": "now", "tune_options": {"share": 0.5}}}, "invalid-body"),
        ({"options": {"tune": "now"}, "target": "nvidia-h200-sxm"}, "cannot-measure"),
        ({"options": {"tune": "now"}, "target": OTHER_CPU}, "cannot-measure"),
    ],
)
def test_trials_that_cannot_be_made_are_refused(http: httpx.Client, change: dict[str, Any], code: str) -> None:
    problem(http.post("/v1/graphs:compile", json={"model": {"graph": GRAPH}, "target": CPU} | change), 422, code)


@pytest.mark.slow
def test_a_model_is_tuned_where_it_is_built(
    http: httpx.Client, client: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = GraphOptions(threads=1, tune="now", tune_options=TuneOptionsModel(budget_trials=2, exact=True))
    assert options.select == "measure"
    response = client.compile_model(GRAPH, "local", options).response
    assert response is not None
    assert response.tuning is not None
    tuning = client.model_tuning(response.digest)
    assert tuning["tree"]["format"] == "roller-wiring/1"
    assert {name: tuning[name] for name in response.tuning} == response.tuning
    assert len(tuning["history"]) <= 2
    plain = client.compile_model(GRAPH, "local", GraphOptions(threads=1)).response
    assert plain is not None
    assert plain.tuning is None
    problem(http.get(f"/v1/models/{plain.digest}/tuning"), 404, "unknown-artifact")
    story = client.model_story(plain.digest)
    assert story["seconds"] == sum(step["seconds"] for step in story["steps"])
    assert [node["name"] for node in story["nodes"]] == ["add"]
    assert http.get(plain.links["story"]).json() == story
    problem(http.get("/v1/models/sha256:0/story"), 404, "unknown-kernel")
    problem(http.get("/v1/models/sha256:0/tuning"), 404, "unknown-kernel")
    file = tmp_path / "model.json"
    file.write_text(json.dumps(GRAPH))
    words = ["model", "tune", str(file), "--threads", "1", "--trials", "2", "--exact", "--server", str(http.base_url), "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["tuning"] == response.tuning


def test_a_slow_model_is_rejected(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path, estimates_timeout_s=1e-9))) as http:
        body = {"model": {"graph": GRAPH}, "target": CPU}
        response = http.post("/v1/graphs:estimate", json=body)
        assert response.status_code in {422, 503}  # 503: the machine gave the worker no time
        assert response.json()["code"] in {"timeout", "worker-stalled"}


def test_a_compiled_model_runs_from_its_bundle(http: httpx.Client, client: Client, tmp_path: Path) -> None:
    proto = mlp()
    operation = client.compile_model(proto.SerializeToString(), "local", GraphOptions(threads=1, name="mlp"))
    response = operation.response
    assert response is not None
    bundle = client.file(response.links["bundle"])
    assert response.digest == digest_of(bundle)
    assert sum(kernel.uses for kernel in response.kernels) == 2
    assert response.estimate.seconds == pytest.approx(sum(kernel.seconds for kernel in response.kernels))
    assert json.loads(client.file(response.links["plan"]))["launches"] == response.plan["launches"]
    assert b"long mlp_run(" in client.file(response.links["header"])
    assert client.file(response.links["source"])
    zipfile.ZipFile(io.BytesIO(bundle)).extractall(tmp_path)
    x = np.arange(16, dtype=np.float32).reshape(2, 8) / 16
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})[0]
    loaded = load_model(tmp_path)
    assert loaded.name == "mlp"
    np.testing.assert_allclose(loaded(x=x)["y"], expected, rtol=1e-4, atol=1e-5)
    again = client.compile_model(proto.SerializeToString(), "local", GraphOptions(threads=1, name="mlp"))
    assert (again.metadata.cache, again.response) == ("hit", response)
    problem(http.get(f"/v1/kernels/{response.digest}"), 404, "unknown-kernel")
    assert http.get(f"/v1/{again.name}").json()["response"]["digest"] == response.digest


def test_a_graph_is_compiled(client: Client, tmp_path: Path) -> None:
    response = client.compile_model(GRAPH, "local", GraphOptions(threads=1)).response
    assert response is not None
    zipfile.ZipFile(io.BytesIO(client.file(response.links["bundle"]))).extractall(tmp_path)
    np.testing.assert_array_equal(load_model(tmp_path)(x=np.ones(4, np.float32))["y"], np.full(4, 2, np.float32))


def test_a_graph_is_compiled_for_a_gpu(client: Client, tmp_path: Path) -> None:
    """Nothing of it is for C: the bundle has the kernels' cubins, and the response what each kind of plans costs."""
    response = client.compile_model(GRAPH, "nvidia-h200-sxm", GraphOptions(plan="graph")).response
    assert response is not None
    assert set(response.links) == {"bundle", "plan", "story", "source"}
    assert response.plan["kind"] == "graph"
    assert set(response.lowerings) == {"launches", "graph", "waves", "persistent"}
    assert b"__global__" in client.file(response.links["source"])
    zipfile.ZipFile(io.BytesIO(client.file(response.links["bundle"]))).extractall(tmp_path)
    model = load_model(tmp_path, runtime="emulator")
    np.testing.assert_array_equal(model(x=np.ones(4, np.float32))["y"], np.full(4, 2, np.float32))
    estimate = client.estimate_model(GRAPH, "nvidia-h200-sxm", GraphOptions(plan="graph"))
    assert estimate.seconds == pytest.approx(response.estimate.seconds)


CHAIN = GRAPH | {
    "nodes": [
        *GRAPH["nodes"],
        {"name": "sub", "expression": "z[i] = y[i] - 1", "inputs": {"y": "y"}, "outputs": {"z": "z"}},
    ],
    "outputs": {"z": "z"},
}
CODE = [
    "python:os.system", "python:", "python:__import__('os')", "python:lambda x: x", "python:exec", "python:a b", "python:../x",
    "python:nms\n", "python:os:system", "python:eval(input())", "python:builtins.exec", "python:" + "n" * 150, "python:*",
    "python:/bin/sh", "python:$(id)", "python:`id`", "python:pickle.loads", "python:\0", "python:numpy.load", "python:__main__.f",
]  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_row_43_a_request_with_code_in_place_of_a_name_is_refused(http: httpx.Client, name: str) -> None:
    body = {"model": {"graph": CHAIN}, "target": "local", "options": {"devices": {"sub": name}}}
    problem(http.post("/v1/graphs:compile", json=body), 422, "unknown-python-op")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"devices": {"sub": {"python": "f"}}}, "invalid-body"),
        ({"devices": ["sub"]}, "invalid-body"),
        ({"across": "sideways"}, "invalid-body"),
        ({"order": "random"}, "invalid-body"),
        ({"sink": "never"}, "invalid-body"),
        ({"devices": {"sub": H200}, "tune": "now"}, "invalid-body"),
        ({"devices": {"sub": "nvidia-h20000"}}, "unknown-hardware"),
        ({"devices": {"sub": "gpu"}}, "unknown-device"),
        ({"devices": {"sub": "cpu"}, "target": H200}, "unknown-device"),
    ],
)
def test_labels_of_a_request_are_checked(http: httpx.Client, options: dict[str, Any], code: str) -> None:
    target = options.get("target", "local")
    body = {"model": {"graph": CHAIN}, "target": target, "options": {k: v for k, v in options.items() if k != "target"}}
    answer = http.post("/v1/graphs:compile", json=body)
    problem(answer, 404 if code == "unknown-hardware" else 422, code)


@pytest.mark.slow
def test_a_model_over_several_devices_is_compiled(http: httpx.Client, client: Client, tmp_path: Path) -> None:
    """An estimate of it, and labels of the file that the request lacks, are refused."""
    options = GraphOptions(threads=1, devices={"sub": H200}, across="split", order="serial")
    response = client.compile_model(CHAIN, "local", options).response
    assert response is not None
    assert [(each.device, each.nodes) for each in response.subgraphs] == [("local", ["add"]), (H200, ["sub"])]
    assert [(each["tensor"], each["from"], each["to"]) for each in response.copies] == [("y", "host", H200), ("z", H200, "host")]
    assert all(0 < each.seconds < response.estimate.seconds for each in response.kernels)
    assert response.sinks is not None
    assert (response.sinks.submissions, response.sinks.outside, response.plan["kind"]) == (2, [], "split")
    zipfile.ZipFile(io.BytesIO(client.file(response.links["bundle"]))).extractall(tmp_path)
    model = load_model(tmp_path, runtime="emulator")
    np.testing.assert_array_equal(model(x=np.ones(4, np.float32))["z"], np.ones(4, np.float32))
    problem(http.post("/v1/graphs:estimate", json=_body(options)), 422, "invalid-option")
    refusal = problem(http.get(f"/v1/models/{response.digest}/story"), 404, "unknown-artifact")
    assert "for several devices" in refusal["detail"]
    with pytest.raises(InputError, match=f"labels in the model's file name {H200}"):
        check_named(ModelRequest("0" * 64, "graph", "local", {"devices": {"add": "cpu"}}), ["local", "python:f", H200])


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"files": {}}, "a version without stories"), ({}, "a version without stories"), (None, "no model"),
     ({"files": {"story": "0" * 64}}, "no longer stored: compile it again")],
)  # fmt: skip
def test_a_story_that_a_model_lacks_says_why(facts: dict[str, Any] | None, words: str) -> None:
    store: Any = SimpleNamespace(model=lambda digest: facts, get=lambda blob: None)
    with pytest.raises(UnknownKernelError, match=words):
        models._read_part(store, f"sha256:{'1' * 64}", "story")


def _body(options: GraphOptions) -> dict[str, Any]:
    return {"model": {"graph": CHAIN}, "target": "local", "options": options.model_dump(exclude_defaults=True)}


def test_everything_that_decides_a_model_is_in_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load(CPU)
    request = ModelRequest("0" * 64, "onnx", CPU, {"threads": 1})
    others = [
        (ModelRequest("1" * 64, "onnx", CPU, {"threads": 1}), spec),
        (ModelRequest("0" * 64, "graph", CPU, {"threads": 1}), spec),
        (ModelRequest("0" * 64, "onnx", CPU, {"threads": 2}), spec),
        (request, device_spec(CPU, 1)),
    ]
    assert model_digest(request, spec) == model_digest(request, spec)
    assert len({model_digest(request, spec), *(model_digest(*other) for other in others)}) == len(others) + 1
    mixed = ModelRequest("0" * 64, "onnx", CPU, {"threads": 1, "devices": {"a": H200, "b": "cpu"}})
    h200 = load(H200)
    monkeypatch.setattr(hardware, "load", lambda name: replace(h200, num_cores=h200.num_cores // 2) if name == H200 else load(name))
    with_other_spec = model_digest(mixed, spec)
    monkeypatch.undo()
    assert model_digest(mixed, spec) != with_other_spec
    monkeypatch.setattr(python_ops, "_registered", {})
    plain = model_digest(request, spec)
    python_ops.python_op("f", abs, {"a": ("float32", (4,))}, {"b": ("float32", (4,))})
    assert model_digest(request, spec) != plain


def test_options_of_several_devices_are_in_the_digest_of_such_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    split = {"across": "split", "order": "serial", "plan": "rammer", "sink": "require"}
    monkeypatch.setattr(python_ops, "_registered", {})
    cpu, gpu = TargetKind.CPU, TargetKind.CUDA
    assert leave_out_unused(split, cpu) == {"plan": "rammer"}
    assert leave_out_unused(split, gpu) == {"plan": "rammer", "sink": "require"}  # which may refuse a plan of a GPU
    assert leave_out_unused({"order": "serial"}, cpu) == {"order": "serial"}  # which is a plan
    assert leave_out_unused({"order": "serial", "plan": "auto"}, cpu) == {"order": "serial", "plan": "auto"}
    assert leave_out_unused(split | {"devices": {"a": H200}}, cpu) == split | {"devices": {"a": H200}}
    python_ops.python_op("f", abs, {"a": ("float32", (4,))}, {"b": ("float32", (4,))})
    assert leave_out_unused(split, cpu) == split  # a file may name f


def test_a_file_is_read_by_its_path(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(mlp().SerializeToString())
    assert len(client.estimate_model(file, CPU).kernels) == 2
    with pytest.raises(InputError) as raised:
        client.estimate_model(tmp_path / "missing.onnx", CPU)
    assert raised.value.code == "unreadable-file"


@pytest.mark.slow
def test_a_model_is_compiled_on_the_command_line(http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps(GRAPH))
    server = ("--server", str(http.base_url), "--select", "model", "--top-k", "1", "--json")
    assert main(["model", "compile", str(graph), *server, "--save", str(tmp_path / "saved")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert load_model(tmp_path / "saved").digest == facts["digest"]
    assert main(["model", "run", str(graph), *server]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == facts["digest"]
    graph.write_text(json.dumps(CHAIN))
    assert main(["model", "run", str(graph), *server, "--device", f"sub={H200}", "--order", "serial", "--emulate"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] != facts["digest"]


@pytest.mark.slow
def test_a_function_of_python_that_the_service_has_is_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "service_ops.py").write_text(
        "import roller_svc\n\n\ndef add_all():\n"
        '    roller_svc.python_op("service_halve", lambda a: a / 2, {"a": ("float32", (4,))}, {"b": ("float32", (4,))})\n'
    )
    monkeypatch.setattr(python_ops, "_registered", {})
    monkeypatch.syspath_prepend(tmp_path)
    use(read_settings(python_ops="service_ops:add_all"))
    try:
        with served(create_app(Settings(store=tmp_path, workers=1))) as http, Client(str(http.base_url)) as client:
            options = GraphOptions(threads=1, devices={"sub": "python:service_halve"})
            response = client.compile_model(CHAIN, "local", options).response
            assert response is not None
            assert response.sinks is not None
            assert [each.node for each in response.sinks.outside] == ["sub"]
            zipfile.ZipFile(io.BytesIO(client.file(response.links["bundle"]))).extractall(tmp_path / "model")
        np.testing.assert_array_equal(load_model(tmp_path / "model")(x=np.ones(4, np.float32))["z"], np.ones(4, np.float32))
    finally:
        monkeypatch.undo()
        use(read_settings())


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [("x.json", "[", "invalid-model"), ("x.json", "[]", "invalid-model"), ("", "", "invalid-option")],
)
def test_files_that_cannot_be_sent_are_named(
    http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, code: str
) -> None:
    path = tmp_path / name
    if name:
        path.write_text(content)
    assert main(["model", "compile", str(path), "--server", str(http.base_url)]) == 2
    assert code in capsys.readouterr().err


# ---------------------------------------------------------------- several targets


def test_a_model_is_built_for_several_targets_by_one_request(http: httpx.Client) -> None:
    body = {
        "model": {"graph": GRAPH | {"name": "several"}},
        "targets": [CPU, "nothing", "graphcore-mk2", "nvidia-h200-sxm"],
        "priority": 1,
    }
    entries = http.post("/v1/graphs:batchCompile", json={"requests": [body]}).json()["results"]
    assert [entry["target"] for entry in entries] == body["targets"]
    assert [entry.get("error", {}).get("code") for entry in entries][1] == "unknown-hardware"
    assert entries[2]["error"]["code"] == "unsupported-target"
    assert "operation" in entries[3]
    name = entries[0]["operation"]["name"]
    assert http.get(f"/v1/{name}?wait=60").json()["response"]["target"] == CPU
    again = http.post("/v1/graphs:batchCompile", json={"requests": [body]}).json()["results"]
    assert again[0]["operation"]["metadata"]["cache"] == "hit"


def test_a_blob_that_is_missing_is_the_error_of_its_request(http: httpx.Client) -> None:
    missing = {"model": {"blob": digest_of(b"never stored")}, "targets": [CPU]}
    present = {"model": {"graph": GRAPH}, "targets": [CPU]}
    entries = http.post("/v1/graphs:batchCompile", json={"requests": [missing, present]}).json()["results"]
    assert (entries[0]["error"]["code"], entries[0]["request"]) == ("unknown-blob", 0)
    assert "operation" in entries[1]


def test_warm_fills_a_service_and_goes_on_where_it_ended(
    http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(tmp_path / f"{number}.json") for number in range(2)]
    for number, file in enumerate(files):
        Path(file).write_text(json.dumps(GRAPH | {"name": f"warm{number}"}))
    words = ["warm", "--targets", f"{CPU},nothing", "--server", str(http.base_url), "--json"]
    assert main([*words, files[0]]) == 1  # one target is unknown
    capsys.readouterr()
    assert main([*words, *files]) == 1
    builds = json.loads(capsys.readouterr().out)["builds"]
    assert [(each["name"], each["target"], each["cache"]) for each in builds] == [
        (files[0], CPU, "hit"),
        (files[0], "nothing", None),
        (files[1], CPU, "miss"),
        (files[1], "nothing", None),
    ]
    assert [each["error"] and each["error"]["code"] for each in builds] == [None, "unknown-hardware"] * 2
    assert main(["warm", "--targets", CPU, "--server", str(http.base_url), *files]) == 0
    assert "2 builds: 2 hits, 0 failed" in capsys.readouterr().out
    assert main([*words, "--store", str(tmp_path), *files]) == 2


def test_warm_fills_a_store_that_a_service_then_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(GRAPH))
    store = str(tmp_path / "store")
    with monkeypatch.context() as environment:
        environment.setenv("ROLLER_PROCESSES", "2")  # of the services that come
        assert main(["warm", str(file), "--targets", CPU, "--store", store, "--workers", "1"]) == 0
    assert "1 build: 0 hits, 0 failed" in capsys.readouterr().out
    with served(create_app(Settings(store=store, workers=0))) as other:
        response = other.post("/v1/graphs:compile", json={"model": {"graph": GRAPH}, "target": CPU})
    assert response.json()["metadata"]["cache"] == "hit"


def test_a_kernel_is_built_for_several_targets_from_the_command_line(
    http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compile", "y[i] = x[i] * 5.0", "--input", "x=float32[8]", "--targets", f"{CPU},nothing"]
    assert main([*words, "--server", str(http.base_url)]) == 1
    text = capsys.readouterr().out
    assert "nothing: unknown hardware" in text
    assert main([*words, "--server", str(http.base_url), "--save", "folder"]) == 2
    assert main(words) == 2
