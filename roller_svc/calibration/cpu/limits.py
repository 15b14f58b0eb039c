"""Measure the limits of a CPU: multiply-adds in registers, and read, write and copy bandwidth at several sizes.

Threads follow the process's affinity and OMP_NUM_THREADS.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roller_svc.calibration.cpu import kernels
from roller_svc.calibration.cpu.probes import CpuKernels, compile_kernels, multiply_timer, pieces, working_sets
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec

_SAMPLES = 7


class Stream(Enum):
    """Kind of memory access."""

    READ = "read"
    WRITE = "write"
    COPY = "copy"


# At every size the better of a vector loop and the C library, which may use non-temporal stores.
_WAYS = {
    Stream.READ: ("read",),
    Stream.WRITE: ("write", "write_library"),
    Stream.COPY: ("copy", "copy_library"),
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bandwidth over one working set."""

    stream: Stream
    level: str
    size_bytes: int  # working set of each thread
    bytes_per_s: float  # a copy counts reads and writes


@dataclass(frozen=True, slots=True)
class Limits:
    flops_per_s: float
    bandwidths: tuple[Bandwidth, ...]

    def copy_bytes_per_s(self, size_bytes: float) -> float:
        """Return the copy bandwidth of the smallest measured working set of `size_bytes` or more, or of the largest."""
        copies = sorted((b for b in self.bandwidths if b.stream is Stream.COPY), key=lambda b: b.size_bytes)
        return next((b.bytes_per_s for b in copies if b.size_bytes >= size_bytes), copies[-1].bytes_per_s)


class LimitProbes:
    """The kernels that measure limits on `threads` threads.

    Raises BuildError if the kernels do not compile, LaunchError if they do not run here.
    """

    def __init__(self, hw: HardwareSpec, threads: int) -> None:
        self._hw, self._threads, self._compiled = hw, threads, compile_kernels(hw)
        self._multiply = multiply_timer(self._compiled, DType.FLOAT32, threads)
        self._flops = kernels.CHAINS * 2 * (hw.vector_bytes // 4) * threads

    def flops_per_s(self) -> float:
        """Return the rate of multiply-adds in registers in one sample of milliseconds, while the clock is constant."""
        return self._flops / self._multiply()

    def limits(self) -> Limits:
        """Return the best of several samples of each limit, in about a second. The memory is freed afterwards."""
        cpu = CpuKernels(self._hw, self._threads, self._compiled)
        bandwidths = [one for stream in Stream for one in _bandwidths(cpu, stream)]
        return Limits(max(self.flops_per_s() for _ in range(_SAMPLES)), tuple(bandwidths))


def _bandwidths(cpu: CpuKernels, stream: Stream) -> list[Bandwidth]:
    sizes = dict(working_sets(cpu.hw, cpu.cores))
    return [
        Bandwidth(stream, level, sizes[level], max(_best(cpu, way, level, piece) for way in _WAYS[stream]))
        for level, piece in pieces(cpu.hw, cpu.cores)
    ]


def _best(cpu: CpuKernels, way: str, level: str, piece_bytes: int) -> float:
    rate = cpu.rate(way, cpu.cores, level, piece_bytes)
    return max(rate() for _ in range(_SAMPLES))
