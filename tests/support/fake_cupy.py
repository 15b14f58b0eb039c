"""A CuPy that is not there: memory of numpy arrays, kernels of Python functions, graphs of closures."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from roller_svc.runtime.binding import aligned_empty


class FakeArray:
    """Looks like cupy.ndarray as far as the runtime looks."""

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        self.numpy = array
        self.data = types.SimpleNamespace(ptr=array.__array_interface__["data"][0])
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides
        self.device = types.SimpleNamespace(id=device)

    def __setitem__(self, key: object, value: FakeArray) -> None:
        self.numpy[key] = value.numpy

    def __getitem__(self, key: object) -> FakeArray:
        return FakeArray(self.numpy[key.numpy if isinstance(key, FakeArray) else key], self.device.id)

    @property
    def nbytes(self) -> int:
        return self.numpy.nbytes

    def get(self) -> np.ndarray:
        return self.numpy.copy()

    def set(self, array: np.ndarray) -> None:
        self.numpy[...] = array


FakeArray.__module__ = "cupy._core.core"


class FakeDriverError(Exception):
    pass


class FakeNoMemoryError(MemoryError):
    pass


class FakeStream:
    """A stream that records; while it does, what is launched on it does not run."""

    ptr = 99

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.recorded: list[Any] | None = None

    def begin_capture(self) -> None:
        assert self.recorded is None
        self.recorded = []

    def end_capture(self) -> Any:
        recorded, self.recorded = self.recorded, None
        assert recorded is not None
        return types.SimpleNamespace(launch=lambda stream: [run() for run in recorded])


class FakeCupy:
    """Records what is called. `kernels`: what the functions of a module do, given addresses.

    `refuse` makes every launch fail, `full` every allocation.
    """

    ndarray = FakeArray
    uint8 = np.uint8

    def __init__(self, kernels: Mapping[str, Callable[..., None]], capability: str = "80") -> None:
        self._kernels = kernels
        self.calls: list[tuple[Any, ...]] = []
        self.streams: list[FakeStream] = []
        self.refuse = self.full = False
        self._capability = capability
        driver = types.SimpleNamespace(
            CUDADriverError=FakeDriverError,
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
            funcSetAttribute=lambda *args: self.calls.append(("attribute", *args)),
        )
        runtime = types.SimpleNamespace(
            CUDARuntimeError=FakeDriverError,
            memsetAsync=self._memset,
            streamSynchronize=lambda _: None,
            memset=ctypes.memset,
            deviceSynchronize=lambda: None,
        )
        self.cuda = types.SimpleNamespace(
            Device=self._device,
            Module=lambda: types.SimpleNamespace(load=lambda _: None, get_function=self._function),
            driver=driver,
            runtime=runtime,
            memory=types.SimpleNamespace(OutOfMemoryError=FakeNoMemoryError),
            Stream=self._stream,
            Event=self._event,
            get_elapsed_time=lambda start, end: float(end.at - start.at),  # one launch or memset takes 1 ms
            get_current_stream=lambda: types.SimpleNamespace(ptr=77),
        )

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> FakeArray:
        if dtype.itemsize == 1 and dtype.kind == "V":
            raise ValueError("Unsupported dtype")
        if self.full:
            raise FakeNoMemoryError
        return FakeArray(aligned_empty(shape, dtype))

    def asarray(self, array: np.ndarray) -> FakeArray:
        made = self.empty(array.shape, array.dtype)
        made.numpy[...] = array
        return made

    def _stream(self, *, non_blocking: bool) -> FakeStream:
        self.streams.append(FakeStream(non_blocking=non_blocking))
        return self.streams[-1]

    def _event(self) -> Any:
        event = types.SimpleNamespace(at=-1, synchronize=lambda: None)
        event.record = lambda _: setattr(event, "at", len(self.calls))
        return event

    @contextlib.contextmanager
    def _device(self, _: int):
        yield types.SimpleNamespace(compute_capability=self._capability)

    def _run(self, stream: int, run: Any) -> None:
        """Now, or when a graph that records it is launched."""
        recording = [s.recorded for s in self.streams if s.ptr == stream and s.recorded is not None]
        if recording:
            recording[0].append(run)
        else:
            run()

    def _memset(self, address: int, value: int, size: int, stream: int) -> None:
        def run() -> None:
            self.calls.append(("memset", size, stream))
            ctypes.memset(address, value, size)

        self._run(stream, run)

    def _function(self, name: str) -> Any:
        def launch(grid: object, block: object, arguments: Any, shared_mem: int, stream: Any) -> None:
            if self.refuse:
                raise FakeDriverError("CUDA_ERROR_INVALID_VALUE")
            assert all(argument.itemsize == 8 for argument in arguments)

            def run() -> None:
                self.calls.append((name, grid, block, shared_mem, stream.ptr))
                self._kernels[name](*(int(argument) for argument in arguments))

            self._run(stream.ptr, run)

        launch.ptr = name  # a stand-in for the driver's handle
        return launch


def floats_at(address: int, count: int) -> np.ndarray:
    """The float32 numbers that lie there, to read and write."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
