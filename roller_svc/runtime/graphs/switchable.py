"""A shared object with the kernels of several choices. Plans that use some of them are tables, which calls are given.

So a model changes its kernels and its plan between two calls, without a linker (ASTRA, ASPLOS 2019).
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import local

import numpy as np

from roller_svc.analysis.model_tables import list_functions, list_tables
from roller_svc.errors import InvariantError
from roller_svc.fork_lock import ForkLock
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.model_plan import PACKED, WEIGHTS, Address, KernelStep, ModelPlan, map_addresses
from roller_svc.runtime.binding import Array
from roller_svc.runtime.cpu import load_library, unload_library
from roller_svc.runtime.cpu_features import check_features
from roller_svc.runtime.graphs.cpu import CpuCalls
from roller_svc.runtime.resident import resident_empty

# The structs of codegen/c/model.py: an int is "i", a long is "l".
_FIELDS = {
    "addresses": "il", "sizes": "l", "updates": "iilll", "steps": "iliiiii",
    "instructions": "iilli", "waits": "ii", "programs": "ii",
}  # fmt: skip
_ROWS = {
    name: np.dtype(kinds if len(kinds) == 1 else [(str(number), kind) for number, kind in enumerate(kinds)], align=True)
    for name, kinds in _FIELDS.items()
}


class _Tables(ctypes.Structure):
    """The struct tables of codegen/c/model.py."""

    _fields_ = (*((name, ctypes.c_void_p) for name in _FIELDS), ("prepack_end", ctypes.c_int), ("run_end", ctypes.c_int))


class _Packed:
    """Packed weights of a kernel for some constants. They are freed with the last model that uses them."""

    def __init__(self, size_bytes: int) -> None:
        self.memory: Array = resident_empty(size_bytes)
        self.address = self.memory.ctypes.data


@dataclass(frozen=True, slots=True)
class _PackGroup:
    """The launches that pack the constants of a kernel, and where a plan has their results."""

    steps: tuple[KernelStep, ...]
    start: int
    end: int
    key: tuple[object, ...]


class BoundModel(CpuCalls):
    """A plan of a switchable model, which is called as a model is."""

    def __init__(self, switchable: SwitchableModel, plan: ModelPlan, packed: Sequence[_Packed]) -> None:
        """Make the tables of a plan, whose packed weights have absolute addresses."""
        tables = list_tables(plan, switchable.functions)
        self._arrays = [np.array(list(getattr(tables, name)), rows) for name, rows in _ROWS.items()]
        self._tables = _Tables(*(array.ctypes.data for array in self._arrays), tables.prepack_end, tables.run_end)
        super().__init__(plan, switchable.library, switchable.name, ctypes.addressof(self._tables))
        self._switchable = switchable
        self._packed = packed  # keeps the memory
        self._bases = switchable.weights.ctypes.data, 0

    def _workspace(self) -> Array:
        return self._switchable.workspace(self.plan.arena_bytes)

    def pack(self) -> None:
        """Run the steps of `plan.prepack`. Raises IndexRangeError."""
        self._prepack(*self._bases)


class SwitchableModel:
    """Kernels of which plans are bound. Calls of several plans may overlap."""

    def __init__(
        self,
        name: str,
        binary: bytes,
        plan: ModelPlan,
        kernels: Sequence[KernelSource],
        weights: Array,
    ) -> None:
        """Load the shared object.

        Args:
            name: what the names of its functions begin with.
            binary: the shared object.
            plan: any plan of the graph. Others have the same inputs, outputs and constants.
            kernels: all kernels of the shared object.
            weights: the constants, each at its offset in `plan`.
        """
        for kernel in kernels:
            check_features(kernel)
        self.name = name
        self.binary = binary
        self.library = load_library(binary, name)
        weakref.finalize(self, unload_library, self.library._handle).atexit = False
        self.weights = weights
        self.functions = list_functions(kernels)
        self._slots = plan.num_slots
        self._offsets = {parameter.digest: parameter.offset_bytes for parameter in plan.weights}
        self._packed: weakref.WeakValueDictionary[tuple[object, ...], _Packed] = weakref.WeakValueDictionary()
        self._memory = local()
        self._lock = ForkLock()

    def can_bind(self, plan: ModelPlan) -> bool:
        """Return whether a plan of kernels of the program has its slots and some of its constants."""
        return plan.num_slots == self._slots and all(parameter.digest in self._offsets for parameter in plan.weights)

    def bind(self, plan: ModelPlan) -> BoundModel:
        """Return a plan as a model. Weights that no other plan in use has packed are packed now."""
        if plan.num_slots != self._slots:
            raise InvariantError(f"{plan.name}: a plan of {plan.num_slots} slots for a program of {self._slots}")
        with self._lock:
            return self._bind(plan)

    def _bind(self, plan: ModelPlan) -> BoundModel:
        groups = _find_groups(plan)
        packed: list[_Packed] = []
        missing: list[KernelStep] = []
        for group in groups:
            memory = self._packed.get(group.key)
            if memory is None:
                memory = self._packed[group.key] = _Packed(group.end - group.start)
                missing += group.steps
            packed.append(memory)
        starts = [group.start for group in groups]
        parameters = [parameter.offset_bytes for parameter in plan.weights]

        def move(address: Address) -> Address:
            at = address.offset_bytes
            if address.slot == WEIGHTS:
                parameter = plan.weights[bisect_right(parameters, at) - 1]
                if parameter.digest not in self._offsets:
                    raise InvariantError(f"{plan.name}: the program has no constant {parameter.digest}")
                return Address(WEIGHTS, self._offsets[parameter.digest] + at - parameter.offset_bytes)
            if address.slot == PACKED:
                number = bisect_right(starts, at) - 1
                return Address(PACKED, packed[number].address + at - starts[number])
            return address

        prepack, steps = (tuple(map_addresses(step, move) for step in each) for each in (missing, plan.steps))
        model = BoundModel(self, replace(plan, prepack=prepack, steps=steps), packed)
        if missing:
            model.pack()
        return model

    def workspace(self, size_bytes: int) -> Array:
        """Return the memory of a thread's calls, which have one workspace for all plans."""
        block: Array | None = getattr(self._memory, "block", None)
        if block is None or block.size < size_bytes:
            block = self._memory.block = resident_empty(size_bytes)
        return block


def _find_groups(plan: ModelPlan) -> list[_PackGroup]:
    """Return the launches that pack weights, by kernel and constants. A plan has their results one behind the other."""
    listed: list[list[KernelStep]] = []
    for step in plan.prepack:
        if not isinstance(step, KernelStep):
            raise InvariantError(f"{step.node}: weights are packed by kernels alone")
        if not (listed and listed[-1][-1].kernel == step.kernel and listed[-1][-1].launch < step.launch):
            listed.append([])
        listed[-1].append(step)
    starts = [min(at.offset_bytes for step in steps for at in step.arguments if at and at.slot == PACKED) for steps in listed]
    ends = [*starts, plan.packed_bytes][1:]
    return [
        _PackGroup(tuple(steps), start, end, _key(plan, steps, start))
        for steps, start, end in zip(listed, starts, ends, strict=True)
    ]


def _key(plan: ModelPlan, steps: Sequence[KernelStep], start: int) -> tuple[object, ...]:
    """Return what packed weights depend on: the kernel, and the constants that its launches read."""
    parameters = [parameter.offset_bytes for parameter in plan.weights]
    key: list[object] = [plan.kernels[steps[0].kernel].source.key]
    for step in steps:
        key.append(step.launch)
        for at in step.arguments:
            if at is None:
                key.append(None)
            elif at.slot == WEIGHTS:
                parameter = plan.weights[bisect_right(parameters, at.offset_bytes) - 1]
                key.append((parameter.digest, at.offset_bytes - parameter.offset_bytes))
            elif at.slot == PACKED:
                key.append(at.offset_bytes - start)
            else:
                raise InvariantError(f"{step.node}: weights are packed from constants alone")
    return tuple(key)
