"""Tensor maps: sizes, and the driver's rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource, Language, LaunchSpec
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap

TILED = TensorMap(
    "map_a", "a", DType.FLOAT16, MapMode.TILED, (100, 300, 7), (208, 62400), (64, 128, 1), (1, 1, 1), swizzle=Swizzle.B128
)
IM2COL = TensorMap(
    "map_x",
    "x",
    DType.FLOAT16,
    MapMode.IM2COL,
    (64, 28, 30, 8),
    (128, 3584, 107520),
    (64, 128),
    (1, 2, 2, 1),
    (-1, -1),
    (-2, -2),
    Swizzle.B128,
)


def test_sizes() -> None:
    assert TILED.bytes == 64 * 128 * 2
    assert TILED.end_bytes == 6 * 62400 + 299 * 208 + 200
    strided = replace(TILED, box=(64, 127, 6), element_strides=(1, 4, 2))
    assert strided.box_elements == (64, 32, 3)
    assert strided.bytes == 64 * 32 * 3 * 2
    assert (IM2COL.rank, IM2COL.bytes) == (4, 64 * 128 * 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"extents": (100, 300, 0)},
        {"extents": (100, 300, (1 << 32) + 1)},
        {"extents": (100,) * 6, "strides_bytes": (208,) * 5, "box": (64, 1, 1, 1, 1, 1), "element_strides": (1,) * 6},
        {"strides_bytes": (200, 62400)},
        {"strides_bytes": (0, 62400)},
        {"strides_bytes": (208, 1 << 40)},
        {"strides_bytes": (208,)},
        {"box": (64, 257, 1)},
        {"box": (72, 128, 1)},
        {"box": (63, 128, 1)},
        {"box": (64, 128)},
        {"element_strides": (1, 9, 1)},
        {"element_strides": (2, 1, 1)},
        {"offset_bytes": 8},
        {"offset_bytes": -16},
        {"lower": (1,), "upper": (1,)},
        {"swizzle": Swizzle.B64},
        {"tf32": True},
    ],
    ids=str,
)
def test_what_the_driver_refuses_cannot_be_made(changes: dict[str, object]) -> None:
    with pytest.raises(InvariantError, match="map_a"):
        replace(TILED, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"box": (64, 1025)},
        {"box": (64, 128, 1)},
        {"lower": (-129, 0)},
        {"upper": (0, 128)},
        {"lower": (-1,), "upper": (-2,)},
        {"upper": (-29, -2)},
        {"extents": (64, 28), "strides_bytes": (128,), "element_strides": (1, 1), "lower": (), "upper": ()},
    ],
    ids=str,
)
def test_the_same_of_im2col(changes: dict[str, object]) -> None:
    with pytest.raises(InvariantError, match="map_x"):
        replace(IM2COL, **changes)


def test_maps_and_clusters_decide_the_binary() -> None:
    launch = LaunchSpec("k", ("a",), (4, 1, 1), (128, 1, 1), tensor_maps=(TILED,))
    source = KernelSource("k", Language.CUDA, Arch("sm_", 90, "a"), "text", (), (launch,))
    others = (
        replace(launch, cluster=2),
        replace(launch, tensor_maps=()),
        replace(launch, tensor_maps=(replace(TILED, box=(32, 128, 1)),)),
        replace(launch, tensor_maps=(replace(TILED, offset_bytes=16),)),
        replace(launch, tensor_maps=(replace(TILED, swizzle=Swizzle.NONE),)),
    )
    keys = {replace(source, launches=(other,)).key for other in (launch, *others)}
    assert len(keys) == 1 + len(others)
    with pytest.raises(InvariantError, match="multiple of the cluster, 3 blocks, got 4"):
        replace(launch, cluster=3)
