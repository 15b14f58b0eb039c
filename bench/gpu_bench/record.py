"""What was found → one JSON file, written anew as rows come in, and a table of a few lines."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpu_bench.targets import geometric_mean, peer_s, target_lines, targets

Json = dict[str, Any]
_WRITE_EVERY_S = 1.0


class Record:
    """The document; what is in it when the process is cut off is in the file, but for the last second."""

    def __init__(self, path: Path, about: Json) -> None:
        self.path = path
        self.document: Json = {"about": about, "complete": False, "verification": [], "sanitizer": [],
                               "bandwidth": None, "calibration": None, "measurements": [], "skipped": []}  # fmt: skip
        self._written_at = -math.inf
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, section: str, row: Json) -> None:
        self.document[section].append(row)
        self.touched()

    def touched(self) -> None:
        """Something of the document is new."""
        if time.monotonic() - self._written_at > _WRITE_EVERY_S:
            self.write()

    def finish(self) -> Json:
        """Write it for the last time, with its summary, which is returned."""
        self.document["summary"] = summary(self.document)
        self.document["complete"] = True
        self.write()
        return dict(self.document["summary"])

    def write(self) -> None:
        beside = self.path.with_name(f"{self.path.name}.part")
        beside.write_text(json.dumps(_finite(self.document), indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)
        self._written_at = time.monotonic()


def summary(document: Json) -> Json:
    """Counts of every family's verdicts; of every class how the model did, and how the vendors' libraries did."""
    verification, measured = document["verification"], [r for r in document["measurements"] if "best_s" in r]
    return {
        "verification": {
            family: dict(sorted(Counter(row["status"] for row in rows).items()))
            for family, rows in _grouped(verification, "family").items()
        },
        "not_repeatable": [row["id"] for row in verification if row.get("repeatable") is False],
        "device_differs_from_emulator": [row["id"] for row in verification if _differs(row)],
        "classes": {cls: _of_class(rows) for cls, rows in _grouped(measured, "cls").items()},
        "targets": targets(measured, (document["bandwidth"] or {}).get("bytes_per_s")),
    }


def table(found: Json) -> str:
    """The summary for a terminal."""
    lines = [f"{'family':<18}verdicts"]
    for family, counts in found["verification"].items():
        lines.append(f"{family:<18}{', '.join(f'{count} {status}' for status, count in counts.items())}")
    if found["classes"]:
        lines += ["", f"{'class':<24}{'cases':>6}{'predicted/measured':>20}{'first/best':>12}{'library/ours':>14}"]
    for cls, one in found["classes"].items():
        peer = "-" if one["peer_to_ours"] is None else f"{one['peer_to_ours']:.2f}"
        lines.append(
            f"{cls:<24}{one['cases']:>6}{one['predicted_to_measured']:>20.2f}{one['first_to_best']:>12.2f}{peer:>14}"
        )
    if found["classes"]:
        lines += ["", *target_lines(found["targets"])]
    return "\n".join(lines)


def _of_class(rows: Sequence[Json]) -> Json:
    """Geometric means over its cases. `predicted_to_measured`: of the candidate that the model likes best, its arrays
    out of the cache where they can be kept out of it, as the model has it; `first_to_best`: its time to that of the
    fastest candidate; `peer_to_ours`: the library's time to ours."""
    peers = [seconds / row["best_s"] for row in rows if (seconds := peer_s(row, "library")) is not None]
    ratios = [row["predicted_s"] / (row["first_cold_s"] or row["first_s"]) for row in rows]
    return {
        "cases": len(rows),
        "predicted_to_measured": geometric_mean(ratios),
        "median_abs_log_ratio": statistics.median(abs(math.log(ratio)) for ratio in ratios),
        "first_to_best": geometric_mean(row["first_s"] / row["best_s"] for row in rows),
        "peer_to_ours": geometric_mean(peers),
    }


def _differs(row: Json) -> bool:
    """One of the two is right and the other is not."""
    emulator = row.get("emulator", {}).get("status")
    return emulator in ("ok", "wrong", "error") and (row["status"] == "ok") != (emulator == "ok")


def _grouped(rows: Iterable[Json], key: str) -> dict[str, list[Json]]:
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: as words."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {key: _finite(one) for key, one in value.items()}
        case list() | tuple():
            return [_finite(one) for one in value]
        case _:
            return value
