"""Simulated NVIDIA libraries, as ctypes calls them: libcuda for tensor maps, libnvidia-ml for clocks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

BUS_ID = "0000:00:00.0"


class Launched(Protocol):
    """The function of one launch."""

    loaded: Any
    index: int

    def run(self, addresses: list[int], stream: int) -> None: ...


class DriverLibrary:
    """libcuda, as runtime/cuda/driver.py calls it.

    A map holds only its address, for the emulator makes its own maps.
    """

    def __init__(self, functions: Mapping[int, Launched]) -> None:
        self._functions = functions

    def cuTensorMapEncodeTiled(self, place: Any, kind: Any, rank: Any, address: Any, *_: Any) -> int:
        ctypes.memset(place.value, 0xFF, 128)
        ctypes.c_uint64.from_address(place.value).value = address.value
        return 0

    cuTensorMapEncodeIm2col = cuTensorMapEncodeTiled

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *_, stream, parameters, _extra = rest
        kernel = self._functions[function.value]
        launch = kernel.loaded.source.launches[kernel.index]
        words = [ctypes.c_uint64.from_address(pointer).value for pointer in parameters]
        count = len(launch.args)
        for view, address in zip(launch.tensor_maps, words[count:], strict=True):
            kernel.loaded.memory[view.buffer] = address - view.offset_bytes
        kernel.run(words[:count], stream.value or 0)
        return 0

    def cuLaunchCooperativeKernel(self, function: Any, *rest: Any) -> int:
        return self.cuLaunchKernel(function, *rest, None)

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> int:
        given = config._obj
        stream = ctypes.c_void_p(given.stream)
        return self.cuLaunchKernel(function, *given.grid, *given.block, given.shared_bytes, stream, parameters, extra)


class NvmlLibrary:
    """libnvidia-ml, with the values of a busy device."""

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
