"""A cubin → calls on GPU arrays, through CuPy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from roller_svc.errors import ArgumentError, InvariantError, LaunchError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.binding import check_names
from roller_svc.runtime.cuda.arrays import ArrayLibrary, CupyArrays, DeviceArray, import_cupy, library_of
from roller_svc.runtime.cuda.driver import Parameters, driver

# Events tell times to about half a microsecond (CUDA runtime API, cudaEventElapsedTime): 0.5 % of a sample.
_MIN_SAMPLE_S = 100e-6
# More shared memory than this, static and dynamic together, a kernel must ask for (CUDA C++ guide, Shared Memory).
_MAX_DEFAULT_SHARED_BYTES = 48 * 1024


@cache
def device_present() -> bool:
    """Whether the driver is there and has a device. Imports no CUDA package and makes no context."""
    return device_count() > 0


def device_count() -> int:
    """Devices that the driver sees; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of the caller's library, as CuPy's launches and events take it: something with a `ptr`."""

    ptr: int


class CudaModule:
    """A cubin, loaded on each device when it is first called there."""

    def __init__(self, compiled: CompiledKernel) -> None:
        if compiled.source.language is not Language.CUDA:
            raise InvariantError(f"{compiled.source.name} is {compiled.source.language.value}, not CUDA")
        self.source: KernelSource = compiled.source
        self._compiled = compiled
        self._lock = threading.Lock()
        self._functions: dict[int, tuple[Any, ...]] = {}

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """One call, on the current stream of the arrays' library, not waited for."""
        call = self.bind(arrays, out)
        call()
        return call.finish()

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> CudaCall:
        """A call made ready: calling the result only launches the kernels, again and again (for timing).

        Raises ArgumentError for arrays that do not fit and LaunchError (no-device, no-cupy, wrong-device).
        """
        if not device_present():
            raise LaunchError(
                f"{self.source.name} is for {self.source.arch} and there is no NVIDIA device here "
                "(no driver, or a driver without a device)",
                code="no-device",
            )
        cupy = import_cupy()
        binding = bind_on_device(self.source.buffers, arrays, out, lambda: CupyArrays(cupy))
        return CudaCall(self.source, cupy, binding, self.functions(cupy, binding.device))

    def functions(self, cupy: Any, device: int) -> tuple[Any, ...]:
        """The entry function of every launch, on that device."""
        with self._lock:
            if device not in self._functions:
                self._functions[device] = _load(self._compiled, cupy, device)
            return self._functions[device]


class Replay:
    """Calls recorded once as a CUDA graph, so that the device and not the host's launching decides how long they take:
    a launch from Python costs more than many a kernel."""

    def __init__(self, cupy: Any, calls: Sequence[CudaCall], times: int) -> None:
        """`times` calls in all, of each of `calls` in turn. Their device is current, their arrays are there."""
        self.times = times
        self._cupy = cupy
        self._calls = calls  # the graph has the addresses of their memory
        self._stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be recorded
        self._stream.begin_capture()
        try:
            for i in range(times):
                calls[i % len(calls)].launch(self._stream)
        finally:  # a stream that goes on recording would swallow what comes next
            self._graph = self._stream.end_capture()

    def seconds(self) -> float:
        """Of all recorded calls. They run once before: so they are warm, and the device is busy until all is queued."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self._graph.launch(stream=self._stream)
        start.record(self._stream)
        self._graph.launch(stream=self._stream)
        end.record(self._stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3


@dataclass(frozen=True, slots=True)
class DeviceBinding:
    """One call's memory by Buffer symbol, and what is copied to the caller's arrays afterwards."""

    library: ArrayLibrary
    device: int
    memory: dict[str, DeviceArray]
    allocated: dict[str, DeviceArray]  # results made for this call, by output name
    user_arrays: dict[str, Any]  # the caller's own arrays that are results
    copies: tuple[tuple[DeviceArray, DeviceArray], ...]  # (to, from)


@dataclass(frozen=True, slots=True)
class _Step:
    """One launch made ready. `parameters`: of a kernel that takes more than addresses; `zeroed`: (address, bytes)."""

    function: Any
    launch: LaunchSpec
    arguments: tuple[np.uint64, ...]
    zeroed: tuple[tuple[int, int], ...]
    parameters: Parameters | None


class CudaCall:
    """One set of arrays bound to a module, launched on the stream that is current when it is called."""

    min_sample_s = _MIN_SAMPLE_S

    def __init__(self, source: KernelSource, cupy: Any, binding: DeviceBinding, functions: tuple[Any, ...]) -> None:
        self._cupy = cupy
        self._binding = binding
        sizes = {b.symbol: b.bytes for b in source.buffers}
        self._replay: Replay | None = None
        memory = dict(binding.memory)
        for buffer in source.buffers_of(Role.WORKSPACE):
            memory[buffer.symbol] = binding.library.empty(buffer.shape, buffer.dtype, binding.device)
        self._memory = memory  # keeps the workspace
        addresses = {symbol: array.address for symbol, array in memory.items()}
        with cupy.cuda.Device(binding.device):
            self._steps = tuple(
                _Step(
                    function,
                    launch,
                    # A numpy scalar has the size of a pointer whatever the platform makes of a Python number.
                    tuple(np.uint64(addresses[symbol]) for symbol in launch.args),
                    tuple((addresses[symbol], sizes[symbol]) for symbol in launch.zeroed),
                    driver().parameters(launch, addresses) if launch.tensor_maps else None,
                )
                for function, launch in zip(functions, source.launches, strict=True)
            )

    def __call__(self) -> None:
        """Launch everything, in order; returns before the work is done."""
        with self._cupy.cuda.Device(self._binding.device), _launch_errors(self._cupy):
            self.launch(self.stream())

    def launch(self, stream: Any) -> None:
        """The same on a stream of the call's device, which is current."""
        for step in self._steps:
            for address, size in step.zeroed:
                self._cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)
            launch = step.launch
            if step.parameters is None:
                step.function(launch.grid, launch.block, step.arguments, shared_mem=launch.shared_bytes, stream=stream)
            else:
                driver().launch(step.function.ptr, launch, step.parameters, stream.ptr)

    def stream(self) -> Stream:
        return Stream(self._binding.library.stream(self._binding.device))

    def stopwatch(self, _: Callable[[], object], times: int) -> float:
        """Seconds that the device takes for `times` of these calls (a Stopwatch of runtime/measure.py)."""
        with self._cupy.cuda.Device(self._binding.device), _launch_errors(self._cupy):
            self._cupy.cuda.runtime.streamSynchronize(self.stream().ptr)  # the arrays may still be on their way
            if self._replay is None or self._replay.times != times:
                self._replay = Replay(self._cupy, (self,), times)
            return self._replay.seconds()

    def device_name(self) -> str:
        with _launch_errors(self._cupy):
            return str(self._cupy.cuda.runtime.getDeviceProperties(self._binding.device)["name"].decode())

    def finish(self) -> dict[str, Any]:
        """The results, by output name, in the caller's library."""
        binding = self._binding
        with _launch_errors(self._cupy):
            for target, copied in binding.copies:
                binding.library.copy_into(target, copied)
        # Only now: a library that takes an array over also takes over what to wait for.
        return binding.user_arrays | {name: binding.library.result(array) for name, array in binding.allocated.items()}


def bind_on_device(
    buffers: tuple[Buffer, ...],
    arrays: Mapping[str, object],
    out: Mapping[str, object] | None,
    default_library: Callable[[], ArrayLibrary],
) -> DeviceBinding:
    """Memory for every input and output; the same rules as runtime/binding.py has for numpy arrays.

    All arrays of a call are of one library and on one device; results are too. `default_library` is for no arrays.
    """
    out = {} if out is None else out
    inputs = [b for b in buffers if b.role is Role.INPUT]
    outputs = [b for b in buffers if b.role is Role.OUTPUT]
    check_names("argument", [b.name for b in inputs], arrays, complete=True)
    check_names("output", [b.name for b in outputs], out, complete=False)
    arguments = [("argument", b, arrays[b.name]) for b in inputs]
    arguments += [("output", b, out[b.name]) for b in outputs if b.name in out]
    library = _common_library(arguments) or default_library()
    views = [_check_array(library, what, buffer, array) for what, buffer, array in arguments]
    device = _common_device(arguments, views)
    memory: dict[str, DeviceArray] = {}
    for buffer, view in zip(inputs, views, strict=False):
        memory[buffer.symbol] = view if view.is_dense(buffer.dtype.bytes) else library.copy_of(view, buffer.dtype)
    targets = {b.name: v for (what, b, _), v in zip(arguments, views, strict=True) if what == "output"}
    allocated: dict[str, DeviceArray] = {}
    copies: list[tuple[DeviceArray, DeviceArray]] = []
    for buffer in outputs:
        target = targets.get(buffer.name)
        other_arrays = [(v, b.dtype.bytes) for (_, b, _), v in zip(arguments, views, strict=True) if v is not target]
        if target is not None and _can_write_in_place(target, buffer, other_arrays):
            memory[buffer.symbol] = target
        else:
            memory[buffer.symbol] = result = library.empty(buffer.shape, buffer.dtype, device)
            if target is None:
                allocated[buffer.name] = result
            else:
                copies.append((target, result))
    return DeviceBinding(library, device, memory, allocated, {name: out[name] for name in targets}, tuple(copies))


def runs_on(arch: Arch, capability: tuple[int, int]) -> bool:
    """Whether a cubin for `arch` runs on a device: the same major number, no older; one with a suffix only there."""
    major, minor = divmod(arch.number, 10)
    return (major, minor) == capability if arch.suffix else major == capability[0] and minor <= capability[1]


def _load(compiled: CompiledKernel, cupy: Any, device: int) -> tuple[Any, ...]:
    source = compiled.source
    with cupy.cuda.Device(device) as current, _launch_errors(cupy):
        digits = str(current.compute_capability)
        capability = int(digits[:-1]), int(digits[-1])
        if not runs_on(source.arch, capability):
            raise LaunchError(
                f"{source.name} is for {source.arch}; device {device} is sm_{digits}: compile for that",
                code="wrong-device",
            )
        module = cupy.cuda.Module()
        module.load(compiled.binary)
        functions = []
        for launch, used in zip(source.launches, compiled.resources, strict=True):
            function = module.get_function(launch.name)
            if launch.shared_bytes and used.shared_bytes > _MAX_DEFAULT_SHARED_BYTES:
                _allow_shared_memory(cupy, function, launch)
            functions.append(function)
        return tuple(functions)


def _allow_shared_memory(cupy: Any, function: Any, launch: LaunchSpec) -> None:
    driver = cupy.cuda.driver
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes)


@contextmanager
def _launch_errors(cupy: Any) -> Iterator[None]:
    try:
        yield
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise LaunchError(f"the device refused the kernel: {error}") from error


def _common_library(arguments: list[tuple[str, Buffer, object]]) -> ArrayLibrary | None:
    libraries = {buffer.name: library_of(buffer.name, array) for _, buffer, array in arguments}
    names = sorted({library.name for library in libraries.values()})
    if len(names) > 1:
        raise ArgumentError(f"the arrays of one call are of several libraries: {', '.join(names)}", code="mixed-arrays")
    return next(iter(libraries.values()), None)


def _common_device(arguments: list[tuple[str, Buffer, object]], views: list[DeviceArray]) -> int:
    devices = {view.device for view in views}
    if len(devices) > 1:
        devices_by_array = ", ".join(f"{b.name} on {v.device}" for (_, b, _), v in zip(arguments, views, strict=True))
        raise ArgumentError(f"the arrays of one call are on several devices: {devices_by_array}", code="mixed-arrays")
    return next(iter(devices), 0)


def _check_array(library: ArrayLibrary, what: str, buffer: Buffer, array: object) -> DeviceArray:
    view = library.view(array)
    if view is None:
        raise ArgumentError(f"{what} {buffer.name!r} is not on a GPU; move it there first", code="not-an-array")
    if view.dtype != buffer.dtype.value:
        raise ArgumentError(f"{what} {buffer.name!r} has dtype {view.dtype}, the kernel takes {buffer.dtype.value}",
                            code="dtype-mismatch")  # fmt: skip
    if view.shape != buffer.shape:
        raise ArgumentError(f"{what} {buffer.name!r} has shape {view.shape}, the kernel takes {buffer.shape}",
                            code="shape-mismatch")  # fmt: skip
    if what == "output" and not library.writeable(array):
        raise ArgumentError(f"output {buffer.name!r} cannot be written in place", code="out-not-writeable")
    return view


def _can_write_in_place(target: DeviceArray, buffer: Buffer, other_arrays: list[tuple[DeviceArray, int]]) -> bool:
    item_bytes = buffer.dtype.bytes
    if not target.is_dense(item_bytes):
        return False
    first, end = target.span(item_bytes)
    spans = [other.span(other_bytes) for other, other_bytes in other_arrays]
    return all(end <= other_first or other_end <= first for other_first, other_end in spans)
