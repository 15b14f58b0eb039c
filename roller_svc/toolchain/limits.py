"""What one compilation may take: time, memory, files."""

from __future__ import annotations

from dataclasses import dataclass

LOG_CHARACTERS = 64 * 1024  # what is kept of a compiler's log; template errors run to megabytes


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """`memory_bytes` bounds the address space of each compiler process, `file_bytes` each file it writes."""

    timeout_s: float = 60.0
    memory_bytes: int = 8 << 30
    file_bytes: int = 256 << 20
    open_files: int = 256


DEFAULT_LIMITS = CompileLimits()


def shortened(log: str) -> str:
    """The log, its middle cut out where it is too long to keep."""
    if len(log) <= LOG_CHARACTERS:
        return log
    half = LOG_CHARACTERS // 2
    return f"{log[:half]}\n[... {len(log) - 2 * half} characters left out ...]\n{log[-half:]}"
