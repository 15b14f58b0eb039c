"""CUDA driver calls that CuPy lacks: encode tensor maps, launch kernels with large parameters."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from roller_svc.errors import LaunchError
from roller_svc.ir.kernel import LaunchSpec
from roller_svc.ir.tensor_map import MapMode, TensorMap
from roller_svc.runtime.saved.launch import DATA_TYPES, L2_PROMOTIONS, LAST_DRIVER_TO_FIX, SMALL_BYTES, SWIZZLES
from roller_svc.runtime.saved.metadata import L2_PROMOTION_BYTES, MAP_ALIGNMENT_BYTES, MAP_BYTES, data_type

_NO_INTERLEAVE = _FILLED_WITH_ZEROS = 0
_COOPERATIVE_TOO_LARGE = 720  # CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
_MULTIPROCESSOR_COUNT, _COOPERATIVE_LAUNCH = 16, 95  # CU_DEVICE_ATTRIBUTE_...
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_...
_WORD_BYTES, _SPAN_WORD, _SPAN_BIT = 8, 1, 21  # see LAST_DRIVER_TO_FIX


@cache
def driver() -> Driver:
    """Return this process's driver. Raises LaunchError if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"the CUDA driver cannot be opened: {error}", code="no-device") from error
    version = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status:
        raise LaunchError(f"cannot read the CUDA driver's version: error {status}", code="no-device")
    return Driver(library, fix_small_maps=version.value <= LAST_DRIVER_TO_FIX)


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("more", ctypes.c_ubyte * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of one launch in order, as the driver takes them."""

    values: tuple[Any, ...]  # own the memory that `addresses` point to
    addresses: Any  # ctypes array of pointers


class Driver:
    """Calls of libcuda, whose functions are attributes of `library`. A device's context must be current."""

    def __init__(self, library: Any, *, fix_small_maps: bool) -> None:
        self.library = library
        self._fix_small_maps = fix_small_maps

    def parameters(self, launch: LaunchSpec, memory: Mapping[str, int]) -> Parameters:
        """Return the parameters of a launch. Raises LaunchError for a tensor map that the driver rejects.

        Args:
            launch: the launch.
            memory: addresses of buffers by symbol.
        """
        pointers = [ctypes.c_uint64(memory[symbol]) for symbol in launch.args]
        maps = [self._encode(view, memory[view.buffer]) for view in launch.tensor_maps]
        addresses = [ctypes.addressof(pointer) for pointer in pointers]
        addresses += [_aligned_address(storage) for storage in maps]
        return Parameters((*pointers, *maps), (ctypes.c_void_p * len(addresses))(*addresses))

    def launch(self, function: int, launch: LaunchSpec, parameters: Parameters, stream: int) -> None:
        """Call cuLaunchKernel, or cuLaunchCooperativeKernel. The cluster size is an attribute in the kernel's source.

        Raises LaunchError (persistent-too-large) for a cooperative launch whose blocks do not fit the device at once.
        """
        sizes = (ctypes.c_uint(n) for n in (*launch.grid, *launch.block, launch.shared_bytes))
        given = (ctypes.c_void_p(function), *sizes, ctypes.c_void_p(stream), parameters.addresses)
        if not launch.cooperative:
            self.check(self.library.cuLaunchKernel(*given, None), f"launch of {launch.name} failed")
            return
        status = self.library.cuLaunchCooperativeKernel(*given)
        code = "persistent-too-large" if status == _COOPERATIVE_TOO_LARGE else None
        self.check(status, f"launch of {launch.name} with {math.prod(launch.grid)} blocks at once failed", code)

    def launch_programmatic(self, function: int, launch: LaunchSpec, parameters: Parameters, stream: int) -> None:
        """Call cuLaunchKernelEx with programmatic stream serialization: the launch may start before the one before it ends."""
        attribute = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        config = _LaunchConfig(launch.grid, launch.block, launch.shared_bytes, stream, ctypes.pointer(attribute), 1)
        given = (ctypes.byref(config), ctypes.c_void_p(function), parameters.addresses, None)
        self.check(self.library.cuLaunchKernelEx(*given), f"launch of {launch.name} failed")

    def count_resident(self, function: int, launch: LaunchSpec) -> int:
        """Return the blocks of a cooperative launch that the current context's device holds at once."""
        device, cores, can_cooperate, blocks = (ctypes.c_int() for _ in range(4))
        library, threads = self.library, ctypes.c_int(math.prod(launch.block))
        self.check(library.cuCtxGetDevice(ctypes.byref(device)), "there is no current context")
        for value, attribute in ((cores, _MULTIPROCESSOR_COUNT), (can_cooperate, _COOPERATIVE_LAUNCH)):
            status = library.cuDeviceGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), device)
            self.check(status, f"cannot read attribute {attribute} of the device")
        status = library.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks), ctypes.c_void_p(function), threads, ctypes.c_size_t(launch.shared_bytes)
        )
        self.check(status, f"cannot read the occupancy of {launch.name}")
        return blocks.value * cores.value if can_cooperate.value else 0

    def _encode(self, view: TensorMap, address: int) -> Any:
        storage = (ctypes.c_ubyte * (MAP_BYTES + MAP_ALIGNMENT_BYTES))()
        rank = view.rank
        tensor = (
            ctypes.c_void_p(_aligned_address(storage)), ctypes.c_int(DATA_TYPES[data_type(view)]),
            ctypes.c_uint32(rank), ctypes.c_void_p(address + view.offset_bytes),
            (ctypes.c_uint64 * rank)(*view.extents), (ctypes.c_uint64 * max(1, rank - 1))(*view.strides_bytes),
        )  # fmt: skip
        element_strides = (ctypes.c_uint32 * rank)(*view.element_strides)
        mode_values = (_NO_INTERLEAVE, SWIZZLES[view.swizzle.value], L2_PROMOTIONS[L2_PROMOTION_BYTES], _FILLED_WITH_ZEROS)
        modes = tuple(ctypes.c_int(kind) for kind in mode_values)
        if view.mode is MapMode.TILED:
            box = (ctypes.c_uint32 * rank)(*view.box)
            status = self.library.cuTensorMapEncodeTiled(*tensor, box, element_strides, *modes)
        else:
            corners = tuple((ctypes.c_int * (rank - 2))(*corner) for corner in (view.lower, view.upper))
            pixels = tuple(ctypes.c_uint32(size) for size in view.box)
            status = self.library.cuTensorMapEncodeIm2col(*tensor, *corners, *pixels, element_strides, *modes)
        self.check(status, f"cannot encode tensor map {view.symbol}")
        if self._fix_small_maps and view.end_bytes - view.offset_bytes < SMALL_BYTES:
            word = ctypes.c_uint64.from_address(_aligned_address(storage) + _SPAN_WORD * _WORD_BYTES)
            word.value &= ~(1 << _SPAN_BIT)
        return storage

    def check(self, status: int, what: str, code: str | None = None) -> None:
        """Raise LaunchError, of a code and with the driver's name of the error, for a status that is not success."""
        if status == 0:
            return
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        raise LaunchError(f"{what}: {(name.value or b'').decode() or f'error {status}'}", code=code)


def _aligned_address(storage: Any) -> int:
    """Return the first aligned address in the storage, where the map is encoded."""
    start = ctypes.addressof(storage)
    return start + -start % MAP_ALIGNMENT_BYTES
