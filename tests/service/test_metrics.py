"""Metrics."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from serving import served

from roller_svc.errors import CompileError
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.request_metrics import RequestMetrics
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


def test_requests_are_counted_by_the_templates_of_their_routes(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path, api_keys="key"), refuse)) as client:
        client.headers["X-API-Key"] = "key"
        for number in range(3):
            client.get(f"/v1/operations/{number}")
        client.get("/v1/operations/1", headers={"X-API-Key": "wrong"})
        client.post("/v1/operations/1:cancel", json={})
        client.get("/nowhere/1")
        client.request("BREW", "/v1/operations/1")
        text = client.get("/metrics").text
    requests, starts = {}, {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "roller_http_requests_total":
                requests[labels["method"], labels["route"], labels["status"]] = sample.value
            elif sample.name == "roller_http_response_start_seconds_count":
                starts[labels["method"], labels["route"]] = sample.value
    operation = "/v1/operations/{operation_id}"
    assert requests == {
        ("GET", operation, "404"): 3,
        ("GET", operation, "401"): 1,  # it has not reached the route
        ("POST", f"{operation}:cancel", "404"): 1,
        ("other", "other", "404"): 1,
        ("other", "other", "405"): 1,
    }
    assert starts["GET", operation] == 4


def test_a_request_without_a_response_has_no_time() -> None:
    registry = CollectorRegistry()
    RequestMetrics(registry, []).observe("GET", "/", None, None)
    labels = {"route": "other", "method": "other"}
    assert registry.get_sample_value("roller_http_requests_total", labels | {"status": "none"}) == 1
    assert registry.get_sample_value("roller_http_response_start_seconds_count", labels) == 0


def test_a_process_tells_its_memory_files_and_free_space(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path), refuse)) as client:
        families = {
            family.name: family.samples[0].value
            for family in text_string_to_metric_families(client.get("/metrics").text)
            if family.samples
        }
    assert families["process_resident_memory_bytes"] > 1 << 20
    assert families["process_open_fds"] > 3
    assert families["roller_store_free_bytes"] > 0
