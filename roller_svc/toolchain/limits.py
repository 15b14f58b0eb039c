"""Resource limits of one compilation: time, memory, files."""

from __future__ import annotations

from dataclasses import dataclass

LOG_CHARACTERS = 64 * 1024  # of a truncated compiler log; template errors take megabytes


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """Limits of one compilation."""

    timeout_s: float = 60.0
    memory_bytes: int = 8 << 30  # address space of each compiler process
    file_bytes: int = 256 << 20  # each file written
    open_files: int = 256


DEFAULT_LIMITS = CompileLimits()


def truncate_log(log: str) -> str:
    """Cut the middle out of a long log."""
    if len(log) <= LOG_CHARACTERS:
        return log
    half = LOG_CHARACTERS // 2
    return f"{log[:half]}\n[... {len(log) - 2 * half} characters left out ...]\n{log[-half:]}"
