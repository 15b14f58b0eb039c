"""HTTP client of the service. Imports only the schemas and the errors of the project."""

from __future__ import annotations

from roller_svc.client.client import Client

__all__ = ["Client"]
