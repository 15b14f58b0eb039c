"""HTTP clients of the service. Imports only the schemas and the errors of the project."""

from __future__ import annotations

from roller_svc.client.async_client import AsyncClient
from roller_svc.client.client import Client
from roller_svc.client.retry import NO_RETRIES, RetryPolicy

__all__ = ["NO_RETRIES", "AsyncClient", "Client", "RetryPolicy"]


def __dir__() -> list[str]:
    return sorted([*__all__, "schemas"])
