"""The comparison with nvMatmulHeuristics: which products are compared, what a tile of its costs, what is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roller_bench import compare_nvmatmulheuristics as comparison
from roller_bench.cases import BenchCase
from roller_svc import hardware

DEVICE = "nvidia-a100-sxm-80gb"


def case(expression: str, dtype: str = "float16", **shapes: list[int]) -> BenchCase:
    inputs = {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()}
    return BenchCase("it", "gemm", expression, inputs, None)


def product_of(one: BenchCase) -> Any:
    return comparison.as_product(one, hardware.load(DEVICE))


def test_products_of_half_precision_matrices_are_compared() -> None:
    found = product_of(case("C[m, n] +=! A[m, k] * B[k, n]", A=[96, 640], B=[640, 160]))
    assert (found.batch, found.m, found.n, found.k, found.layout) == (1, 96, 160, 640, "NN_ROW_MAJOR")
    transposed = product_of(case("C[m, n] +=! A[k, m] * B[n, k]", "bfloat16", A=[640, 96], B=[160, 640]))
    assert (transposed.m, transposed.n, transposed.k, transposed.layout) == (96, 160, 640, "TT_ROW_MAJOR")
    batched = product_of(case("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", A=[3, 96, 640], B=[3, 640, 160]))
    assert (batched.batch, batched.m, batched.n, batched.k) == (3, 96, 160, 640)


@pytest.mark.parametrize(
    "other",
    [
        case("C[m, n] +=! A[m, k] * B[k, n]", "float32", A=[96, 640], B=[640, 160]),
        case("D[m, n] +=! A[m, k] * B[k, n]; C[m, n] = D[m, n].call(`exp`)", A=[96, 640], B=[640, 160]),
        case("C[i] = A[i] * B[i]", A=[640], B=[640]),
        case("C[f, x] +=! A[c, x + r] * B[f, c, r] where x in 64", A=[64, 66], B=[64, 64, 3]),
    ],
    ids=["type", "epilogue", "map", "windows"],
)
def test_nothing_else_is(other: BenchCase) -> None:
    assert product_of(other) is None


def test_a_tile_that_the_model_chose_costs_what_its_candidate_does() -> None:
    found = product_of(case("C[m, n] +=! A[m, k] * B[n, k]", A=[4096, 1024], B=[2048, 1024]))
    roller = comparison.RollerModel(found, hardware.load(DEVICE))
    best = roller.candidates[0]
    best_json = comparison.candidate_json(best)
    choice = comparison.Choice(
        tuple(best_json["tile"]),
        (*best_json["warp"], 16),
        best_json["stages"],
        best_json["split_k"],
        (1, 1),
        best.estimate.seconds,
    )
    assert roller.own_seconds(choice) == pytest.approx(best.estimate.seconds)
    row = comparison.row(found, roller, [choice])
    assert row["tile_first"]
    assert row["tile_in_ten"]
    assert row["their_tile_over_ours"] == pytest.approx(1.0)
    # 1024 sums and more for each thread: only with other warps
    greedy = replace(choice, tile=(256, 128, 32), warp=(256, 128, 32))
    assert roller.own_seconds(greedy) is None
    assert roller.seconds(greedy) >= best.estimate.seconds


def test_on_hopper_a_tile_is_priced_on_warpgroups_too() -> None:
    """The model's own costs what its candidate does, whatever warps are said to have it, and no more than on warps."""
    hopper = hardware.load("nvidia-h200-sxm")
    found = product_of(case("C[m, n] +=! A[m, k] * B[n, k]", A=[4096, 4096], B=[4096, 4096]))
    roller = comparison.RollerModel(found, hopper)
    best = roller.candidates[0]
    best_json = comparison.candidate_json(best)
    assert best_json["unit"].startswith("wgmma")
    choice = comparison.Choice(tuple(best_json["tile"]), (64, 64, 64), 4, best_json["split_k"], (1, 1), best.estimate.seconds)
    assert roller.seconds(choice) == pytest.approx(best.estimate.seconds)
    assert roller.own_seconds(choice) > 1.1 * best.estimate.seconds


def test_shares_and_medians_are_over_the_products() -> None:
    def row(first: bool, roller: float, theirs: float, cost: float | None) -> dict[str, Any]:
        return {
            "ours": {"seconds": roller},
            "theirs": {"seconds": theirs},
            "tile_first": first,
            "tile_in_ten": True,
            "ours_in_their_ten": False,
            "registers_suffice": first,
            "their_tile_over_ours": cost,
            "spearman_of_choices": None,
        }

    found = comparison.summary([row(True, 1.0, 1.0, 1.0), row(False, 2.0, 1.5, 1.5), row(False, 3.0, 9.0, None)])
    assert found["tile_first"] == pytest.approx(1 / 3)
    assert found["tile_in_ten"] == 1.0
    assert found["cannot_have_their_tile"] == pytest.approx(1 / 3)
    assert found["their_tile_over_ours"] == {"median": 1.25, "p90": 1.5, "within_5_percent": 0.5, "under_98_percent": 0.0}
    assert found["spearman_of_seconds"] == pytest.approx(1.0)
    assert found["spearman_of_choices_median"] is None


def test_without_the_wheel_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compare_nvmatmulheuristics"])
    monkeypatch.setattr(comparison, "WHEEL", "a-wheel-that-nobody-has")
    with pytest.raises(SystemExit, match="a-wheel-that-nobody-has is not installed: pip install 'roller-svc"):
        comparison.main()
