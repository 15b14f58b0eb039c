"""A simulated CuPy: small arrays have memory, large ones only addresses."""

from __future__ import annotations

import ctypes
import importlib.machinery
import math
import types
import weakref
from typing import Any

import numpy as np

from roller_bench.gpu.rehearsal.driver import NOWHERE, Device, DriverError, Event, Module, NoMemoryError, Stream
from roller_bench.gpu.rehearsal.nvidia import BUS_ID

NAME = "NVIDIA H200"
REAL_BYTES = 16 << 20  # larger arrays have addresses and no memory
_ALIGNMENT_BYTES = 512


class Allocation:
    """The memory of an array and its views; freed when all are gone."""


class Array:
    """cupy.ndarray, with memory or only an address."""

    def __init__(self, device: Device, numpy: Any, shape: tuple[int, ...], dtype: Any, address: int, base: Any) -> None:
        self._device, self._base = device, base
        self.numpy, self.shape, self.dtype = numpy, shape, np.dtype(dtype)
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        self.strides = np.broadcast_to(np.zeros((), self.dtype), shape).strides if numpy is None else numpy.strides
        self.data = types.SimpleNamespace(ptr=address)
        self.device = types.SimpleNamespace(id=0)

    def get(self) -> Any:
        self._device.wait()
        return np.zeros(self.shape, self.dtype) if self.numpy is None else self.numpy.copy()

    def set(self, values: Any) -> None:
        if self.numpy is not None:
            self.numpy[...] = values

    def fill(self, value: Any) -> None:
        if self.numpy is not None:
            self.numpy.fill(value)

    def __getitem__(self, key: Any) -> Array:
        if self.numpy is None:
            if isinstance(key, Array):
                return Array(self._device, np.zeros(key.shape, self.dtype), key.shape, self.dtype, NOWHERE, None)
            start, stop, _ = key.indices(self.shape[0])
            address = self.data.ptr + start * self.dtype.itemsize
            return Array(self._device, None, (stop - start,), self.dtype, address, self._base)
        part = self.numpy[key.numpy if isinstance(key, Array) else key]
        return Array(self._device, part, part.shape, part.dtype, part.ctypes.data, self._base)

    def __setitem__(self, key: Any, value: Array) -> None:
        self._device.work(value.nbytes)
        if self.numpy is not None and value.numpy is not None:
            self.numpy[key] = value.numpy


Array.__module__ = "cupy"


class Runtime:
    """cupy.cuda.runtime."""

    CUDARuntimeError = DriverError
    memcpyDeviceToDevice = 3

    def __init__(self, device: Device) -> None:
        self._device = device

    def getDeviceProperties(self, _: int) -> dict[str, Any]:
        self._device.check()
        spec = self._device.spec
        return {
            "name": NAME.encode(),
            "major": 9,
            "minor": 0,
            "multiProcessorCount": spec.num_cores,
            "totalGlobalMem": spec.dram.capacity_bytes,
            "l2CacheSize": spec.level("l2").capacity_bytes,
            "sharedMemPerBlockOptin": spec.limits.shared_bytes_per_block,
        }

    def driverGetVersion(self) -> int:
        return 13000

    runtimeGetVersion = driverGetVersion

    def deviceGetPCIBusId(self, _: int) -> str:
        return BUS_ID

    def memset(self, address: int, value: int, size: int) -> None:
        self._device.check()
        if address < NOWHERE:
            ctypes.memset(address, value, size)

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        recording = Stream.recording(stream)
        if recording is None:
            self.memset(address, value, size)
        else:
            recording.append(lambda: self._device.work(size))

    def memcpyAsync(self, target: int, source: int, size: int, _kind: int, _stream: int) -> None:
        self._device.check()
        self._device.work(2 * size)
        if max(target, source) < NOWHERE:
            ctypes.memmove(target, source, size)

    def deviceSynchronize(self) -> None:
        self._device.wait()

    def streamSynchronize(self, _: int) -> None:
        self._device.check()


class CurrentDevice:
    """cupy.cuda.Device."""

    compute_capability = "90"

    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> CurrentDevice:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def synchronize(self) -> None:
        self._device.check()


class Arrays:
    """CuPy's functions that create arrays."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        of_type, device, allocation = np.dtype(dtype), self._device, Allocation()
        nbytes = math.prod(shape) * of_type.itemsize
        device.allocate(nbytes)
        weakref.finalize(allocation, device.free, nbytes)
        if nbytes > REAL_BYTES:
            return Array(device, None, tuple(shape), of_type, device.address(nbytes), allocation)
        memory = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        values = memory[start : start + nbytes].view(of_type).reshape(shape)
        return Array(device, values, tuple(shape), of_type, values.ctypes.data, allocation)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def asarray(self, values: Any) -> Array:
        array = self.empty(values.shape, values.dtype)
        array.set(values)
        return array


def make_cupy(device: Device) -> types.ModuleType:
    """Return a module with the parts of CuPy that are used."""
    arrays, module, nothing = Arrays(device), types.ModuleType("cupy"), types.SimpleNamespace
    driver = nothing(
        CUDADriverError=DriverError,
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        funcSetAttribute=lambda *_: device.check(),
    )
    cuda = nothing(
        Device=lambda _: CurrentDevice(device),
        Module=lambda: Module(device),
        Stream=Stream,
        Event=lambda: Event(device),
        runtime=Runtime(device),
        driver=driver,
        memory=nothing(OutOfMemoryError=NoMemoryError),
        get_elapsed_time=lambda start, end: 1e3 * (end.at_s - start.at_s),
        get_current_stream=lambda: nothing(ptr=0),
    )
    names = {"__spec__": importlib.machinery.ModuleSpec("cupy", None), "__version__": "rehearsed", "ndarray": Array,
             "empty": arrays.empty, "zeros": arrays.zeros, "asarray": arrays.asarray, "cuda": cuda,
             "get_default_memory_pool": lambda: nothing(free_all_blocks=lambda: None)}  # fmt: skip
    for name, value in names.items():
        setattr(module, name, value)
    return module
