"""What was found → a file of JSON lines, each on the disk before the next is begun; such files → one document.

A file that was cut off is a result: all lines but a last broken one count.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError

Json = dict[str, Any]
SECTIONS = (
    "verification", "sanitizer", "smoke", "probes", "measurements", "comparisons", "judged", "skipped", "stages",
)  # fmt: skip


class Record:
    """A file of lines, begun with `about`. Each line has its `section`, and is written before `add` returns."""

    def __init__(self, path: Path, about: Json) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines: list[Json] = []
        self._began = time.monotonic()
        self._file = path.open("w", encoding="utf-8")
        self.add("about", about)

    def add(self, section: str, row: Json) -> None:
        """`at_s`: since the run began."""
        line = {"section": section, "at_s": round(time.monotonic() - self._began, 3), **row}
        self.lines.append(line)
        self._file.write(json.dumps(finite(line), separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Without this line a file was cut off."""
        self.add("end", {})
        self._file.close()


def read(path: Path) -> list[Json]:
    """The whole lines of a file; raises ArgumentError for what is no file of results."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ArgumentError(f"{path}: {problem}", code="unreadable-file") from problem
    lines: list[Json] = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            lines.append(dict(json.loads(line)))
        except ValueError as problem:
            if line.endswith("\n"):
                raise ArgumentError(f"{path}, line {number}: {problem}", code="unreadable-file") from problem
    if not lines or lines[0].get("section") != "about":
        raise ArgumentError(f"{path} does not begin as a file of results does", code="unreadable-file")
    return lines


def document(files: Sequence[Sequence[Json]]) -> Json:
    """Rows by section, of all runs together. Of a row that two runs have the later counts; comparisons and verdicts
    join the measurement of their case. `complete`: no file was cut off."""
    found: dict[str, dict[str, Json]] = {section: {} for section in SECTIONS}
    for lines in files:
        for line in lines:
            section, row = line["section"], {key: value for key, value in line.items() if key != "section"}
            if section in found:
                found[section][_key(section, row, len(found[section]))] = row
    abouts = [_without_section(lines[0]) for lines in files]
    rows: Json = {section: list(of_section.values()) for section, of_section in found.items()}
    rows["measurements"] = _merge_comparisons(rows.pop("measurements"), rows.pop("comparisons"), rows.pop("judged"))
    return {
        "about": abouts,
        "rehearsal": any(about.get("rehearsal", False) for about in abouts),
        "complete": all(lines[-1]["section"] == "end" for lines in files),
        **rows,
    }


def _key(section: str, row: Json, count: int) -> str:
    """What tells rows of a section apart."""
    match section:
        case "comparisons":
            return f"{row['id']} {row['peer']}"
        case "sanitizer":
            return str(row["tool"])
        case "smoke" | "probes":
            return str(row["name"])
        case "skipped" | "stages":
            return f"{row['stage']} {count}"
    return str(row["id"])


def _merge_comparisons(measurements: Iterable[Json], comparisons: Iterable[Json], checked: Iterable[Json]) -> list[Json]:
    rows = {row["id"]: {**row, "peers": dict(row.get("peers", {}))} for row in measurements}
    for one in comparisons:
        if one["id"] not in rows:  # of a run that only compared
            rows[one["id"]] = {**one["ours"], "id": one["id"], "peers": {}}
        rows[one["id"]]["peers"][one["peer"]] = one["found"]
    for one in checked:
        if one["id"] in rows:
            rows[one["id"]]["judged"] = one["judged"]
    return list(rows.values())


def _without_section(line: Json) -> Json:
    return {key: value for key, value in line.items() if key != "section"}


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: as words."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: finite(one) for key, one in value.items()}
        case list() | tuple():
            return [finite(one) for one in value]
        case _:
            return value
