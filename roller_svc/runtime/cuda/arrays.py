"""Arrays on a GPU, of CuPy, PyTorch or any library with DLPack, as one small set of operations."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """Where an array lies. `strides` are in bytes; `array` is the library's own and keeps the memory."""

    array: Any
    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int

    def is_dense(self, item_bytes: int) -> bool:
        """Row-major without gaps, and aligned as kernels expect it."""
        step = item_bytes
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != step:
                return False
            step *= extent
        return self.address % ALIGNMENT_BYTES == 0

    def span(self, item_bytes: int) -> tuple[int, int]:
        """The first byte's address and the one after the last's."""
        offsets = [(extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)]
        return self.address + sum(r for r in offsets if r < 0), self.address + sum(r for r in offsets if r > 0) + item_bytes


class ArrayLibrary(Protocol):
    """What a call needs of the caller's library. Streams and devices are the ones that it has as current."""

    name: str

    def view(self, array: Any) -> DeviceArray | None:
        """None for an array that is not on a GPU."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray: ...

    def copy_of(self, array: DeviceArray, dtype: DType) -> DeviceArray:
        """A dense, aligned copy."""
        ...

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None: ...

    def writeable(self, array: Any) -> bool: ...

    def stream(self, device: int) -> int:
        """The current stream's handle."""
        ...

    def result(self, array: DeviceArray) -> Any:
        """The array as the caller gets it."""
        ...


def import_cupy() -> Any:
    """CuPy, which loads and launches; raises LaunchError where it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise LaunchError(f"running CUDA kernels takes CuPy: {_INSTALL_CUPY} ({error})", code="no-cupy") from error
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
                raise ArgumentError(f"CuPy has no arrays of {dtype.value}: call with PyTorch tensors",
                                    code="dtype-mismatch") from error  # fmt: skip
            except self._cupy.cuda.memory.OutOfMemoryError as error:
                raise LaunchError(
                    f"the device has no room for {dtype.value}{list(shape)}", code="out-of-memory"
                ) from error

    def copy_of(self, array: DeviceArray, dtype: DType) -> DeviceArray:
        copy = self.empty(array.shape, dtype, array.device)
        self.copy_into(copy, array)
        return copy

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._cupy.cuda.Device(target.device):
            target.array[...] = source.array

    def writeable(self, array: Any) -> bool:
        return True

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

    def copy_of(self, array: DeviceArray, dtype: DType) -> DeviceArray:
        copy = self.empty(array.shape, dtype, array.device)
        self.copy_into(copy, array)
        return copy

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._torch.no_grad():
            target.array.copy_(source.array)

    def writeable(self, array: Any) -> bool:
        return not (array.requires_grad and array.is_leaf)

    def stream(self, device: int) -> int:
        return int(self._torch.cuda.current_stream(device).cuda_stream)

    def result(self, array: DeviceArray) -> Any:
        return array.array


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """A dense array on the current device, of any element type: CuPy keeps the bytes, and has not all of the types."""

    raw: Any  # one dimension of uint8
    dtype: DType
    shape: tuple[int, ...]

    @classmethod
    def of(cls, cupy: Any, array: Array) -> DeviceBytes:
        """A copy of an array that is in the host's memory."""
        dense = np.ascontiguousarray(array)
        return cls(cupy.asarray(dense.reshape(-1).view(np.uint8)), DType(array.dtype.name), array.shape)

    def numpy(self) -> Array:
        """A copy in the host's memory; waits for what the current stream has to do."""
        host: Array = self.raw.get()
        return host.view(numpy_dtype(self.dtype)).reshape(self.shape)


class ByteArrays(CupyArrays):
    """What `placed` makes: results are DeviceBytes too."""

    name = "bytes"

    def view(self, array: DeviceBytes) -> DeviceArray:
        strides: list[int] = []
        step = array.dtype.bytes
        for extent in reversed(array.shape):
            strides.insert(0, step)
            step *= extent
        raw = array.raw
        return DeviceArray(
            array, int(raw.data.ptr), array.dtype.value, array.shape, tuple(strides), int(raw.device.id)
        )  # fmt: skip

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray:
        raw = self._allocate((math.prod(shape) * dtype.bytes,), DType.UINT8, device)
        return self.view(DeviceBytes(raw, dtype, shape))

    def copy_into(self, target: DeviceArray, source: DeviceArray) -> None:
        with self._cupy.cuda.Device(target.device):
            target.array.raw[...] = source.array.raw


def copy_to_device(arrays: Mapping[str, Array]) -> dict[str, DeviceBytes]:
    """Arrays of the host's memory, copied to the current device; LaunchError where they do not fit."""
    cupy = import_cupy()
    try:
        return {name: DeviceBytes.of(cupy, array) for name, array in arrays.items()}
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise LaunchError(f"the device has no room for the arrays: {error}", code="out-of-memory") from error


class DlpackArrays(CupyArrays):
    """Any other library: through CuPy without a copy, results handed back by the library's own from_dlpack."""

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
    """The library of the argument called `name`; raises ArgumentError for what is no GPU array of any."""
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
        f"argument {name!r} is of type {kind}: this kernel runs on a GPU and takes arrays that lie there "
        "(CuPy, PyTorch, anything with DLPack)",
        code="not-an-array",
    )


def _require_view(view: DeviceArray | None) -> DeviceArray:
    if view is None:
        raise LaunchError("an array just made on a GPU is not there")
    return view
