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


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [*TARGETS, "local"])
def test_a_router_is_one_launch(target: str) -> None:
    """Experts of each token with weights by a softmax over all, or over the chosen ones."""
    x = np.random.default_rng(2).normal(size=(5, 64)).astype(np.float32)
    text = (
        "I = top_k_indices(x, k=3); V = top_k_values(x, k=3); C = softmax(V); "
        "m[i] >=! x[i, j]; s[i] +=! exp(x[i, j] - m[i]); A[i, q] = exp(V[i, q] - m[i]) / s[i]"
    )
    kernel = roller_svc.compile(
        text, inputs={"x": ("float32", (5, 64))}, outputs=["I", "C", "A"], target=target, select="model", top_k=1,
        **({} if target == "local" else {"runtime": "emulator"}),
    )  # fmt: skip
    assert len(kernel.launches) == 1
    found, chosen = kernel.run({"x": x}), ordered(x, 3, largest=True)
    np.testing.assert_array_equal(found["I"], chosen)
    exponentials = np.exp(x.astype(np.float64))
    picked = np.take_along_axis(exponentials, chosen, 1)
    np.testing.assert_allclose(found["C"], picked / picked.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(found["A"], picked / exponentials.sum(1, keepdims=True), rtol=1e-5)
