"""What a CPU reaches at most: multiply-adds in registers, and reading, writing and copying at several sizes.

By small C kernels that the project's toolchain compiles for the spec's instructions and vector registers. Threads are
those of the process: its affinity and OMP_NUM_THREADS decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.binding import aligned_empty
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import compile_source

# Enough chains to cover the latency of an FMA (4 to 5 clocks) on two ports, and few enough for 16 registers.
CHAINS = 12
_SAMPLES = 7
_SAMPLE_S = 0.01
_STREAM_LEVELS = ("l1", "l2", "l3")
# A working set in DRAM: so many times the last level, which keeps a part of what is streamed through it.
_BEYOND_CACHES = 4
_DRAM_BYTES_MOST = 512 << 20  # for all threads
FMAS = 100_000
_PAGE = 4096


class Stream(Enum):
    """What is done to memory, and how many bytes an element moves."""

    READ = "read"
    WRITE = "write"
    COPY = "copy"


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


def measured_limits(hw: HardwareSpec, threads: int) -> Limits:
    """All limits, in about a second. Raises BuildError where nothing compiles for the spec or it does not run here."""
    flops = CHAINS * 2 * (hw.vector_bytes // 4) * FMAS * threads
    found = [one for stream in Stream for one in _bandwidths(stream, hw, threads)]
    return Limits(flops / _fma_s(hw, threads), tuple(found))


def sizes(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """A working set of one thread for each level: half of what it has of a cache, and well beyond the last."""
    levels = [level for level in reversed(hw.levels) if level.name in _STREAM_LEVELS]
    result = [(v.name, v.capacity_bytes // (2 * threads if v.name == "l3" else 2)) for v in levels]
    dram = min(_BEYOND_CACHES * levels[-1].capacity_bytes, _DRAM_BYTES_MOST) // threads
    return [*((name, size // _PAGE * _PAGE) for name, size in result), ("dram", dram // _PAGE * _PAGE)]


_HEAD = """
#include <stdint.h>
#include <string.h>
typedef float V __attribute__((vector_size({bytes}), aligned(4)));
"""

# Every chain and every sum is a variable of its own: an array would lie in memory.
_FMA = """
void fma(float *out, const int64_t *shape) {
  #pragma omp parallel for schedule(static, 1)
  for (int64_t t = 0; t < shape[0]; t++) {
    V a = {zero} + 0.999999f, b = {zero} + 1e-6f;
    {declared}
    for (int64_t n = 0; n < shape[1]; n++) { {body} }
    V sum = {summed};
    out[t * 16] = sum[0];
  }
}
"""
_CHAIN = 'c{j} = c{j} * a + b; __asm__("" : "+{register}"(c{j}));'

# shape: threads, vectors of a thread's working set, repetitions
_STREAMS = {
    Stream.READ: ("c{j} += x[i + {j}];",),
    Stream.WRITE: ("x[i + {j}] = c0;", "memset(x, 0, part * sizeof(V));"),
    Stream.COPY: ("y[i + {j}] = x[i + {j}];", "memcpy(y, x, part * sizeof(V));"),
}
_UNROLLED = 8  # additions under way: their latency on two ports
_LOOP = "for (int64_t i = 0; i < part; i += {unrolled}) { {body} }"
# The ends of a working set have a page between them, half of it between what is read and what is written: addresses
# that agree in their last 12 bits would be taken for the same.
_STREAM = """
void stream(float *out, const int64_t *shape) {
  #pragma omp parallel for schedule(static, 1)
  for (int64_t t = 0; t < shape[0]; t++) {
    int64_t part = shape[1] / {parts};
    V *x = (V *)out + t * (shape[1] + {page}), *y = x + part + {page} / 2;
    {declared}
    for (int64_t r = 0; r < shape[2]; r++) {
      {loop}
      __asm__ volatile("" : : "r"(x), "r"(y) : "memory");
    }
    V sum = {summed};
    __asm__ volatile("" : : "{register}"(sum));
  }
}
"""


def _fma_s(hw: HardwareSpec, threads: int) -> float:
    """Seconds in which every thread does FMAS rounds of CHAINS multiply-adds."""
    compiled = compile_source(_source("fma", _FMA, hw, {"body": _repeated(_CHAIN, CHAINS)} | _sums(CHAINS)))
    call = _bound(compiled, 16 * threads, (threads, FMAS, 0))
    return min(_timed(call) for _ in range(_SAMPLES))


def _bandwidths(stream: Stream, hw: HardwareSpec, threads: int) -> list[Bandwidth]:
    """At every size, the better of a loop of vectors and what the C library does, which may go past the caches."""
    kernels = [compile_source(_source("stream", _STREAM, hw, _stream_words(stream, way, hw)))
               for way in _STREAMS[stream]]  # fmt: skip
    return [
        Bandwidth(stream, level, size, max(_bytes_per_s(k, size, threads, hw.vector_bytes) for k in kernels))
        for level, size in sizes(hw, threads)
    ]


def _stream_words(stream: Stream, way: str, hw: HardwareSpec) -> dict[str, str]:
    loop = _LOOP.replace("{body}", _repeated(way, _UNROLLED)) if "{j}" in way else way
    parts = "2" if stream is Stream.COPY else "1"
    words = {"loop": loop, "unrolled": str(_UNROLLED), "parts": parts, "page": str(_PAGE // hw.vector_bytes)}
    return words | _sums(_UNROLLED)


def _repeated(text: str, count: int) -> str:
    return " ".join(text.replace("{j}", str(j)) for j in range(count))


def _sums(count: int) -> dict[str, str]:
    """Variables c0, c1, ... and their sum."""
    return {
        "declared": _repeated("V c{j} = {zero} + (float){j};", count),
        "summed": " + ".join(f"c{j}" for j in range(count)),
    }


def _bytes_per_s(compiled: CompiledKernel, size: int, threads: int, vector_bytes: int) -> float:
    floats = (size + _PAGE) * threads // 4
    once = _timed(_bound(compiled, floats, (threads, size // vector_bytes, 1)))
    repeats = max(1, round(_SAMPLE_S / max(once, 1e-7)))
    call = _bound(compiled, floats, (threads, size // vector_bytes, repeats))
    call()
    return size * threads * repeats / min(_timed(call) for _ in range(_SAMPLES))


def _bound(compiled: CompiledKernel, floats: int, shape: tuple[int, int, int]) -> Callable[[], None]:
    """The kernel on so many floats, which it has touched once."""
    buffers = tuple(
        replace(b, shape=(floats,)) if b.role is Role.OUTPUT else b for b in compiled.source.buffers
    )  # fmt: skip
    out = aligned_empty((floats,), np.dtype(np.float32))
    out.fill(0)
    module = CpuModule(replace(compiled, source=replace(compiled.source, buffers=buffers)))
    return module.bound({"shape": np.array(shape, np.int64)}, {"out": out})


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _source(name: str, body: str, hw: HardwareSpec, words: dict[str, str]) -> KernelSource:
    register = "w" if hw.arch.prefix == "armv" else "v" if hw.vector_bytes == 64 else "x"
    machine = {"bytes": str(hw.vector_bytes), "zero": "(V){0}", "register": register}
    text = _HEAD + body
    for word, value in (words | machine).items():
        text = text.replace("{" + word + "}", value)
    buffers = (
        Buffer("shape", "shape", Role.INPUT, DType.INT64, (3,)),
        Buffer("out", "out", Role.OUTPUT, DType.FLOAT32, (1,)),
    )
    wide = (f"-mprefer-vector-width={8 * hw.vector_bytes}",) if hw.arch.prefix == "x86-64-v" else ()
    options = ("-fopenmp", *wide)
    return KernelSource(name, Language.C, hw.arch, text, buffers, (LaunchSpec(name, ("out", "shape")),), (), options)
