"""Metrics."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from serving import served

from roller_svc.errors import CompileError
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
