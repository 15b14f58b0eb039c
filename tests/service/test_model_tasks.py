"""What a worker returns for a model is checked: it may have run a client's code."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from roller_svc.errors import BuildServiceError
from roller_svc.farm.build import artifact_json
from roller_svc.farm.models import ModelRequest
from roller_svc.farm.store import MODELS
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
