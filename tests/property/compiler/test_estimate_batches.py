"""A batch is its parts: what other programs, devices and orders are asked for changes no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roller_bench.cases import BenchCase, performance_cases
from roller_svc.compiler.estimates.batch import EstimateCache, Item
from roller_svc.compiler.serialize import Json

CORPUS = Path(__file__).parents[3] / "bench" / "data" / "public.json"
TARGETS = ("nvidia-h200-sxm", "nvidia-h100-sxm", "nvidia-a100-sxm-80gb", "nvidia-v100-sxm2", "amd-mi50", "cpu-x86-avx2")
CASES = tuple(performance_cases(CORPUS))


def item_of(case: BenchCase) -> Item:
    return Item(case.expression, case.inputs, case.outputs)


def unplaced(answer: Json) -> Json:
    return {name: value for name, value in answer.items() if name != "item"}


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.lists(st.sampled_from(CASES), min_size=1, max_size=3, unique_by=lambda case: case.id),
    st.lists(st.sampled_from(TARGETS), min_size=1, max_size=4, unique=True),
    st.integers(1, 3),
)
def test_a_batch_is_its_parts(cases: list[BenchCase], targets: list[str], top_k: int) -> None:
    items = [item_of(case) for case in cases]
    estimates = EstimateCache()
    estimates.estimates(items[::-1], targets[::-1], top_k)  # something to remember
    batch = estimates.estimates(items, targets, top_k)
    singles = [EstimateCache().estimates([item], [target], top_k)[0] for item in items for target in targets]
    assert [unplaced(answer) for answer in batch] == [unplaced(answer) for answer in singles]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::12], ids=lambda case: case.id)
def test_devices_share_nothing_that_shows(case: BenchCase) -> None:
    together = EstimateCache().estimates([item_of(case)], TARGETS, 10)
    assert together == [EstimateCache().estimates([item_of(case)], [target], 10)[0] for target in TARGETS]
