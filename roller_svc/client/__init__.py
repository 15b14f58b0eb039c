"""HTTP client of the service. Imports nothing else of the project but the schemas and the errors."""

from __future__ import annotations

from roller_svc.client.client import Client

__all__ = ["Client"]
