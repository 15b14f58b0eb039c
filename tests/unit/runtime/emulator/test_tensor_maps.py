"""Tensor maps in the emulator: parameters, and copies against an independent implementation in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator_support import cuda, module, wrappers
from reference_kernels import tensor
from tma_copies import arrived
from tma_kernels import CASES, bringing, swizzled, tiled, unsigned

from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.binding import numpy_dtype

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("name", CASES)
def test_a_copy_brings_what_is_expected(name: str) -> None:
    view, coordinates, offsets = CASES[name]
    memory = np.arange(1, -(-view.end_bytes // view.dtype.bytes) + 1).astype(numpy_dtype(unsigned(view)))
    found = module(bringing(view, memory.size, coordinates, offsets)).run({"X": memory})["Y"]
    assert np.array_equal(found, swizzled(arrived(view, memory, coordinates, offsets), view))


def test_tf32_is_rounded_on_the_way() -> None:
    view = replace(tiled((32, 8), (128,), (32, 8), dtype=DType.FLOAT32), tf32=True)
    values = np.random.default_rng(1).standard_normal(256).astype(np.float32)
    found = module(bringing(view, 256, (0, 0))).run({"X": values.view(np.uint32)})["Y"]
    assert not (found & 0x1FFF).any()
    assert (np.abs(found.view(np.float32) - values) <= np.abs(values) * 2**-11 * (1 + 2**-10)).all()


def test_a_tensor_map_is_a_parameter_with_plain_fields() -> None:
    """The source's own opaque struct is commented out."""
    view = TensorMap(
        "view",
        "a",
        DType.FLOAT32,
        MapMode.IM2COL,
        (4, 5, 3, 2),
        (32, 160, 480),
        (4, 8),
        (1, 2, 1, 1),
        (-1, 0),
        (1, -2),
        Swizzle.NONE,
        16,
    )
    box = TensorMap("box", "c", DType.FLOAT32, MapMode.TILED, (16, 2), (64,), (16, 1), (1, 1), swizzle=Swizzle.B64)
    text = (
        wrappers("TensorMap")
        + """
extern "C" __global__ void __launch_bounds__(32, 1) __cluster_dims__(2, 1, 1)
one(const float *a, float *c, const __grid_constant__ TensorMap view, const __grid_constant__ TensorMap box) {
  if (threadIdx.x || blockIdx.x) return;
  float *at = c;
  *at++ = *(const float *)view.data;
  *at++ = (float)(view.rank + 10 * view.pixels + 100 * view.element_bytes);
  *at++ = (float)view.bytes;
  *at++ = (float)(view.extents[3] * 1000 + view.strides[3]);
  *at++ = (float)(view.box[1] + 10 * view.steps[1]);
  *at++ = (float)(view.lower[0] + 10 * view.upper[1]);
  *at++ = (float)((float *)box.data - c);
  *at++ = (float)(box.rank + 10 * box.pixels + 100 * box.swizzle_bytes);
  *at++ = (float)(box.strides[0] + 10 * box.strides[1]);
}
"""
    )
    launch = LaunchSpec("one", ("a", "c"), (2, 1, 1), (32, 1, 1), tensor_maps=(view, box), cluster=2)
    a = np.arange(32, dtype=np.float32)
    buffers = (tensor("A", "a", Role.INPUT, shape=(32,)), tensor("C", "c", Role.OUTPUT, shape=(32,)))
    found = module(cuda(text, buffers, launch)).run({"A": a})["C"][:9]
    assert found.tolist() == [4, 414, 128, 2480, 28, -21, 0, 6402, 644]
