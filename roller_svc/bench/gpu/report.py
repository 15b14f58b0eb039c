"""A document of results → its summary, and a table for a terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from roller_svc.bench.gpu.record import document, finite, read
from roller_svc.bench.gpu.targets import geometric_mean, speed_ratios, target_lines, targets

Json = dict[str, Any]
BAD = ("wrong", "error", "refused", "timeout")


def report_of(paths: Sequence[Path]) -> Json:
    """The document of these files, with its summary. Raises ArgumentError."""
    document_ = document([read(path) for path in paths])
    return {**document_, "summary": summary(document_)}


def write(document_: Json, path: Path) -> None:
    path.write_text(json.dumps(finite(document_), indent=1) + "\n", encoding="utf-8")


def summary(document_: Json) -> Json:
    """Counts of every family's verdicts; of every class how the model did, and how the vendors' libraries did."""
    verification, measured = document_["verification"], [row for row in document_["measurements"] if "best_s" in row]
    return {
        "wrong": wrong(document_),
        "verification": {
            family: dict(sorted(Counter(row["status"] for row in rows).items()))
            for family, rows in _grouped(verification, "family").items()
        },
        "not_repeatable": [row["id"] for row in verification if row.get("repeatable") is False],
        "device_differs_from_emulator": [row["id"] for row in verification if _differs(row)],
        "sanitizer": {row["tool"]: row["status"] for row in document_["sanitizer"]},
        "classes": {cls: _class_summary(rows) for cls, rows in _grouped(measured, "cls").items()},
        "targets": targets(measured, bandwidth(document_)),
        "seconds_by_stage": _seconds(document_["stages"]),
    }


def wrong(document_: Json) -> list[str]:
    """What ran and was not right, by name. What another's kernel refuses is not ours."""
    rows = [*document_["verification"], *({"id": row["tool"], **row} for row in document_["sanitizer"])]
    rows += [{"id": row["name"], **row} for row in (*document_["smoke"], *document_["probes"])]
    names = [row["id"] for row in rows if row.get("status") in BAD]
    names += [row["id"] for row in document_["measurements"] if "error" in row or _failed_check(row)]
    return [*names, *(f"stage {row['stage']}" for row in document_["stages"] if row["ended"] not in ("done", "time"))]


def bandwidth(document_: Json) -> float | None:
    """Of a copy within the device."""
    rates = [row["bytes_per_s"] for row in document_["smoke"] if "bytes_per_s" in row]
    return rates[-1] if rates else None


def table(document_: Json) -> str:
    """The summary for a terminal."""
    total = document_["summary"]
    lines = ["REHEARSAL: nothing here ran on a GPU, times are the model's"] if document_["rehearsal"] else []
    lines += [] if document_["complete"] else ["a file was cut off: what follows is what it holds"]
    lines += [f"{'stage':<18}{'seconds':>8}{'done':>6}{'left':>6}  ended"]
    lines += [
        f"{row['stage']:<18}{row['seconds']:>8.1f}{row['done']:>6}{row['left']:>6}  {row['ended']}"
        for row in document_["stages"]
    ]
    lines += ["", f"{'family':<18}verdicts"]
    for family, counts in total["verification"].items():
        lines.append(f"{family:<18}{', '.join(f'{count} {status}' for status, count in counts.items())}")
    lines += [f"{tool:<18}{status}" for tool, status in total["sanitizer"].items()]
    if document_["probes"]:
        lines += ["", f"{'probe':<32}{'value':>12}  unit"]
        lines += [f"{row['name']:<32}{_number(row.get('value')):>12}  {row.get('unit', '')}" for row in document_["probes"]]
    if total["classes"]:
        lines += ["", f"{'class':<24}{'cases':>6}{'predicted/measured':>20}{'first/best':>12}{'library/ours':>14}"]
    for cls, one in total["classes"].items():
        ratio = "-" if one["peer_to_ours"] is None else f"{one['peer_to_ours']:.2f}"
        lines.append(
            f"{cls:<24}{one['cases']:>6}{one['predicted_to_measured']:>20.2f}{one['first_to_best']:>12.2f}{ratio:>14}"
        )
    if total["classes"]:
        lines += ["", *target_lines(total["targets"])]
    lines += ["", f"not right: {', '.join(total['wrong']) or 'nothing'}"]
    return "\n".join(lines)


def _class_summary(rows: Sequence[Json]) -> Json:
    """Geometric means over its cases. `predicted_to_measured`: of the candidate that the model likes best, its arrays
    out of the cache where they can be kept out of it, as the model has it; `first_to_best`: its time to that of the
    fastest candidate; `peer_to_ours`: the library's time to ours, of the same block of samples."""
    ratios = [row["predicted_s"] / (row.get("first_cold_s") or row["first_s"]) for row in rows]
    return {
        "cases": len(rows),
        "predicted_to_measured": geometric_mean(ratios),
        "median_abs_log_ratio": statistics.median(abs(math.log(ratio)) for ratio in ratios),
        "first_to_best": geometric_mean(row["first_s"] / row["best_s"] for row in rows),
        "peer_to_ours": geometric_mean(speed_ratios(rows, "library")),
    }


def _failed_check(row: Json) -> bool:
    return str(row.get("judged", "")).startswith("wrong")


def _differs(row: Json) -> bool:
    """One of the two is right and the other is not."""
    emulator = row.get("emulator", {}).get("status")
    return emulator in ("ok", "wrong", "error") and (row["status"] == "ok") != (emulator == "ok")


def _seconds(stages: Sequence[Json]) -> dict[str, float]:
    names = dict.fromkeys(row["stage"] for row in stages)
    return {name: sum(row["seconds"] for row in stages if row["stage"] == name) for name in names}


def _grouped(rows: Iterable[Json], key: str) -> dict[str, list[Json]]:
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
