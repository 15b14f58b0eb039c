"""Compare measurements with the performance goals of the project."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from roller_bench.gpu.samples import PRODUCTS

Json = dict[str, Any]
SQUARE = "square-8192-bfloat16"
# With less data the launch (1 to 2 us) is more than a few percent of the streaming time.
MIN_STREAM_BYTES = 128 << 20
# The goals: our speed relative to the baseline's.
LIBRARY_GOAL, COPY_GOAL, FUSED_GOAL, ATTENTION_GOAL = 0.9, 0.9, 1.0, 0.8


def targets(measured: Sequence[Json], copy_bytes_per_s: float | None) -> Json:
    """Return for each goal the geometric mean and the minimum of the speed ratios, and the number of cases.

    Values are None if nothing was measured. `memory_bound` has one goal per class; its baseline is a copy.
    """
    squares = [row for row in measured if row["id"] == SQUARE]
    products = [row for row in measured if row["cls"] in PRODUCTS]
    fused = [row for row in measured if row["fused"] and not _is_attention(row)]
    attention = [row for row in measured if _is_attention(row)]
    streaming = [row for row in measured if row["memory_bound"] and row["bytes"] >= MIN_STREAM_BYTES]
    return {
        SQUARE: _goal_row(LIBRARY_GOAL, speed_ratios(squares, "library")),
        "contractions": _goal_row(LIBRARY_GOAL, speed_ratios(products, "library")),
        "contractions, the model's first": _goal_row(LIBRARY_GOAL, speed_ratios(products, "library", roller_field="first_s")),
        "fused, to torch.compile": _goal_row(FUSED_GOAL, speed_ratios(fused, "torch.compile")),
        "attention, to the best of torch": _goal_row(ATTENTION_GOAL, speed_ratios(attention, "library", "torch.compile")),
        "written for Triton": _goal_row(FUSED_GOAL, speed_ratios(measured, "triton")),
        "memory_bound": {
            cls: _goal_row(COPY_GOAL, [_copy_ratio(row, copy_bytes_per_s) for row in streaming if row["cls"] == cls])
            for cls in sorted({row["cls"] for row in streaming})
        }
        if copy_bytes_per_s
        else {},
    }


def target_lines(goals: Json) -> list[str]:
    """Format the goals for a terminal."""
    rows = {name: row for name, row in goals.items() if name != "memory_bound"}
    rows |= {f"copy bandwidth: {cls}": row for cls, row in goals["memory_bound"].items()}
    lines = [f"{'goal':<44}{'cases':>6}{'share':>8}{'least':>8}{'goal':>7}"]
    for name, row in rows.items():
        share, least = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("share", "least"))
        lines.append(f"{name:<44}{row['cases']:>6}{share:>8}{least:>8}{row['goal']:>7.2f}")
    return lines


def speed_ratios(rows: Sequence[Json], *baselines: str, roller_field: str = "ours_s") -> list[float]:
    """Return our speed over that of the fastest of these baselines, for each row that one of them ran.

    Both times are from the same interleaved block of samples.
    """
    ratios = []
    for row in rows:
        timed = [row.get("peers", {}).get(name, {}) for name in baselines]
        ratios.append(
            [baseline_row["median_s"] / baseline_row[roller_field] for baseline_row in timed if "median_s" in baseline_row]
        )
    return [min(of_row) for of_row in ratios if of_row]


def geometric_mean(values: Iterable[float]) -> float | None:
    factors = list(values)
    return statistics.geometric_mean(factors) if factors else None


def _goal_row(goal: float, ratios: Sequence[float]) -> Json:
    return {"share": geometric_mean(ratios), "least": min(ratios, default=None), "cases": len(ratios), "goal": goal}


def _copy_ratio(row: Json, copy_bytes_per_s: float) -> float:
    """Return our bandwidth over that of a copy, with a cold cache where that was measured."""
    return float(row["bytes"] / (row.get("cold_s") or row["best_s"]) / copy_bytes_per_s)


def _is_attention(row: Json) -> bool:
    return bool(row["cls"].startswith("attention"))
