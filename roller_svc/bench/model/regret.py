"""Predicted and measured seconds of cases' plans → what the model's choice costs, and how well it ranks and tells.

Predicted times and those that others took → how far apart they are, and whether they are in the same order.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MIN_RANKED = 3  # two values are always in order or in reverse


def median_abs_log_ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """The median of |ln(predicted / taken)|: 0.1 is a tenth off; None of no pair."""
    logs = [abs(math.log(predicted / measured)) for predicted, measured in pairs]
    return statistics.median(logs) if logs else None


def fraction(value: Sequence[bool]) -> float | None:
    """How many of them hold; None of none."""
    return sum(value) / len(value) if value else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties given their mean rank; None where there are too few, or all are equal."""
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    if len(pairs) < MIN_RANKED or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]


Json = dict[str, Any]
TOP_K = 10
CURVE = 20  # the best of the model's first 1, 2, ... so many
METRICS = (
    "spearman", "spearman_within", "spearman_halves", "top1_regret_mean", "top1_regret_p90", "top1_regret_max",
    "top10_regret_mean", "median_abs_log_ratio", "chosen_median_abs_log_ratio",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EvaluatedCase:
    """`pairs`: predicted and measured seconds of each plan, one at least. Of plans predicted alike the first counts as
    put first. `halves`: seconds by either half of a plan's samples, where they were kept."""

    id: str
    cls: str
    pairs: tuple[tuple[float, float], ...]
    halves: tuple[tuple[float, float], ...] = ()

    def regret(self, first: int) -> float:
        """How much longer than the best of all takes the best of so many that the model puts first: 0.1 is a tenth."""
        ranked = sorted(self.pairs, key=lambda pair: pair[0])
        return min(measured for _, measured in ranked[:first]) / min(measured for _, measured in self.pairs) - 1

    @property
    def top1(self) -> tuple[float, float]:
        """Predicted and measured seconds of the plan that the model puts first."""
        return min(self.pairs, key=lambda pair: pair[0])


def case_json(case: EvaluatedCase) -> Json:
    predicted_s, measured_s = case.top1
    return {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "best_s": min(measured for _, measured in case.pairs),
        "top1_regret": case.regret(1),
        "top10_regret": case.regret(TOP_K),
        "spearman": spearman(case.pairs),
        "median_abs_log_ratio": median_abs_log_ratio(case.pairs),
    }


def metrics(cases: Sequence[EvaluatedCase]) -> Json:
    """The figures of a class: `spearman` and `median_abs_log_ratio` over the plans of all its cases together,
    `spearman_within` the mean of the cases' own, `spearman_halves` of two halves of the samples in place of predicted
    and measured, `chosen_median_abs_log_ratio` of the plans put first. All None where there are no cases."""
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
        "top10_regret_mean": statistics.fmean(case.regret(TOP_K) for case in cases),
        "median_abs_log_ratio": median_abs_log_ratio(pairs),
        "chosen_median_abs_log_ratio": median_abs_log_ratio([case.top1 for case in cases]),
    }


def evaluation(cases: Sequence[EvaluatedCase]) -> Json:
    """The figures of all cases and of each class, and the regret of the best of the model's first 1, 2, ..."""
    classes = sorted({case.cls for case in cases})
    return {
        "overall": metrics(cases) | {"regret_curve": regret_curve(cases)},
        "classes": {cls: metrics([case for case in cases if case.cls == cls]) for cls in classes},
    }


def regret_curve(cases: Sequence[EvaluatedCase]) -> list[Json]:
    """Mean and ninetieth percentile of the cases' regrets, for each number of plans that are tried."""
    curve = []
    for first in range(1, CURVE + 1) if cases else ():
        regrets = [case.regret(first) for case in cases]
        curve.append({"first": first, "mean": statistics.fmean(regrets), "p90": percentile(regrets, 0.9)})
    return curve


def percentile(values: Sequence[float], fraction: float) -> float:
    """The least of the values that so large a share of them do not exceed."""
    return sorted(values)[math.ceil(fraction * len(values)) - 1]
