"""Operators with published times → the model's prediction beside them, and our seconds beside the artifact's."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.bench.cases import BenchCase
from roller_svc.construct import rank
from roller_svc.construct.partition import partition
from roller_svc.errors import ArgumentError
from roller_svc.ir.hardware import HardwareSpec

TARGET = "nvidia-v100-sxm2"
ARTIFACT_TOP1_MEAN_S = 0.413  # ROLLER's own mean from expression to its first kernel, figure 11 of the artifact
TOP_K = 10
Json = dict[str, Any]


def bench_published(path: Path, target: str = TARGET) -> Json:
    """The median of |ln(predicted / best published)|, overall and a class; `best` is the fastest system's time."""
    hw = hardware.load(target)
    rows = [_row(op, hw) for op in _operators(path)]
    kinds = sorted({row["cls"] for row in rows})
    seconds = [row["construct_s"] for row in rows]
    return {
        "overall": {
            "median_abs_log_ratio": _median_abs_log_ratio(rows),
            "construct_mean_s": statistics.mean(seconds),
            "construct_max_s": max(seconds),
            "artifact_top1_mean_s": ARTIFACT_TOP1_MEAN_S,
        },
        "classes": {
            kind: {"median_abs_log_ratio": _median_abs_log_ratio([r for r in rows if r["cls"] == kind])}
            for kind in kinds
        },
        "cases": rows,
    }


def _operators(path: Path) -> list[Json]:
    try:
        operators: list[Json] = json.loads(path.read_text(encoding="utf-8"))["ops"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ArgumentError(f"{path}: not a file of published times: {problem}", code="unreadable-file") from problem
    return operators


def _row(op: Json, hw: HardwareSpec) -> Json:
    program = BenchCase(op["id"], op["kind"], op["expr"], op["expr_inputs"], None).program()
    groups = partition(program, hw)
    start = time.perf_counter()
    ranked = [rank(group, hw, hw.unit_for(group.space.compute_dtype), TOP_K)[0] for group in groups]
    construct_s = time.perf_counter() - start
    times_ms = op["v100_ms"]
    systems = ("cudalib_tf_ms", "tvm_autotvm_ms", "ansor_ms", "roller_top10_ms")
    return {
        "id": op["id"],
        "cls": op["kind"],
        "predicted_s": sum(candidates[0].estimate.seconds for candidates in ranked),
        "bound": max((candidates[0].estimate for candidates in ranked), key=lambda e: e.seconds).bound,
        "best_published_s": min(times_ms[s] for s in systems) / 1e3,
        "roller_s": times_ms["roller_top10_ms"] / 1e3,
        "construct_s": construct_s,
    }


def _median_abs_log_ratio(rows: Sequence[Json]) -> float:
    return statistics.median(abs(math.log(row["predicted_s"] / row["best_published_s"])) for row in rows)
