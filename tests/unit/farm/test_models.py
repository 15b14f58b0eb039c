"""Requests for models: their records, and the queue that builds them, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError, UnsupportedModelError, UnsupportedNode
from roller_svc.farm.models import ModelRequest, parse_record, request_record
from roller_svc.farm.operations import CacheStatus, JobQueue, Operation, OperationState
from roller_svc.farm.store import MODELS, Artifact, Store
from roller_svc.ir.report import BuildRequest

REQUEST = ModelRequest("0" * 64, "onnx", "cpu-x86-avx2", {"select": "model"})
DIGEST = "sha256:" + "d" * 64


class Models:
    """Build a model whose only file is its request's blob; fail for plan "bad"."""

    def __init__(self) -> None:
        self.built = 0

    def digest(self, request: ModelRequest) -> str:
        return f"sha256:{request.blob}"

    def build(self, request: ModelRequest) -> Artifact:
        self.built += 1
        if request.options.get("plan") == "bad":
            raise UnsupportedModelError((UnsupportedNode("Unique", "a", "no"), UnsupportedNode("NonZero", "b", "no")))
        return Artifact(DIGEST, {"digest": DIGEST}, {"bundle": request.blob.encode()}, MODELS)


def refuse(_: BuildRequest) -> Artifact:
    raise AssertionError("a kernel was requested")


def digest(_: BuildRequest) -> str:
    raise AssertionError("a kernel was requested")


def queue(store: Store, models: Models | None) -> JobQueue:
    return JobQueue(store, refuse, digest, workers=1, length=4, models=models)


def finished(jobs: JobQueue, operation: Operation) -> Operation:
    future = jobs.done_future(operation.id)
    if future is not None:
        future.result(60)
    done = jobs.get(operation.id)
    assert done is not None
    assert done.done
    return done


def test_a_record_holds_the_whole_request() -> None:
    kernel = build_request("y[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model")
    for request in (REQUEST, kernel):
        assert parse_record(request_record(request)) == request


@pytest.mark.parametrize("model", [{"blob": "0"}, {**request_record(REQUEST), "more": 1}, [], "onnx"])
def test_a_record_of_another_version_is_not_read(model: object) -> None:
    with pytest.raises(TypeError):
        parse_record({"model": model})


def test_a_model_is_built_once_and_is_no_kernel(tmp_path: Path) -> None:
    store, models = Store(tmp_path), Models()
    jobs = queue(store, models)
    first = finished(jobs, jobs.submit(REQUEST))
    assert (first.facts, first.cache) == ({"digest": DIGEST}, CacheStatus.MISS)
    again = jobs.submit(REQUEST)
    assert (again.facts, again.cache, models.built) == (first.facts, CacheStatus.HIT, 1)
    assert store.kernel(DIGEST) is None
    jobs.close()


def test_a_failed_model_names_every_node(tmp_path: Path) -> None:
    jobs = queue(Store(tmp_path), Models())
    wanted = ModelRequest("1" * 64, "onnx", "cpu-x86-avx2", {"plan": "bad"})
    error = finished(jobs, jobs.submit(wanted)).error
    assert error is not None
    nodes = error["nodes"]
    assert isinstance(nodes, list)
    assert [node["name"] for node in nodes] == ["a", "b"]
    jobs.close()


def test_an_unfinished_model_is_built_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = {
        "id": "0-model", "action": "", "stage": OperationState.BUILDING.value, "cache": CacheStatus.MISS.value,
        "create_time": "now", "request": request_record(REQUEST), "facts": None, "error": None, "attempts": 1,
    }  # fmt: skip
    store.write_record("0-model", record)
    jobs = queue(store, Models())
    assert jobs.resume() == 1
    operation = jobs.get("0-model")
    assert operation is not None
    assert finished(jobs, operation).facts == {"digest": DIGEST}
    jobs.close()


def test_a_queue_without_a_builder_of_models_rejects_them(tmp_path: Path) -> None:
    jobs = queue(Store(tmp_path), None)
    with pytest.raises(ArgumentError) as raised:
        jobs.submit(REQUEST)
    assert raised.value.code == "unsupported-request"
    jobs.close()


def test_a_model_with_a_damaged_file_is_built_again(tmp_path: Path) -> None:
    store, models = Store(tmp_path), Models()
    jobs = queue(store, models)
    finished(jobs, jobs.submit(REQUEST))
    (tmp_path / MODELS / DIGEST.removeprefix("sha256:")).write_bytes(b"damaged")
    assert finished(jobs, jobs.submit(REQUEST)).facts == {"digest": DIGEST}
    assert models.built == 2
    jobs.close()
