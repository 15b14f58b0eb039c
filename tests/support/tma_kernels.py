"""Kernels of one block that load one box by TMA and write it out as laid out in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from roller_bench.gpu.probe_kernels import box_copy
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap

HOPPER = Arch("sm_", 90, "a")
UNSIGNED = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32}


def unsigned(view: TensorMap) -> DType:
    """The type of buffers that hold the map's elements bit by bit."""
    return UNSIGNED[view.dtype.bytes]


def bringing(view: TensorMap, elements: int, coordinates: tuple[int, ...], offsets: tuple[int, ...] = ()) -> KernelSource:
    """Return the kernel that copies one box from X, flat, to Y, with the bits of the map's elements."""
    return box_copy(HOPPER, view, elements, unsigned(view), coordinates=coordinates, offsets=offsets)


def swizzled(rows: np.ndarray, view: TensorMap) -> np.ndarray:
    """Rows of a box as they lie in shared memory, flat: bits 4 to 6 of an address, as many as the mode has, are joined
    to bits 7 to 9 by exclusive or (PTX ISA, "Tensor Swizzle Modes")."""
    flat = np.ascontiguousarray(rows).reshape(-1)
    address = np.arange(flat.size) * view.dtype.bytes
    chunks = max(1, view.swizzle.value // 16)
    placed = address ^ ((address >> 7 & chunks - 1) << 4)
    found = np.empty_like(flat)
    found[placed // view.dtype.bytes] = flat
    return found


def tiled(extents: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], **more: Any) -> TensorMap:
    steps = more.pop("element_strides", (1,) * len(extents))
    return TensorMap("view", "x", more.pop("dtype", DType.FLOAT16), MapMode.TILED, extents, strides, box, steps, **more)


def pixels(extents: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, int], **more: Any) -> TensorMap:
    return TensorMap("view", "x", DType.FLOAT16, MapMode.IM2COL, extents, strides, box, **more)


IMAGES = {"extents": (64, 9, 7, 3), "strides": (128, 1152, 8064)}
# name → map, coordinates, offsets
CASES: dict[str, tuple[TensorMap, tuple[int, ...], tuple[int, ...]]] = {
    "matrix": (tiled((72, 40), (144,), (64, 32), swizzle=Swizzle.B128), (16, 20), ()),
    "narrow rows": (tiled((72, 40), (144,), (32, 32), swizzle=Swizzle.B64), (48, -3), ()),
    "bytes": (tiled((80, 40), (80,), (32, 64), dtype=DType.INT8, swizzle=Swizzle.B32), (60, 0), ()),
    "a box beyond the tensor": (tiled((24, 5), (48,), (64, 128), swizzle=Swizzle.B128), (0, 0), ()),
    "a row of one": (tiled((1024,), (), (64,)), (990,), ()),
    "outer strides are shorter": (tiled((64, 5, 6), (768, 128), (64, 4, 2), swizzle=Swizzle.B128), (0, 1, 3), ()),
    "rows overlap": (tiled((64, 30), (16,), (64, 8), swizzle=Swizzle.B128), (0, 5), ()),
    "steps": (tiled((64, 20, 9), (128, 2560), (64, 16, 6), element_strides=(1, 2, 3), swizzle=Swizzle.B128),
              (0, -1, 1), ()),
    "five dimensions": (tiled((16, 3, 4, 5, 2), (32, 96, 384, 1920), (16, 3, 2, 1, 2)), (0, 0, 3, 2, 0), ()),
    "an offset": (tiled((64, 10), (128,), (64, 8), offset_bytes=208), (0, 0), ()),
    "pixels": (pixels(**IMAGES, box=(64, 64), element_strides=(1, 1, 1, 1), lower=(-1, -1), upper=(-1, -1),
                      swizzle=Swizzle.B128), (0, 3, -1, 0), (2, 1)),
    "pixels in steps": (pixels(**IMAGES, box=(32, 48), element_strides=(1, 2, 3, 1), lower=(-2, 0), upper=(-1, -2),
                               swizzle=Swizzle.B64), (32, 2, 3, 1), (1, 2)),
    "pixels of a row": (pixels((64, 30, 4), (128, 3840), (64, 64), element_strides=(1, 1, 1), lower=(-1,), upper=(-1,),
                               swizzle=Swizzle.B128), (0, 5, 1), (2,)),
    "pixels of a volume": (pixels((64, 5, 4, 3, 2), (128, 640, 2560, 7680), (64, 64), element_strides=(1,) * 5,
                                  lower=(-1, -1, -1), upper=(-1, -1, -1), swizzle=Swizzle.B128), (0, 1, 0, -1, 0),
                           (1, 2, 0)),
    "pixels beyond the last image": (pixels(**IMAGES, box=(64, 128), element_strides=(1, 1, 1, 1), lower=(0, 0),
                                            upper=(-2, -2), swizzle=Swizzle.B128), (0, 0, 0, 2), (0, 2)),
    "one place of a dimension": (pixels((48, 9, 7, 2, 3), (192, 1728, 96, 12096), (16, 64),
                                        element_strides=(1,) * 5, lower=(-1, -1, 0), upper=(-1, -1, -1)),
                                 (16, -1, -1, 0, 1), (1, 1, 1)),
}  # fmt: skip
