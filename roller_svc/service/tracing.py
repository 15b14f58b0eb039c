"""OpenTelemetry traces of requests and builds. Loaded only if ROLLER_OTLP_ENDPOINT is set (extra `otel`).

A request's span is the parent of the spans `queue` and `build` of its operation, whose row has the W3C `traceparent`.
They are recorded when an attempt has ended, from the times that it noted, by whichever process ran it.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from roller_svc.farm.runner import Attempt
from roller_svc.farm.statistics import SUCCEEDED
from roller_svc.service.access import OPEN_PATHS
from roller_svc.version import __version__

SERVICE_NAME = "roller-svc"
NS_PER_S = 1_000_000_000


class Tracing:
    """Records spans.

    Args:
        provider: of the tracer; it is shut down by `close`.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("roller_svc", __version__)
        self.middleware = TracingMiddleware  # for an application that does not import this module

    def extract(self, traceparent: str | None) -> Context:
        """Return the context of a remote parent, or an empty one."""
        return self._propagator.extract({} if traceparent is None else {"traceparent": traceparent}, Context())

    def current(self) -> str | None:
        """Return the traceparent of the current span, or None without one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get("traceparent")

    def record(self, attempt: Attempt) -> None:
        """Record the spans of an attempt that has ended."""
        claim, parent = attempt.claim, self.extract(attempt.claim.traceparent)
        common: dict[str, str | int] = {"roller.operation": claim.id, "roller.attempt": claim.attempt}
        # The row has the database's clock: a queue span never ends before it begins.
        queued_s = min(claim.ready_time, attempt.start_s)
        queue = self.tracer.start_span("queue", parent, attributes=common, start_time=_ns(queued_s))
        queue.end(_ns(attempt.start_s))
        build = self.tracer.start_span(
            "build",
            parent,
            SpanKind.CONSUMER,
            start_time=_ns(attempt.start_s),
            attributes=common | {"roller.worker": attempt.worker, "roller.code": attempt.code},
        )
        inside = trace.set_span_in_context(build, Context())
        for stage in attempt.stages:
            span = self.tracer.start_span(stage.name, inside, start_time=_ns(stage.start_s))
            span.end(_ns(stage.start_s + stage.seconds))
        if attempt.code != SUCCEEDED:
            build.set_status(Status(StatusCode.ERROR, attempt.code))
        build.end(_ns(attempt.end_s))

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


class TracingMiddleware:
    """Makes a span of each request, as a child of the client's span if it names one."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        parent = self._tracing.extract(Headers(scope=scope).get("traceparent"))
        method = str(scope["method"])
        with self._tracing.tracer.start_as_current_span(method, parent, SpanKind.SERVER) as span:
            bind_contextvars(trace_id=trace.format_trace_id(span.get_span_context().trace_id))

            async def send_with_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self._app(scope, receive, send_with_status)
            finally:
                route = getattr(scope.get("route"), "path_format", None)  # a template: it has few values
                span.set_attribute("http.request.method", method)
                if route is not None:
                    span.set_attribute("http.route", route)
                    span.update_name(f"{method} {route}")


def export_to(endpoint: str) -> Tracing:
    """Return a tracing that exports to a collector by OTLP over HTTP; OTEL_* variables set the rest."""
    resource = Resource.create({"service.version": __version__})
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider)


def _ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)
