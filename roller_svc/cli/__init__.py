"""The `roller` command: one module for each verb, loaded when it is used."""

from __future__ import annotations

from roller_svc.cli.main import main

__all__ = ["main"]
