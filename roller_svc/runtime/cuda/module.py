"""Load cubins and launch them on GPU arrays, through CuPy."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, Self

import numpy as np

from roller_svc.errors import ArgumentError, InvariantError, LaunchError
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.binding import Binding, bind, overlap
from roller_svc.runtime.cuda.arrays import ArrayLibrary, CupyArrays, DeviceArray, import_cupy, library_of
from roller_svc.runtime.cuda.driver import Parameters, driver
from roller_svc.runtime.saved.launch import MAX_DEFAULT_SHARED_BYTES

# Events resolve about half a microsecond (CUDA runtime API, cudaEventElapsedTime): 0.5 % of a sample.
_MIN_SAMPLE_S = 100e-6
# CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR (CUDA driver API).
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_DEVICE_NAME_BYTES = 256


@cache
def device_present() -> bool:
    """Whether there is a driver with a device. Imports no CUDA package and creates no context."""
    return device_count() > 0


def device_count() -> int:
    """Return the number of devices that the driver sees; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device that the driver sees."""

    name: str
    capability: tuple[int, int]  # compute capability, major and minor


def list_devices() -> tuple[CudaDevice, ...]:
    """Return the devices that the driver sees. Imports no CUDA package and creates no context."""
    count = device_count()
    if not count:
        return ()
    driver = ctypes.CDLL("libcuda.so.1")
    devices = []
    for ordinal in range(count):
        handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(_MAX_DEVICE_NAME_BYTES)
        results = (
            driver.cuDeviceGet(ctypes.byref(handle), ordinal),
            driver.cuDeviceGetName(name, len(name), handle),
            driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, handle),
            driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, handle),
        )
        if not any(results):
            devices.append(CudaDevice(name.value.decode(errors="replace"), (major.value, minor.value)))
    return tuple(devices)


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of the caller's library in the form that CuPy takes: an object with a `ptr`."""

    ptr: int


class CudaModule:
    """A cubin, loaded on each device at the first call there."""

    takes_tensors = True  # of torch, as they are

    def __init__(self, compiled: CompiledKernel) -> None:
        if compiled.source.language is not Language.CUDA:
            raise InvariantError(f"{compiled.source.name} is {compiled.source.language.value}, not CUDA")
        if any(launch.cooperative for launch in compiled.source.launches):
            raise LaunchError(f"{compiled.source.name} has a cooperative launch, which only its model makes")
        self.source: KernelSource = compiled.source
        self._compiled = compiled
        self._lock = threading.Lock()
        self._functions: dict[int, tuple[Any, ...]] = {}

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Launch the kernel on the current stream of the arrays' library without waiting for it."""
        call = self.bind(arrays, out)
        call()
        return call.results()

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> CudaCall:
        """Return a bound call: each call of the result only launches the kernels (for timing).

        Raises ArgumentError for arrays that do not fit and LaunchError (no-device, no-cupy, wrong-device).
        """
        if not device_present():
            raise LaunchError(
                f"{self.source.name} is for {self.source.arch} and there is no NVIDIA device here "
                '(no driver, or a driver without a device); runtime="emulator" runs it on the CPU',
                code="no-device",
            )
        cupy = import_cupy()
        library = DeviceArrays.of_call(self.source.buffers, arrays, out, CupyArrays(cupy))
        binding = bind(self.source.buffers, arrays, out, library)
        return CudaCall(self.source, cupy, library, binding, self.functions(cupy, library.device))

    def functions(self, cupy: Any, device: int) -> tuple[Any, ...]:
        """Return the entry function of every launch on that device."""
        with self._lock:
            if device not in self._functions:
                self._functions[device] = load_functions(self._compiled, cupy, device)
            return self._functions[device]


class Launchable(Protocol):
    """Launches that a stream may record."""

    def launch(self, stream: Any) -> None: ...


class Replay:
    """Calls captured in a CUDA graph, to time the device and not the launch overhead of Python."""

    def __init__(self, cupy: Any, calls: Sequence[Launchable], times: int) -> None:
        """Capture `times` calls, round-robin over `calls`. Their device must be current."""
        self.times = times
        self._cupy = cupy
        self._calls = calls  # own the memory whose addresses are in the graph
        self._stream = cupy.cuda.Stream(non_blocking=True)  # the default stream cannot be captured
        self._stream.begin_capture()
        try:
            for i in range(times):
                calls[i % len(calls)].launch(self._stream)
        finally:  # a stream still in capture mode would record later work instead of running it
            self._graph = self._stream.end_capture()

    def seconds(self) -> float:
        """Return the time of all captured calls. They run once before, which warms up and hides the queueing."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        self._graph.launch(stream=self._stream)
        start.record(self._stream)
        self._graph.launch(stream=self._stream)
        end.record(self._stream)
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3


@dataclass(frozen=True, slots=True)
class _Step:
    """One launch with its arguments."""

    function: Any
    launch: LaunchSpec
    arguments: tuple[np.uint64, ...]
    zeroed: tuple[tuple[int, int], ...]  # (address, bytes)
    parameters: Parameters | None  # for a kernel with tensor maps


class CudaCall:
    """Arrays bound to a module. A call launches on the stream that is current then."""

    min_sample_s = _MIN_SAMPLE_S

    def __init__(
        self,
        source: KernelSource,
        cupy: Any,
        library: DeviceArrays,
        binding: Binding[DeviceArray],
        functions: tuple[Any, ...],
    ) -> None:
        self._cupy = cupy
        self._library = library
        self._binding = binding
        sizes = {b.symbol: b.bytes for b in source.buffers}
        self._replay: Replay | None = None
        memory = dict(binding.memory)
        for buffer in source.buffers_of(Role.WORKSPACE):
            memory[buffer.symbol] = library.empty(buffer)
        self._memory = memory  # keeps the workspace
        addresses = {symbol: array.address for symbol, array in memory.items()}
        with cupy.cuda.Device(library.device):
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
        """Launch all kernels in order, and the copies of outputs. Returns before the work is done."""
        with self._cupy.cuda.Device(self._library.device), launch_errors(self._cupy), self._library.noted_writes(self._binding):
            self.launch(self.stream())
            self._binding.copy_back()

    def launch(self, stream: Any) -> None:
        """Launch all kernels on a stream of the call's device, which must be current."""
        for step in self._steps:
            for address, size in step.zeroed:
                self._cupy.cuda.runtime.memsetAsync(address, 0, size, stream.ptr)
            launch = step.launch
            if step.parameters is None:
                step.function(launch.grid, launch.block, step.arguments, shared_mem=launch.shared_bytes, stream=stream)
            else:
                driver().launch(step.function.ptr, launch, step.parameters, stream.ptr)

    def stream(self) -> Stream:
        return Stream(self._library.library.stream(self._library.device))

    def stopwatch(self, _: Callable[[], object], times: int) -> float:
        """Return the device time of `times` calls in seconds (a Stopwatch of runtime/measure.py)."""
        with self._cupy.cuda.Device(self._library.device), launch_errors(self._cupy):
            self._cupy.cuda.runtime.streamSynchronize(self.stream().ptr)  # the arrays may still be in transfer
            if self._replay is None or self._replay.times != times:
                self._replay = Replay(self._cupy, (self,), times)
            return self._replay.seconds()

    def device_name(self) -> str:
        with launch_errors(self._cupy):
            return str(self._cupy.cuda.runtime.getDeviceProperties(self._library.device)["name"].decode())

    def results(self) -> dict[str, Any]:
        """Return the results by output name, as arrays of the caller's library."""
        with launch_errors(self._cupy):
            return self._binding.results()


class DeviceArrays:
    """GPU arrays of one call, results included: of one library, on one device."""

    def __init__(self, library: ArrayLibrary) -> None:
        self.library = library
        self.device = 0
        self._devices: dict[tuple[str, str], int] = {}  # of the arrays so far

    @classmethod
    def of_call(
        cls,
        buffers: Sequence[Buffer],
        arrays: Mapping[str, object],
        out: Mapping[str, object] | None,
        default: ArrayLibrary,
    ) -> Self:
        """Return the common library of a call's arrays, or the default one for a call without arrays."""
        by_role = {Role.INPUT: arrays, Role.OUTPUT: out or {}}
        libraries = [
            library_of(each.name, by_role[each.role][each.name]) for each in buffers if each.name in by_role.get(each.role, ())
        ]
        names = sorted({library.name for library in libraries})
        if len(names) > 1:
            raise ArgumentError(f"arrays must come from one library, got {', '.join(names)}", code="mixed-arrays")
        return cls(libraries[0] if libraries else default)

    def view(self, what: str, buffer: Buffer, value: Any) -> DeviceArray:
        view = self.library.view(value)
        if view is None:
            raise ArgumentError(f"{what} {buffer.name!r} is not on a GPU; move it there first", code="not-an-array")
        if self.library.needs_gradient(value):
            raise ArgumentError(
                f"{what} {buffer.name!r} requires a gradient, which kernels and models do not give",
                code="needs-gradient",
                hint="call below torch.no_grad(), or pass .detach()",
            )
        if view.dtype != buffer.dtype.value:
            raise ArgumentError(
                f"{what} {buffer.name!r} has dtype {view.dtype}, expected {buffer.dtype.value}", code="dtype-mismatch"
            )
        if view.shape != buffer.shape:
            raise ArgumentError(f"{what} {buffer.name!r} has shape {view.shape}, expected {buffer.shape}", code="shape-mismatch")
        if what == "output" and not self.library.writeable(value):
            raise ArgumentError(f"output {buffer.name!r} cannot be written in place", code="out-not-writeable")
        self._devices[what, buffer.name] = self.device = view.device
        if len(set(self._devices.values())) > 1:
            shown = ", ".join(f"{name} on {device}" for (_, name), device in self._devices.items())
            raise ArgumentError(f"the arrays of one call are on several devices: {shown}", code="mixed-arrays")
        return view

    def is_dense(self, array: DeviceArray) -> bool:
        return array.is_dense

    def is_writeable(self, value: Any) -> bool:
        return self.library.writeable(value)

    def shares_memory(self, first: DeviceArray, second: DeviceArray) -> bool:
        (start, end), (other_start, other_end) = first.span, second.span
        return start < other_end and other_start < end

    def overlaps_itself(self, array: DeviceArray) -> bool:
        return overlap(array.shape, array.strides, array.item_bytes)

    def is_same(self, first: DeviceArray, second: DeviceArray) -> bool:
        return first.address == second.address and first.strides == second.strides

    def empty(self, buffer: Buffer) -> DeviceArray:
        return self.library.empty(buffer.shape, buffer.dtype, self.device)

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        self.library.copy_into(target, source)

    def result(self, array: DeviceArray) -> Any:
        return self.library.result(array)

    @contextmanager
    def noted_writes(self, binding: Binding[DeviceArray]) -> Iterator[None]:
        """Tell the library of the caller's arrays that the call in the block may have written, also if it fails."""
        try:
            yield
        finally:
            self.library.note_writes(binding.written)


def runs_on(arch: Arch, capability: tuple[int, int]) -> bool:
    """Whether a cubin for `arch` runs on a device.

    The major number must be equal and the minor one not higher. With a suffix both must be equal.
    """
    major, minor = divmod(arch.number, 10)
    return (major, minor) == capability if arch.suffix else major == capability[0] and minor <= capability[1]


def load_functions(compiled: CompiledKernel, cupy: Any, device: int) -> tuple[Any, ...]:
    """Load a cubin on a device, and return the entry function of every launch. Raises LaunchError (wrong-device)."""
    source = compiled.source
    with cupy.cuda.Device(device) as current, launch_errors(cupy):
        digits = str(current.compute_capability)
        capability = int(digits[:-1]), int(digits[-1])
        if not runs_on(source.arch, capability):
            raise LaunchError(
                f"{source.name} is compiled for {source.arch}, device {device} is sm_{digits}",
                code="wrong-device",
            )
        module = cupy.cuda.Module()
        module.load(compiled.binary)
        functions = []
        for launch, used in zip(source.launches, compiled.resources, strict=True):
            function = module.get_function(launch.name)
            if launch.shared_bytes and used.shared_bytes > MAX_DEFAULT_SHARED_BYTES:
                _allow_shared_memory(cupy, function, launch)
            functions.append(function)
        return tuple(functions)


def _allow_shared_memory(cupy: Any, function: Any, launch: LaunchSpec) -> None:
    driver = cupy.cuda.driver
    driver.funcSetAttribute(function.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes)


@contextmanager
def launch_errors(cupy: Any) -> Iterator[None]:
    """Raise errors of CuPy as LaunchError."""
    try:
        yield
    except (cupy.cuda.driver.CUDADriverError, cupy.cuda.runtime.CUDARuntimeError) as error:
        raise LaunchError(f"kernel launch failed: {error}") from error
