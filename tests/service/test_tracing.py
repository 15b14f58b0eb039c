"""Traces: a request and its build are one trace, in whichever process the build runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import builders
import pytest
from builders import Builder, digest_of
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from serving import served

from roller_svc.errors import ArgumentError, CompileError
from roller_svc.farm.machine import machine_queues
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.telemetry import open_tracing
from roller_svc.service.tracing import Tracing
from roller_svc.service.worker import FarmWorker
from roller_svc.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
BODY = {"expression": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [4]}}, "target": "cpu-x86-avx2"}
WAIT = {"Prefer": "wait=60"}
CLIENT_TRACE = "0123456789abcdef0123456789abcdef"
CLIENT_SPAN = "0123456789abcdef"


class Spans:
    """A tracing whose spans stay in memory."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.finished() if span.name == name]
        return span

    def finished(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def names(self) -> list[str]:
        return [span.name for span in self.finished()]


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.tracing.close()


def refuse(_: BuildRequest) -> Artifact:
    raise CompileError("the compiler said no")


def check_one_trace(service: Spans, builder: Spans) -> None:
    """The client's span, the request's, and below it the queue's and the build's with its stages."""
    request, queue, build = service.named("POST /v1/kernels:compile"), builder.named("queue"), builder.named("build")
    stages = [builder.named(name) for name in ("parse", "construct", "compile")]
    contexts = [span.get_span_context() for span in (request, queue, build, *stages)]
    assert {f"{context.trace_id:032x}" for context in contexts} == {CLIENT_TRACE}
    assert f"{request.parent.span_id:016x}" == CLIENT_SPAN
    assert {span.parent.span_id for span in (queue, build)} == {request.get_span_context().span_id}
    assert {stage.parent.span_id for stage in stages} == {build.get_span_context().span_id}
    assert queue.start_time <= queue.end_time == build.start_time
    assert all(build.start_time <= stage.start_time <= stage.end_time <= build.end_time for stage in stages)
    assert build.attributes["roller.code"] == "ok"
    assert build.attributes["roller.operation"] == queue.attributes["roller.operation"]


@pytest.mark.slow
def test_a_build_of_the_embedded_farm_is_one_trace(tmp_path: Path, spans: Spans) -> None:
    headers = WAIT | {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    with served(create_app(Settings(store=tmp_path, workers=1), tracing=spans.tracing)) as client:
        assert client.post("/v1/kernels:compile", json=BODY, headers=headers).json()["response"]
    check_one_trace(spans, spans)


@pytest.mark.slow
def test_a_build_of_a_worker_is_one_trace(tmp_path: Path, spans: Spans) -> None:
    of_worker = Spans()
    worker = FarmWorker(Settings(store=tmp_path, workers=1), machine_queues(), tracing=of_worker.tracing)
    worker.start()
    headers = WAIT | {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"}
    with served(create_app(Settings(store=tmp_path, workers=0), tracing=spans.tracing)) as client:
        assert client.post("/v1/kernels:compile", json=BODY, headers=headers).json()["response"]
        worker.close()
    check_one_trace(spans, of_worker)
    assert "build" not in spans.names()


def test_a_failed_build_is_marked(tmp_path: Path, spans: Spans) -> None:
    with served(create_app(Settings(store=tmp_path), refuse, tracing=spans.tracing)) as client:
        client.post("/v1/kernels:compile", json=BODY, headers=WAIT)
    build = spans.named("build")
    assert build.attributes["roller.code"] == "compile-failed"
    assert not build.status.is_ok


def test_requests_are_named_after_routes_and_probes_are_left_out(tmp_path: Path, spans: Spans) -> None:
    with served(create_app(Settings(store=tmp_path), refuse, tracing=spans.tracing)) as client:
        for path in ("/v1/operations/secret", "/no/such/path", "/healthz", "/readyz"):
            client.get(path, headers={"traceparent": "00-nonsense"})
    assert sorted(spans.names()) == ["GET", "GET /v1/operations/{operation_id}"]
    assert spans.named("GET").attributes["http.response.status_code"] == 404
    assert spans.named("GET").parent is None


def test_a_hit_from_memory_has_the_span_of_a_routed_one(tmp_path: Path, spans: Spans) -> None:
    with served(create_app(Settings(store=tmp_path), Builder(), digest_of, tracing=spans.tracing)) as client:
        for _ in range(3):  # built, routed, remembered
            assert client.post("/v1/kernels:compile", json=builders.BODY, headers=WAIT).json()["response"]
    _, routed, remembered = [span for span in spans.finished() if span.name == "POST /v1/kernels:compile"]
    assert routed.attributes == remembered.attributes
    assert routed.kind == remembered.kind


def test_a_client_that_samples_nothing_is_heeded(tmp_path: Path, spans: Spans) -> None:
    headers = WAIT | {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-00"}
    with served(create_app(Settings(store=tmp_path), refuse, tracing=spans.tracing)) as client:
        client.post("/v1/kernels:compile", json=BODY, headers=headers)
    assert spans.names() == []


@pytest.mark.slow
def test_nothing_is_imported_without_the_setting(tmp_path: Path) -> None:
    """FastAPI itself imports the API of OpenTelemetry, which records nothing."""
    program = (
        "import sys\n"
        "import roller_svc.service.server, roller_svc.service.worker\n"
        "from roller_svc.service.telemetry import open_tracing\n"
        "from roller_svc.settings import Settings\n"
        "assert open_tracing(Settings()) is None\n"
        "loaded = [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]\n"
        "assert not loaded, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ROLLER_OTLP_ENDPOINT": ""}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, cwd=tmp_path)


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ArgumentError, match="ROLLER_OTLP_ENDPOINT"):
        open_tracing(Settings(otlp_endpoint="collector:4318"))
