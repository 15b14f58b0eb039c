"""Results that a stranger wrote: what is none is a miss, which a build repairs, whatever the archive says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import BODY, text_kernel

from roller_svc.client.schemas import CompileRequest
from roller_svc.errors import ArgumentError
from roller_svc.farm.collection import verify
from roller_svc.farm.results import is_result
from roller_svc.farm.store import MODELS, Artifact, Store
from roller_svc.farm.store_archive import export_results, import_results
from roller_svc.service.mapping import build_request_from_body

ACTION = f"sha256:{'a' * 64}"
DIGEST = f"sha256:{'1' * 64}"
KERNEL = text_kernel(build_request_from_body(CompileRequest.model_validate(BODY)), "text")
MODEL = Artifact(
    DIGEST,
    {
        "digest": DIGEST,
        "target": "cpu-x86-avx2",
        "inputs": [],
        "outputs": [],
        "kernels": [],
        "plan": {},
        "estimate": {"seconds": 0},
        "files": {"bundle": "2" * 64},
    },
    {},
    MODELS,
)


def manifest_of(artifact: Artifact) -> dict[str, Any]:
    files = MODEL.facts["files"] if artifact is MODEL else dict.fromkeys(artifact.files, "3" * 64)
    manifest = {"digest": artifact.digest, "facts": artifact.facts, "files": files, "folder": artifact.folder}
    parsed: dict[str, Any] = json.loads(json.dumps(manifest))  # a copy
    return parsed


@pytest.mark.parametrize("artifact", [KERNEL, MODEL], ids=["kernel", "model"])
def test_a_result_is_one(artifact: Artifact) -> None:
    assert is_result(manifest_of(artifact))


FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no facts": lambda manifest: manifest.update(facts={}),
    "facts of another one": lambda manifest: manifest["facts"].update(digest=f"sha256:{'f' * 64}"),
    "no estimate": lambda manifest: manifest["facts"].pop("estimate"),
    "an estimate that is text": lambda manifest: manifest["facts"].update(estimate="fast"),
    "a number that is text": lambda manifest: manifest["facts"]["estimate"].update(seconds="1"),
    "no files": lambda manifest: manifest.update(files={}),
    "names of files that are lists": lambda manifest: manifest["facts"].update(files=[["source"]]),
    "a file more": lambda manifest: manifest["files"].update(other="4" * 64),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("artifact", [KERNEL, MODEL], ids=["kernel", "model"])
def test_what_lacks_facts_or_files_is_none(artifact: Artifact, fault: str) -> None:
    manifest = manifest_of(artifact)
    FAULTS[fault](manifest)
    assert not is_result(manifest)


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """An archive whose action has the kernel's files, and no facts."""
    source = Store(tmp_path / "stranger")
    source.publish(ACTION, Artifact(KERNEL.digest, {}, KERNEL.files))
    export_results(source, tmp_path / "poisoned.tar")
    return tmp_path / "poisoned.tar"


def test_an_archive_without_facts_is_refused(tmp_path: Path, poisoned: Path) -> None:
    store = Store(tmp_path / "store", None, is_result)
    with pytest.raises(ArgumentError, match="not complete"):
        import_results(store, poisoned)
    assert store.action_result(ACTION) is None


def test_a_name_without_facts_is_a_miss_that_verify_reports_and_a_build_repairs(tmp_path: Path, poisoned: Path) -> None:
    import_results(Store(tmp_path / "store"), poisoned)  # by a version that did not check
    store = Store(tmp_path / "store", None, is_result)
    for _ in range(2):
        assert store.action_result(ACTION) is None
        assert store.kernel(KERNEL.digest) is None
    bare = KERNEL.digest.removeprefix("sha256:")
    assert sorted(verify(store).names) == [f"ac/{'a' * 64}", f"kernels/{bare}"]
    assert store.publish(ACTION, KERNEL) == KERNEL.facts
    assert store.action_result(ACTION) == KERNEL.facts
    assert store.file(KERNEL.digest, "source") == KERNEL.files["source"]
    assert verify(store).names == []
