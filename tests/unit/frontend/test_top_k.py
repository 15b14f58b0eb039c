"""top_k_indices in rounds: one launch on every device, the order of ties and of NaN, a router's softmax before it."""

from __future__ import annotations

from typing import Any

import cases_gpu
import numpy as np
import pytest
from cases_cpu import cpu_case

import roller_svc
from roller_svc.frontend.ops.calls import expand
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

TARGETS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x")


def expanded(call: str, dtype: str, shape: tuple[int, ...]) -> str:
    return expand(call, {"x": TensorType(DType(dtype), shape)}).text


def values(dtype: str, shape: tuple[int, ...]) -> Any:
    """Values with many ties, NaN and infinities."""
    found = np.random.default_rng(4).integers(-4, 5, shape).astype(dtype)
    if np.issubdtype(found.dtype, np.floating):
        found[0, ::3], found[1, ::2], found[2, :] = np.nan, np.inf, -np.inf
        found[-1, ::2], found[-1, 1::2] = np.nan, np.inf
    return found


def ordered(x: Any, k: int, *, largest: bool) -> Any:
    """The stable order, in which NaN is the greatest."""
    wide = x.astype(np.float64)
    keys = np.where(np.isnan(wide), 0.0, wide)
    return np.lexsort((-keys if largest else keys, np.isnan(wide) ^ largest), axis=1)[:, :k]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("dtype", "shape", "k"), [("float32", (9, 67), 5), ("float16", (5, 8), 8), ("int16", (3, 300), 2)])
def test_ties_keep_their_order_and_nan_is_the_greatest(dtype: str, shape: tuple[int, ...], k: int, *, largest: bool) -> None:
    x = values(dtype, shape)
    call = f"I = top_k_indices(x, k={k}, largest={str(largest).lower()})"
    kernel = roller_svc.compile(call, inputs={"x": (dtype, shape)}, target="local", select="model", top_k=1)
    assert len(kernel.launches) == 1
    np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x, k, largest=largest))


@pytest.mark.emulator
def test_a_block_finds_the_first_elements_of_its_rows() -> None:
    cases_gpu.case(expanded("I = top_k_indices(x, k=2)", "float32", (5, 67)), {"x": ("float32", (5, 67))}).check_some(1)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_every_device_finds_them_in_one_launch(target: str, *, largest: bool) -> None:
    for dtype, shape, k in (("float32", (5, 67), 4), ("float16", (33, 8), 2), ("int8", (3, 2100), 3)):
        call = f"I = top_k_indices(x, k={k}, largest={str(largest).lower()})"
        kernel = roller_svc.compile(
            call, inputs={"x": (dtype, shape)}, target=target, select="model", top_k=1, runtime="emulator"
        )  # fmt: skip
        assert len(kernel.launches) == 1
        x = values(dtype, shape)
        np.testing.assert_array_equal(kernel.run({"x": x})["I"], ordered(x, k, largest=largest))


@pytest.mark.slow
@pytest.mark.emulator
def test_blocks_of_all_kinds_find_the_same() -> None:
    cases_gpu.case(expanded("I = top_k_indices(x, k=3)", "float32", (3, 130)), {"x": ("float32", (3, 130))}).check_some(4)
    cpu_case(expanded("I = top_k_indices(x, k=3)", "float32", (3, 130)), {"x": ("float32", (3, 130))}).check_some(4)
