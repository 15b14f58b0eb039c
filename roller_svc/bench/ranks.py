"""Predicted times and those that others took → how far apart they are, and whether they are in the same order."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

LEAST_RANKED = 3  # two values are always in order or in reverse


def median_abs_log_ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """The median of |ln(predicted / taken)|: 0.1 is a tenth off; None of no pair."""
    logs = [abs(math.log(predicted / taken)) for predicted, taken in pairs]
    return statistics.median(logs) if logs else None


def share(found: Sequence[bool]) -> float | None:
    """How many of them hold; None of none."""
    return sum(found) / len(found) if found else None


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Spearman's rank correlation, ties given their mean rank; None where there are too few, or all are equal."""
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    if len(pairs) < LEAST_RANKED or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(first, second)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]
