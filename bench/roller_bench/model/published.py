"""Compare predictions with the times that the ROLLER artifact publishes.

On V100 the model's first plan is compared with the best published time, and our construction time with the artifact's
(ours ends at the kernel source, theirs at the built kernel). On K80 and MI50 the artifact names its best tile for each
operator: it becomes an rProgram of our families, or of `artifact_kernel` where the artifact generates other kernels.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roller_bench.cases import BenchCase, typed
from roller_bench.input_files import Kind, OperatorModel, PublishedModel, TileModel, checked, read_json
from roller_bench.model.artifact_kernel import artifact_seconds
from roller_bench.model.regret import fraction, median_abs_log_ratio, spearman
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import ArgumentError, InvariantError, RollerError
from roller_svc.families import prepare
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import TileSpace
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, TargetKind
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.rprogram import RProgram, RTile

TARGET = "nvidia-v100-sxm2"
# ROLLER's mean seconds from expression to its first kernel and to all ten (figure 11 of the artifact)
ARTIFACT_TOP1_MEAN_S, ARTIFACT_TOP10_MEAN_S = 0.413, 13.35
# ROLLER's constants of a V100 (the artifact's arch/V100.py): FLOP/s, and bytes/s of memory
ARTIFACT_ROOF = (12.48e12, 750e9)
TOP_K = 10
PUBLISHED = Kind("not a file of published times")
Json = dict[str, Any]


def bench_published(path: Path) -> Json:
    """Return the median of |ln(predicted / best published)|, overall and by class.

    The best published time is that of the fastest system. `rooflines` has the same for two rooflines, with ROLLER's
    constants and with the vendor's peaks. Medians exclude cases with an `error`, and those whose best time is below the
    compute bound of the direct algorithm (`below_direct_floor`).
    """
    hw = hardware.load(TARGET)
    rows = [operator_row(op, hw, _row) for op in operators(path)]
    timed = [row for row in rows if row["error"] is None]
    evaluated = [row for row in timed if not row["below_direct_floor"]]
    seconds = {
        f"{name}_mean_s": statistics.mean(row[f"{name}_s"] for row in timed) if timed else None
        for name in ("construct", "top1_text", "top10_text")
    }
    artifact = {"artifact_top1_mean_s": ARTIFACT_TOP1_MEAN_S, "artifact_top10_mean_s": ARTIFACT_TOP10_MEAN_S}
    return {
        "target": TARGET,
        "overall": _summary(evaluated) | seconds | artifact,
        "classes": by_class(evaluated, _summary),
        "cases": rows,
    }


def operators(path: Path) -> tuple[OperatorModel, ...]:
    """Read the operators of a file of published times. Raises ArgumentError for an invalid file."""
    return tuple(checked(path, PUBLISHED, PublishedModel, read_json(path, PUBLISHED)).ops)


def operator_row(op: OperatorModel, hw: HardwareSpec, row: Callable[[OperatorModel, HardwareSpec], Json]) -> Json:
    """Return the row of an operator; `error` if it has no results."""
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
    groups, ranked, _ = rank_best_partition(program, hw, TOP_K)
    constructed = time.perf_counter()
    plans = best_plans(ranked, TOP_K)
    emit_plan(plans[0], program, groups, hw)
    first = time.perf_counter()
    for plan in plans[1:]:
        emit_plan(plan, program, groups, hw)
    last = time.perf_counter()
    return {
        "predicted_s": plans[0].estimate.seconds,
        "uncertainty": plans[0].estimate.uncertainty,
        "bound": plans[0].dominant_choice.estimate.bound,
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
    """Return the vendor's float32 peaks, or the achievable rates if none are stated."""
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
        "within_uncertainty": fraction(within),
        "rooflines": rooflines,
    }


# Device id: its field in the file of published times.
COLUMNS = {"nvidia-k80": "k80", "amd-mi50": "mi50"}
# Classes whose kernels the artifact stages in shared memory and we do not, and the target kinds for which they are
# estimated so: reductions only where the compiled code is known (docs/model.md).
STAGED = {"depthwiseconv": tuple(TargetKind), "pooling": tuple(TargetKind), "reduce": (TargetKind.AMD,)}
_LEVEL = re.compile(r"\[level (\d): \[tile: \[([\d, ]*)\]; step: \[([\d, ]*)\]\]\]")


def bench_tiles(path: Path, target: str) -> Json:
    """Compare estimates of the published tiles (`tile_s`) with their published times (`roller_s`).

    Returns Spearman's correlation and the median of |ln(estimate / published)|, overall and by class. Also returns how
    often the best of our ten candidates (`predicted_s`) is at most the tile's estimate, and at most the published time.
    Operators with an `error` do not count.
    """
    if target not in COLUMNS:
        raise ArgumentError(f"no tiles are published for {target}", code="invalid-option", hint=f"--target: {' or '.join(COLUMNS)}")
    hw = hardware.load(target)
    rows = [operator_row(op, hw, _tile_row) for op in operators(path)]
    evaluated = [row for row in rows if row["error"] is None]
    classes = by_class(evaluated, _tile_summary)
    return {"target": target, "overall": _tile_summary(evaluated), "classes": classes, "cases": rows}


def published_program(text: str, space: TileSpace, unit: ComputeUnit) -> RProgram:
    """Parse `[level 0: [tile: [128, 128]; step: [32]]][level 1: ...]` into an rProgram.

    Level 0 is the block tile with its k-tile, level 1 the thread tile; spatial axes are in the order of the space.
    """
    levels = {int(level): (_numbers(tile), _numbers(step)) for level, tile, step in _LEVEL.findall(text)}
    if not {0, 1} <= levels.keys() or any(len(levels[level][0]) != len(space.spatial) for level in (0, 1)):
        raise ArgumentError(f"expected a tile of {[a.name for a in space.spatial]}, got {text!r}", code="unreadable-file")
    step = math.prod(levels[0][1])
    block = {a.name: n for a, n in zip(space.spatial, levels[0][0], strict=True)}
    thread = {a.name: n for a, n in zip(space.spatial, levels[1][0], strict=True)}
    block |= {a.name: min(a.extent, step) for a in space.reduced}
    return RProgram(
        space,
        unit,
        RTile(tuple((a.name, block[a.name]) for a in space.axes)),
        RTile(tuple((a.name, thread.get(a.name, 1)) for a in space.axes)),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _tile_row(op: OperatorModel, hw: HardwareSpec) -> Json:
    published: TileModel | None = getattr(op, COLUMNS[hw.id])
    if published is None:
        raise ArgumentError(f"no time is published for {hw.id}", code="unreadable-file")
    program = program_of(op)
    groups = partition(program, hw)
    if len(groups) > 1:
        raise ArgumentError(f"one tile for {len(groups)} kernels", code="unreadable-file")
    (group,) = groups
    unit = hw.unit_for(group.space.compute_dtype)
    family, p = prepare(group, hw, unit)
    tile = published_program(published.roller_best_config, group.space, unit)
    staged = hw.family in STAGED.get(op.kind, ())
    tile_s = artifact_seconds(p, tile)[0] if staged else family.model(p).estimate(tile).seconds
    _, ranked, _ = rank_best_partition(program, hw, TOP_K)
    return {
        "tile": published.roller_best_config,
        "tile_s": tile_s,
        "predicted_s": sum(candidates[0].estimate.seconds for candidates in ranked),
        "best_published_s": published.best_s,
        "roller_s": published.roller_s,
    }


def _tile_summary(rows: Sequence[Json]) -> Json:
    pairs = [(row["tile_s"], row["roller_s"]) for row in rows]
    return {
        "cases": len(rows),
        "spearman": spearman(pairs),
        "median_abs_log_ratio": median_abs_log_ratio(pairs),
        "top10_within_estimate": fraction([row["predicted_s"] <= row["tile_s"] for row in rows]),
        "top10_within_published": fraction([row["predicted_s"] <= row["roller_s"] for row in rows]),
    }
