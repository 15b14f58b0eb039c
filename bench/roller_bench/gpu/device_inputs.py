"""Create device arrays by repeating a pattern on the device: at most a million values cross the bus."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from roller_bench.gpu.device_errors import OUT_OF_MEMORY
from roller_svc.errors import LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cuda.arrays import DeviceBytes


def on_device(cupy: Any, program: TensorProgram, patterns: Mapping[str, Array]) -> dict[str, DeviceBytes]:
    """Create all inputs and wait for the copies. Raises LaunchError (out-of-memory)."""
    arrays = {name: _repeat(cupy, patterns[name], kind.shape) for name, kind in program.inputs}
    cupy.cuda.runtime.deviceSynchronize()  # graphs replay on streams that do not wait for this one
    return arrays


def allocate(cupy: Any, nbytes: int) -> Any:
    """Allocate device memory. Raises LaunchError (out-of-memory)."""
    try:
        return cupy.empty((nbytes,), np.dtype(np.uint8))
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise LaunchError(f"the device cannot allocate {nbytes} bytes", code=OUT_OF_MEMORY) from error


def read_elements(cupy: Any, array: DeviceBytes, indices: Array) -> Array:
    """Copy the elements at these flat indices to the host."""
    width = array.dtype.bytes
    byte_offsets = (indices.astype(np.int64)[:, None] * width + np.arange(width)).reshape(-1)
    arrays: Array = array.raw[cupy.asarray(byte_offsets)].get()
    return arrays


def _repeat(cupy: Any, pattern: Array, shape: tuple[int, ...]) -> DeviceBytes:
    """Repeat a pattern by device-to-device copies of doubling size, without waiting for them."""
    values = np.ascontiguousarray(pattern).view(np.uint8)
    total = math.prod(shape) * pattern.dtype.itemsize
    raw, runtime = allocate(cupy, total), cupy.cuda.runtime
    filled = min(values.size, total)
    raw[:filled].set(values[:filled])
    while filled < total:
        more = min(filled, total - filled)
        address, stream = int(raw.data.ptr), cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(address + filled, address, more, runtime.memcpyDeviceToDevice, stream)
        filled += more
    return DeviceBytes(raw, DType(pattern.dtype.name), shape)
