"""The CUDA runtime on a real device: arrays of CuPy and PyTorch, streams, shared memory, times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.runtime.cuda.arrays import DeviceBytes, copy_to_device
from roller_svc.runtime.cuda.module import CudaModule
from roller_svc.runtime.measure import measure
from roller_svc.toolchain.nvrtc import compile_cuda

pytestmark = pytest.mark.gpu

# Needs more shared memory than a kernel gets without asking.
TEXT = """
extern "C" __global__ void reverse(const float *a, float *w) {
    extern __shared__ float tile[];
    for (int i = threadIdx.x; i < 20000; i += blockDim.x) tile[i] = a[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 20000; i += blockDim.x) w[i] += tile[19999 - i];
}
extern "C" __global__ void twice(const float *w, float *c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < 20000) c[i] = 2.0f * w[i];
}
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def module(cupy: Any) -> CudaModule:
    buffers = tuple(
        Buffer(name, name.lower(), role, DType.FLOAT32, (20000,))
        for name, role in (("A", Role.INPUT), ("W", Role.WORKSPACE), ("C", Role.OUTPUT))
    )
    launches = (
        LaunchSpec("reverse", ("a", "w"), (1, 1, 1), (256, 1, 1), 80_000, ("w",)),
        LaunchSpec("twice", ("w", "c"), (79, 1, 1), (256, 1, 1)),
    )
    arch = Arch("sm_", int(cupy.cuda.Device().compute_capability))
    return CudaModule(compile_cuda(KernelSource("reverse_twice", Language.CUDA, arch, TEXT, buffers, launches)))


def test_cupy_arrays(cupy: Any, module: CudaModule) -> None:
    a = cupy.random.rand(20000, dtype=cupy.float32)
    for given in (a, cupy.repeat(a, 2)[::2], cupy.concatenate([a[:1], a])[1:]):
        assert (module.run({"A": given})["C"] == 2 * a[::-1]).all()
    with cupy.cuda.Stream(non_blocking=True):
        out = cupy.zeros(40000, cupy.float32)[::2]
        assert module.run({"A": a}, {"C": out})["C"] is out
        assert (out == 2 * a[::-1]).all()


def test_torch_tensors(module: CudaModule) -> None:
    torch = pytest.importorskip("torch")
    a = torch.rand(20000, device="cuda")
    result = module.run({"A": a})["C"]
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, 2 * a.flip(0))
    with torch.cuda.stream(torch.cuda.Stream()):
        out = torch.zeros(40000, device="cuda")[::2]
        assert module.run({"A": a}, {"C": out})["C"] is out
        assert torch.equal(out, 2 * a.flip(0))


def test_placed_arrays(module: CudaModule) -> None:
    a = np.random.default_rng(0).random(20000, np.float32)
    result = module.run(copy_to_device({"A": a}))["C"]
    assert isinstance(result, DeviceBytes)
    assert np.array_equal(result.numpy(), 2 * a[::-1])
    for dtype in DType:
        values = np.arange(24).reshape(4, 6).astype(numpy_dtype(dtype))
        assert np.array_equal(copy_to_device({"x": values})["x"].numpy(), values)


def test_times_are_the_devices(cupy: Any, module: CudaModule) -> None:
    call = module.bind({"A": cupy.ones(20000, cupy.float32)})
    measured = measure(call)
    assert 1e-6 < measured.median_s < 1e-2
    assert measured.device_name
    assert (call.results()["C"] == 2).all()  # what was timed is what a call does


def test_the_launcher_stands_without_the_project(cupy: Any, module: CudaModule, tmp_path: Path) -> None:
    """The cubin alone, loaded by CuPy from a file."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(module._compiled.binary)
    raw = cupy.RawModule(path=str(path)).get_function("twice")
    w, c = cupy.ones(20000, cupy.float32), cupy.zeros(20000, cupy.float32)
    raw((79,), (256,), (w, c))
    assert (c == 2).all()
