"""Resources in a cubin's ELF against the compiler's log."""

from __future__ import annotations

import dataclasses

import pytest
from reference_kernels import cuda_scale

from roller_svc.errors import CompileError
from roller_svc.ir.hardware import Arch
from roller_svc.toolchain.binaries.cubin import read_cubin
from roller_svc.toolchain.nvrtc import compile_cuda

DYNAMIC = """
extern "C" __global__ void flip(const float *a, float *c) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    c[threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void scale(float *c) { c[threadIdx.x] *= 2.0f; }
"""
ARCHS = [Arch("sm_", 75), Arch("sm_", 80), Arch("sm_", 90, "a"), Arch("sm_", 100, "a"), Arch("sm_", 120, "a")]


@pytest.mark.parametrize("arch", ARCHS, ids=str)
@pytest.mark.parametrize("text", [cuda_scale().text, DYNAMIC], ids=["static", "dynamic"])
def test_elf_and_log_agree(arch: Arch, text: str) -> None:
    compiled = compile_cuda(dataclasses.replace(cuda_scale(arch), text=text))
    kernels = read_cubin(compiled.binary)
    assert set(kernels) == {"flip", "scale"}
    for launch, used in zip(compiled.source.launches, compiled.resources, strict=True):
        kernel = kernels[launch.name]
        assert kernel.registers_per_thread == used.registers_per_thread
        assert kernel.shared_bytes == used.shared_bytes
        assert kernel.stack_bytes == 0
        assert kernel.parameter_bytes == 8 * len(launch.args)
    assert kernels["flip"].barriers == 1
    assert kernels["scale"].barriers == 0
    assert kernels["flip"].max_threads == (256 if text != DYNAMIC else None)


def test_other_bytes_are_rejected() -> None:
    binary = compile_cuda(cuda_scale()).binary
    for damaged in (b"", b"\x7fELF\x02", binary[:100], binary[:1000], b"\x7fELF\x01" + binary[5:]):
        with pytest.raises(CompileError) as raised:
            read_cubin(damaged)
        assert raised.value.code == "bad-cubin"
