"""Cases are visited several times, and a candidate takes what its quietest calls of all visits took."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from roller_bench.cases import BenchCase
from roller_bench.interleaved_timing import QUANTILES, fast_quantiles_s
from roller_bench.model.measurement_passes import EXTRA_PASSES, PASSES, merge_passes, passes_of, pending_passes

CASES = [BenchCase(name, "gemm", "C[m] = A[m]", {}, None) for name in ("first", "second", "third")]


def row(seconds: list[float], **changes: Any) -> dict[str, Any]:
    candidates = [
        {"error": None, "quiet_s": s, "quietest_s": [s] * (QUANTILES // 2), "min_s": 0.9 * s, "median_s": 2 * s}
        | {"samples": 6, "predicted_s": 1.0}
        for s in seconds
    ]
    return {"id": "first", "error": None, "repeated": 1, "disturbed": False, "candidates": candidates} | changes


def test_all_cases_come_before_one_comes_again_and_disturbed_visits_at_the_end() -> None:
    done: dict[tuple[str, int], Any] = {("second", 0): row([1.0])}
    order = []
    for pass_, number, case in pending_passes(CASES, done):
        order.append((pass_, number))
        done[case.id, pass_] = row([1.0], disturbed=number == 3 and pass_ == 1)
    later = [(pass_, number) for pass_ in range(1, PASSES) for number in (1, 2, 3)]
    assert order == [(0, 1), (0, 3), *later, (1, 3)]


@pytest.mark.parametrize(
    ("slow", "more"),
    [
        ((), []),
        ((0, 1), []),  # either half has met a quiet minute
        ((1, 3), [4, 5, 6, 7]),  # until the quietest fifth of all calls in the second half are quiet ones
        (range(1, PASSES + EXTRA_PASSES, 2), list(range(PASSES, PASSES + EXTRA_PASSES))),
    ],
)
def test_a_case_comes_again_while_halves_of_its_visits_are_apart(slow: Collection[int], more: list[int]) -> None:
    done: dict[tuple[str, int], Any] = {}
    order = []
    for pass_, number, case in pending_passes(CASES, done):
        order.append((pass_, number))
        level = 1.1 if number == 2 and pass_ in slow else 1.0
        done[case.id, pass_] = row([level, 3 * level, 1.0])
    assert order[: PASSES * 3] == [(pass_, number) for pass_ in range(PASSES) for number in (1, 2, 3)]
    assert order[PASSES * 3 :] == [(pass_, 2) for pass_ in more]
    assert len(passes_of(CASES[1], done)) == PASSES + len(more)


def test_the_quietest_calls_of_each_candidate_count_and_what_either_half_of_its_visits_says_is_kept() -> None:
    found = merge_passes([row([1.0, 4.0]), row([2.0, 3.0])])
    assert [c["quiet_s"] for c in found["candidates"]] == [1.0, 3.0]
    assert not any("quietest_s" in c for c in found["candidates"])
    assert [c["half_s"] for c in found["candidates"]] == [[1.0, 2.0], [4.0, 3.0]]
    assert [c["min_s"] for c in found["candidates"]] == pytest.approx([0.9, 2.7])
    assert [(c["median_s"], c["samples"]) for c in found["candidates"]] == [(3.0, 12), (7.0, 12)]
    assert (found["repeated"], found["disturbed"]) == (2, False)


def test_visits_that_are_as_quiet_as_each_other_both_count() -> None:
    """As if all calls had been made in one visit: the quietest fifth of them."""
    early, late = [float(n) for n in range(0, 200, 2)], [float(n) for n in range(1, 200, 2)]
    passes = [row([1.0]), row([1.0])]
    for pass_, calls in zip(passes, (early, late), strict=True):
        pass_["candidates"][0]["quietest_s"] = fast_quantiles_s([calls])
    (candidate,) = merge_passes(passes)["candidates"]
    assert candidate["quiet_s"] == pytest.approx(sum(range(40)) / 40, rel=0.05)


def test_every_other_visit_is_one_measurement_and_those_between_another() -> None:
    (candidate,) = merge_passes([row([seconds]) for seconds in (3.0, 4.0, 1.0, 2.0)])["candidates"]
    assert candidate["half_s"] == [1.0, 2.0]
    (candidate,) = merge_passes([row([seconds]) for seconds in (3.0, 4.0, 1.0)])["candidates"]
    assert candidate["half_s"] == [1.0, 4.0]


def test_a_case_is_disturbed_where_all_its_visits_were() -> None:
    assert not merge_passes([row([1.0], disturbed=True), row([1.0])])["disturbed"]
    assert merge_passes([row([1.0], disturbed=True)] * PASSES)["disturbed"]


def test_visits_that_failed_do_not_count_unless_all_did() -> None:
    lost = {"id": "first", "error": "worker-lost: it died", "candidates": []}
    (only,) = merge_passes([lost, row([2.0])])["candidates"]
    assert (only["quiet_s"], only["half_s"]) == (2.0, None)
    assert merge_passes([lost, lost]) == lost


def test_a_candidate_that_was_wrong_once_has_no_time() -> None:
    wrong = row([1.0])
    wrong["candidates"][0] |= {"error": "wrong-answer: differs", "quiet_s": None, "min_s": None}
    for passes in ([wrong, row([1.0])], [row([1.0]), wrong]):
        (candidate,) = merge_passes(passes)["candidates"]
        assert candidate["error"] == "wrong-answer: differs"
        assert candidate["quiet_s"] is candidate["min_s"] is candidate["half_s"] is None
