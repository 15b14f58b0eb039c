"""A simulated device: its clock is a sum of estimates, and the emulator runs its kernels."""

from __future__ import annotations

import ctypes
import math
import time
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from roller_bench.gpu.graphs import GraphTask
from roller_bench.gpu.rehearsal import Plan
from roller_bench.gpu.timing import CheckTask, TimingTask
from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Role
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.runtime.graphs.emulated import MAX_TOGETHER

SPEC = "nvidia-h200-sxm"
EMULATED_BYTES = 2 << 20  # kernels with larger buffers are not run
NOWHERE = 1 << 60  # first address of arrays without memory
SMALL_DEVICE_BYTES = 24 << 20  # memory with the fault `memory`
FAULT_INTERVAL = 3  # with the fault `fault`, every nth task fails
TASKS_BEFORE_LOSS = 4  # with the fault `gone`, tasks before the device disappears
SLOW_S = 4.0  # each synchronisation with the fault `slow`
_LAUNCH_S = 2e-6
_FOREVER_S = 3600.0


class DriverError(Exception):
    """An error code of the runtime or the driver."""


class NoMemoryError(MemoryError):
    """CuPy's out-of-memory error."""


class Device:
    """Clock, memory and faults. `uncomputed`: a launched kernel was too large to emulate."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.spec: HardwareSpec = hardware.load(SPEC)
        self.now_s = 0.0
        self.allocated_bytes = 0
        self.functions: dict[int, Function] = {}
        self.predicted_s: dict[str, float] = {}
        self.uncomputed = False
        self.computes = True
        self.broken = ""
        self._ticks = 0
        self._launches_left = math.inf
        self._next_address = NOWHERE

    def begin(self, task: object) -> None:
        """Take the model's estimates of the task's kernels, and schedule the fault."""
        self.uncomputed = False
        self.computes = not isinstance(task, GraphTask)  # a model's launches share memory, which the emulator does not place
        if isinstance(task, TimingTask):
            self.predicted_s |= {one.compiled.source.key: one.predicted_s for one in task.candidates}
        with (self.plan.folder / "tasks").open("ab") as counted:
            counted.write(b".")
            number = counted.tell()
        if self.plan.fault == "fault" and number % FAULT_INTERVAL == 0:
            self._launches_left = 2
        if self.plan.fault == "gone" and number > TASKS_BEFORE_LOSS:
            self.broken = "CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"
            if number == TASKS_BEFORE_LOSS + 1:
                time.sleep(_FOREVER_S)  # a task on a lost device never returns

    def amend(self, result: Any) -> Any:
        """Skip the check of results if the kernel was too large for the emulator."""
        if self.uncomputed and isinstance(result, tuple) and isinstance(result[1], CheckTask):
            return result[0] | {"checked": "not checked: rehearsal, and too large to be emulated"}, None
        if not self.computes:
            return [row | {"checked": "not checked: rehearsal, which runs no model"} for row in result]
        return result

    def check(self) -> None:
        if self.broken:
            raise DriverError(self.broken)

    def wait(self) -> None:
        self.check()
        if self.plan.fault == "slow":
            time.sleep(SLOW_S)

    def advance(self, seconds: float) -> None:
        """Advance the clock with a small variation, so that samples differ."""
        self._ticks += 1
        self.now_s += seconds * (1 + self._ticks * 7 % 5 / 200)

    def work(self, nbytes: float, flops: float = 0.0, dtype: str = "float32") -> None:
        """Advance the clock by the roofline time, on the fastest unit that is exact for the type."""
        units = [one for one in self.spec.units if one.in_dtype.value == dtype]
        exact = [one for one in units if not one.is_matrix or dtype not in ("float32", "float64")]
        rate = max((one.flops_per_s for one in exact), default=self.spec.units[0].flops_per_s)
        self.advance(_LAUNCH_S + max(nbytes / self.spec.dram.bandwidth_bytes_per_s, flops / rate))

    def allocate(self, nbytes: int) -> None:
        self.check()
        capacity = SMALL_DEVICE_BYTES if self.plan.fault == "memory" else self.spec.dram.capacity_bytes
        if self.allocated_bytes + nbytes > capacity:
            raise NoMemoryError(f"Out of memory allocating {nbytes} bytes")
        self.allocated_bytes += nbytes

    def free(self, nbytes: int) -> None:
        self.allocated_bytes -= nbytes

    def address(self, nbytes: int) -> int:
        self._next_address += -(-nbytes // 512) * 512
        return self._next_address - -(-nbytes // 512) * 512

    def count_launch(self) -> None:
        self.check()
        self._launches_left -= 1
        if self._launches_left < 0:
            self.broken = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"
            self.check()


class Function:
    """The kernel function of one launch."""

    def __init__(self, device: Device, loaded: Module, index: int) -> None:
        self.device, self.loaded, self.index = device, loaded, index
        self.ptr = 1000 + len(device.functions)
        device.functions[self.ptr] = self

    def __call__(self, grid: object, block: object, arguments: Any, shared_mem: int, stream: Any) -> None:
        self.run([int(one) for one in arguments], stream.ptr)

    def run(self, addresses: list[int], stream: int) -> None:
        """Launch the kernel. While a graph is recorded only its time is, and replays compute nothing."""
        self.device.count_launch()
        recording = Stream.recording(stream)
        if recording is not None:
            recording.append(self.advance_clock)
            return
        self.advance_clock()
        source = self.loaded.source
        launch = source.launches[self.index]
        self.loaded.memory |= dict(zip(launch.args, addresses, strict=True))
        if self.index == len(source.launches) - 1:
            self.loaded.compute()

    def advance_clock(self) -> None:
        """Let the time of the launch pass."""
        source = self.loaded.source
        predicted, share = self.device.predicted_s.get(source.key), len(source.launches)
        if predicted is None:
            self.device.work(sum(b.bytes for b in source.buffers) / share)
        else:
            self.device.advance(predicted / share)


class Module:
    """A loaded cubin. All its launches are emulated together at the last one."""

    loading: CompiledKernel | None = None

    def __init__(self, device: Device) -> None:
        self.device = device
        self.memory: dict[str, int] = {}

    def load(self, binary: bytes) -> None:
        assert Module.loading is not None
        assert binary == Module.loading.binary
        self.compiled = Module.loading
        self.source: KernelSource = self.compiled.source

    def get_function(self, name: str) -> Function:
        index = [launch.name for launch in self.source.launches].index(name)
        return Function(self.device, self, index)

    def compute(self) -> None:
        outer = [b for b in self.source.buffers if b.role in (Role.INPUT, Role.OUTPUT)]
        if not self.device.computes or all(b.role is Role.INPUT for b in outer):
            return
        is_known = all(b.symbol in self.memory and self.memory[b.symbol] < NOWHERE for b in outer)
        together = max((launch.grid[0] for launch in self.source.launches if launch.cooperative), default=0)
        if not is_known or together > MAX_TOGETHER or sum(b.bytes for b in self.source.buffers) > EMULATED_BYTES:
            self.device.uncomputed = bool(outer)
            return
        inputs = {b.name: _values_at(self.memory[b.symbol], b) for b in outer if b.role is Role.INPUT}
        results = load_emulated(self.compiled).run(inputs)
        for buffer in outer:
            if buffer.role is Role.OUTPUT:
                output = np.ascontiguousarray(results[buffer.name])
                ctypes.memmove(self.memory[buffer.symbol], output.ctypes.data, output.nbytes)


def _values_at(address: int, buffer: Buffer) -> Any:
    return np.frombuffer(ctypes.string_at(address, buffer.bytes), numpy_dtype(buffer.dtype)).reshape(buffer.shape)


class Stream:
    """A stream that can record a graph."""

    every: ClassVar[weakref.WeakSet[Stream]] = weakref.WeakSet()

    def __init__(self, device: Device | None = None, *, non_blocking: bool = True) -> None:
        self.ptr = 1 + len(Stream.every)
        while any(other.ptr == self.ptr for other in Stream.every):
            self.ptr += 1
        self.recorded: list[Callable[[], None]] | None = None
        Stream.every.add(self)

    @staticmethod
    def recording(pointer: int) -> list[Callable[[], None]] | None:
        found = [one.recorded for one in Stream.every if one.ptr == pointer and one.recorded is not None]
        return found[0] if found else None

    def begin_capture(self) -> None:
        self.recorded = []

    def end_capture(self) -> Any:
        recorded, self.recorded = self.recorded or [], None
        return types.SimpleNamespace(launch=lambda stream: [advance_clock() for advance_clock in recorded])


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = self.device.now_s

    def synchronize(self) -> None:
        self.device.wait()
