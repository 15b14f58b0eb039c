"""Write results as JSON lines and merge such files into one document.

Each line is on disk before the next is written. A truncated file is a result too: a broken last line is ignored, and
the first lines, which appear together, have the rows that the run was to write.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError

Json = dict[str, Any]
SECTIONS = (
    "planned", "verification", "sanitizer", "smoke", "probes", "measurements", "graphs", "comparisons", "checked",
    "skipped", "stages",
)  # fmt: skip


class Record:
    """A file of JSON lines; each line is flushed to disk before `add` returns.

    The first is the section `about`, then a line for each stage of `planned`: {stage: {section: ids of rows}}. The file
    appears with these lines.
    """

    def __init__(self, path: Path, about: Json, planned: Mapping[str, Mapping[str, Sequence[str]]] = {}) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.lines: list[Json] = []
        self._began = time.monotonic()
        first = path.with_name(f"{path.name}.part")
        self._file = first.open("w", encoding="utf-8")
        self.add("about", about)
        for stage, rows in planned.items():
            self.add("planned", {"stage": stage, "rows": rows})
        first.replace(path)

    def add(self, section: str, row: Json) -> None:
        """Append a row with `at_s`, the seconds since the run began."""
        line = {"section": section, "at_s": round(time.monotonic() - self._began, 3), **row}
        self.lines.append(line)
        self._file.write(json.dumps(finite(line), separators=(",", ":")) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Write the section `end`, without which a file counts as truncated."""
        self.add("end", {})
        self._file.close()


def read(path: Path) -> list[Json]:
    """Return the complete lines of a file; raise ArgumentError if it is not a file of results."""
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
        raise ArgumentError(f"{path}: expected section `about` in the first line", code="unreadable-file")
    return lines


def merge_runs(files: Sequence[Sequence[Json]]) -> Json:
    """Merge the lines of several runs into one document with a list of rows for each section.

    A row of a later run replaces the same row of an earlier one. Comparisons and checks are merged into the measurement
    of their case. `complete` is false if a file was truncated. `missing` has the rows that no run wrote.
    """
    rows_by_section: dict[str, dict[str, Json]] = {section: {} for section in SECTIONS}
    for lines in files:
        for line in lines:
            section, row = line["section"], {key: value for key, value in line.items() if key != "section"}
            if section == "judged":  # the section's earlier name
                section, row = "checked", {"id": row["id"], "checked": row["judged"]}
            if section in rows_by_section:
                rows_by_section[section][_key(section, row, len(rows_by_section[section]))] = row
    missing = find_missing(rows_by_section)
    abouts = [_without_section(lines[0]) for lines in files]
    rows: Json = {section: list(of_section.values()) for section, of_section in rows_by_section.items()}
    rows["measurements"] = _merge_comparisons(rows.pop("measurements"), rows.pop("comparisons"), rows.pop("checked"))
    return {
        "about": abouts,
        "rehearsal": any(about.get("rehearsal", False) for about in abouts),
        "complete": all(lines[-1]["section"] == "end" for lines in files),
        "missing": missing,
        **rows,
    }


def find_missing(rows_by_section: Mapping[str, Mapping[str, Json]]) -> dict[str, Json]:
    """Return {stage: {`planned`: number of rows, `missing`: ids of those that are not there}}, in the order of the run.

    Stages that ended with nothing left have decided to write no row, for example for a compiler that cannot apply.
    """
    done = {row["stage"] for row in rows_by_section["stages"].values() if row["ended"] == "done"}
    written = {section: {_id(section, row) for row in rows.values()} for section, rows in rows_by_section.items()}
    found: dict[str, Json] = {}
    for row in rows_by_section["planned"].values():
        ids = [(section, name) for section, names in row["rows"].items() for name in names]
        missing = [name for section, name in ids if name not in written[section]]
        if missing and row["stage"] not in done:
            found[row["stage"]] = {"planned": len(ids), "missing": missing}
    return found


def _id(section: str, row: Json) -> str:
    """Return the id by which a row is planned."""
    return str(row.get("probe", row["name"])) if section == "probes" else _key(section, row, 0)


def _key(section: str, row: Json, count: int) -> str:
    """Return the key that identifies a row within its section."""
    match section:
        case "comparisons":
            return f"{row['id']} {row['peer']}"
        case "sanitizer":
            return str(row["tool"])
        case "smoke" | "probes":
            return str(row["name"])
        case "planned":
            return str(row["stage"])
        case "skipped" | "stages":
            return f"{row['stage']} {count}"
    return str(row["id"])


def _merge_comparisons(measurements: Iterable[Json], comparisons: Iterable[Json], checked: Iterable[Json]) -> list[Json]:
    rows = {row["id"]: {**row, "peers": dict(row.get("peers", {}))} for row in measurements}
    for row in comparisons:
        if row["id"] not in rows:  # of a run with the stage `compare` only
            rows[row["id"]] = {**row["ours"], "id": row["id"], "peers": {}}
        rows[row["id"]]["peers"][row["peer"]] = row["found"]
    for row in checked:
        if row["id"] in rows:
            rows[row["id"]]["checked"] = row["checked"]
    return list(rows.values())


def _without_section(line: Json) -> Json:
    return {key: value for key, value in line.items() if key != "section"}


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by strings."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: finite(row) for key, row in value.items()}
        case list() | tuple():
            return [finite(row) for row in value]
        case _:
            return value
