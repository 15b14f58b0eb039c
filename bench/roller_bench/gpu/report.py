"""Summarize a document of results and format it for a terminal."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from roller_bench.gpu.record import finite, merge_runs, read
from roller_bench.gpu.targets import geometric_mean, speed_ratios, target_lines, targets

Json = dict[str, Any]
REFUSED = "refused"
BAD = ("wrong", "error", REFUSED, "timeout")


def report_of(paths: Sequence[Path]) -> Json:
    """Return the merged document of these files with its summary. Raises ArgumentError."""
    document = merge_runs([read(path) for path in paths])
    return {**document, "summary": summary(document)}


def write(document: Json, path: Path) -> None:
    """Write the document; the file appears whole."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(finite(document), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def summary(document: Json) -> Json:
    """Return verification counts by family, and model error and library ratios by class of cases."""
    verification, measured = document["verification"], [row for row in document["measurements"] if "best_s" in row]
    return {
        "wrong": wrong(document),
        "verification": {
            family: dict(sorted(Counter(row["status"] for row in rows).items()))
            for family, rows in _grouped(verification, "family").items()
        },
        "not_repeatable": [row["id"] for row in verification if row.get("repeatable") is False],
        "device_differs_from_emulator": [row["id"] for row in verification if _differs(row)],
        "sanitizer": {row["tool"]: row["status"] for row in document["sanitizer"]},
        "classes": {cls: _class_summary(rows) for cls, rows in _grouped(measured, "cls").items()},
        "targets": targets(measured, bandwidth(document)),
        "seconds_by_stage": _seconds(document["stages"]),
    }


def wrong(document: Json) -> list[str]:
    """Return the names of everything that ran and was wrong. Failures of baselines do not count."""
    rows = [*document["verification"], *({"id": row["tool"], **row} for row in document["sanitizer"])]
    rows += [{"id": row["name"], **row} for row in (*document["smoke"], *document["probes"])]
    rows += [row for row in document["graphs"] if row["status"] != REFUSED]
    names = [row["id"] for row in rows if row.get("status") in BAD]
    names += [row["id"] for row in document["measurements"] if "error" in row or _failed_check(row)]
    names += [row["id"] for row in document["graphs"] if _failed_check(row)]
    return [*names, *(f"stage {row['stage']}" for row in document["stages"] if row["ended"] not in ("done", "time"))]


def bandwidth(document: Json) -> float | None:
    """Return the bandwidth of a device-to-device copy, bytes/s, or None if not measured."""
    rates = [row["bytes_per_s"] for row in document["smoke"] if "bytes_per_s" in row]
    return rates[-1] if rates else None


def table(document: Json) -> str:
    """Return the summary as text for a terminal."""
    total = document["summary"]
    lines = ["REHEARSAL: nothing here ran on a GPU, times are the model's"] if document["rehearsal"] else []
    lines += [] if document["complete"] else ["a file was cut off: the tables show its complete lines"]
    lines += [f"{'stage':<18}{'seconds':>8}{'done':>6}{'left':>6}  ended"]
    lines += [
        f"{row['stage']:<18}{row['seconds']:>8.1f}{row['done']:>6}{row['left']:>6}  {row['ended']}" for row in document["stages"]
    ]
    if document["missing"]:
        lines += ["", f"{'missing':<18}{'rows':>8}{'of':>6}  first of them"]
        lines += [
            f"{stage:<18}{len(one['missing']):>8}{one['planned']:>6}  {', '.join(one['missing'][:3])}"
            for stage, one in document["missing"].items()
        ]
    lines += ["", f"{'family':<18}verdicts"]
    for family, counts in total["verification"].items():
        lines.append(f"{family:<18}{', '.join(f'{count} {status}' for status, count in counts.items())}")
    lines += [f"{tool:<18}{status}" for tool, status in total["sanitizer"].items()]
    if document["probes"]:
        lines += ["", f"{'probe':<32}{'value':>12}  unit"]
        lines += [f"{row['name']:<32}{_number(row.get('value')):>12}  {row.get('unit', '')}" for row in document["probes"]]
    if document["graphs"]:
        lines += ["", f"{'model and lowering':<36}{'us':>10}{'predicted':>11}{'launches':>10}  result"]
        lines += [_graph_line(row) for row in document["graphs"]]
    if total["classes"]:
        lines += ["", f"{'class':<24}{'cases':>6}{'predicted/measured':>20}{'first/best':>12}{'library/ours':>14}"]
    for cls, one in total["classes"].items():
        ratio = "-" if one["peer_to_ours"] is None else f"{one['peer_to_ours']:.2f}"
        lines.append(f"{cls:<24}{one['cases']:>6}{one['predicted_to_measured']:>20.2f}{one['first_to_best']:>12.2f}{ratio:>14}")
    if total["classes"]:
        lines += ["", *target_lines(total["targets"])]
    lines += ["", f"not right: {', '.join(total['wrong']) or 'nothing'}"]
    return "\n".join(lines)


def _graph_line(row: Json) -> str:
    """Return the line of a model by one lowering."""
    times = [f"{row[key] * 1e6:.1f}" if key in row else "-" for key in ("median_s", "predicted_s")]
    result = row.get("checked", f"{row['status']} {row.get('detail', '')}".strip())
    return f"{row['id']:<36}{times[0]:>10}{times[1]:>11}{row.get('launches', '-'):>10}  {result[:80]}"


def _class_summary(rows: Sequence[Json]) -> Json:
    """Return geometric means over the cases of a class.

    `predicted_to_measured` is for the model's first candidate, with a cold cache where that was measured, as the model
    assumes. `first_to_best` is its time over that of the fastest candidate. `peer_to_ours` is the library's time over
    ours in the same interleaved block of samples.
    """
    ratios = [row["predicted_s"] / (row.get("first_cold_s") or row["first_s"]) for row in rows]
    return {
        "cases": len(rows),
        "predicted_to_measured": geometric_mean(ratios),
        "median_abs_log_ratio": statistics.median(abs(math.log(ratio)) for ratio in ratios),
        "first_to_best": geometric_mean(row["first_s"] / row["best_s"] for row in rows),
        "peer_to_ours": geometric_mean(speed_ratios(rows, "library")),
    }


def _failed_check(row: Json) -> bool:
    return str(row.get("checked", "")).startswith("wrong")


def _differs(row: Json) -> bool:
    """Return whether exactly one of device and emulator is right."""
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
