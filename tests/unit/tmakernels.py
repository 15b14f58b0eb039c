"""Kernels of one block that bring one box by TMA and write it out as it lies in shared memory."""

from __future__ import annotations

import numpy as np
from emulated import wrappers

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role
from roller_svc.ir.tensor_map import MapMode, TensorMap

HOPPER = Arch("sm_", 90, "a")
UNSIGNED = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32}


def unsigned(view: TensorMap) -> DType:
    """The type of buffers that hold the map's elements bit by bit."""
    return UNSIGNED[view.dtype.bytes]


def bringing(
    view: TensorMap, elements: int, coordinates: tuple[int, ...], offsets: tuple[int, ...] = ()
) -> KernelSource:
    """From X, flat, to Y: what one copy brings. The map's buffer is `x`."""
    im2col = "im2col_" if view.mode is MapMode.IM2COL else ""
    load = f"tma_load_{im2col}{view.rank}d"
    type_ = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}[view.dtype.bytes]
    numbers = "".join(f", {n}" for n in (*coordinates, *offsets))
    count = view.bytes // view.dtype.bytes
    text = (
        wrappers("barrier_init", "fence_barrier_init", "barrier_expect", "barrier_wait", load)
        + f"""
extern "C" __global__ void __launch_bounds__(32, 1)
bring(const {type_} *__restrict__ x, {type_} *__restrict__ y, const __grid_constant__ TensorMap view) {{
  __shared__ __align__(1024) {type_} room[{count}];
  __shared__ __align__(8) unsigned long long full[1];
  if ((int)threadIdx.x == 0) {{
    barrier_init(&full[0], 1);
    fence_barrier_init();
  }}
  __syncthreads();
  if ((int)threadIdx.x == 0) {{
    barrier_expect(&full[0], {view.bytes});
    {load}(&room[0], &view, &full[0]{numbers});
  }}
  barrier_wait(&full[0], 0);
  for (int i = (int)threadIdx.x; i < {count}; i += 32) y[i] = room[i];
}}
"""
    )
    buffers = (
        Buffer("X", "x", Role.INPUT, unsigned(view), (elements,)),
        Buffer("Y", "y", Role.OUTPUT, unsigned(view), (count,)),
    )
    launch = LaunchSpec("bring", ("x", "y"), (1, 1, 1), (32, 1, 1), maps=(view,))
    return KernelSource("bring", Language.CUDA, HOPPER, text, buffers, (launch,))


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
