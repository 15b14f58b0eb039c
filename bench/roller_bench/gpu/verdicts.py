"""Read the emulator's verdicts from the file of a dry run, for a run that has a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roller_bench.gpu.record import read

Json = dict[str, Any]


def read_verdicts(path: Path | None) -> dict[str, Json]:
    """Return {check id: {`key` of the kernel source, `emulator`: its verdict}}. Raises ArgumentError."""
    if path is None:
        return {}
    rows = (line for line in read(path) if line["section"] == "verification")
    return {row["id"]: {"key": row["key"], "emulator": row["emulator"]} for row in rows if "emulator" in row}
