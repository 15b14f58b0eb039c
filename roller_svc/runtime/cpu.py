"""Load compiled C kernels and call them on numpy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import numpy as np

from roller_svc.errors import InvariantError, LaunchError
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Role, align_blocks
from roller_svc.runtime.binding import ELEMENT_ALIGNMENT, Array, Binding, NumpyArrays, PlainArrays, bind, range_error
from roller_svc.runtime.cpu_features import check_features
from roller_svc.runtime.resident import resident_empty
from roller_svc.runtime.thread_pool import share_pool

RTLD_NOLOAD = 0x4  # as in <dlfcn.h>; Python's os module has it only on some platforms
_OPENMP_RUNTIMES = ("libgomp.so.1", "libomp.so.5", "libiomp5.so")


class _Entry(Protocol):
    def __call__(self, *arguments: ctypes.c_void_p | int) -> None: ...


class CpuModule:
    """A shared object, loaded during the lifetime of this object. Calls from several threads may overlap."""

    def __init__(self, compiled: CompiledKernel, alignment_bytes: int = ELEMENT_ALIGNMENT) -> None:
        """Load a kernel.

        Args:
            compiled: the kernel.
            alignment_bytes: alignment of inputs and outputs that the source assumes beyond that of the elements.
                Arrays with less are copied. Generated kernels assume no more.
        """
        if compiled.source.language is not Language.C:
            raise InvariantError(f"{compiled.source.name} is {compiled.source.language.value}, not C")
        self.source: KernelSource = compiled.source
        check_features(compiled.source)
        self.library = NumpyArrays(alignment_bytes)
        library = load_library(compiled.binary, compiled.source.name)
        weakref.finalize(self, unload_library, library._handle).atexit = False  # a call under way keeps the module
        self._entries = tuple(_entry(library, launch, compiled.source.name) for launch in self.source.launches)
        self._scratch = threading.local()

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array]:
        """Run the kernel. Raises ArgumentError for arrays that do not fit, IndexRangeError for a bad index."""
        results = self.run_plain(arrays, out)
        if results is not None:
            return results
        binding = bind(self.source.buffers, arrays, out, self.library)
        blocks = (self.workspace(), self._thread_block("prepared", self.source.prepacked_buffers))
        launches = (*self.launches(prepare=True), *self.launches(prepare=False))
        CpuCall(self, binding, blocks, launches)()
        return binding.results()

    def run_plain(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array] | None:
        """Run the kernel on arrays as they are. Returns None if `bind` has to convert or refuse one."""
        call: _DirectCall | None = getattr(self._scratch, "direct", None)
        if call is None:
            blocks = (self.workspace(), self._thread_block("prepared", self.source.prepacked_buffers))
            launches = (*self.launches(prepare=True), *self.launches(prepare=False))
            call = self._scratch.direct = _DirectCall(self, self.source.buffers, {}, blocks, launches)
        return call(arrays, out)

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> CpuCall:
        """Return a bound call: constants are packed, each call of the result runs the other launches (for timing)."""
        constants = {name: array for name, array in arrays.items() if name in self.source.constants}
        variables = {name: array for name, array in arrays.items() if name not in constants}
        return self.prepare(constants).bind(variables, out)

    def prepare(self, constants: Mapping[str, object]) -> PreparedCpu:
        """Run the launches that depend only on constants. Raises ArgumentError for arrays that do not fit."""
        return PreparedCpu(self, constants)

    def launches(self, *, prepare: bool) -> tuple[tuple[_Entry, LaunchSpec], ...]:
        """Return the prepack launches, or the others, in order."""
        pairs = zip(self._entries, self.source.launches, strict=True)
        return tuple((entry, launch) for entry, launch in pairs if launch.is_prepack == prepare)

    def workspace(self) -> _Block:
        """Return this thread's workspace, reused by its next call."""
        prepared = self.source.prepacked_buffers
        return self._thread_block("workspace", tuple(b for b in self.source.buffers_of(Role.WORKSPACE) if b not in prepared))

    def _thread_block(self, name: str, buffers: tuple[Buffer, ...]) -> _Block:
        """Return this thread's block of that name."""
        block: _Block | None = getattr(self._scratch, name, None)
        if block is None:
            block = _Block(buffers)
            setattr(self._scratch, name, block)
        return block


class PreparedCpu:
    """A module bound to its constants, which must not change while this is in use.

    Calls from several threads may overlap.
    """

    def __init__(self, module: CpuModule, constants: Mapping[str, object]) -> None:
        self._module = module
        self.source: KernelSource = module.source
        buffers = module.source.buffers
        self._remaining_buffers = tuple(b for b in buffers if b.role is not Role.INPUT or b.name not in module.source.constants)
        binding = bind((b for b in buffers if b not in self._remaining_buffers), constants, None, module.library)
        self._constants = binding.memory
        self._block = _Block(module.source.prepacked_buffers)
        CpuCall(module, binding, (self._block,), module.launches(prepare=True))()
        self._scratch = threading.local()

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array]:
        """Run the kernel with the other arrays. Raises as CpuModule.run does."""
        results = self.run_plain(arrays, out)
        if results is not None:
            return results
        call = self.bind(arrays, out)
        call()
        return call.results()

    def bind(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> CpuCall:
        """Return a bound call: each call of the result only runs the kernel (for timing)."""
        binding = bind(self._remaining_buffers, arrays, out, self._module.library, self._constants.values())
        full_binding = replace(binding, memory=self._constants | binding.memory)
        blocks = (self._module.workspace(), self._block)
        return CpuCall(self._module, full_binding, blocks, self._module.launches(prepare=False))

    def run_plain(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Array] | None:
        """Run the kernel on arrays as they are. Returns None if `bind` has to convert or refuse one."""
        call: _DirectCall | None = getattr(self._scratch, "direct", None)
        if call is None:
            blocks = (self._module.workspace(), self._block)
            launches = self._module.launches(prepare=False)
            call = _DirectCall(self._module, self._remaining_buffers, self._constants, blocks, launches)
            self._scratch.direct = call
        return call(arrays, out)


class _Block:
    """One allocation for several buffers, each aligned."""

    def __init__(self, buffers: tuple[Buffer, ...]) -> None:
        offsets, size_bytes = align_blocks(buffers)
        self._memory = resident_empty(size_bytes)
        start = _address(self._memory)
        self.addresses = {symbol: start + offset for symbol, offset in offsets.items()}


class _DirectCall:
    """Launches on the arrays of each call as they are. For one thread, whose workspace it uses."""

    def __init__(
        self,
        module: CpuModule,
        buffers: tuple[Buffer, ...],
        constants: Mapping[str, Array],
        blocks: tuple[_Block, ...],
        launches: tuple[tuple[_Entry, LaunchSpec], ...],
    ) -> None:
        """Prepare the calls.

        Args:
            module: the loaded kernel.
            buffers: those that are bound for each call.
            constants: the memory of the other inputs, by symbol.
            blocks: the memory of workspace and prepacked constants.
            launches: what a call runs.
        """
        self._source = module.source
        # donated inputs are copied or written, and a module may assume more than the alignment of elements
        self._is_usable = not any(b.donated for b in buffers) and module.library.alignment_bytes == ELEMENT_ALIGNMENT
        self._plain = PlainArrays(buffers, constants.values())
        self._constants = constants  # keeps the memory
        self._blocks = blocks
        self._status = (ctypes.c_longlong * 4)()
        given = [b for role in (Role.INPUT, Role.OUTPUT) for b in buffers if b.role is role]
        # what is not bound for each call has a fixed address
        fixed = {symbol: _address(array) for symbol, array in constants.items()}
        for block in blocks:
            fixed |= block.addresses
        fixed |= {b.symbol: ctypes.addressof(self._status) for b in self._source.buffers_of(Role.STATUS)}
        places = {b.symbol: position for position, b in enumerate(given)} | {s: len(given) + i for i, s in enumerate(fixed)}
        self._fixed = list(fixed.values())
        sizes = {b.symbol: b.bytes for b in self._source.buffers}
        self._steps = [
            (
                entry,
                _chosen([places[symbol] for symbol in launch.args]),
                [(places[symbol], sizes[symbol]) for symbol in launch.zeroed],
            )
            for entry, launch in launches
        ]

    def __call__(self, arrays: Mapping[str, object], out: Mapping[str, object] | None) -> dict[str, Array] | None:
        inputs = self._plain.inputs(arrays) if self._is_usable else None
        if inputs is None:
            return None
        written = self._plain.outputs(out, inputs)
        if written is None:
            return None
        results, outputs = written
        addresses = inputs + outputs + self._fixed
        status = self._status
        for entry, arguments, zeroed in self._steps:
            for place, size_bytes in zeroed:
                ctypes.memset(addresses[place], 0, size_bytes)
            entry(*arguments(addresses))
            if status[0]:
                status[0] = 0
                raise range_error(self._source, status[1], status[2])
        return results


def _chosen(places: list[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """Return a function that takes the elements at these places of a list."""
    if len(places) == 1:
        return lambda listed: (listed[places[0]],)
    taken: Callable[[list[int]], tuple[int, ...]] = itemgetter(*places)
    return taken


class CpuCall:
    """Arrays bound to launches. Results are valid after a call. Not thread-safe."""

    def __init__(
        self,
        module: CpuModule,
        binding: Binding[Array],
        workspace: tuple[_Block, ...],
        launches: tuple[tuple[_Entry, LaunchSpec], ...],
    ) -> None:
        self._module = module  # keeps the library loaded
        self._binding = binding
        self._workspace = workspace
        source = module.source
        self._status = np.zeros(4, np.int64)
        addresses = {symbol: _address(array) for symbol, array in binding.memory.items()}
        for block in workspace:
            addresses |= block.addresses
        addresses |= {b.symbol: _address(self._status) for b in source.buffers_of(Role.STATUS)}
        sizes = {b.symbol: b.bytes for b in source.buffers}
        self._steps = tuple(
            (
                entry,
                tuple(ctypes.c_void_p(addresses[symbol]) for symbol in launch.args),
                tuple((addresses[symbol], sizes[symbol]) for symbol in launch.zeroed),
            )
            for entry, launch in launches
        )

    def __call__(self) -> None:
        """Run the launches in order, and write the outputs. Raises IndexRangeError if one reads an index out of range."""
        self._status[0] = 0
        for entry, arguments, zeroed in self._steps:
            for address, size in zeroed:
                ctypes.memset(address, 0, size)
            entry(*arguments)
            if self._status[0]:
                raise range_error(self._module.source, int(self._status[1]), int(self._status[2]))
        self._binding.copy_back()

    def results(self) -> dict[str, Array]:
        """Return the results by output name."""
        return self._binding.results()


def _address(array: Array) -> int:
    return array.ctypes.data


def load_library(binary: bytes, name: str) -> ctypes.CDLL:
    """Load the library of a kernel or model, which only unload_library unloads.

    The file name is never reused: the loader returns the loaded library for a known name, so a repeated
    /proc/self/fd/N would return an older kernel.
    """
    handle, path = tempfile.mkstemp(prefix="roller-", suffix=".so")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL | os.RTLD_NOW)
        if share_pool(library, name):
            ctypes.CDLL(path, mode=RTLD_NOLOAD)  # increments the reference count, which is never decremented
    except OSError as error:
        raise LaunchError(f"{name}: cannot load shared object: {error}", code="load-failed") from error
    finally:
        Path(path).unlink()  # the mapping keeps the file
    # Threads of an OpenMP runtime wait inside its code: unloading it with the last kernel would crash them.
    for runtime in _OPENMP_RUNTIMES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(runtime, mode=RTLD_NOLOAD)  # increments the reference count, which is never decremented
    return library


def unload_library(handle: int) -> None:
    dlclose = ctypes.CDLL(None).dlclose
    dlclose.argtypes = (ctypes.c_void_p,)
    dlclose(handle)


def _entry(library: ctypes.CDLL, launch: LaunchSpec, name: str) -> _Entry:
    try:
        function = library[launch.name]
    except AttributeError as error:
        raise LaunchError(f"{name}: the shared object has no function {launch.name}", code="load-failed") from error
    function.argtypes = [ctypes.c_void_p] * len(launch.args)
    function.restype = None
    entry: _Entry = function
    return entry
