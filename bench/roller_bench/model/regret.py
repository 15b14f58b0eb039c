"""Metrics of predicted against measured times: regret of the model's first plans, rank correlation, log ratio."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MIN_RANKED = 3  # the rank correlation of two values is always 1 or -1


def median_abs_log_ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return the median of |ln(predicted / measured)|, or None without pairs."""
    logs = [abs(math.log(predicted / measured)) for predicted, measured in pairs]
    return statistics.median(logs) if logs else None


def fraction(values: Sequence[bool]) -> float | None:
    """Return the fraction of true values, or None without values."""
    return sum(values) / len(values) if values else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for ties; None for too few or equal values."""
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    if len(pairs) < MIN_RANKED or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


Json = dict[str, Any]
FIRST = (1, 3)  # plans whose regret is reported beside that of a random order
TOP_K = 10  # a random order is about as good in ten plans; readers of the JSON expect it
CURVE = 20  # length of the regret curve
METRICS = (
    "spearman", "spearman_within", "spearman_halves", "top1_regret_mean", "top1_regret_p90", "top1_regret_max",
    "top3_regret_mean", "random_top1_regret_mean", "random_top3_regret_mean", "top10_regret_mean",
    "median_abs_log_ratio", "chosen_median_abs_log_ratio",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvaluatedCase:
    """The predicted and measured times of a case."""

    id: str
    cls: str
    pairs: tuple[tuple[float, float], ...]  # (predicted, measured) seconds of each plan, at least one
    halves: tuple[tuple[float, float], ...] = ()  # seconds by each half of a plan's samples, if known

    def regret(self, first: int) -> float:
        """Return the relative regret of the best of the model's first plans: 0.1 is 10 % slower than the best plan."""
        ranked = sorted(self.pairs, key=lambda pair: pair[0])
        return min(measured for _, measured in ranked[:first]) / min(measured for _, measured in self.pairs) - 1

    def random_regret(self, first: int) -> float:
        """Return the expected regret of the best of the first plans in a random order.

        Of n plans, the i-th fastest is the best of k in C(n - i, k - 1) of C(n, k) cases.
        """
        times = sorted(measured for _, measured in self.pairs)
        chosen = min(first, len(times))
        cases = (math.comb(len(times) - i, chosen - 1) for i in range(1, len(times) + 1))
        best_s = sum(n * s for n, s in zip(cases, times, strict=True)) / math.comb(len(times), chosen)
        return best_s / times[0] - 1

    @property
    def top1(self) -> tuple[float, float]:
        """Return predicted and measured seconds of the model's first plan."""
        return min(self.pairs, key=lambda pair: pair[0])


def case_json(case: EvaluatedCase) -> Json:
    predicted_s, measured_s = case.top1
    return {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "best_s": min(measured for _, measured in case.pairs),
        "top1_regret": case.regret(1),
        "top3_regret": case.regret(3),
        "top10_regret": case.regret(TOP_K),
        "spearman": spearman(case.pairs),
        "median_abs_log_ratio": median_abs_log_ratio(case.pairs),
    }


def metrics(cases: Sequence[EvaluatedCase]) -> Json:
    """Return the metrics of several cases; all None without cases.

    `spearman` and `median_abs_log_ratio` are over the plans of all cases, `spearman_within` is the mean over the cases.
    `spearman_halves` is the split-half correlation of the measurements. `chosen_median_abs_log_ratio` is over the
    model's first plans. `random_...` are the expected regrets of a random order of the same plans.
    """
    if not cases:
        return {"cases": 0, "plans": 0} | dict.fromkeys(METRICS)
    pairs = [pair for case in cases for pair in case.pairs]
    first = [case.regret(1) for case in cases]
    within = [value for case in cases if (value := spearman(case.pairs)) is not None]
    return {
        "cases": len(cases),
        "plans": len(pairs),
        "spearman": spearman(pairs),
        "spearman_within": statistics.fmean(within) if within else None,
        "spearman_halves": spearman([half for case in cases for half in case.halves]),
        "top1_regret_mean": statistics.fmean(first),
        "top1_regret_p90": percentile(first, 0.9),
        "top1_regret_max": max(first),
        "top3_regret_mean": statistics.fmean(case.regret(3) for case in cases),
        **{f"random_top{k}_regret_mean": statistics.fmean(case.random_regret(k) for case in cases) for k in FIRST},
        "top10_regret_mean": statistics.fmean(case.regret(TOP_K) for case in cases),
        "median_abs_log_ratio": median_abs_log_ratio(pairs),
        "chosen_median_abs_log_ratio": median_abs_log_ratio([case.top1 for case in cases]),
    }


def evaluation(cases: Sequence[EvaluatedCase]) -> Json:
    """Return the metrics of all cases and of each class, and the regret curve."""
    classes = sorted({case.cls for case in cases})
    return {
        "overall": metrics(cases) | {"regret_curve": regret_curve(cases)},
        "classes": {cls: metrics([case for case in cases if case.cls == cls]) for cls in classes},
    }


def regret_curve(cases: Sequence[EvaluatedCase]) -> list[Json]:
    """Return mean and 90th percentile of the regret for each number of tried plans, and the mean of a random order."""
    curve = []
    for first in range(1, CURVE + 1) if cases else ():
        regrets = [case.regret(first) for case in cases]
        random_mean = statistics.fmean(case.random_regret(first) for case in cases)
        curve.append({"first": first, "mean": statistics.fmean(regrets), "p90": percentile(regrets, 0.9), "random": random_mean})
    return curve


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the smallest value that at least this fraction of the values does not exceed."""
    return sorted(values)[math.ceil(fraction * len(values)) - 1]
