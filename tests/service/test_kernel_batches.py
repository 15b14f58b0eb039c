"""kernels:batchCompile, kernels:measure, hardware:validate, and caching of blobs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import BODY, Builder, digest_of
from httpx import Client
from serving import running

from roller_svc.farm.registry import Worker
from roller_svc.farm.routing import machine_queue
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

BATCH, MEASURE, VALIDATE = "/v1/kernels:batchCompile", "/v1/kernels:measure", "/v1/hardware:validate"
MAX_ITEMS = 12


@pytest.fixture
def app(tmp_path: Path, builder: Builder) -> Any:
    settings = Settings(store=tmp_path / "store", workers=1, queue_length=8, max_items=MAX_ITEMS)
    return create_app(settings, builder, digest_of)


@pytest.fixture
def client(app: Any, builder: Builder) -> Iterator[Client]:
    with running(app) as (_, port), Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        yield client
        builder.gate.set()


def item(number: int, **fields: Any) -> dict[str, Any]:
    return BODY | {"expression": f"{BODY['expression']} # {number}"} | fields


def results(client: Client, *items: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(BATCH, json={"requests": items})
    assert response.status_code == 200, response.text
    entries: list[dict[str, Any]] = response.json()["results"]
    return entries


def test_a_batch_builds_each_kernel_once(client: Client, builder: Builder) -> None:
    entries = results(client, *(item(number % 3) for number in range(9)))
    names = [entry["operation"]["name"] for entry in entries]
    assert len(set(names)) == 3
    assert names == names[:3] * 3
    for name in names[:3]:
        assert client.get(f"/v1/{name}?wait=30").json()["done"]
    assert builder.built == 3
    again = results(client, *(item(number) for number in range(3)))
    assert [entry["operation"]["metadata"]["cache"] for entry in again] == ["hit"] * 3


def test_failures_are_those_of_their_items(client: Client) -> None:
    wrong_option = item(2, options={"top_k": 0})
    entries = results(client, item(1), item(2, expression="bad"), wrong_option, item(3, target="nvidia-nothing"))
    assert "operation" in entries[0]
    assert [entry.get("error", {}).get("code") for entry in entries] == [
        None,
        "syntax-error",
        "invalid-option",
        "unknown-hardware",
    ]
    assert entries[1]["error"]["errors"][0]["pointer"] == "/requests/1/expression"
    assert [entry["error"]["status"] for entry in entries[1:]] == [422, 422, 404]


def test_the_quota_counts_items(tmp_path: Path, builder: Builder) -> None:
    app = create_app(Settings(store=tmp_path, workers=1, queue_length_per_client=4, api_keys="key"), builder, digest_of)
    headers = {"X-API-Key": "key"}
    with running(app) as (_, port), Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, headers=headers) as client:
        builder.gate.clear()
        entries = results(client, *(item(number) for number in range(6)), item(0))
        builder.gate.set()
    codes = [entry.get("error", {}).get("code") for entry in entries]
    assert codes == [None] * 4 + ["quota-exceeded"] * 2 + [None]
    assert entries[6]["operation"]["name"] == entries[0]["operation"]["name"]
    assert entries[5]["error"]["status"] == 429


@pytest.mark.parametrize(("count", "code"), [(0, "invalid-body"), (MAX_ITEMS + 1, "too-many-items")])
def test_a_batch_has_limits(client: Client, count: int, code: str) -> None:
    response = client.post(BATCH, json={"requests": [item(number) for number in range(count)]})
    assert (response.status_code, response.json()["code"]) == (422, code)


def test_items_that_there_is_no_time_for_say_so(tmp_path: Path, builder: Builder) -> None:
    app = create_app(Settings(store=tmp_path, estimates_timeout_s=1e-9), builder, digest_of)
    with running(app) as (_, port), Client(base_url=f"http://127.0.0.1:{port}") as client:
        (entry,) = results(client, item(1))
    assert (entry["error"]["code"], entry["error"]["status"]) == ("batch-timeout", 503)


def test_one_request_builds_for_several_targets(client: Client, builder: Builder) -> None:
    several = {name: value for name, value in item(1).items() if name != "target"} | {
        "targets": ["cpu-x86-avx2", "nvidia-nothing", "nvidia-h200-sxm"]
    }
    entries = results(client, item(2), several, several | {"targets": ["cpu-x86-avx2"]})
    assert [(entry["request"], entry["target"]) for entry in entries] == [(0, BODY["target"])] + [
        (1, target) for target in several["targets"]
    ] + [(2, "cpu-x86-avx2")]
    assert (entries[2]["error"]["code"], entries[2]["error"]["status"]) == ("unknown-hardware", 404)
    names = [entries[number]["operation"]["name"] for number in (0, 1, 3, 4)]
    assert len(set(names)) == 3  # two requests are for the same build
    assert names[1] == names[3]
    for name in names:
        assert client.get(f"/v1/{name}?wait=30").json()["done"]
    assert builder.built == 3


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"targets": ["cpu-x86-avx2"], "target": "cpu-x86-avx2"}, "invalid-body"),
        ({"targets": []}, "invalid-body"),
        ({"targets": ["cpu-x86-avx2", "local", "cpu-x86-avx2"]}, "invalid-body"),
        ({"targets": ["", ""]}, "invalid-body"),
        ({"targets": [f"a{number}" for number in range(65)]}, "invalid-body"),
        ({"targets": [f"a{number}" for number in range(MAX_ITEMS + 1)]}, "too-many-items"),
    ],
)
def test_targets_have_limits(client: Client, fields: dict[str, Any], code: str) -> None:
    body = {name: value for name, value in item(1).items() if name != "target"} | fields
    response = client.post(BATCH, json={"requests": [body]})
    assert (response.status_code, response.json()["code"]) == (422, code)
    assert client.post("/v1/kernels:compile", json=body).json()["code"] == "invalid-body"  # it has one target


# ---------------------------------------------------------------- measure


def test_a_cpu_is_measured_by_the_services_own_worker(client: Client, builder: Builder) -> None:
    response = client.post(MEASURE, json=item(1), headers={"Prefer": "wait=30"})
    assert response.status_code == 422  # the body says select: model
    body = item(1, options={"top_k": 2})
    assert client.post(MEASURE, json=body, headers={"Prefer": "wait=30"}).json()["done"]
    compiled = client.post("/v1/kernels:compile", json=item(1, options={"top_k": 2, "select": "measure"}))
    assert compiled.json()["metadata"]["cache"] == "hit"


@pytest.mark.parametrize(("field", "value"), [("select", "model"), ("runtime", "emulator")])
def test_options_that_exclude_a_measurement_are_rejected(client: Client, field: str, value: str) -> None:
    response = client.post(MEASURE, json=item(1, target="nvidia-h200-sxm", options={field: value}))
    assert (response.status_code, response.json()["code"]) == (422, "invalid-option")


def test_a_gpu_is_measured_only_where_a_worker_has_it(app: Any, client: Client) -> None:
    body = item(1, target="nvidia-h200-sxm", options={})
    response = client.post(MEASURE, json=body)
    assert (response.status_code, response.json()["code"]) == (422, "no-measuring-worker")
    assert "kernels:compile" in response.json()["errors"][0]["hint"]
    registry, generator = app.state.roller.farm.registry, app.state.roller.farm.queue.generator
    registry.add(Worker("draining", ("measure.sm_90a",), generator, {}, is_draining=True))
    registry.add(Worker("another version", ("measure.sm_90a",), "g", {}))
    assert client.post(MEASURE, json=body).status_code == 422
    registry.add(Worker("gpu", ("measure.sm_90a",), generator, {}))
    operation = client.post(MEASURE, json=body)
    assert (operation.status_code, operation.json()["metadata"]["queue"]) == (202, "measure.sm_90a")


def test_local_is_measured_by_this_machine(client: Client) -> None:
    operation = client.post(MEASURE, json=item(1, target="local", options={}))
    assert operation.json()["metadata"]["queue"] == machine_queue()


# ---------------------------------------------------------------- hardware


def test_a_valid_spec_comes_back_whole(client: Client) -> None:
    whole = client.get("/v1/hardware/cpu-x86-avx2").json()
    assert client.post(VALIDATE, json={"hardware": whole}).json() == {"hardware": whole}
    text = (Path(__file__).resolve().parents[2] / "hwspecs" / "cpu-x86-avx2.yaml").read_text(encoding="utf-8")
    assert client.post(VALIDATE, json={"hardware": text}).json() == {"hardware": whole}


def test_every_fault_of_a_spec_has_a_pointer(client: Client) -> None:
    spec = client.get("/v1/hardware/cpu-x86-avx2").json()
    spec["levels"][1]["capacity_bytes"] = -1
    spec["units"][0]["a/b.c~"] = 1
    del spec["clock_hz"]
    response = client.post(VALIDATE, json={"hardware": spec})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-spec")
    pointers = {each["pointer"] for each in response.json()["errors"]}
    assert pointers == {
        "/hardware/levels/1/capacity_bytes",
        "/hardware/units/0/a~1b.c~0",
        "/hardware/clock_hz",
    }


def test_faults_of_yaml_have_lines(client: Client) -> None:
    path = Path(__file__).resolve().parents[2] / "hwspecs" / "cpu-x86-avx2.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    at = {name: next(n for n, line in enumerate(lines) if line.startswith(name)) for name in ("vendor", "num_cores")}
    lines[at["vendor"]], lines[at["num_cores"]] = "vendor: 7", "num_cores: none"
    errors = client.post(VALIDATE, json={"hardware": "\n".join(lines)}).json()["errors"]
    assert {each["line"] for each in errors} == {number + 1 for number in at.values()}
    assert {each["message"].partition(":")[0] for each in errors} == {"vendor", "num_cores"}
    broken = client.post(VALIDATE, json={"hardware": "a: [1"})
    assert (broken.status_code, broken.json()["code"]) == (422, "invalid-spec")
    assert broken.json()["errors"][0]["line"] in (1, 2)  # where the bracket is, or where it is missed


@pytest.mark.parametrize("spec", ["", "- 1", "a: &x 1\nb: *x", "!!python/object:os.system {}", {}, {"levels": 3}])
def test_other_values_are_no_specs(client: Client, spec: object) -> None:
    assert client.post(VALIDATE, json={"hardware": spec}).json()["code"] == "invalid-spec"


# ---------------------------------------------------------------- blobs


def test_blobs_are_immutable(client: Client) -> None:
    content = b"a model"
    path = f"/v1/blobs/sha256:{hashlib.sha256(content).hexdigest()}"
    assert client.get(path, headers={"If-None-Match": "*"}).status_code == 404
    client.put(path, content=content)
    response = client.get(path)
    assert response.content == content
    assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
    again = client.get(path, headers={"If-None-Match": f'"x", {response.headers["etag"]}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", response.headers["etag"])
    assert client.get(path, headers={"If-None-Match": '"x"'}).content == content


@pytest.mark.parametrize("targets", [["H200", "nvidia-h200-sxm"], ["cpu-x86-avx2", "a100_sxm", "A100 SXM"]])
def test_two_names_of_one_device_are_one_target_twice(client: Client, builder: Builder, targets: list[str]) -> None:
    several = {name: value for name, value in item(1).items() if name != "target"} | {"targets": targets}
    response = client.post(BATCH, json={"requests": [item(2), several]})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-body")
    assert response.json()["errors"][0]["pointer"] == "/requests/1/targets"
    assert targets[-1] in response.json()["detail"]
    assert not builder.built
    items = [{"expression": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [4]}}}]
    response = client.post("/v1/estimates", json={"items": items, "targets": targets})
    assert (response.status_code, response.json()["errors"][0]["pointer"]) == (422, "/targets")


def test_hardware_and_targets_have_different_ids(client: Client) -> None:
    """Two results with one target could not be told apart."""
    spec = client.get("/v1/hardware/nvidia-h200-sxm").json()
    body = {"items": [{"expression": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [4]}}}], "hardware": spec}
    for targets in (["nvidia-h200-sxm"], ["sm_90"], ["cpu-x86-avx2, nvidia-h200-sxm"]):
        response = client.post("/v1/estimates", json=body | {"targets": targets})
        assert (response.status_code, response.json()["errors"][0]["pointer"]) == (422, "/targets")
        assert "got 'nvidia-h200-sxm' twice" in response.json()["detail"]
    for hardware, targets in ((spec, ["cpu-x86-avx2"]), (spec | {"id": "mine"}, ["nvidia-h200-sxm"])):
        response = client.post("/v1/estimates", json=body | {"hardware": hardware, "targets": targets})
        assert [entry["target"] for entry in response.json()["estimates"]] == [*targets, hardware["id"]]
