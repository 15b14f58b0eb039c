"""Run a model's shared object on numpy arrays: one C call for the whole model."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from threading import local
from typing import NamedTuple

import numpy as np

from roller_svc.errors import IndexRangeError, InvariantError, LaunchError
from roller_svc.ir.kernel import ALIGNMENT_BYTES
from roller_svc.ir.model_plan import CopyStep, KernelStep, LoopStep, ModelPlan, Step, VDeviceStep, iter_steps
from roller_svc.ir.program import TensorType
from roller_svc.ir.vdevice import executes
from roller_svc.runtime.binding import (
    ELEMENT_ALIGNMENT,
    Array,
    Binding,
    NumpyArrays,
    PlainArrays,
    range_error,
)
from roller_svc.runtime.cpu import load_library, unload_library
from roller_svc.runtime.cpu_features import check_features
from roller_svc.runtime.graphs.buffers import bind_call, call_buffers
from roller_svc.runtime.resident import resident_empty

_Pointers = ctypes.Array[ctypes.c_void_p]


class Moment(NamedTuple):
    """When a step ran, or its rTasks on a vEU."""

    step: KernelStep | CopyStep
    start_s: float
    end_s: float
    veu: int  # 0 for a step that is not part of a virtual device's plan


class _ThreadMemory(NamedTuple):
    """Keep for the calls of a thread the workspace, pointers to inputs and outputs, and where a failed check is reported."""

    workspace: Array
    inputs: _Pointers
    outputs: _Pointers
    status: Array
    arguments: tuple[ctypes.c_void_p, ...]  # of the model's function: addresses of these, and of weights and packed weights


class CpuCalls:
    """The calls of a plan by a loaded program. They may overlap: each thread has a workspace of its own."""

    _bases: tuple[int, int]  # addresses of weights and packed weights

    def __init__(self, plan: ModelPlan, library: ctypes.CDLL, name: str, *bound: int) -> None:
        """Find the functions.

        Args:
            plan: the plan.
            library: the program, whose functions have names that begin with `name`.
            name: see `library`.
            bound: address of the tables of the plan, for a program of which plans are bound.
        """
        self.plan = plan
        self._name = name
        self._library = library
        self._bound = bound
        self._run = self._function("run", 6 + len(bound))
        self._memory = local()
        self._buffers = call_buffers(plan)
        self._plain = PlainArrays(self._buffers)
        self._states = {name for name, _ in plan.states}

    def _workspace(self) -> Array:
        """Return memory for the calls of this thread."""
        return resident_empty(self.plan.arena_bytes)

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array]:
        """Return the outputs by name; write them to arrays in `out` if given. States are in `out`, and are results too.

        Raises ArgumentError for arrays that do not fit, IndexRangeError for an index from data out of range.
        """
        results = self.run_plain(arrays, out)
        if results is not None:
            return results
        binding = bind_call(self._buffers, arrays, out, NumpyArrays(ELEMENT_ALIGNMENT))
        self.run_at(*self._addresses(binding))
        binding.copy_back()
        return binding.results()

    def run_plain(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array] | None:
        """Run the model on arrays as they are. Returns None if `bind_call` has to convert or refuse one."""
        if self._states and (out is None or not self._states <= out.keys()):
            return None
        inputs = self._plain.inputs(arrays)
        if inputs is None:
            return None
        written = self._plain.outputs(out, inputs)
        if written is None:
            return None
        results, outputs = written
        self.run_at(inputs, outputs)
        return results

    def run_at(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Run on dense tensors of the plan's types at these addresses, in its order. Raises IndexRangeError as `run`.

        The states come after the outputs.
        """
        self._call(self._run, inputs, outputs)

    def profile(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> list[Moment]:
        """Run the model once and return each executed step, or its rTasks on a vEU. Times are since the first.

        Raises as `run` does.
        """
        return self.run_timed(arrays, out)[1]

    def run_timed(
        self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None
    ) -> tuple[dict[str, Array], list[Moment]]:
        """Return the results as `run` does, and the moments as `profile` does."""
        steps = list(_executed(self.plan.steps))
        times = np.zeros(max(1, 2 * len(steps)))
        binding = bind_call(self._buffers, arrays, out, NumpyArrays(ELEMENT_ALIGNMENT))
        self._call(self._function("profile", 7 + len(self._bound)), *self._addresses(binding), _address(times))
        binding.copy_back()
        starts, ends = (times[: 2 * len(steps)] - times[: 2 * len(steps)].min(initial=np.inf)).reshape(-1, 2).T.tolist()
        moments = [Moment(step, start, end, veu) for (step, veu), start, end in zip(steps, starts, ends, strict=True)]
        return binding.results(), moments

    def _addresses(self, binding: Binding[Array]) -> tuple[list[int], list[int]]:
        """Return the addresses of a binding's inputs, and of its outputs and states."""
        addresses = [_address(binding.memory[buffer.symbol]) for buffer in self._buffers]
        return addresses[: len(self.plan.inputs)], addresses[len(self.plan.inputs) :]

    def _call(self, function: ctypes._NamedFuncPointer, inputs: Sequence[int], outputs: Sequence[int], *more: int) -> None:
        memory: _ThreadMemory | None = getattr(self._memory, "block", None)
        if memory is None:
            memory = self._memory.block = self._thread_memory()
        memory.inputs[: len(inputs)] = [*inputs]
        memory.outputs[: len(outputs)] = [*outputs]
        failed = function(*memory.arguments, *more)
        if failed >= 0:
            error = self._range_error(int(failed), memory.status)
            memory.status[:] = 0
            raise error

    def _prepack(self, weights: int, packed: int) -> None:
        """Pack weights at an address, to another one. Raises IndexRangeError."""
        prepack = self._function("prepack", 4 + len(self._bound))
        workspace, status = self._workspace(), np.zeros(4, np.int64)
        failed = prepack(weights, packed, _address(workspace), _address(status), *self._bound)
        if failed >= 0:
            raise self._range_error(int(failed), status)

    def _function(self, name: str, arguments: int) -> ctypes._NamedFuncPointer:
        try:
            function: ctypes._NamedFuncPointer = getattr(self._library, f"{self._name}_{name}")
        except AttributeError as error:
            raise LaunchError(
                f"{self.plan.name}: the shared object has no function {self._name}_{name}", code="load-failed"
            ) from error
        function.argtypes = [ctypes.c_void_p] * arguments
        function.restype = ctypes.c_long
        return function

    def _thread_memory(self) -> _ThreadMemory:
        """Return what a thread's calls reuse, without an error."""
        workspace, status = self._workspace(), np.zeros(4, np.int64)
        written = (*self.plan.outputs, *self.plan.states)
        inputs, outputs = ((ctypes.c_void_p * max(1, len(tensors)))() for tensors in (self.plan.inputs, written))
        addresses = (
            ctypes.addressof(inputs), ctypes.addressof(outputs), _address(workspace), *self._bases, _address(status), *self._bound,
        )  # fmt: skip
        return _ThreadMemory(workspace, inputs, outputs, status, tuple(map(ctypes.c_void_p, addresses)))

    def _range_error(self, row: int, status: Array) -> IndexRangeError:
        step = list(iter_steps((*self.plan.prepack, *self.plan.steps)))[row]
        if not isinstance(step, KernelStep):
            raise InvariantError(f"step {row} of {self.plan.name} reported an index, and launches no kernel")
        error = range_error(self.plan.kernels[step.kernel].source, int(status[1]), int(status[2]))
        return IndexRangeError(f"node {step.node!r}: {error.message}", hint=error.hint)


class CpuModel(CpuCalls):
    """A loaded model."""

    def __init__(self, plan: ModelPlan, name: str, binary: bytes, weights: Array, packed: Array | None = None) -> None:
        """Load the shared object.

        Args:
            plan: the plan that it was made of.
            name: what the names of its functions begin with.
            binary: the shared object.
            weights: the weights; those that steps read suffice with packed weights.
            packed: the packed weights, which are computed if they are not given.
        """
        for kernel in plan.kernels:
            check_features(kernel.source)
        library = load_library(binary, name)
        weakref.finalize(self, unload_library, library._handle).atexit = False
        super().__init__(plan, library, name)
        if packed is None:
            packed, aligned = resident_empty(plan.packed_bytes)[: plan.packed_bytes], _aligned(weights, plan.weights_bytes)
            self._prepack(_address(aligned), _address(packed))
        self.packed: Array = _aligned(packed, plan.packed_bytes)
        read = weights.reshape(-1).view(np.uint8)[: plan.read_weights_bytes]
        # without the others, which can then be freed
        self.weights: Array = _copy(read) if read.size < weights.nbytes else _aligned(read, plan.read_weights_bytes)
        self._bases = _address(self.weights), _address(self.packed)


def _executed(steps: tuple[Step, ...]) -> Iterator[tuple[KernelStep | CopyStep, int]]:
    """Yield steps and vEUs in the order in which a profile has them: those of a loop once for each of its steps."""
    for step in steps:
        match step:
            case LoopStep():
                for _ in range(step.steps):
                    yield from _executed(step.body)
            case VDeviceStep():
                for veu, _, instruction in executes(step.plan):
                    yield step.steps[step.operators[instruction.operator].step], veu
            case _:
                yield step, 0


def _aligned(array: Array, size_bytes: int) -> Array:
    """Return the bytes at an aligned address; at least one, so that there is an address."""
    flat = array.reshape(-1).view(np.uint8)
    if flat.size != size_bytes:
        raise InvariantError(f"{flat.size} bytes of weights, expected {size_bytes}")
    return flat if size_bytes and _address(flat) % ALIGNMENT_BYTES == 0 else _copy(flat)


def _copy(flat: Array) -> Array:
    copy = resident_empty(flat.size)
    copy[: flat.size] = flat
    return copy


def _address(array: Array) -> int:
    return array.ctypes.data


def weights_block(types: list[tuple[TensorType, int, Array]], size_bytes: int) -> Array:
    """Return one block with each array at its offset."""
    block = resident_empty(size_bytes)[:size_bytes]
    for type_, offset, array in types:
        block[offset : offset + type_.bytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return block
