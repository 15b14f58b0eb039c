"""The `roller` command: one module per subcommand, loaded on use."""

from __future__ import annotations

from roller_svc.cli.command import main

__all__ = ["main"]
