"""Values that repeat → whole arrays, made on the device: what crosses the bus is a million values at most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from roller_svc.bench.gpu.device_errors import OUT_OF_MEMORY
from roller_svc.errors import LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cuda.arrays import DeviceBytes


def on_device(cupy: Any, program: TensorProgram, patterns: Mapping[str, Array]) -> dict[str, DeviceBytes]:
    """An array of each input, which is there when this returns; raises LaunchError (out-of-memory)."""
    arrays = {name: _repeat(cupy, patterns[name], kind.shape) for name, kind in program.inputs}
    cupy.cuda.runtime.deviceSynchronize()  # streams that a graph is replayed on wait for no other
    return arrays


def allocate(cupy: Any, nbytes: int) -> Any:
    """So many bytes of the device; raises LaunchError (out-of-memory)."""
    try:
        return cupy.empty((nbytes,), np.dtype(np.uint8))
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise LaunchError(f"the device has no room for {nbytes} bytes", code=OUT_OF_MEMORY) from error


def read_elements(cupy: Any, array: DeviceBytes, places: Array) -> Array:
    """The elements at these flat indices, in the host's memory."""
    width = array.dtype.bytes
    byte_offsets = (places.astype(np.int64)[:, None] * width + np.arange(width)).reshape(-1)
    arrays: Array = array.raw[cupy.asarray(byte_offsets)].get()
    return arrays


def _repeat(cupy: Any, pattern: Array, shape: tuple[int, ...]) -> DeviceBytes:
    """Copies within the device, each as long as all before it. They may still be under way."""
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
