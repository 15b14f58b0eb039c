"""CUDA graphs built node by node, through the driver."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from roller_svc.errors import InvariantError
from roller_svc.ir.kernel import LaunchSpec
from roller_svc.runtime.cuda.driver import Driver, Parameters

Node = ctypes.c_void_p
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
_PROGRAMMATIC_DEPENDENCY = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
MAX_COPY_BYTES = 1 << 30  # of a node: a pitch is less than 2 GiB (CU_DEVICE_ATTRIBUTE_MAX_PITCH)


class KernelNodeParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint), ("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


class EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte), ("to_port", ctypes.c_ubyte), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5),
    )  # fmt: skip


class MemsetNodeParameters(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class CopyEnd(ctypes.Structure):
    """One half of CUDA_MEMCPY3D: where bytes are read or written."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t), ("y", ctypes.c_size_t), ("z", ctypes.c_size_t), ("lod", ctypes.c_size_t),
        ("memory_type", ctypes.c_int), ("host", ctypes.c_void_p), ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p), ("reserved", ctypes.c_void_p), ("pitch", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class CopyNodeParameters(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = (
        ("source", CopyEnd), ("target", CopyEnd), ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )  # fmt: skip


class Graph:
    """A CUDA graph, for the context that is current when it is made."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._library = driver.library
        # drivers before CUDA 12.3 have no data of edges
        self._has_edge_data = hasattr(driver.library, "cuGraphAddDependencies_v2")
        self._graph, self._context = ctypes.c_void_p(), ctypes.c_void_p()
        driver.check(self._library.cuCtxGetCurrent(ctypes.byref(self._context)), "there is no current context")
        driver.check(self._library.cuGraphCreate(ctypes.byref(self._graph), ctypes.c_uint(0)), "cannot create a graph")
        weakref.finalize(self, self._library.cuGraphDestroy, self._graph).atexit = False

    def add_kernel(
        self, function: int, launch: LaunchSpec, parameters: Parameters, after: Iterable[Node], *, is_early: bool = False
    ) -> Node:
        """Add a launch. The values of the parameters are copied. Raises InvariantError for a cooperative launch.

        `is_early`: whether it may start before the launches that it comes after end.
        """
        if launch.cooperative:
            raise InvariantError(f"{launch.name} is a cooperative launch, and the nodes of a graph are not")
        given = KernelNodeParameters(
            function, launch.grid, launch.block, launch.shared_bytes, ctypes.addressof(parameters.addresses)
        )
        is_early = is_early and self._has_edge_data
        node = self._add(self._library.cuGraphAddKernelNode_v2, () if is_early else after, given, what=f"kernel {launch.name}")
        for before in after if is_early else ():
            self._add_programmatic_edge(before, node)
        return node

    def _add_programmatic_edge(self, before: Node, node: Node) -> None:
        data = EdgeData(_PROGRAMMATIC_PORT, 0, _PROGRAMMATIC_DEPENDENCY)
        ends = (ctypes.byref(before), ctypes.byref(node), ctypes.byref(data), ctypes.c_size_t(1))
        self._driver.check(self._library.cuGraphAddDependencies_v2(self._graph, *ends), "cannot add an edge to a graph")

    def add_zeros(self, address: int, size_bytes: int, after: Iterable[Node]) -> Node:
        """Add the filling of memory with zeros."""
        given = MemsetNodeParameters(address, 0, 0, 1, size_bytes, 1)
        return self._add(self._library.cuGraphAddMemsetNode, after, given, self._context, what="memset")

    def add_copies(self, target: int, source: int, size_bytes: int, after: Sequence[Node]) -> tuple[Node, ...]:
        """Add a copy of memory: a node for each of its parts, which have no order."""
        firsts = range(0, size_bytes, MAX_COPY_BYTES)
        return tuple(
            self._add_copy(target + first, source + first, min(MAX_COPY_BYTES, size_bytes - first), after) for first in firsts
        )

    def _add_copy(self, target: int, source: int, size_bytes: int, after: Iterable[Node]) -> Node:
        ends = (CopyEnd(memory_type=_DEVICE_MEMORY, device=each, pitch=size_bytes, height=1) for each in (source, target))
        given = CopyNodeParameters(*ends, size_bytes, 1, 1)
        return self._add(self._library.cuGraphAddMemcpyNode, after, given, self._context, what="copy")

    def instantiate(self) -> GraphExecution:
        """Return the graph as it is now, ready to be launched."""
        execution = ctypes.c_void_p()
        status = self._library.cuGraphInstantiateWithFlags(ctypes.byref(execution), self._graph, ctypes.c_ulonglong(0))
        self._driver.check(status, "cannot instantiate a graph")
        return GraphExecution(self._driver, execution)

    def _add(self, add: Any, after: Iterable[Node], given: ctypes.Structure, *context: ctypes.c_void_p, what: str) -> Node:
        node, before = Node(), list(after)
        nodes = (Node * max(1, len(before)))(*before)
        status = add(ctypes.byref(node), self._graph, nodes, ctypes.c_size_t(len(before)), ctypes.byref(given), *context)
        self._driver.check(status, f"cannot add a node to a graph: {what}")
        return node


class GraphExecution:
    """An instantiated graph."""

    def __init__(self, driver: Driver, execution: ctypes.c_void_p) -> None:
        self._driver = driver
        self._execution = execution
        weakref.finalize(self, driver.library.cuGraphExecDestroy, execution).atexit = False

    def launch(self, stream: int) -> None:
        """Launch all nodes on a stream. Returns before the work is done."""
        status = self._driver.library.cuGraphLaunch(self._execution, ctypes.c_void_p(stream))
        self._driver.check(status, "launch of a graph failed")
