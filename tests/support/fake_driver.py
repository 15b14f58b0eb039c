"""A driver of CUDA or HIP that is not there: it records its calls."""

from __future__ import annotations

import ctypes
from typing import Any


class FakeDriver:
    """Records calls of CUDA and HIP as the program that includes fake_cuda/cuda.h prints them."""

    def __init__(self, launches: Any) -> None:
        self.calls: list[Any] = []
        self.encoded = self.functions = 0
        self.has_context = True
        self._sizes = [[8] * len(each.args) + [128] * len(each.tensor_maps) for each in launches]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name.replace("hipModuleLaunch", "cuLaunch").replace("hip", "cu"))

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def cuGetDevice(self, _: Any) -> int:
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1 if self.has_context else None
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 100 + device
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.has_context = True
        return self._record("current", context.value)

    cuCtxGetDevice = cuGetDevice  # noqa: N815 - the driver's name

    def cuModuleLoadData(self, _: Any, image: bytes) -> int:
        return self._record("load", image.decode())

    def cuModuleGetFunction(self, function: Any, _: Any, name: bytes) -> int:
        self.functions += 1
        function._obj.value = self.functions
        return self._record("function", name.decode())

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        return self._record("attribute", function.value, attribute, value)

    def cuMemsetD8Async(self, *arguments: Any) -> int:
        return self._record("fill", *map(_plain, arguments))

    def cuTensorMapEncodeTiled(self, place: Any, *rest: Any) -> int:
        return self._encode("tiled", place, rest)

    def cuTensorMapEncodeIm2col(self, place: Any, *rest: Any) -> int:
        return self._encode("im2col", place, rest)

    def _encode(self, mode: str, place: Any, rest: tuple[Any, ...]) -> int:
        self.encoded += 1
        address = place.value if hasattr(place, "value") else ctypes.addressof(place._obj)
        assert address % 128 == 0
        ctypes.memset(address, self.encoded, 128)
        return self._record(mode, *map(_plain, rest))

    def cuLaunchKernel(self, function: Any, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        assert extra is None
        launch_bytes = self._sizes.pop(0)
        values = [ctypes.string_at(a, n).hex() for a, n in zip(parameters, launch_bytes, strict=True)]
        return self._record("launch", function.value, [_plain(size) for size in sizes], stream.value, values)

    def cuLaunchCooperativeKernel(self, function: Any, *given: Any) -> int:
        self.cuLaunchKernel(function, *given, None)
        self.calls[-1][0] = "cooperative"
        return 0

    def cuMemcpyDtoDAsync(self, *arguments: Any) -> int:
        return self._record("copy", *map(_plain, arguments))

    def _record(self, *call: Any) -> int:
        self.calls.append(list(call))
        return 0


def _plain(value: Any) -> Any:
    if isinstance(value, ctypes.Array):
        return list(value)
    return value.value if hasattr(value, "value") else value
