"""Scans on CPUs: rows in chunks, columns in vectors, against the interpreter."""

from __future__ import annotations

import pytest
from cases_cpu import Types, cpu_case

from roller_svc import hardware
from roller_svc.ir.group import GroupKind

AVX512 = hardware.load("cpu-x86-avx512")
CASES: dict[str, tuple[str, Types]] = {
    "chunks and a rest": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 1131", {"x": ("float32", (3, 1131))}),
    "reversed": ("y[i, j] +=! exp(x[i, o]).when([o >= j], 0.0) where j in 1100; z[i, j] = y[i, j] + x[i, j]",
                 {"x": ("float64", (3, 1100))}),
    "columns": ("y[b, j, i] +=! x[b, o, i].when([o < j], 0.0) where j in 21; z[b, j, i] = y[b, j, i] * x[b, j, i]",
                {"x": ("float32", (2, 21, 77))}),
    "extrema": ("y[i, j] >=! x[i, o].when([o < j], -128) where j in 65", {"x": ("int8", (5, 65))}),
}  # fmt: skip
MORE: dict[str, tuple[str, Types]] = {
    "short": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 3", {"x": ("float32", (1000, 3))}),
    "product": ("y[i, j] *=! x[i, o].when([j < o], 1) where j in 37", {"x": ("int32", (3, 37))}),
    "narrow columns": ("y[j, i] <=! x[o, i].when([o >= j], const(`inf`)) where j in 67", {"x": ("float16", (67, 33))}),
    "one column": ("y[j] +=! x[o].when([o <= j], 0) where j in 1537", {"x": ("int8", (1537,))}),
    "guards": ("y[i, j] +=! (x[i, o] * w[o]).when([o <= j, o > 3, i < 4], 0.0) where j in 65",
               {"x": ("bfloat16", (5, 65)), "w": ("float32", (65,))}),
    "wide": ("y[j, i] +=! x[o, i].when([o <= j], 0.0) where j in 3", {"x": ("float32", (3, 9001))}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_interpreter(name: str) -> None:
    found = cpu_case(*CASES[name])
    assert found.group.kind is GroupKind.SCAN
    found.check_some(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_candidates_of_wide_vectors_match_the_interpreter(name: str) -> None:
    cpu_case(*(CASES | MORE)[name], AVX512).check_some(3)


def test_an_extremum_is_a_chain_and_a_sum_is_not() -> None:
    types: Types = {"x": ("float32", (4, 64))}
    chain = cpu_case("y[i, j] >=! x[i, o].when([o <= j], const(`-inf`)) where j in 64", types)
    steps = cpu_case("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 64", types)
    assert "inside[7]" not in chain.source(chain.ranked[0]).text
    assert "inside[7]" in steps.source(steps.ranked[0]).text
