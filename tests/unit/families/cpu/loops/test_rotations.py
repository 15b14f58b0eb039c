"""Rows that are rotated, or whose blocks change places: vectors of adjacent elements, and the time of a copy."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

ROTATIONS = {
    "half": "(k + {half}) % {n}",
    "by one": "(k + 1) % {n}",
    "by an odd number": "(k + 77) % {n}",
    "blocks": "k // 128 * 128 + (k + 64) % 128",
    "blocks down": "k // 64 * 64 + (k + 16) % 64",
    "pairs": "k // 2 * 2 + (k + 1) % 2",
}


def seconds(index: str, rows: int, n: int, target: str) -> float:
    text = f"y[m, k] = x[m, {index.format(n=n, half=n // 2)}] + 1.0 where m in {rows}, k in {n}"
    compute = parse(text, {"x": TensorType(DType.FLOAT32, (rows, n))})
    return estimate_program(PartitionCache(compute), hardware.load(target)).plans[0].estimate.seconds


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "amd-mi300x", "cpu-x86-avx512"])
@pytest.mark.parametrize("rows", [1, 8])
def test_rotations_of_long_rows_take_about_the_time_of_a_copy(target: str, rows: int) -> None:
    n = 1 << 22 if rows == 1 else 1 << 20
    copy = seconds("k", rows, n, target)
    for name, index in ROTATIONS.items():
        if name == "pairs" and target.startswith("cpu"):
            continue  # element by element
        assert seconds(index, rows, n, target) < (1.4 if name == "by one" or "odd" in name else 1.05) * copy


def test_elements_far_apart_take_longer_than_a_copy() -> None:
    assert seconds("k * 2 % {n}", 1, 1 << 22, "amd-mi300x") > 1.5 * seconds("k", 1, 1 << 22, "amd-mi300x")


@pytest.mark.parametrize("name", ROTATIONS)
def test_kernels_of_rotations_are_right(name: str) -> None:
    n = 4096
    x = np.arange(n, dtype=np.float32)
    index = ROTATIONS[name].format(n=n, half=n // 2)
    kernel = roller_svc.compile(f"y[k] = x[{index}] where k in {n}", {"x": x}, target="cpu-x86-avx2", select="model", top_k=1)
    right = [eval(index, {"k": k}) for k in range(n)]
    np.testing.assert_array_equal(np.asarray(kernel(x=x)["y"]), x[right])
