"""A device, its driver, CuPy and NVML that are not there: memory of numpy, kernels by the emulator, a clock of sums."""

from __future__ import annotations

import ctypes
import importlib.machinery
import math
import sys
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np

from gpu_bench import clocks, probing
from gpu_bench.rehearsal import Plan
from gpu_bench.rehearsal.libraries import installed_libraries
from gpu_bench.timing import JudgeTask, TimingTask
from roller_svc import hardware
from roller_svc.backends import emulated
from roller_svc.calibration import samples
from roller_svc.calibration.cuda_kernels import Sizes
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Role
from roller_svc.runtime import cuda, cuda_driver
from roller_svc.runtime.binding import numpy_dtype

SPEC = "nvidia-h200-sxm"
NAME, BUS_ID = "NVIDIA H200", "0000:00:00.0"
# Larger arrays have addresses and no memory, and kernels of larger buffers are not run.
REAL_BYTES, EMULATED_BYTES = 16 << 20, 2 << 20
NOWHERE = 1 << 60  # addresses of arrays without memory
SMALL_DEVICE_BYTES = 24 << 20  # of one that runs out of memory
EVERY = 3  # so many tasks go by before the next on a device with faults meets its own
LAST = 4  # tasks that a device that disappears does
SLOW_S = 4.0  # that each wait for a slow device takes
_LAUNCH_S = 2e-6
_SIZES = Sizes(cores=0, last_cache_bytes=1 << 16, dram_bytes=1 << 18, rounds=64, steps=64)  # of calibration's kernels
_FOREVER_S = 3600.0


class DriverError(Exception):
    """What the runtime or the driver answers."""


class NoMemoryError(MemoryError):
    """Of CuPy."""


class Device:
    """Its clock, its memory, and what befalls it. `uncomputed`: a kernel was launched whose results nobody knows."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.spec: HardwareSpec = hardware.load(SPEC)
        self.now_s = 0.0
        self.held_bytes = 0
        self.functions: dict[int, Function] = {}
        self.predicted_s: dict[str, float] = {}
        self.uncomputed = False
        self.broken = ""
        self._ticks = 0
        self._launches_left = math.inf
        self._next_address = NOWHERE

    def begin(self, task: object) -> None:
        """What the model expects of the task's kernels; and what is to befall the device meanwhile."""
        self.uncomputed = False
        if isinstance(task, TimingTask):
            self.predicted_s |= {one.compiled.source.key: one.predicted_s for one in task.candidates}
        with (self.plan.folder / "tasks").open("ab") as counted:
            counted.write(b".")
            number = counted.tell()
        if self.plan.fault == "fault" and number % EVERY == 0:
            self._launches_left = 2
        if self.plan.fault == "gone" and number > LAST:
            self.broken = "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
            if number == LAST + 1:
                time.sleep(_FOREVER_S)  # what is under way when a device goes does not come back

    def amended(self, result: Any) -> Any:
        """A row whose kernel was too large for the emulator is not judged."""
        if self.uncomputed and isinstance(result, tuple) and isinstance(result[1], JudgeTask):
            return result[0] | {"judged": "not judged: rehearsed, and too large to be emulated"}, None
        return result

    def check(self) -> None:
        if self.broken:
            raise DriverError(self.broken)

    def wait(self) -> None:
        self.check()
        if self.plan.fault == "slow":
            time.sleep(SLOW_S)

    def advance(self, seconds: float) -> None:
        """A little unevenly, so that samples differ."""
        self._ticks += 1
        self.now_s += seconds * (1 + self._ticks * 7 % 5 / 200)

    def work(self, nbytes: float, flops: float = 0.0, dtype: str = "float32") -> None:
        """As long as memory takes, or the fastest unit that computes in the type without rounding it."""
        fitting = [one for one in self.spec.units if one.in_dtype.value == dtype]
        exact = [one for one in fitting if not one.is_matrix or dtype not in ("float32", "float64")]
        rate = max((one.flops_per_s for one in exact), default=self.spec.units[0].flops_per_s)
        self.advance(_LAUNCH_S + max(nbytes / self.spec.dram.bandwidth_bytes_per_s, flops / rate))

    def allocated(self, nbytes: int) -> None:
        self.check()
        most = SMALL_DEVICE_BYTES if self.plan.fault == "memory" else self.spec.dram.capacity_bytes
        if self.held_bytes + nbytes > most:
            raise NoMemoryError(f"Out of memory allocating {nbytes} bytes")
        self.held_bytes += nbytes

    def freed(self, nbytes: int) -> None:
        self.held_bytes -= nbytes

    def address(self, nbytes: int) -> int:
        self._next_address += -(-nbytes // 512) * 512
        return self._next_address - -(-nbytes // 512) * 512

    def launched(self) -> None:
        self.check()
        self._launches_left -= 1
        if self._launches_left < 0:
            self.broken = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
            self.check()


class Function:
    """The function of one launch of a module."""

    def __init__(self, device: Device, loaded: Module, index: int) -> None:
        self.device, self.loaded, self.index = device, loaded, index
        self.ptr = 1000 + len(device.functions)
        device.functions[self.ptr] = self

    def __call__(self, grid: object, block: object, arguments: Any, shared_mem: int, stream: Any) -> None:
        self.run([int(one) for one in arguments], stream.ptr)

    def run(self, addresses: list[int], stream: int) -> None:
        """Now, or when the graph that records it is replayed; then its time passes and nothing is computed."""
        self.device.launched()
        source = self.loaded.source
        predicted = self.device.predicted_s.get(source.key)
        size = sum(b.bytes for b in source.buffers)
        share = len(source.launches)

        def passes() -> None:
            if predicted is None:
                self.device.work(size / share)
            else:
                self.device.advance(predicted / share)

        recording = Stream.recording(stream)
        if recording is not None:
            recording.append(passes)
            return
        passes()
        launch = source.launches[self.index]
        self.loaded.memory |= dict(zip(launch.args, addresses, strict=True))
        if self.index == share - 1:
            self.loaded.compute()


class Module:
    """A cubin, and the text that it comes from; all its launches are emulated together, at the last of them."""

    loading: CompiledKernel | None = None

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memory: dict[str, int] = {}

    def load(self, binary: bytes) -> None:
        assert Module.loading is not None
        assert binary == Module.loading.binary
        self.compiled = Module.loading
        self.source: KernelSource = self.compiled.source

    def get_function(self, name: str) -> Function:
        index = [launch.name for launch in self.source.launches].index(name)
        return Function(self.device, self, index)

    def compute(self) -> None:
        outer = [b for b in self.source.buffers if b.role in (Role.INPUT, Role.OUTPUT)]
        known = all(b.symbol in self.memory and self.memory[b.symbol] < NOWHERE for b in outer)
        if not known or sum(b.bytes for b in self.source.buffers) > EMULATED_BYTES:
            self.device.uncomputed = bool(outer)
            return
        inputs = {
            b.name: _values_at(self.memory[b.symbol], b)
            for b in outer if b.role is Role.INPUT
        }  # fmt: skip
        results = emulated(self.compiled).run(inputs)
        for buffer in outer:
            if buffer.role is Role.OUTPUT:
                made = np.ascontiguousarray(results[buffer.name])
                ctypes.memmove(self.memory[buffer.symbol], made.ctypes.data, made.nbytes)


def _values_at(address: int, buffer: Buffer) -> Any:
    return np.frombuffer(ctypes.string_at(address, buffer.bytes), numpy_dtype(buffer.dtype)).reshape(buffer.shape)


class Stream:
    """One that may record."""

    every: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()

    def __init__(self, device: Device | None = None, *, non_blocking: bool = True) -> None:
        self.ptr = 1 + len(Stream.every)
        while any(other.ptr == self.ptr for other in Stream.every):
            self.ptr += 1
        self.recorded: list[Callable[[], None]] | None = None
        Stream.every.add(self)

    @staticmethod
    def recording(pointer: int) -> list[Callable[[], None]] | None:
        found = [one.recorded for one in Stream.every if one.ptr == pointer and one.recorded is not None]
        return found[0] if found else None

    def begin_capture(self) -> None:
        self.recorded = []

    def end_capture(self) -> Any:
        recorded, self.recorded = self.recorded or [], None
        return types.SimpleNamespace(launch=lambda stream: [passes() for passes in recorded])


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = self.device.now_s

    def synchronize(self) -> None:
        self.device.wait()


class Room:
    """What an array and all its parts hold, and the device gets back when they are gone."""


class Array:
    """cupy.ndarray, of memory or of an address alone."""

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


def cupy_of(device: Device) -> types.ModuleType:
    """As much of CuPy as is used."""
    module = types.ModuleType("cupy")
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)

    def empty(shape: tuple[int, ...], dtype: Any) -> Array:
        of_type = np.dtype(dtype)
        nbytes = math.prod(shape) * of_type.itemsize
        device.allocated(nbytes)
        base = Room()
        if nbytes > REAL_BYTES:
            made = Array(device, None, tuple(shape), of_type, device.address(nbytes), base)
        else:
            room = np.empty(nbytes + 512, np.uint8)
            start = -room.ctypes.data % 512
            values = room[start : start + nbytes].view(of_type).reshape(shape)
            made = Array(device, values, tuple(shape), of_type, values.ctypes.data, base)
        weakref.finalize(base, device.freed, nbytes)
        return made

    def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
        made = empty(shape, dtype)
        made.fill(0)
        return made

    def asarray(values: Any) -> Array:
        made = empty(values.shape, values.dtype)
        made.set(values)
        return made

    def properties(_: int) -> dict[str, Any]:
        device.check()
        spec = device.spec
        return {"name": NAME.encode(), "major": 9, "minor": 0, "multiProcessorCount": spec.num_cores,
                "totalGlobalMem": spec.dram.capacity_bytes, "l2CacheSize": spec.level("l2").capacity_bytes,
                "sharedMemPerBlockOptin": spec.limits.shared_bytes_per_block}  # fmt: skip

    def memset(address: int, value: int, size: int, *_: Any) -> None:
        if address < NOWHERE:
            ctypes.memset(address, value, size)

    def memset_async(address: int, value: int, size: int, stream: int) -> None:
        recording = Stream.recording(stream)
        if recording is not None:
            recording.append(lambda: device.work(size))
        else:
            memset(address, value, size)

    class Current:
        """cupy.cuda.Device: a context, and an object that can be waited for."""

        def __init__(self, _: int) -> None:
            self.compute_capability = "90"

        def __enter__(self) -> Current:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def synchronize(self) -> None:
            device.check()

    runtime = types.SimpleNamespace(
        CUDARuntimeError=DriverError, getDeviceProperties=properties, driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000, deviceGetPCIBusId=lambda _: BUS_ID, memset=memset, memsetAsync=memset_async,
        memcpyAsync=lambda *sizes: device.work(2 * sizes[2]), memcpyDeviceToDevice=3,
        deviceSynchronize=device.wait, streamSynchronize=lambda _: device.check(),
    )  # fmt: skip
    driver = types.SimpleNamespace(
        CUDADriverError=DriverError, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        funcSetAttribute=lambda *_: device.check(),
    )  # fmt: skip
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        Device=Current, Module=lambda: Module(device), Stream=Stream, Event=lambda: Event(device), runtime=runtime,
        driver=driver, memory=types.SimpleNamespace(OutOfMemoryError=NoMemoryError),
        get_elapsed_time=lambda start, end: 1e3 * (end.at_s - start.at_s),
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    )  # fmt: skip
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    names = {"ndarray": Array, "empty": empty, "zeros": zeros, "asarray": asarray, "__version__": "rehearsed",
             "get_default_memory_pool": lambda: pool}  # fmt: skip
    for name, value in names.items():
        setattr(module, name, value)
    return module


class DriverLibrary:
    """libcuda, as runtime/cuda_driver.py calls it. The first word of a map is its address: the emulator makes maps of
    its own."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def cuTensorMapEncodeTiled(self, place: Any, kind: Any, rank: Any, address: Any, *_: Any) -> int:
        ctypes.memset(place.value, 0xFF, 128)
        ctypes.c_uint64.from_address(place.value).value = address.value
        return 0

    cuTensorMapEncodeIm2col = cuTensorMapEncodeTiled

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *_, stream, parameters, _extra = rest
        one = self._device.functions[function.value]
        launch = one.loaded.source.launches[one.index]
        words = [ctypes.c_uint64.from_address(pointer).value for pointer in parameters]
        count = len(launch.args)
        for view, address in zip(launch.maps, words[count:], strict=True):
            one.loaded.memory[view.buffer] = address - view.offset_bytes
        one.run(words[:count], stream.value or 0)
        return 0


class NvmlLibrary:
    """libnvidia-ml: figures of a device that is busy."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, device: Any) -> int:
        return 0 if bus_id == BUS_ID.encode() else 6

    def nvmlDeviceGetClockInfo(self, device: Any, kind: int, value: Any) -> int:
        value._obj.value = 1980 if kind == 1 else 2619
        return 0

    def nvmlDeviceGetPowerUsage(self, device: Any, value: Any) -> int:
        value._obj.value = 500_000
        return 0

    def nvmlDeviceGetTemperature(self, device: Any, sensor: int, value: Any) -> int:
        value._obj.value = 40
        return 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Any, value: Any) -> int:
        value._obj.value = 0
        return 0


@cache
def installed(plan: Plan) -> Device:
    """The device of this process, in place of what it has not: for good, since the process is for nothing else."""
    device = Device(plan)
    sys.modules["cupy"] = cupy_of(device)
    installed_libraries(device)
    load = cuda._load

    def loaded(compiled: CompiledKernel, cupy: Any, index: int) -> tuple[Any, ...]:
        Module.loading = compiled
        return load(compiled, cupy, index)

    replaced: list[tuple[Any, str, Any]] = [
        (cuda, "_load", loaded), (cuda, "device_present", lambda: True),
        (clocks, "nvml_library", NvmlLibrary), (samples, "waiting_s", lambda: 0.0),
        (probing, "SECONDS", 0.2), (probing, "sizes_of", lambda hw: replace(_SIZES, cores=hw.num_cores)),
    ]  # fmt: skip
    driver = cuda_driver.Driver(DriverLibrary(device), mend_small_maps=True)
    replaced += [(module, "driver", lambda: driver) for module in (cuda, cuda_driver)]
    for module, name, value in replaced:
        setattr(module, name, value)
    return device
