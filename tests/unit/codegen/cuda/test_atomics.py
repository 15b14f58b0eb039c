"""Atomic reductions of scatters: the instructions that they become, and their values in the emulator."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from cases_hip import needs_hipcc
from emulator_support import module

from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorType
from roller_svc.toolchain import compile_source, sass_text

H200, A100, MI250 = "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"
ROWS, UPDATES = 1 << 16, 400


def scatter(operator: str, dtype: str, target: str, rows: int = ROWS, updates: int = UPDATES) -> KernelSource:
    """Return the kernel of a scatter of `updates` elements to a target of `rows`."""
    types = {"T": TensorType(DType(dtype), (rows,)), "X": TensorType(DType(dtype), (updates,)),
             "I": TensorType(DType.INT32, (updates,))}  # fmt: skip
    program, spec = parse(f"T[I[i]] {operator} X[i]", types, None), hardware.load(target)
    groups, ranked, _ = rank_best_partition(program, spec, 1)
    return emit_plan(best_plans(ranked, 1)[0], program, groups, spec)


def kind_of(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)


@pytest.mark.parametrize(
    ("operator", "dtype", "target", "instruction"),
    [
        ("+=.", "int32", H200, "REDG.E.ADD"),
        ("+=.", "uint32", A100, "RED.E.ADD"),
        ("+=.", "int64", H200, "REDG.E.ADD.64"),
        ("+=.", "float32", H200, "REDG.E.ADD.F32"),
        ("+=.", "float64", A100, "RED.E.ADD.F64"),
        ("+=.", "float16", A100, "RED.E.ADD.F16x2"),
        ("+=.", "float16", H200, "REDG.E.ADD.F16x2"),
        ("+=.", "bfloat16", H200, "REDG.E.ADD.BF16x2"),
        (">=.", "int32", H200, "REDG.E.MAX.S32"),
        ("<=.", "uint32", H200, "REDG.E.MIN"),
        ("<=.", "int64", A100, "RED.E.MIN.S64"),
        (">=.", "float32", H200, "REDG.E.MAX.S32"),
        ("<=.", "float64", A100, "RED.E.MAX.64"),
    ],
)
def test_a_reduction_that_the_device_has_is_one_red(operator: str, dtype: str, target: str, instruction: str) -> None:
    text = sass_text(compile_source(scatter(operator, dtype, target)).binary)
    assert instruction in text
    assert "CAS" not in text
    assert re.search(r"\bATOM", text) is None  # its result is not used


@pytest.mark.parametrize(
    ("operator", "dtype", "target"), [("+=.", "bfloat16", A100), ("+=.", "uint8", H200), (">=.", "float16", H200)]
)
def test_what_the_device_lacks_is_compare_and_swap(operator: str, dtype: str, target: str) -> None:
    assert "CAS" in sass_text(compile_source(scatter(operator, dtype, target)).binary)


STORED = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
          "float16", "bfloat16", "float32", "float64")  # fmt: skip


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("operator", ["+=.", ">=.", "<=."])
def test_hip_swaps_whole_words(operator: str, dtype: str) -> None:
    """HIP's atomicCAS takes 32 and 64 bits."""
    words = re.findall(r"(unsigned \w+(?: long)?) \*at = ", scatter(operator, dtype, MI250).text)
    assert set(words) <= {"unsigned int", "unsigned long long"}
    assert bool(words) or DType(dtype).bits > 16


@needs_hipcc
@pytest.mark.slow
@pytest.mark.parametrize("operator", ["+=.", ">=.", "<=."])
@pytest.mark.parametrize("dtype", STORED)
def test_hip_has_the_atomics_of_every_type(operator: str, dtype: str) -> None:
    assert compile_source(scatter(operator, dtype, MI250)).binary


@pytest.mark.emulator
@pytest.mark.parametrize("target", [A100, H200, MI250])
@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "uint32", "int64", "uint64", "float32", "float64", "float16", "bfloat16"]
)
def test_sums_are_those_of_numpy(dtype: str, target: str) -> None:
    values, places = (np.arange(UPDATES) % 3).astype(kind_of(dtype)), (np.arange(UPDATES) % 7).astype(np.int32)
    before = (np.arange(ROWS) % 64).astype(kind_of(dtype))
    expected = before.astype(np.float64)
    np.add.at(expected, places, values.astype(np.float64))
    found = module(scatter("+=.", dtype, target), 2).run({"T": before, "X": values, "I": places})["T"]
    np.testing.assert_array_equal(found.astype(np.float64), expected)


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_other_half_of_a_pair_stays(dtype: str) -> None:
    special = np.array([-0.0, 0.0, 1.0, np.inf, 1e-7, -np.inf], dtype=np.float32).astype(kind_of(dtype))
    before = np.resize(special, ROWS)
    values, places = np.ones(UPDATES, dtype=kind_of(dtype)), (np.arange(UPDATES) // 100 * 7).astype(np.int32)
    found = module(scatter("+=.", dtype, H200)).run({"T": before, "X": values, "I": places})["T"]
    kept = np.setdiff1d(np.arange(ROWS), places)
    np.testing.assert_array_equal(found[kept].view(np.uint16), before[kept].view(np.uint16))
    assert (found[[0, 7, 14]] > before[[0, 7, 14]]).all()


SPECIAL = (-np.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 7.0, np.inf)


@pytest.mark.emulator
@pytest.mark.parametrize("operator", [">=.", "<=."])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_order_of_floats_is_that_of_numpy(operator: str, dtype: str) -> None:
    """Each pair of special values meets, in both orders; NaN of either sign wins from both sides."""
    nans = np.array([np.nan, -np.nan])
    finite = np.array(SPECIAL)
    every = np.concatenate([finite, nans])
    before = np.repeat(every, len(every)).astype(dtype)
    values = np.tile(every, len(every)).astype(dtype)
    more = np.concatenate([values, np.tile([-5.0, 5.0], len(every) ** 2 // 2)]).astype(dtype)  # after some NaNs
    places = np.concatenate([np.arange(len(values)), np.arange(len(more) - len(values))]).astype(np.int32)
    target = np.zeros(ROWS, dtype)
    target[: len(before)] = before
    expected = target.copy()
    with np.errstate(invalid="ignore"):
        (np.maximum if operator == ">=." else np.minimum).at(expected, places, more)
    for seed in (0, 3):
        source = scatter(operator, dtype, A100, updates=len(more))
        found = module(source, seed).run({"T": target, "X": more, "I": places})["T"]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.emulator
@pytest.mark.parametrize("operator", [">=.", "<=."])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "int8"])
@pytest.mark.parametrize("target", [A100, MI250])
def test_order_of_integers_is_that_of_numpy(operator: str, dtype: str, target: str) -> None:
    info = np.iinfo(dtype)
    every = np.array([info.min, info.min + 1, info.max // 2, info.max - 1, info.max], dtype=dtype)
    values, places = np.resize(every, UPDATES), (np.arange(UPDATES) % 13).astype(np.int32)
    before = np.resize(every[1:4], ROWS)
    expected = before.copy()
    (np.maximum if operator == ">=." else np.minimum).at(expected, places, values)
    found = module(scatter(operator, dtype, target), 1).run({"T": before, "X": values, "I": places})["T"]
    np.testing.assert_array_equal(found, expected)
