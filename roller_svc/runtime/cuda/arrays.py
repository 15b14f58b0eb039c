"""One interface to GPU arrays of CuPy, PyTorch and any library with DLPack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from roller_svc.errors import ArgumentError, LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.runtime.binding import Array, numpy_dtype

ALIGNMENT_BYTES = 64
_DLPACK_CUDA = 2
_DLPACK_CUDA_MANAGED = 13
_INSTALL_CUPY = "pip install 'roller-svc[gpu]'"


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """An array's memory on a device."""

    array: Any  # the library's own object, which owns the memory
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    device: int

    @property
    def item_bytes(self) -> int:
        return DType(self.dtype).bytes

    @property
    def is_dense(self) -> bool:
        """Whether the array is row-major without gaps and aligned as kernels expect."""
        step = self.item_bytes
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return self.address % ALIGNMENT_BYTES == 0

    @property
    def span(self) -> tuple[int, int]:
        """Return the address of the first byte and the one after the last."""
        offsets = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return self.address + sum(r for r in offsets if r < 0), self.address + sum(r for r in offsets if r > 0) + self.item_bytes


class ArrayLibrary(Protocol):
    """The operations of the caller's array library that a call needs, on its current stream and device."""

    name: str

    def view(self, array: Any) -> DeviceArray | None:
        """Return the array's memory, or None if it is not on a GPU."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray: ...

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None: ...

    def writeable(self, array: Any) -> bool: ...

    def needs_gradient(self, array: Any) -> bool:
        """Return whether the library expects gradients of what is computed from an array."""
        ...

    def note_writes(self, arrays: Iterable[Any]) -> None:
        """Tell the library that kernels wrote to arrays of the caller."""
        ...

    def stream(self, device: int) -> int:
        """Return the current stream's handle."""
        ...

    def result(self, array: DeviceArray) -> Any:
        """Return the array as an object of the caller's library."""
        ...


def import_cupy() -> Any:
    """Import CuPy, which loads and launches kernels. Raises LaunchError if it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise LaunchError(f"running CUDA kernels needs CuPy: {_INSTALL_CUPY} ({error})", code="no-cupy") from error
    return cupy


class CupyArrays:
    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def view(self, array: Any) -> DeviceArray | None:
        return DeviceArray(
            array, int(array.data.ptr), array.dtype.name, tuple(array.shape), tuple(array.strides), int(array.device.id)
        )

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray:
        return _require_view(self.view(self._allocate(shape, dtype, device)))

    def _allocate(self, shape: tuple[int, ...], dtype: DType, device: int) -> Any:
        with self._cupy.cuda.Device(device):
            try:
                return self._cupy.empty(shape, numpy_dtype(dtype))
            except (TypeError, ValueError) as error:
                raise ArgumentError(
                    f"CuPy has no arrays of {dtype.value}: call with PyTorch tensors", code="dtype-mismatch"
                ) from error
            except self._cupy.cuda.memory.OutOfMemoryError as error:
                raise LaunchError(
                    f"out of device memory: cannot allocate {dtype.value}{list(shape)}", code="out-of-memory"
                ) from error

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._cupy.cuda.Device(target.device):
            target.array[...] = source.array

    def writeable(self, array: Any) -> bool:
        return True

    def needs_gradient(self, array: Any) -> bool:
        return False

    def note_writes(self, arrays: Iterable[Any]) -> None:
        """CuPy keeps no versions of arrays, nor does DLPack."""

    def stream(self, device: int) -> int:
        with self._cupy.cuda.Device(device):
            return int(self._cupy.cuda.get_current_stream().ptr)

    def result(self, array: DeviceArray) -> Any:
        return array.array


class TorchArrays:
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def view(self, array: Any) -> DeviceArray | None:
        if array.device.type != "cuda":
            return None
        if array.is_conj() or array.is_neg():
            array = array.resolve_conj().resolve_neg()
        strides = tuple(stride * array.element_size() for stride in array.stride())
        dtype = str(array.dtype).removeprefix("torch.")
        return DeviceArray(array, int(array.data_ptr()), dtype, tuple(array.shape), strides, int(array.device.index))

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray:
        kind = getattr(self._torch, dtype.value, None)
        if kind is None:
            raise ArgumentError(f"this PyTorch has no tensors of {dtype.value}", code="dtype-mismatch")
        return _require_view(self.view(self._torch.empty(shape, dtype=kind, device=f"cuda:{device}")))

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._torch.no_grad():
            target.array.copy_(source.array)

    def writeable(self, array: Any) -> bool:
        return not (array.requires_grad and array.is_leaf) and not array.is_neg()  # a view of negated numbers is copied

    def needs_gradient(self, array: Any) -> bool:
        return bool(array.requires_grad and self._torch.is_grad_enabled())

    def note_writes(self, arrays: Iterable[Any]) -> None:
        """Give tensors a new version, so that torch does not compute gradients from what they were."""
        for array in arrays:
            if not array.is_inference():
                self._torch.autograd.graph.increment_version(array)

    def stream(self, device: int) -> int:
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def result(self, array: DeviceArray) -> Any:
        return array.array


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A dense array on the current device, stored as CuPy bytes because CuPy lacks some element types."""

    raw: Any  # one dimension of uint8
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, cupy: Any, array: Array) -> DeviceBytes:
        """Copy an array from host memory to the device."""
        dense = np.ascontiguousarray(array)
        return cls(cupy.asarray(dense.reshape(-1).view(np.uint8)), DType(array.dtype.name), array.shape)

    def numpy(self) -> Array:
        """Copy to host memory, after the work of the current stream."""
        host: Array = self.raw.get()
        return host.view(numpy_dtype(self.dtype)).reshape(self.shape)


class ByteArrays(CupyArrays):
    """The library of DeviceBytes, for inputs and results."""

    name = "bytes"

    def view(self, array: DeviceBytes) -> DeviceArray:
        strides: list[int] = []
        step = array.dtype.bytes
        for extent in reversed(array.shape):
            strides.insert(0, step)
            step *= extent
        raw = array.raw
        return DeviceArray(array, int(raw.data.ptr), array.dtype.value, array.shape, tuple(strides), int(raw.device.id))

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray:
        raw = self._allocate((math.prod(shape) * dtype.bytes,), DType.UINT8, device)
        return self.view(DeviceBytes(raw, dtype, shape))

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._cupy.cuda.Device(target.device):
            target.array.raw[...] = source.array.raw


def copy_to_device(arrays: Mapping[str, Array]) -> dict[str, DeviceBytes]:
    """Copy host arrays to the current device. Raises LaunchError if they do not fit."""
    cupy = import_cupy()
    try:
        return {name: DeviceBytes.of(cupy, array) for name, array in arrays.items()}
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise LaunchError(f"out of device memory: cannot copy the arrays: {error}", code="out-of-memory") from error


def copy_into_device(target: DeviceBytes, array: Array) -> None:
    """Copy a host array into one on the device, before later work of the current stream."""
    target.raw.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def copy_to_host(arrays: Mapping[str, DeviceBytes]) -> dict[str, Array]:
    """Copy arrays to host memory, after the work of the current stream."""
    return {name: array.numpy() for name, array in arrays.items()}


def synchronize() -> None:
    """Wait for the work of the current device."""
    import_cupy().cuda.runtime.deviceSynchronize()


class DlpackArrays(CupyArrays):
    """Any other library with DLPack: arrays are viewed through CuPy without a copy, results use its from_dlpack."""

    def __init__(self, cupy: Any, name: str, from_dlpack: Any) -> None:
        super().__init__(cupy)
        self.name = name
        self._from_dlpack = from_dlpack

    def view(self, array: Any) -> DeviceArray | None:
        if isinstance(array, self._cupy.ndarray):
            return super().view(array)
        kind, device = array.__dlpack_device__()
        if int(kind) not in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED):
            return None
        with self._cupy.cuda.Device(int(device)):
            return super().view(self._cupy.from_dlpack(array))

    def writeable(self, array: Any) -> bool:
        return False

    def result(self, array: DeviceArray) -> Any:
        return self._from_dlpack(array.array)


def library_of(name: str, array: Any) -> ArrayLibrary:
    """Return the library of the argument called `name`. Raises ArgumentError if it is not a GPU array."""
    if isinstance(array, DeviceBytes):
        return ByteArrays(import_cupy())
    package = type(array).__module__.partition(".")[0]
    if package == "cupy":
        return CupyArrays(import_cupy())
    if package == "torch":
        import torch

        return TorchArrays(torch)
    if package != "numpy" and hasattr(array, "__dlpack__") and hasattr(array, "__array_namespace__"):
        return DlpackArrays(import_cupy(), package, array.__array_namespace__().from_dlpack)
    kind = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
    raise ArgumentError(
        f"argument {name!r} must be an array on a GPU (CuPy, PyTorch, anything with DLPack), got {kind}",
        code="not-an-array",
    )


def _require_view(view: DeviceArray | None) -> DeviceArray:
    if view is None:
        raise LaunchError("an array just allocated on a GPU is not on a GPU")
    return view
