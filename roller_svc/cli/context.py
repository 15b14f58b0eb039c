"""Context of a subcommand: the program text, for error messages that quote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CommandContext:
    expression: str = ""
