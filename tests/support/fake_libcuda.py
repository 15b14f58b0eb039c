"""A CUDA driver that is not there: launches and graphs of Python functions on host memory.

A launched graph runs its nodes in a random order that its edges allow.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from roller_svc.runtime.cuda.graph import CopyNodeParameters, EdgeData, KernelNodeParameters, MemsetNodeParameters


@dataclass
class FakeGraph:
    """Nodes, with the nodes before each; in a graph that is instantiated nothing is added."""

    nodes: list[tuple[str, Callable[[], None], tuple[int, ...]]] = field(default_factory=list)
    programmatic: list[tuple[int, int]] = field(default_factory=list)  # edges of these kinds, from and to kernels


class FakeLibcuda:
    """`kernels`: by the handle of a function, what it does with its parameters (addresses of arrays)."""

    def __init__(self, kernels: Mapping[int, Callable[..., None]], parameters: Mapping[int, int], seed: int = 0) -> None:
        """Take the kernels, and how many addresses each has as parameters."""
        self.kernels = kernels
        self.parameters = parameters
        self.random = random.Random(seed)
        self.graphs: list[FakeGraph] = []
        self.launched: list[str] = []
        self.destroyed = 0
        self.resident_blocks = 1 << 20  # of a cooperative launch

    def cuCtxGetDevice(self, device: Any) -> int:
        device._obj.value = 0
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        value._obj.value = {16: 1, 95: 1}[attribute.value]  # one multiprocessor, which has cooperative launches
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: Any, function: Any, threads: Any, shared_bytes: Any) -> int:
        assert function.value in self.kernels
        blocks._obj.value = self.resident_blocks
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 7
        return 0

    def cuGraphCreate(self, graph: Any, flags: Any) -> int:
        assert flags.value == 0
        self.graphs.append(FakeGraph())
        graph._obj.value = len(self.graphs)
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        self.destroyed += 1
        return 0

    def cuGraphExecDestroy(self, execution: Any) -> int:
        return self.cuGraphDestroy(execution)

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, before: Any, count: Any, given: Any) -> int:
        values: KernelNodeParameters = given._obj
        assert all(extent > 0 for extent in (*values.grid, *values.block))
        return self._add("kernel", node, graph, before, count, self._call(values.function, values.parameters))

    def cuGraphAddMemsetNode(self, node: Any, graph: Any, before: Any, count: Any, given: Any, context: Any) -> int:
        values: MemsetNodeParameters = given._obj
        assert (values.value, values.element_bytes, values.height, context.value) == (0, 1, 1, 7)
        target, size = values.target, values.width
        return self._add("memset", node, graph, before, count, lambda: ctypes.memset(target, 0, size))

    def cuGraphAddMemcpyNode(self, node: Any, graph: Any, before: Any, count: Any, given: Any, context: Any) -> int:
        values: CopyNodeParameters = given._obj
        assert (values.source.memory_type, values.target.memory_type, values.height, values.depth, context.value) == (2, 2, 1, 1, 7)
        target, source, size = values.target.device, values.source.device, values.width
        return self._add("copy", node, graph, before, count, lambda: ctypes.memmove(target, source, size))

    def cuGraphAddDependencies_v2(self, graph: Any, before: Any, node: Any, data: Any, count: Any) -> int:
        built, edge = self.graphs[graph.value - 1], data._obj
        first, last = before._obj.value - 1, node._obj.value - 1
        assert isinstance(edge, EdgeData)
        assert (edge.from_port, edge.to_port, edge.type, bytes(edge.reserved), count.value) == (1, 0, 1, bytes(5), 1)
        kind, run, all_before = built.nodes[last]
        assert (built.nodes[first][0], kind) == ("kernel", "kernel")
        assert first not in all_before
        built.nodes[last] = (kind, run, (*all_before, first))
        built.programmatic.append((first, last))
        return 0

    def cuGraphInstantiateWithFlags(self, execution: Any, graph: Any, flags: Any) -> int:
        execution._obj.value = graph.value
        return 0

    def cuGraphLaunch(self, execution: Any, stream: Any) -> int:
        graph = self.graphs[execution.value - 1]
        waiting = set(range(len(graph.nodes)))
        while waiting:
            ready = sorted(i for i in waiting if not waiting & set(graph.nodes[i][2]))
            chosen = self.random.choice(ready)
            waiting.remove(chosen)
            graph.nodes[chosen][1]()
        self.launched.append("graph")
        return 0

    def cuLaunchKernel(self, function: Any, *given: Any) -> int:
        *_, parameters, extra = given
        assert extra is None
        self._call(function.value, ctypes.addressof(parameters))()
        self.launched.append("kernel")
        return 0

    def cuLaunchCooperativeKernel(self, function: Any, *given: Any) -> int:
        *sizes, _, _, parameters = given
        if sizes[0].value > self.resident_blocks:
            return 720
        self._call(function.value, ctypes.addressof(parameters))()
        self.launched.append("cooperative")
        return 0

    def _call(self, function: int, parameters: int) -> Callable[[], None]:
        """Return the call of a kernel. The values of its parameters are read at once, as the driver does."""
        pointers = (ctypes.c_void_p * self.parameters[function]).from_address(parameters)
        addresses = [ctypes.c_uint64.from_address(pointer).value for pointer in pointers]
        return lambda: self.kernels[function](*addresses)

    def _add(self, kind: str, node: Any, graph: Any, before: Any, count: Any, run: Callable[[], Any]) -> int:
        nodes = self.graphs[graph.value - 1].nodes
        nodes.append((kind, run, tuple(before[i] - 1 for i in range(count.value))))
        node._obj.value = len(nodes)
        return 0
