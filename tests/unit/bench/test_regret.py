"""Regret of the model's first plans, by hand, beside that of a random order; curves."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from roller_bench.model.regret import METRICS, EvaluatedCase, case_json, evaluation, metrics, percentile, spearman

RIGHT = EvaluatedCase("right", "gemm", ((1.0, 1.0), (2.0, 2.0), (4.0, 3.0)))
WRONG = EvaluatedCase("wrong", "conv", ((3.0, 1.0), (2.0, 1.5), (1.0, 2.0)))


def test_regret_is_measured_from_the_best_of_all() -> None:
    assert [RIGHT.regret(first) for first in (1, 2, 3)] == [0.0, 0.0, 0.0]
    assert [WRONG.regret(first) for first in (1, 2, 3, 20)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize("first", [1, 2, 3, 4, 9])
def test_a_random_order_has_the_mean_regret_of_all_orders(first: int) -> None:
    times = (1.0, 1.5, 1.5, 4.0)
    case = EvaluatedCase("four", "gemm", tuple((1.0, time) for time in times))
    orders = [min(order[:first]) / min(times) - 1 for order in itertools.permutations(times)]
    assert case.random_regret(first) == pytest.approx(statistics.fmean(orders))


def test_of_plans_predicted_alike_the_first_counts() -> None:
    assert EvaluatedCase("tie", "gemm", ((1.0, 3.0), (1.0, 2.0))).regret(1) == pytest.approx(0.5)


def test_a_case_says_what_was_chosen_and_what_was_best() -> None:
    row = case_json(WRONG)
    assert (row["predicted_s"], row["measured_s"], row["best_s"]) == (1.0, 2.0, 1.0)
    assert (row["top1_regret"], row["top3_regret"], row["spearman"]) == (1.0, 0.0, -1.0)
    assert row["median_abs_log_ratio"] == pytest.approx(math.log(2))


def test_figures_pool_plans_and_average_cases() -> None:
    found = metrics([RIGHT, WRONG])
    assert (found["cases"], found["plans"]) == (2, 6)
    assert found["spearman"] == pytest.approx(spearman([*RIGHT.pairs, *WRONG.pairs]))
    assert found["spearman_within"] == pytest.approx(0.0)
    assert (found["top1_regret_mean"], found["top1_regret_p90"], found["top1_regret_max"]) == (0.5, 1.0, 1.0)
    assert (found["top3_regret_mean"], found["top10_regret_mean"]) == (0.0, 0.0)
    assert found["random_top1_regret_mean"] == pytest.approx((1.0 + 0.5) / 2)
    assert found["random_top3_regret_mean"] == 0.0
    assert found["chosen_median_abs_log_ratio"] == pytest.approx(math.log(2) / 2)


def test_classes_are_judged_by_themselves() -> None:
    found = evaluation([RIGHT, WRONG])
    assert {cls: one["top1_regret_mean"] for cls, one in found["classes"].items()} == {"conv": 1.0, "gemm": 0.0}
    curve = found["overall"]["regret_curve"]
    assert [point["first"] for point in curve] == list(range(1, 21))
    assert [point["mean"] for point in curve[:4]] == pytest.approx([0.5, 0.25, 0.0, 0.0])
    assert [point["random"] for point in curve[:3]] == pytest.approx([0.75, 0.25, 0.0])


def test_nothing_to_judge_has_no_figures() -> None:
    overall = evaluation([])["overall"]
    assert overall == {"cases": 0, "plans": 0, "regret_curve": []} | dict.fromkeys(METRICS)


def test_a_percentile_is_an_element() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.9) == 3.0
    assert percentile([float(n) for n in range(1, 11)], 0.9) == 9.0
    assert percentile([5.0], 0.9) == 5.0


def test_ties_share_their_mean_rank() -> None:
    """Ranks 1.5 1.5 3 4 beside 1 2 3 4: by hand 3 / sqrt(10)."""
    assert spearman([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert spearman([(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]) is None
