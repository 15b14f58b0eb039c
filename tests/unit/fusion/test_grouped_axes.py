"""Grouped convolutions become batches of convolutions."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc
from roller_svc.compiler.partition_cache import partition
from roller_svc.frontend.parse import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.program import TensorType

Types = dict[str, tuple[str, tuple[int, ...]]]
EPILOGUE = "Y[n, f, h, w] = relu(T[n, f, h, w] + R[n, f, h, w])"


def text_of(groups: int, stride: int = 1) -> str:
    return f"T = conv2d(X, W, B, padding=1, groups={groups}, stride={stride}); {EPILOGUE}"


def types_of(batch: int, channels: int, filters: int, size: int, groups: int, stride: int = 1) -> Types:
    out = (size - 1) // stride + 1
    return {
        "X": ("float32", (batch, channels, size, size)),
        "W": ("float32", (filters, channels // groups, 3, 3)),
        "B": ("float32", (filters,)),
        "R": ("float32", (batch, filters, out, out)),
    }


def kernel_groups(text: str, types: dict[str, tuple[str, tuple[int, ...]]], outputs: tuple[str, ...]) -> list[KernelGroup]:
    inputs = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in types.items()}
    return list(partition(parse(text, inputs, outputs), load("cpu-x86-avx2")))


def test_groups_are_a_batch_axis_and_epilogues_are_fused() -> None:
    (group,) = kernel_groups(text_of(13), types_of(1, 104, 104, 28, 13), ("Y",))
    assert [axis.extent for axis in group.space.role(AxisRole.BATCH)] == [13]
    tiles = {axis.extent for role in (AxisRole.M, AxisRole.N) for axis in group.space.role(role)}
    assert tiles == {8, 28 * 28}
    assert dict(group.stored)["Y"].elements == 104 * 28 * 28


def test_depthwise_convolutions_are_windows() -> None:
    """Without channels to reduce there is no product: a plane for each filter is better."""
    for multiplier in (1, 2):
        (group,) = kernel_groups(text_of(24), types_of(1, 24, 24 * multiplier, 12, 24), ("Y",))
        assert not group.space.role(AxisRole.BATCH)


def test_results_that_another_statement_reduces_keep_their_view() -> None:
    text = "T = conv2d(X, W, groups=4); Y[n, h, w] +=! T[n, f, h, w] where n in 1"
    types = {"X": ("float32", (1, 16, 8, 8)), "W": ("float32", (16, 4, 1, 1))}
    groups = kernel_groups(text, types, ("Y",))
    assert all(not group.space.role(AxisRole.BATCH) for group in groups)


@pytest.mark.parametrize("target", ["cpu-x86-avx2", "local"])
@pytest.mark.parametrize(
    ("batch", "channels", "filters", "size", "groups", "stride"),
    [(1, 104, 104, 9, 13, 1), (2, 16, 32, 7, 4, 2), (1, 12, 12, 10, 6, 1), (3, 32, 64, 5, 2, 1), (1, 64, 64, 6, 16, 1)],
)
def test_grouped_convolutions_are_right(
    target: str, batch: int, channels: int, filters: int, size: int, groups: int, stride: int
) -> None:
    text, types = text_of(groups, stride), types_of(batch, channels, filters, size, groups, stride)
    kernel = roller_svc.compile(text, types, constants=["W", "B"], outputs=["Y"], target=target, select="model", top_k=1)
    arrays = {
        name: np.random.default_rng(i).standard_normal(shape).astype(dtype)
        for i, (name, (dtype, shape)) in enumerate(types.items())
    }
    want = roller_svc.reference(text, types, arrays, outputs=["Y"])["Y"]
    np.testing.assert_allclose(kernel(**arrays)["Y"], want, rtol=1e-4, atol=1e-4)
