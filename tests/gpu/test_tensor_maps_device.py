"""Tensor maps on a real device of sm_90: the driver takes them, and copies bring what is expected of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tma_copies import arrived
from tma_kernels import CASES, bringing, swizzled, tiled, unsigned

from roller_svc.ir.dtype import DType
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.toolchain.nvrtc import compile_cuda

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    if module.cuda.Device().compute_capability != "90":
        pytest.skip("the device is not of sm_90")
    return module


@pytest.mark.parametrize("name", CASES)
def test_a_copy_brings_what_is_expected(cupy: Any, name: str) -> None:
    view, coordinates, offsets = CASES[name]
    memory = np.arange(1, -(-view.end_bytes // view.dtype.bytes) + 1).astype(numpy_dtype(unsigned(view)))
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
