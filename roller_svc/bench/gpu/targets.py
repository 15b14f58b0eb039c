"""Measurements → how they stand to what the project means to reach on a device."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from roller_svc.bench.gpu.samples import PRODUCTS

Json = dict[str, Any]
SQUARE = "square-8192-bfloat16"
# Below it launching a kernel, a microsecond or two, is more than a few hundredths of what streaming the data takes.
MIN_STREAM_BYTES = 128 << 20
# The goals: our speed as a share of the other's.
LIBRARY_GOAL, COPY_GOAL, FUSED_GOAL, ATTENTION_GOAL = 0.9, 0.9, 1.0, 0.8


def targets(measured: Sequence[Json], copy_bytes_per_s: float | None) -> Json:
    """Of each goal the geometric mean of our speed as a share of the peer's, the least share, and the number of cases;
    null where nothing was measured. `memory_bound` has one of these for every class, its peer a copy."""
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
        } if copy_bytes_per_s else {},
    }  # fmt: skip


def target_lines(goals: Json) -> list[str]:
    """The same for a terminal."""
    rows = {name: one for name, one in goals.items() if name != "memory_bound"}
    rows |= {f"copy bandwidth: {cls}": one for cls, one in goals["memory_bound"].items()}
    lines = [f"{'goal':<44}{'cases':>6}{'share':>8}{'least':>8}{'goal':>7}"]
    for name, one in rows.items():
        share, least = ("-" if one[key] is None else f"{one[key]:.2f}" for key in ("share", "least"))
        lines.append(f"{name:<44}{one['cases']:>6}{share:>8}{least:>8}{one['goal']:>7.2f}")
    return lines


def speed_ratios(rows: Sequence[Json], *baselines: str, roller_field: str = "ours_s") -> list[float]:
    """Of each row our speed as a share of that of the best of these peers, each beside ours in one block of samples;
    rows that none of them ran are left out."""
    goals = [
        [row_of_baseline["median_s"] / row_of_baseline[roller_field] for name in baselines if "median_s" in (row_of_baseline := row.get("peers", {}).get(name, {}))]
        for row in rows
    ]
    return [min(of_row) for of_row in goals if of_row]


def geometric_mean(values: Iterable[float]) -> float | None:
    goals = list(values)
    return statistics.geometric_mean(goals) if goals else None


def _goal_row(goal: float, speed_ratios: Sequence[float]) -> Json:
    return {"share": geometric_mean(speed_ratios), "least": min(speed_ratios, default=None), "cases": len(speed_ratios), "goal": goal}


def _copy_ratio(row: Json, copy_bytes_per_s: float) -> float:
    """Of arrays out of the cache; what is too small to be kept out of it is not asked for (LEAST_STREAM_BYTES)."""
    return float(row["bytes"] / (row.get("cold_s") or row["best_s"]) / copy_bytes_per_s)


def _is_attention(row: Json) -> bool:
    return bool(row["cls"].startswith("attention"))
