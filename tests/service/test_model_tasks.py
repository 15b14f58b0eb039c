"""What a worker returns for a model is checked: it may have run a client's code."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from gpu_models import graph, node, tensor
from onnx_models import mlp

from roller_svc.errors import ArgumentError, BuildServiceError
from roller_svc.farm.build import artifact_json
from roller_svc.farm.models import ModelRequest
from roller_svc.farm.store import MODELS
from roller_svc.service import model_tasks
from roller_svc.service.model_tasks import ModelTask, build_model_task, parse_estimate, parse_model_artifact

FILES = {"bundle": b"b", "plan": b"{}", "source": b"int x;", "story": b"{}", "header": b"int x;"}
Change = Callable[[dict[str, Any]], object]


def document() -> dict[str, Any]:
    blobs = {kind: hashlib.sha256(content).hexdigest() for kind, content in FILES.items()}
    digest = f"sha256:{blobs['bundle']}"
    return {
        "digest": digest,
        "facts": {"digest": digest, "files": blobs},
        "files": {kind: base64.b64encode(content).decode() for kind, content in FILES.items()},
        "stages": [],
    }


def test_a_model_survives_its_encoding() -> None:
    artifact = parse_model_artifact(document())
    assert (artifact.files, artifact.folder) == (FILES, MODELS)
    assert artifact_json(artifact) == document()


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(digest="sha256:" + "0" * 64),
        lambda d: d.update(digest="../../x"),
        lambda d: d["facts"].update(digest="sha256:" + "0" * 64),
        lambda d: d["facts"]["files"].update(plan="0" * 64),
        lambda d: d["facts"].pop("files"),
        lambda d: d["files"].update(bundle="AAAA"),
        lambda d: d["files"].update(header="no base64!"),
        lambda d: d["files"].update(more="AAAA"),
        lambda d: d["files"].pop("header"),
        lambda d: d.pop("files"),
        lambda d: d.update(facts=[]),
    ],
)
def test_a_malformed_model_is_rejected(change: Change) -> None:
    malformed = document()
    change(malformed)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        parse_model_artifact(malformed)


@pytest.mark.parametrize("estimate", [[], "text", None, 1])
def test_a_malformed_estimate_is_rejected(estimate: object) -> None:
    with pytest.raises(ValueError, match="not an object"):
        parse_estimate(estimate)


def test_a_worker_with_other_code_builds_nothing() -> None:
    request = ModelRequest("0" * 64, "onnx", "cpu-x86-avx2", {})
    with pytest.raises(BuildServiceError) as raised:
        build_model_task(ModelTask(request, b"", generator="another"))
    assert raised.value.code == "generator-replaced"


def labelled_graph(device: str) -> tuple[str, bytes]:
    nodes = [node(name, "C[i, j] = A[i, j] + 1", A=read) for name, read in (("a", "x"), ("b", "a"))]
    return "graph", json.dumps(graph({"x": tensor(4, 8)}, {}, [nodes[0], nodes[1] | {"device": device}], "b")).encode()


def labelled_onnx(device: str) -> tuple[str, bytes]:
    proto = mlp()
    proto.graph.node[0].metadata_props.add(key="roller.device", value=device)
    return "onnx", proto.SerializeToString()


@pytest.mark.parametrize("label", [labelled_graph, labelled_onnx])
def test_labels_of_a_file_that_the_request_lacks_are_refused_before_a_build(
    monkeypatch: pytest.MonkeyPatch, label: Callable[[str], tuple[str, bytes]]
) -> None:
    built: list[str] = []

    def build(_: object, target: str, **options: object) -> None:
        built.append(target)
        raise ArgumentError("builds")

    monkeypatch.setattr(model_tasks, "compile_model", build)
    gpu, cpu = "nvidia-h200-sxm", "cpu-x86-avx2"

    def task(device: str, **devices: str) -> None:
        form, content = label(device)
        build_model_task(ModelTask(ModelRequest("0" * 64, form, cpu, {"devices": devices} if devices else {}), content))

    with pytest.raises(ArgumentError, match=f"labels in the model's file name {gpu}"):
        task(gpu)
    assert not built
    for device, named in ((gpu, {"*": gpu}), (cpu, {}), (gpu, {"*": cpu})):
        with pytest.raises(ArgumentError, match="builds"):
            task(device, **named)
    assert built == [cpu] * 3
