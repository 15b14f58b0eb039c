"""Context of a subcommand, for error messages."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CommandContext:
    """The program's text, and flags that differ for the command from those that messages show by default."""

    expression: str = ""
    flags: dict[str, str] = field(default_factory=dict)
