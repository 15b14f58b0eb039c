"""Operators with published times → the model's prediction beside them, and our seconds beside the artifact's.

Our seconds go from expression to kernel text, the artifact's to built kernels.
"""

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
from roller_svc.errors import ArgumentError
from roller_svc.generate import generate
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.pipeline import best_plans, ranked_groups

TARGET = "nvidia-v100-sxm2"
# ROLLER's own means from expression to its first kernel and to all ten, figure 11 of the artifact
ARTIFACT_TOP1_MEAN_S, ARTIFACT_TOP10_MEAN_S = 0.413, 13.35
TOP_K = 10
Json = dict[str, Any]


def bench_published(path: Path, target: str = TARGET) -> Json:
    """The median of |ln(predicted / best published)|, overall and a class; `best` is the fastest system's time."""
    hw = hardware.load(target)
    rows = [_row(op, hw) for op in _operators(path)]
    kinds = sorted({row["cls"] for row in rows})
    return {
        "overall": {
            "median_abs_log_ratio": _median_abs_log_ratio(rows),
            "construct_mean_s": statistics.mean(row["construct_s"] for row in rows),
            "top1_text_mean_s": statistics.mean(row["top1_text_s"] for row in rows),
            "top10_text_mean_s": statistics.mean(row["top10_text_s"] for row in rows),
            "artifact_top1_mean_s": ARTIFACT_TOP1_MEAN_S,
            "artifact_top10_mean_s": ARTIFACT_TOP10_MEAN_S,
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
    except OSError as problem:
        raise ArgumentError(f"cannot read {path}: {problem.strerror}", code="unreadable-file") from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise ArgumentError(f"{path}: not a file of published times: {problem}", code="unreadable-file") from problem
    return operators


def _row(op: Json, hw: HardwareSpec) -> Json:
    start = time.perf_counter()
    program = BenchCase(op["id"], op["kind"], op["expr"], op["expr_inputs"], None).program()
    parsed = time.perf_counter()
    groups, ranked, _ = ranked_groups(program, hw, TOP_K)
    constructed = time.perf_counter()
    plans = best_plans(ranked, TOP_K)
    generate(plans[0], program, groups, hw)
    first = time.perf_counter()
    for plan in plans[1:]:
        generate(plan, program, groups, hw)
    last = time.perf_counter()
    times_ms = op["v100_ms"]
    systems = ("cudalib_tf_ms", "tvm_autotvm_ms", "ansor_ms", "roller_top10_ms")
    return {
        "id": op["id"],
        "cls": op["kind"],
        "predicted_s": sum(candidates[0].estimate.seconds for candidates in ranked),
        "bound": max((candidates[0].estimate for candidates in ranked), key=lambda e: e.seconds).bound,
        "best_published_s": min(times_ms[s] for s in systems) / 1e3,
        "roller_s": times_ms["roller_top10_ms"] / 1e3,
        "construct_s": constructed - parsed,
        "top1_text_s": first - start,
        "top10_text_s": last - start,
    }


def _median_abs_log_ratio(rows: Sequence[Json]) -> float:
    return statistics.median(abs(math.log(row["predicted_s"] / row["best_published_s"])) for row in rows)
