"""Open the tracing of a process if its settings ask for one. OpenTelemetry is imported only then."""

from __future__ import annotations

import contextlib
import pkgutil
from typing import TYPE_CHECKING

from roller_svc.errors import ArgumentError
from roller_svc.settings import Settings

if TYPE_CHECKING:
    from roller_svc.service.tracing import Tracing

EXPORT_TO = "roller_svc.service.tracing:export_to"


def open_tracing(settings: Settings) -> Tracing | None:
    """Return the tracing of the settings, or None. Raises ArgumentError if it is not installed."""
    if not settings.otlp_endpoint:
        return None
    if not settings.otlp_endpoint.startswith(("http://", "https://")):
        raise ArgumentError(
            "ROLLER_OTLP_ENDPOINT: expected the URL of a collector",
            code="invalid-setting",
            hint="http://collector:4318",
        )
    with contextlib.suppress(ModuleNotFoundError):
        tracing: Tracing = pkgutil.resolve_name(EXPORT_TO)(settings.otlp_endpoint)
        return tracing
    raise ArgumentError(
        "ROLLER_OTLP_ENDPOINT: OpenTelemetry is not installed",
        code="invalid-setting",
        hint="pip install 'roller-svc[otel]'",
    )
