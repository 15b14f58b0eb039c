"""The CUDA driver, for what CuPy does not do: encode tensor maps, launch kernels with parameters of many bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from roller_svc.errors import LaunchError
from roller_svc.ir.kernel import LaunchSpec
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap
from roller_svc.runtime.saved.metadata import MAP_ALIGNMENT_BYTES, MAP_BYTES, data_type

# Members of the driver's enumerations (cuda.h, CUtensorMapDataType and its neighbours).
_DATA_TYPES = {"UINT8": 0, "UINT16": 1, "UINT32": 2, "UINT64": 4, "TFLOAT32": 11}
_SWIZZLES = {Swizzle.NONE: 0, Swizzle.B32: 1, Swizzle.B64: 2, Swizzle.B128: 3}
_L2_PROMOTION = 3  # ..._L2_256B: L2_PROMOTION_BYTES of `map_metadata`
_NO_INTERLEAVE = _FILLED_WITH_ZEROS = 0
# Drivers up to CUDA 13.1 set bit 85 of a map whatever its tensor's size, which is for those that span 128 KiB or more.
# CUTLASS clears it in smaller ones (copy_traits_sm90_tma.hpp, copy_traits_sm90_im2col.hpp); Hopper has it reserved.
LAST_DRIVER_TO_FIX = 13010
_SMALL_BYTES = 128 << 10
_WORD_BYTES, _SPAN_WORD, _SPAN_BIT = 8, 1, 21


@cache
def driver() -> Driver:
    """The one of this process; raises LaunchError where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"the CUDA driver cannot be opened: {error}", code="no-device") from error
    version = ctypes.c_int()
    status = library.cuDriverGetVersion(ctypes.byref(version))
    if status:
        raise LaunchError(f"the CUDA driver does not tell its version: error {status}", code="no-device")
    return Driver(library, fix_small_maps=version.value <= LAST_DRIVER_TO_FIX)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Of one launch, in order, as the driver takes them: an address of each. `values` keeps what lies there."""

    values: tuple[Any, ...]
    addresses: Any  # ctypes array of pointers


class Driver:
    """Calls of libcuda; `library` has its functions as attributes. A device's context is current."""

    def __init__(self, library: Any, *, fix_small_maps: bool) -> None:
        self.library = library
        self._fix_small_maps = fix_small_maps

    def parameters(self, launch: LaunchSpec, memory: Mapping[str, int]) -> Parameters:
        """`memory`: addresses of buffers by symbol. Raises LaunchError for a map that the driver refuses."""
        pointers = [ctypes.c_uint64(memory[symbol]) for symbol in launch.args]
        maps = [self._encode(view, memory[view.buffer]) for view in launch.tensor_maps]
        addresses = [ctypes.addressof(pointer) for pointer in pointers] + [_aligned_address(room) for room in maps]
        return Parameters((*pointers, *maps), (ctypes.c_void_p * len(addresses))(*addresses))

    def launch(self, function: int, launch: LaunchSpec, parameters: Parameters, stream: int) -> None:
        """cuLaunchKernel; the size of clusters stands in the kernel's own text."""
        sizes = (ctypes.c_uint(n) for n in (*launch.grid, *launch.block, launch.shared_bytes))
        status = self.library.cuLaunchKernel(
            ctypes.c_void_p(function), *sizes, ctypes.c_void_p(stream), parameters.addresses, None
        )
        self._check(status, f"the device refused {launch.name}")

    def _encode(self, view: TensorMap, address: int) -> Any:
        storage = (ctypes.c_ubyte * (MAP_BYTES + MAP_ALIGNMENT_BYTES))()
        rank = view.rank
        tensor = (
            ctypes.c_void_p(_aligned_address(storage)), ctypes.c_int(_DATA_TYPES[data_type(view)]), ctypes.c_uint32(rank),
            ctypes.c_void_p(address + view.offset_bytes), (ctypes.c_uint64 * rank)(*view.extents),
            (ctypes.c_uint64 * max(1, rank - 1))(*view.strides_bytes),
        )  # fmt: skip
        element_strides = (ctypes.c_uint32 * rank)(*view.element_strides)
        mode_values = (_NO_INTERLEAVE, _SWIZZLES[view.swizzle], _L2_PROMOTION, _FILLED_WITH_ZEROS)
        modes = tuple(ctypes.c_int(kind) for kind in mode_values)
        if view.mode is MapMode.TILED:
            box = (ctypes.c_uint32 * rank)(*view.box)
            status = self.library.cuTensorMapEncodeTiled(*tensor, box, element_strides, *modes)
        else:
            corners = tuple((ctypes.c_int * (rank - 2))(*corner) for corner in (view.lower, view.upper))
            pixels = tuple(ctypes.c_uint32(size) for size in view.box)
            status = self.library.cuTensorMapEncodeIm2col(*tensor, *corners, *pixels, element_strides, *modes)
        self._check(status, f"the driver refused tensor map {view.symbol}")
        if self._fix_small_maps and view.end_bytes - view.offset_bytes < _SMALL_BYTES:
            word = ctypes.c_uint64.from_address(_aligned_address(storage) + _SPAN_WORD * _WORD_BYTES)
            word.value &= ~(1 << _SPAN_BIT)
        return storage

    def _check(self, status: int, what: str) -> None:
        if status == 0:
            return
        name = ctypes.c_char_p()
        self.library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
        raise LaunchError(f"{what}: {(name.value or b'').decode() or f'error {status}'}")


def _aligned_address(storage: Any) -> int:
    """The address in the room at which the map lies."""
    start = ctypes.addressof(storage)
    return start + -start % MAP_ALIGNMENT_BYTES
