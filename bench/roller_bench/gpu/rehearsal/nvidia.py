"""Simulated NVIDIA libraries, as ctypes calls them: libcuda for tensor maps, libnvidia-ml for clocks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, Protocol

BUS_ID = "0000:00:00.0"
_ATTRIBUTES = {16: 132, 95: 1}  # multiprocessors, and whether launches may be cooperative


class Launched(Protocol):
    """The function of one launch."""

    loaded: Any
    index: int

    def run(self, addresses: list[int], stream: int) -> None: ...
    def advance_clock(self) -> None: ...


class DriverLibrary:
    """libcuda, as runtime/cuda/driver.py calls it.

    A map holds only its address, for the emulator makes its own maps.
    """

    def __init__(self, functions: Mapping[int, Launched], work: Callable[[float], None]) -> None:
        """Take the functions by their handles, and what advances the clock by the time of moving some bytes."""
        self._functions, self._work = functions, work
        self._graphs: list[list[Callable[[], None]]] = []  # the nodes of each: they only take time

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

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = 0
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        value._obj.value = _ATTRIBUTES[attribute.value]
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: Any, function: Any, threads: Any, shared_bytes: Any) -> int:
        blocks._obj.value = 1
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 1
        return 0

    def cuGraphCreate(self, graph: Any, flags: Any) -> int:
        self._graphs.append([])
        graph._obj.value = len(self._graphs)
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        return 0

    cuGraphExecDestroy = cuGraphDestroy

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, before: Any, count: Any, given: Any) -> int:
        function = self._functions[given._obj.function]
        return self._add(graph, node, function.advance_clock)

    def cuGraphAddMemsetNode(self, node: Any, graph: Any, before: Any, count: Any, given: Any, context: Any) -> int:
        size = given._obj.width
        return self._add(graph, node, lambda: self._work(size))

    def cuGraphAddMemcpyNode(self, node: Any, graph: Any, before: Any, count: Any, given: Any, context: Any) -> int:
        size = 2 * given._obj.width
        return self._add(graph, node, lambda: self._work(size))

    def cuGraphInstantiateWithFlags(self, execution: Any, graph: Any, flags: Any) -> int:
        execution._obj.value = graph.value
        return 0

    def cuGraphLaunch(self, execution: Any, stream: Any) -> int:
        for advance_clock in self._graphs[execution.value - 1]:
            advance_clock()
        return 0

    def _add(self, graph: Any, node: Any, advance_clock: Callable[[], None]) -> int:
        nodes = self._graphs[graph.value - 1]
        nodes.append(advance_clock)
        node._obj.value = len(nodes)
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
