"""Operators with published times → the model's prediction beside them, and our seconds beside the artifact's.

Our seconds go from expression to kernel text, the artifact's to built kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roller_svc import hardware
from roller_svc.bench.cases import BenchCase, typed
from roller_svc.bench.documents import Kind, OperatorModel, PublishedModel, checked, read_json
from roller_svc.bench.ranks import median_abs_log_ratio, share, spearman
from roller_svc.errors import InvariantError, RollerError
from roller_svc.generate import generate
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ranking import best_plans, ranked_groups

TARGET = "nvidia-v100-sxm2"
# ROLLER's own means from expression to its first kernel and to all ten, figure 11 of the artifact
ARTIFACT_TOP1_MEAN_S, ARTIFACT_TOP10_MEAN_S = 0.413, 13.35
# ROLLER's own constants of a V100 (the artifact's arch/V100.py): FLOP/s, and bytes/s of memory
ARTIFACT_ROOF = (12.48e12, 750e9)
TOP_K = 10
PUBLISHED = Kind("not a file of published times")
Json = dict[str, Any]


def bench_published(path: Path) -> Json:
    """The median of |ln(predicted / best published)|, overall and a class; `best` is the fastest system's time.

    `rooflines` has the same of two rooflines, max of operations / rate and of least bytes / bandwidth: with ROLLER's
    constants and with the vendor's peaks. Operators whose best time is below what the direct algorithm's operations
    take at the peak (`below_direct_floor`) are among the cases and in no median, and so are those with an `error`.
    """
    hw = hardware.load(TARGET)
    rows = [tried(op, hw, _row) for op in operators(path)]
    timed = [row for row in rows if row["error"] is None]
    judged = [row for row in timed if not row["below_direct_floor"]]
    seconds = {
        f"{name}_mean_s": statistics.mean(row[f"{name}_s"] for row in timed) if timed else None
        for name in ("construct", "top1_text", "top10_text")
    }
    artifact = {"artifact_top1_mean_s": ARTIFACT_TOP1_MEAN_S, "artifact_top10_mean_s": ARTIFACT_TOP10_MEAN_S}
    return {
        "target": TARGET,
        "overall": _summary(judged) | seconds | artifact,
        "classes": by_class(judged, _summary),
        "cases": rows,
    }


def operators(path: Path) -> tuple[OperatorModel, ...]:
    """The operators of a file of published times; ArgumentError where it is none."""
    return tuple(checked(path, PUBLISHED, PublishedModel, read_json(path, PUBLISHED)).ops)


def tried(op: OperatorModel, hw: HardwareSpec, row: Callable[[OperatorModel, HardwareSpec], Json]) -> Json:
    """The operator's row; `error`: why it has no figures."""
    try:
        return {"id": op.id, "cls": op.kind, "error": None} | row(op, hw)
    except InvariantError:
        raise
    except RollerError as failure:
        return {"id": op.id, "cls": op.kind, "error": f"{failure.code}: {failure.message}"}


def program_of(op: OperatorModel) -> TensorProgram:
    return BenchCase(op.id, op.kind, op.expr, typed(op.expr_inputs), None).program()


def by_class(rows: Sequence[Json], summary: Callable[[Sequence[Json]], Json]) -> Json:
    classes = sorted({row["cls"] for row in rows})
    return {cls: summary([row for row in rows if row["cls"] == cls]) for cls in classes}


def _row(op: OperatorModel, hw: HardwareSpec) -> Json:
    start = time.perf_counter()
    program = program_of(op)
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
        "predicted_s": plans[0].estimate.seconds,
        "uncertainty": plans[0].estimate.uncertainty,
        "bound": plans[0].main.estimate.bound,
        "best_published_s": op.v100_ms.best_s,
        "roller_s": op.v100_ms.roller_s,
        "roofline_s": {
            "artifact": _roofline_s(op, *ARTIFACT_ROOF),
            "peaks": _roofline_s(op, *_peaks(hw)),
        },
        "below_direct_floor": op.below_direct_floor,
        "construct_s": constructed - parsed,
        "top1_text_s": first - start,
        "top10_text_s": last - start,
    }


def _roofline_s(op: OperatorModel, flops_per_s: float, bytes_per_s: float) -> float:
    return max(op.flops / flops_per_s, op.min_bytes / bytes_per_s)


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
        "within_uncertainty": share(within),
        "rooflines": rooflines,
    }
