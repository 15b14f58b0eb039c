"""Device buffers between guard bytes: writes outside a buffer are detected, reads outside give NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, Role
from roller_svc.runtime.binding import Array, Binding
from roller_svc.runtime.cuda.arrays import ByteArrays, DeviceArray, DeviceBytes
from roller_svc.runtime.cuda.module import CudaCall, CudaModule, DeviceArrays

# Larger than a row of the widest tile: a store that is off by a row or a vector hits the guard.
GUARD_BYTES = 64 * 1024
# NaN in every floating-point type, -1 in signed integers: unlikely as a result.
FILL = 0xFF


@dataclass(frozen=True, slots=True)
class Block:
    """One buffer: guard, `size` bytes, guard."""

    whole: Any
    size: int

    def written_guard_offsets(self) -> list[int]:
        """Return the offsets of overwritten guard bytes, relative to the first byte of the buffer."""
        ends = (self.whole[:GUARD_BYTES].get(), self.whole[GUARD_BYTES + self.size :].get())
        starts = (-GUARD_BYTES, self.size)
        written = (np.flatnonzero(guard != FILL) for guard in ends)
        return [start + int(at) for start, places in zip(starts, written, strict=True) for at in places]


class GuardedArrays(ByteArrays):
    """An array library whose arrays are initialised with FILL and placed between guards."""

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self.blocks: list[Block] = []

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> DeviceArray:
        size = math.prod(shape) * dtype.bytes
        whole = self._allocate((size + 2 * GUARD_BYTES,), DType.UINT8, device)
        self._cupy.cuda.runtime.memset(whole.data.ptr, FILL, size + 2 * GUARD_BYTES)
        self.blocks.append(Block(whole, size))
        return self.view(DeviceBytes(whole[GUARD_BYTES : GUARD_BYTES + size], dtype, shape))

    def to_device(self, values: Array) -> DeviceArray:
        """Copy an array from the host."""
        copy = self.empty(values.shape, DType(values.dtype.name), 0)
        copy.array.raw.set(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return copy


class GuardedCall:
    """A kernel bound to guarded copies of its inputs."""

    def __init__(self, compiled: CompiledKernel, arrays: Mapping[str, Array], cupy: Any) -> None:
        self._cupy = cupy
        self._source = compiled.source
        self._library = GuardedArrays(cupy)
        self._donated = {b.name: np.ascontiguousarray(arrays[b.name]) for b in self._source.updated_buffers}
        memory, outputs = {}, {}
        for buffer in self._source.buffers:
            if buffer.role is Role.INPUT:
                memory[buffer.symbol] = self._library.to_device(arrays[buffer.name])
                if buffer.donated:
                    outputs[buffer.name] = memory[buffer.symbol]
            elif buffer.role is Role.OUTPUT and buffer.name in self._donated:
                memory[buffer.symbol] = outputs[buffer.name]
            elif buffer.role is Role.OUTPUT:
                memory[buffer.symbol] = outputs[buffer.name] = self._library.empty(buffer.shape, buffer.dtype, 0)
        self._outputs = outputs
        library = DeviceArrays(self._library)
        binding = Binding(library, memory, outputs, {})
        self._call = CudaCall(self._source, cupy, library, binding, CudaModule(compiled).functions(cupy, 0))

    def results(self) -> dict[str, Array]:
        """Run once on outputs initialised with FILL or as donated; return the outputs on the host.

        Errors of the device are raised here as CuPy raises them. After one, this process cannot use the device.
        """
        for name, output in self._outputs.items():
            raw = output.array.raw
            if name in self._donated:
                raw.set(self._donated[name].reshape(-1).view(np.uint8))
            else:
                self._cupy.cuda.runtime.memset(raw.data.ptr, FILL, raw.nbytes)
        self._call()
        self._cupy.cuda.runtime.deviceSynchronize()
        return {name: array.numpy() for name, array in self._call.results().items()}

    def guard_violations(self) -> list[str]:
        """Return the buffers whose guards were overwritten, and where."""
        violations = []
        updated = self._source.updated_buffers  # in the block of an input
        names = [b.symbol for b in self._source.buffers if b.role in (Role.INPUT, Role.OUTPUT) and b not in updated]
        names += [b.symbol for b in self._source.buffers_of(Role.WORKSPACE)]
        for name, block in zip(names, self._library.blocks, strict=True):
            offsets = block.written_guard_offsets()
            if offsets:
                violations.append(f"{len(offsets)} bytes outside {name}, the first at {offsets[0]} of {block.size}")
        return violations
