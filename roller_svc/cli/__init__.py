"""The `roller` command: one module for each verb, loaded when it is used."""

from __future__ import annotations

from roller_svc.cli.command import main

__all__ = ["main"]
