"""What a command was given, kept for the errors that point into it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CommandContext:
    expression: str = ""
