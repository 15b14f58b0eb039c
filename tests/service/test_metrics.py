"""Metrics and readiness."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import served

from roller_svc.errors import BuildServiceError, CompileError, StoreError
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

BODY = {"expression": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [4]}}, "target": "cpu-x86-avx2"}


def refuse(_: BuildRequest) -> Artifact:
    raise CompileError("the compiler said no")


def test_metrics_of_a_service_that_was_used(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path), refuse)) as client:
        for _ in range(3):
            client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=30"})
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["roller_submissions_total", "miss"] == 1
    assert samples["roller_submissions_total", "hit"] == 2  # its error is remembered
    assert samples["roller_recently_ended_operations", "compile-failed"] == 1
    assert samples["roller_workers", "active"] == 1
    assert 0 <= samples["roller_recent_build_seconds", "0.5"] < 60


@pytest.mark.parametrize("part", ["database", "store"])
def test_a_service_without_its_database_or_store_is_not_ready(
    tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(Settings(store=tmp_path), refuse)
    state = app.state.roller

    def away() -> None:
        raise StoreError("away")

    with served(app) as client:
        assert client.get("/readyz").json() == {"status": "ready"}
        with monkeypatch.context() as patch:
            objects, database = (state.store.objects, "check_writable"), (state.farm.queue.database, "check")
            patch.setattr(*(objects if part == "store" else database), away)
            assert client.get("/readyz").status_code == 503
        assert client.get("/readyz").status_code == 200


def test_a_service_without_its_broker_is_ready_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings(store=tmp_path), refuse)

    def away() -> None:
        raise BuildServiceError("the broker cannot be reached", code="broker-error")

    monkeypatch.setattr(app.state.roller.farm.courier, "check", away)
    with served(app) as client:
        response = client.get("/readyz")
    assert (response.status_code, response.json()["broker"]) == (200, "the broker cannot be reached")
