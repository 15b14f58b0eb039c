"""What a kernel is counted as."""

from __future__ import annotations

import pytest
from cases_matrix import ADA, AMPERE, TURING, chosen, contraction, tiles, unit
from schedule_support import program

from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.ir.group import GroupKind
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Plan
from roller_svc.verify.kernel_stats import count_features, epilogue, summarize_kernels

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
F16 = {"A": "float16 32 64", "B": "float16 64 48"}


@pytest.mark.parametrize(
    ("rest", "more", "expected"),
    [
        ("", {}, ["none"]),
        ("Y[m, n] = C[m, n] + v[n]", {"v": "float16 48"}, ["bias"]),
        ("Y[m, n] = C[m, n] + v[m]", {"v": "float16 32"}, ["bias"]),
        ("Y[m, n] = C[m, n] + R[m, n]", {"R": "float16 32 48"}, ["residual"]),
        ("Y[n, m] = C[m, n] + R[n, m] + v[n]", {"R": "float16 48 32", "v": "float16 48"}, ["bias", "residual"]),
        ("Y[m, n] = relu(C[m, n])", {}, ["activation"]),
        ("Y[m, n] = max(C[m, n], 0.0) * 0.5", {}, ["activation"]),  # what scales is part of the function's formula
        ("Y[m, n] = 0.5 * C[m, n] * (1.0 + erf(C[m, n] * 0.7071))", {}, ["activation"]),
        ("Y[m, n] = C[m, n] * 0.125", {}, ["scale"]),
        ("Y[m, n] = C[m, n] / 8", {}, ["scale"]),
        ("Y[m, n] = (C[m, n] * 0.125).cast(`float32`)", {}, ["scale", "cast"]),
        ("Y[m] >=! C[m, n]", {}, ["row reduction"]),
        ("Y[m, n] = C[m, n] + v[n]; Z[m] +=! Y[m, n]", {"v": "float16 48"}, ["bias", "row reduction"]),
    ],
)
def test_an_epilogue_is_told_from_its_statements(rest: str, more: dict[str, str], expected: list[str]) -> None:
    assert list(epilogue(contraction(f"{MATMUL}; {rest}" if rest else MATMUL, **F16, **more))) == expected


@pytest.mark.parametrize(
    ("hw", "name", "a", "b", "loads"),
    [
        (AMPERE, "mma_f16", "float16 32 64", "float16 64 48", ["async16", "async16"]),
        (AMPERE, "mma_f16", "float16 32 68", "float16 68 54", ["async8", "async4"]),
        (TURING, "mma_f16", "float16 32 64", "float16 64 48", ["vector", "vector"]),
        (AMPERE, "mma_f16", "float16 32 65", "float8_e5m2 65 48", ["element", "vector"]),
        (ADA, "mma_e4m3", "float8_e4m3fn 32 64", "float8_e4m3fn 64 48", ["async16", "element"]),  # turned on the way
    ],
)
def test_loads_are_classed_as_they_are_made(hw: HardwareSpec, name: str, a: str, b: str, loads: list[str]) -> None:
    text = "C[m, n] +=! A[m, k].cast(`float32`) * B[k, n].cast(`float32`)"
    group = contraction(text, hw, A=a, B=b)
    (found,) = summarize_kernels((group,), Plan((chosen(tiles(group, unit(hw, name), (16, 16, 32), (16, 8))),)), hw)
    assert [operand["load"] for operand in found["operands"]] == loads
    assert [operand["stored"] for operand in found["operands"]] == [a.split()[0], b.split()[0]]


def test_a_kernel_says_its_family_unit_and_tiles() -> None:
    group = contraction(MATMUL, **F16)
    by_hand = tiles(group, unit(AMPERE, "mma_f16"), (16, 16, 16), (16, 8), stages=3, split_k=4)
    (plain,), _ = rank(group, AMPERE, AMPERE.unit_for(group.space.compute_dtype), 1)
    found = summarize_kernels((group, group), Plan((chosen(by_hand), plain)), AMPERE)
    assert found[0] == {
        "kind": "contraction",
        "family": "mma",
        "unit": "mma_f16",
        "lanes": 32,
        "split_k": 4,
        "stream_k": 0,
        "stages": 3,
        "raster": 1,
        "blocks": 0,
        "cluster_m": 1,
        "cluster_n": 1,
        "cluster_k": 1,
        "pingpong": 0,
        "epilogue": ["none"],
        "operands": [{"dtype": "float16", "stored": "float16", "load": "async16"}] * 2,
    }
    assert (found[1]["family"], found[1]["unit"]) == ("simt", "fma_f32")
    assert [operand["load"] for operand in found[1]["operands"]] == [None, None]
    totals = count_features(found)
    assert totals["family"] == {"mma": 1, "simt": 1}
    assert totals["split_k"]["4"] == 1
    assert totals["load"] == {"async16": 2}
    assert totals["types"] == {"float16 x float16": 2}
    assert totals["epilogue"] == {"none": 2}


def test_what_is_no_contraction_has_neither_operands_nor_epilogue() -> None:

    (group,) = partition(program("Y[m, n] = relu(X[m, n])", X="float32 64 64"), AMPERE)
    assert group.kind is GroupKind.NEST
    (best,), _ = rank(group, AMPERE, AMPERE.unit_for(group.space.compute_dtype), 1)
    (found,) = summarize_kernels((group,), Plan((best,)), AMPERE)
    assert (found["kind"], found["operands"], found["epilogue"]) == ("nest", [], [])
