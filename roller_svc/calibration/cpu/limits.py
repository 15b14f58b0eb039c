"""What a CPU reaches at most: multiply-adds in registers, and reading, writing and copying at several sizes.

Threads are those of the process: its affinity and OMP_NUM_THREADS decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from roller_svc.calibration.cpu import kernels
from roller_svc.calibration.cpu.probes import CpuKernels, compiled_kernels, multiply_timer, pieces, working_sets
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec

_SAMPLES = 7


class Stream(Enum):
    """What is done to memory, and how many bytes an element moves."""

    READ = "read"
    WRITE = "write"
    COPY = "copy"


# At every size, the better of a loop of vectors and what the C library does, which may go past the caches.
_WAYS = {
    Stream.READ: ("read",),
    Stream.WRITE: ("write", "write_library"),
    Stream.COPY: ("copy", "copy_library"),
}


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """`bytes_per_s` over a working set of `size_bytes` for each thread; a copy counts what is read and written."""

    stream: Stream
    level: str
    size_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    flops_per_s: float
    bandwidths: tuple[Bandwidth, ...]

    def copy_bytes_per_s(self, size_bytes: float) -> float:
        """The copy bandwidth of the smallest measured working set that holds so many bytes, else the largest's."""
        copies = sorted((b for b in self.bandwidths if b.stream is Stream.COPY), key=lambda b: b.size_bytes)
        return next((b.bytes_per_s for b in copies if b.size_bytes >= size_bytes), copies[-1].bytes_per_s)


class LimitProbes:
    """The kernels that find limits, on so many threads. Raises BuildError where nothing compiles for the spec,
    LaunchError where it does not run here."""

    def __init__(self, hw: HardwareSpec, threads: int) -> None:
        self._hw, self._threads, self._compiled = hw, threads, compiled_kernels(hw)
        self._multiply = multiply_timer(self._compiled, DType.FLOAT32, threads)
        self._flops = kernels.CHAINS * 2 * (hw.vector_bytes // 4) * threads

    def flops_per_s(self) -> float:
        """Of multiply-adds in registers, in one sample of some milliseconds: a clock changes within seconds."""
        return self._flops / self._multiply()

    def limits(self) -> Limits:
        """The best of several samples each, in about a second. The memory that it takes is free again afterwards."""
        cpu = CpuKernels(self._hw, self._threads, self._compiled)
        found = [one for stream in Stream for one in _bandwidths(cpu, stream)]
        return Limits(max(self.flops_per_s() for _ in range(_SAMPLES)), tuple(found))


def _bandwidths(cpu: CpuKernels, stream: Stream) -> list[Bandwidth]:
    sizes = dict(working_sets(cpu.hw, cpu.cores))
    return [
        Bandwidth(stream, level, sizes[level], max(_best(cpu, way, level, piece) for way in _WAYS[stream]))
        for level, piece in pieces(cpu.hw, cpu.cores)
    ]


def _best(cpu: CpuKernels, way: str, level: str, piece_bytes: int) -> float:
    rate = cpu.rate(way, cpu.cores, level, piece_bytes)
    return max(rate() for _ in range(_SAMPLES))
