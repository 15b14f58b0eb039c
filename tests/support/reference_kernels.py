"""Small kernels written by hand, for the tests of toolchains and runtimes."""

from __future__ import annotations

import platform

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role, RuntimeCheck

HOST = Arch("x86-64-v", 1) if platform.machine() == "x86_64" else Arch("armv", 8)
SM_80 = Arch("sm_", 80)
F32 = DType.FLOAT32


def tensor(name: str, symbol: str, role: Role, dtype: DType = F32, shape: tuple[int, ...] = (4, 6)) -> Buffer:
    return Buffer(name, symbol, role, dtype, shape)


def add(options: tuple[str, ...] = ()) -> KernelSource:
    """C[i] = A[i] + B[i] on 4x6 floats."""
    text = "void add(const float *a, const float *b, float *c) { for (long i = 0; i < 24; i++) c[i] = a[i] + b[i]; }\n"
    buffers = (
        tensor("A", "a", Role.INPUT),
        tensor("B", "b", Role.INPUT),
        tensor("C", "c", Role.OUTPUT),
    )
    return KernelSource("add", Language.C, HOST, text, buffers, (LaunchSpec("add", ("a", "b", "c")),), options=options)


def row_sums_doubled() -> KernelSource:
    """Two launches: sums of rows added up in a zeroed workspace, then doubled."""
    text = """
void sums(const float *a, float *w) { for (long i = 0; i < 24; i++) w[i / 6] += a[i]; }
void twice(const float *w, float *c) { for (long i = 0; i < 4; i++) c[i] = 2 * w[i]; }
"""
    buffers = (
        tensor("A", "a", Role.INPUT),
        tensor("w", "w", Role.WORKSPACE, shape=(4,)),
        tensor("C", "c", Role.OUTPUT, shape=(4,)),
    )
    launches = (LaunchSpec("sums", ("a", "w"), zeroed=("w",)), LaunchSpec("twice", ("w", "c")))
    return KernelSource("row_sums_doubled", Language.C, HOST, text, buffers, launches)


def gather() -> KernelSource:
    """C[i] = A[P[i]] with a checked index."""
    text = """
#include <stdint.h>
void gather(const float *a, const int32_t *p, float *c, int64_t *status) {
    for (long i = 0; i < 3; i++) {
        if (p[i] < 0 || p[i] >= 5) { status[0] = 1; status[1] = 0; status[2] = p[i]; return; }
        c[i] = a[p[i]];
    }
}
"""
    buffers = (
        tensor("A", "a", Role.INPUT, shape=(5,)),
        tensor("P", "p", Role.INPUT, DType.INT32, (3,)),
        tensor("C", "c", Role.OUTPUT, shape=(3,)),
        tensor("status", "status", Role.STATUS, DType.INT64, (4,)),
    )
    launches = (LaunchSpec("gather", ("a", "p", "c", "status")),)
    checks = (RuntimeCheck("A", 0, 5, "P[i]", "i"),)
    return KernelSource("gather", Language.C, HOST, text, buffers, launches, checks)


def cuda_scale(arch: Arch = SM_80, shared_bytes: int = 0) -> KernelSource:
    """Two CUDA kernels: one with static shared memory and a barrier, one plain."""
    text = """
extern "C" __global__ void __launch_bounds__(256) flip(const float *a, float *c) {
    __shared__ float tile[512];
    tile[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    c[threadIdx.x] = tile[255 - threadIdx.x];
}
extern "C" __global__ void scale(float *c) { c[blockIdx.x * 64 + threadIdx.x] *= 2.0f; }
"""
    buffers = (tensor("A", "a", Role.INPUT, shape=(256,)), tensor("C", "c", Role.OUTPUT, shape=(256,)))
    launches = (
        LaunchSpec("flip", ("a", "c"), (1, 1, 1), (256, 1, 1), shared_bytes),
        LaunchSpec("scale", ("c",), (4, 1, 1), (64, 1, 1)),
    )
    return KernelSource("cuda_scale", Language.CUDA, arch, text, buffers, launches)
