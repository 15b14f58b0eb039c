"""Run a model on NVIDIA devices: its kernels one after the other in a stream, or as one CUDA graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from roller_svc.analysis.step_order import check_operands, find_early_starts, find_predecessors
from roller_svc.errors import LaunchError, RollerWarning
from roller_svc.ir.dtype import DType
from roller_svc.ir.event_state import EVENT_WORDS
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.model_plan import Address, CopyStep, KernelStep, ModelPlan, unroll_steps
from roller_svc.runtime.binding import Array, Binding
from roller_svc.runtime.cuda.arrays import CupyArrays, DeviceArray, import_cupy
from roller_svc.runtime.cuda.driver import Driver, Parameters, driver
from roller_svc.runtime.cuda.graph import Graph, Node
from roller_svc.runtime.cuda.module import DeviceArrays, device_present, launch_errors, load_functions
from roller_svc.runtime.graphs.buffers import bind_call, call_buffers
from roller_svc.runtime.graphs.cooperative import find_cooperative, raise_reached_deadline

MAX_PREPARED = 16  # calls with other addresses, which are kept for a device
MAX_ARENAS = 8  # of streams, on a device
_DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 2, 3  # cudaMemcpyKind
# With a stream's handle: start a call.
Start = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The start of a call with some addresses."""

    start: Start
    is_graph: bool


@dataclass(slots=True)
class _Loaded:
    """A model on a device."""

    functions: dict[int, tuple[Any, ...]]  # of each kernel in use, of each launch
    weights: DeviceArray
    packed: DeviceArray
    steps: tuple[KernelStep | CopyStep, ...]  # of a call
    as_graph: bool
    predecessors: tuple[tuple[int, ...], ...]  # of the steps, for a graph
    arenas: dict[int, DeviceArray] = field(default_factory=dict)  # by stream: calls on several may overlap
    prepared: dict[tuple[int, ...], _Prepared] = field(default_factory=dict)  # by the addresses of the slots


@dataclass(frozen=True, slots=True)
class _Bound:
    """A call's arrays, and the addresses of its slots. It keeps their memory."""

    cupy: Any
    loaded: _Loaded
    binding: Binding[DeviceArray]
    slots: tuple[int, ...]
    stream: int
    arena: DeviceArray


class CudaModel:
    """A model of cubins, loaded on each device at the first call there."""

    def __init__(self, plan: ModelPlan, compiled: Sequence[CompiledKernel], weights: Array, *, as_graph: bool) -> None:
        """Take a plan with the kernels that it runs.

        Args:
            plan: the plan.
            compiled: its kernels.
            weights: all weights.
            as_graph: whether calls with the same addresses launch a CUDA graph from the second one on.
        """
        self.plan = plan
        self._compiled = compiled
        self._weights = weights.reshape(-1).view(np.uint8)
        self._buffers = call_buffers(plan)
        self._steps = tuple(unroll_steps(plan.steps))
        self._fallback = tuple(unroll_steps(plan.fallback))
        self._as_graph = as_graph
        self._once = tuple(unroll_steps(plan.prepack))
        check_operands(plan, (*self._once, *self._steps, *self._fallback))
        self._cooperative = tuple(find_cooperative(plan, self._steps))
        self._loaded: dict[int, _Loaded] = {}
        self._lock = Lock()

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Start a call on the current stream of the arrays' library, and return the outputs by name.

        A call with a cooperative launch returns when the work is done.
        Raises ArgumentError for arrays that do not fit, LaunchError (no-device, no-cupy, wrong-device, out-of-memory,
        persistent-too-large), and KernelTimeoutError if a wait in a cooperative launch reached its deadline.
        """
        with self._bound(arrays, out) as call:
            self._prepared(call.cupy, call.loaded, call.slots)(call.stream)
            for step, events in find_cooperative(self.plan, call.loaded.steps):
                _check_deadline(call.cupy, step, _address(call.slots, events), call.stream)
            call.binding.copy_back()
            return call.binding.results()

    def prepare(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> Start:
        """Return what starts calls on these arrays in a stream, to time the device.

        Nothing waits for such a call, and nobody learns that a wait in it has reached its deadline.
        """
        with self._bound(arrays, out) as call:
            loaded, slots = call.loaded, call.slots
            start = self._graph(loaded, slots) if loaded.as_graph else self._in_stream(call.cupy, loaded, loaded.steps, slots)

        def start_bound(stream: int, _: _Bound = call) -> None:
            start(stream)

        return start_bound

    @contextmanager
    def _bound(self, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> Iterator[_Bound]:
        """Bind a call's arrays on their device, which is current meanwhile."""
        if not device_present():
            raise LaunchError(
                f"{self.plan.name} is for {self.plan.target} and there is no NVIDIA device here "
                '(no driver, or a driver without a device); runtime="emulator" runs it on the CPU',
                code="no-device",
            )
        cupy = import_cupy()
        library = DeviceArrays.of_call(self._buffers, arrays, out, CupyArrays(cupy))
        binding = bind_call(self._buffers, arrays, out, library)
        stream = library.library.stream(library.device)
        with cupy.cuda.Device(library.device), launch_errors(cupy), self._lock:
            loaded = self._on_device(cupy, library.device, stream)
            arena = self._arena(cupy, loaded, library.device, stream)
            slots = [loaded.weights.address, loaded.packed.address, arena.address]
            slots += [binding.memory[buffer.symbol].address for buffer in self._buffers]
            with library.noted_writes(binding):
                yield _Bound(cupy, loaded, binding, tuple(slots), stream, arena)

    def _on_device(self, cupy: Any, device: int, stream: int) -> _Loaded:
        """Return the model on a device; load it and pack its weights there once."""
        if device not in self._loaded:
            functions = self._load_functions(cupy, device, [step for step, _ in self._cooperative])
            uses_fallback = self._needs_fallback(functions)
            steps, as_graph = (self._fallback, True) if uses_fallback else (self._steps, self._as_graph)
            functions |= self._load_functions(cupy, device, (*self._once, *steps), known=functions)
            weights, packed = _upload(cupy, self._weights, device), _allocate(cupy, self.plan.packed_bytes, device)
            predecessors = find_predecessors(self.plan, steps) if as_graph else ()
            loaded = _Loaded(functions, weights, packed, steps, as_graph, predecessors)
            if self._once:
                self._in_stream(cupy, loaded, self._once, (weights.address, packed.address))(stream)
                cupy.cuda.runtime.streamSynchronize(stream)  # streams of later calls do not wait for this one
                # without the weights that only packing reads, which can then be freed
                loaded.weights = _upload(cupy, self._weights[: self.plan.read_weights_bytes], device)
            self._loaded[device] = loaded
        return self._loaded[device]

    def _load_functions(
        self, cupy: Any, device: int, steps: Sequence[KernelStep | CopyStep], known: Collection[int] = ()
    ) -> dict[int, tuple[Any, ...]]:
        """Return the functions of the kernels that steps launch, without known ones."""
        used = {step.kernel for step in steps if isinstance(step, KernelStep)}.difference(known)
        return {number: load_functions(self._compiled[number], cupy, device) for number in sorted(used)}

    def _needs_fallback(self, functions: Mapping[int, tuple[Any, ...]]) -> bool:
        """Return whether the device holds fewer blocks at once than a cooperative launch has, and warn of it.

        Raises LaunchError (persistent-too-large) if the plan has no other steps.
        """
        for step, _ in self._cooperative:
            launch = self.plan.kernels[step.kernel].source.launches[step.launch]
            resident, blocks = driver().count_resident(functions[step.kernel][step.launch].ptr, launch), math.prod(launch.grid)
            if blocks <= resident:
                continue
            message = f"{launch.name} has {blocks} blocks that run together, and the device holds {resident}"
            if not self._fallback:
                raise LaunchError(message, code="persistent-too-large")
            warnings.warn(f"{message}: {self.plan.name} runs as a CUDA graph", RollerWarning, stacklevel=2)
            return True
        return False

    def _arena(self, cupy: Any, loaded: _Loaded, device: int, stream: int) -> DeviceArray:
        """Return the arena of a stream. The oldest is freed after the work of the device, which may use it."""
        arena = loaded.arenas.pop(stream, None)
        if arena is None and len(loaded.arenas) >= MAX_ARENAS:
            cupy.cuda.runtime.deviceSynchronize()
            del loaded.arenas[next(iter(loaded.arenas))]
        loaded.arenas[stream] = arena or _allocate(cupy, self.plan.arena_bytes, device)
        return loaded.arenas[stream]

    def _prepared(self, cupy: Any, loaded: _Loaded, slots: tuple[int, ...]) -> Start:
        """Return what starts a call with these addresses.

        A graph takes longer to build than launches take, so it is built when the addresses come again.
        """
        prepared = loaded.prepared.pop(slots, None)
        if prepared is None:
            prepared = _Prepared(self._in_stream(cupy, loaded, loaded.steps, slots), is_graph=False)
        elif loaded.as_graph and not prepared.is_graph:
            prepared = _Prepared(self._graph(loaded, slots), is_graph=True)
        while len(loaded.prepared) >= MAX_PREPARED:
            del loaded.prepared[next(iter(loaded.prepared))]
        loaded.prepared[slots] = prepared
        return prepared.start

    def _in_stream(self, cupy: Any, loaded: _Loaded, steps: Sequence[KernelStep | CopyStep], slots: tuple[int, ...]) -> Start:
        """Return what launches steps one after the other."""
        library = driver()
        parameters = [_parameters(library, self.plan, step, slots) for step in steps]

        def start(stream: int) -> None:
            runtime = cupy.cuda.runtime
            for step, given in zip(steps, parameters, strict=True):
                if isinstance(step, CopyStep):
                    ends = (_address(slots, step.target), _address(slots, step.source))
                    runtime.memcpyAsync(*ends, step.bytes, _DEVICE_TO_DEVICE, stream)
                    continue
                for address, size in step.zeroed:
                    runtime.memsetAsync(_address(slots, address), 0, size, stream)
                launch = self.plan.kernels[step.kernel].source.launches[step.launch]
                library.launch(loaded.functions[step.kernel][step.launch].ptr, launch, given, stream)

        return start

    def _graph(self, loaded: _Loaded, slots: tuple[int, ...]) -> Start:
        """Return what launches a graph of the steps: an edge is a hazard."""
        library = driver()
        graph = Graph(library)
        nodes: list[tuple[Node, ...]] = []  # of each step, its last ones
        early = find_early_starts(self.plan, loaded.steps, loaded.predecessors)
        for step, before, is_early in zip(loaded.steps, loaded.predecessors, early, strict=True):
            after = [node for number in before for node in nodes[number]]
            if isinstance(step, CopyStep):
                nodes.append(graph.add_copies(_address(slots, step.target), _address(slots, step.source), step.bytes, after))
                continue
            zeros = [graph.add_zeros(_address(slots, address), size, after) for address, size in step.zeroed]
            launch = self.plan.kernels[step.kernel].source.launches[step.launch]
            function = loaded.functions[step.kernel][step.launch].ptr
            given = _parameters(library, self.plan, step, slots)
            nodes.append((graph.add_kernel(function, launch, given, zeros or after, is_early=is_early),))
        return graph.instantiate().launch


def _check_deadline(cupy: Any, step: KernelStep, events: int, stream: int) -> None:
    """Wait for the end of a cooperative launch. Raises KernelTimeoutError if a wait in it reached its deadline."""
    state = np.zeros(EVENT_WORDS, np.uint32)
    runtime = cupy.cuda.runtime
    runtime.memcpyAsync(state.ctypes.data, events, state.nbytes, _DEVICE_TO_HOST, stream)
    runtime.streamSynchronize(stream)
    raise_reached_deadline(step, state)


def _parameters(library: Driver, plan: ModelPlan, step: KernelStep | CopyStep, slots: Sequence[int]) -> Parameters:
    """Return the parameters of a step's launch; none for a copy."""
    if isinstance(step, CopyStep):
        return Parameters((), None)
    launch = plan.kernels[step.kernel].source.launches[step.launch]
    named = zip(launch.operands, step.arguments, strict=True)
    return library.parameters(launch, {symbol: _address(slots, at) for symbol, at in named if at is not None})


def _address(slots: Sequence[int], address: Address) -> int:
    return slots[address.slot] + address.offset_bytes


def _allocate(cupy: Any, size_bytes: int, device: int) -> DeviceArray:
    return CupyArrays(cupy).empty((max(1, size_bytes),), DType.UINT8, device)


def _upload(cupy: Any, array: Array, device: int) -> DeviceArray:
    target = _allocate(cupy, array.nbytes, device)
    if array.nbytes:
        target.array.set(np.ascontiguousarray(array))
    return target
