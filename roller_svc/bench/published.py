"""Operators with published times → the model's prediction beside them, and our seconds beside the artifact's.

Our seconds go from expression to kernel text, the artifact's to built kernels.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.bench.cases import BenchCase
from roller_svc.bench.ranks import median_abs_log_ratio, spearman
from roller_svc.errors import ArgumentError
from roller_svc.generate import generate
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ranking import best_plans, ranked_groups

TARGET = "nvidia-v100-sxm2"
# ROLLER's own means from expression to its first kernel and to all ten, figure 11 of the artifact
ARTIFACT_TOP1_MEAN_S, ARTIFACT_TOP10_MEAN_S = 0.413, 13.35
# ROLLER's own constants of a V100 (the artifact's arch/V100.py): FLOP/s, and bytes/s of memory
ARTIFACT_ROOF = (12.48e12, 750e9)
TOP_K = 10
SYSTEMS = ("cudalib_tf_ms", "tvm_autotvm_ms", "ansor_ms", "roller_top10_ms")
Json = dict[str, Any]


def bench_published(path: Path, target: str = TARGET) -> Json:
    """The median of |ln(predicted / best published)|, overall and a class; `best` is the fastest system's time.

    `rooflines` has the same of two rooflines, max of operations / rate and of least bytes / bandwidth: with ROLLER's
    constants and with the vendor's peaks. Operators whose best time is below what the direct algorithm's operations
    take at the peak (`below_direct_floor`) are among the cases and in no median.
    """
    hw = hardware.load(target)
    rows = [_row(op, hw) for op in operators(path)]
    judged = [row for row in rows if not row["below_direct_floor"]]
    seconds = {
        "construct_mean_s": statistics.mean(row["construct_s"] for row in rows),
        "top1_text_mean_s": statistics.mean(row["top1_text_s"] for row in rows),
        "top10_text_mean_s": statistics.mean(row["top10_text_s"] for row in rows),
        "artifact_top1_mean_s": ARTIFACT_TOP1_MEAN_S,
        "artifact_top10_mean_s": ARTIFACT_TOP10_MEAN_S,
    }
    kinds = sorted({row["cls"] for row in judged})
    return {
        "overall": _summary(judged) | seconds,
        "classes": {kind: _summary([r for r in judged if r["cls"] == kind]) for kind in kinds},
        "cases": rows,
    }


def operators(path: Path) -> list[Json]:
    """The operators of a file of published times."""
    try:
        found: list[Json] = json.loads(path.read_text(encoding="utf-8"))["ops"]
    except OSError as problem:
        raise ArgumentError(f"cannot read {path}: {problem.strerror}", code="unreadable-file") from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise ArgumentError(f"{path}: not a file of published times: {problem}", code="unreadable-file") from problem
    return found


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
    return {
        "id": op["id"],
        "cls": op["kind"],
        "predicted_s": plans[0].estimate.seconds,
        "uncertainty": plans[0].estimate.uncertainty,
        "bound": plans[0].main.estimate.bound,
        "best_published_s": min(op["v100_ms"][system] for system in SYSTEMS) / 1e3,
        "roller_s": op["v100_ms"]["roller_top10_ms"] / 1e3,
        "roofline_s": {
            "artifact": _roofline_s(op, *ARTIFACT_ROOF),
            "peaks": _roofline_s(op, *_peaks(hw)),
        },
        "below_direct_floor": op.get("below_direct_floor", False),
        "construct_s": constructed - parsed,
        "top1_text_s": first - start,
        "top10_text_s": last - start,
    }


def _roofline_s(op: Json, flops_per_s: float, bytes_per_s: float) -> float:
    flops, least_bytes = float(op["flops"]), float(op["min_bytes"])
    return max(flops / flops_per_s, least_bytes / bytes_per_s)


def _peaks(hw: HardwareSpec) -> tuple[float, float]:
    """The vendor's figures, of float32; the achievable ones where none are stated."""
    unit = hw.unit_for(DType.FLOAT32)
    return (
        unit.peak_flops_per_s or unit.flops_per_s,
        hw.dram.peak_bandwidth_bytes_per_s or hw.dram.bandwidth_bytes_per_s,
    )


def _summary(rows: Sequence[Json]) -> Json:
    published = [row["best_published_s"] for row in rows]
    predicted = list(zip([row["predicted_s"] for row in rows], published, strict=True))
    rooflines = {
        name: median_abs_log_ratio(zip([row["roofline_s"][name] for row in rows], published, strict=True))
        for name in ("artifact", "peaks")
    }
    within = [max(a / b, b / a) <= row["uncertainty"] for (a, b), row in zip(predicted, rows, strict=True)]
    return {
        "cases": len(rows),
        "median_abs_log_ratio": median_abs_log_ratio(predicted),
        "spearman": spearman(predicted),
        "within_uncertainty": sum(within) / len(within),
        "rooflines": rooflines,
    }
