"""Tensor maps on a real device of sm_90: the driver takes them, and copies bring what is expected of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tmacopies import arrived
from tmakernels import bringing, swizzled, unsigned

from roller_svc.ir.dtype import DType
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.runtime.cuda import CudaModule
from roller_svc.toolchain.nvrtc import compile_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    if module.cuda.Device().compute_capability != "90":
        pytest.skip("the device is not of sm_90")
    return module


def tiled(extents: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], **more: Any) -> TensorMap:
    steps = more.pop("element_strides", (1,) * len(extents))
    return TensorMap("view", "x", more.pop("dtype", DType.FLOAT16), MapMode.TILED, extents, strides, box, steps, **more)


def pixels(extents: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, int], **more: Any) -> TensorMap:
    return TensorMap("view", "x", DType.FLOAT16, MapMode.IM2COL, extents, strides, box, **more)


IMAGES = {"extents": (64, 9, 7, 3), "strides": (128, 1152, 8064)}
CASES = {
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


@pytest.mark.parametrize("name", CASES)
def test_a_copy_brings_what_is_expected(cupy: Any, name: str) -> None:
    view, coordinates, offsets = CASES[name]
    memory = np.arange(1, -(-view.reach_bytes // view.dtype.bytes) + 1).astype(numpy_dtype(unsigned(view)))
    module = CudaModule(compile_cuda(bringing(view, memory.size, coordinates, offsets)))
    found = module.run({"X": cupy.asarray(memory)})["Y"].get()
    assert np.array_equal(found, swizzled(arrived(view, memory, coordinates, offsets), view))


def test_tf32_is_rounded_on_the_way(cupy: Any) -> None:
    """To ten bits behind the point; half a step off is to either side."""
    view = replace(tiled((32, 8), (128,), (32, 8), dtype=DType.FLOAT32), tf32=True)
    values = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    module = CudaModule(compile_cuda(bringing(view, 256, (0, 0))))
    found = module.run({"X": cupy.asarray(values.view(np.uint32))})["Y"].get()
    assert not (found & 0x1FFF).any()
    assert (np.abs(found.view(np.float32) - values) <= np.abs(values) * 2**-11 * (1 + 2**-10)).all()
