"""Micro-benchmarks of a CPU: clock, multiply-adds, bandwidths and latencies of levels, threads, packing.

The C kernels are compiled for the spec's instructions and vector width, and run on one thread per core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle

import numpy as np
from numpy.typing import NDArray

from roller_svc.calibration.cpu import kernels
from roller_svc.calibration.samples import Probe
from roller_svc.errors import LaunchError
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import Buffer, CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.runtime.binding import Array, aligned_empty
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import compile_source

OWN_CACHES = ("l1", "l2")
CACHES = (*OWN_CACHES, "l3")
DRAM = "dram"
SAMPLE_S = 0.003  # a thousand times the cost of a call
# A working set in DRAM, in multiples of the LLC, which retains a part of streamed data.
_DRAM_SIZE_FACTOR = 4
_MAX_DRAM_BYTES = 512 << 20  # for all threads
_PIECE_BYTES = 16 << 20  # of the DRAM working set, for all threads, in one sample
# Pieces accessed before a timed piece, in multiples of the LLC, and at most. They evict dirty lines of other data. The
# LLC is not LRU: one multiple of its capacity is not enough.
_EVICTION_FACTOR, _MAX_EVICTION_PIECES = 4, 8
_SHAPE = 5
_WARM_UP_ROUNDS = 1000  # multiply-adds before each piece of the clock's chain: some microseconds
_EMPTY_CALLS = 200  # of an empty parallel region
_BARRIERS, _COUNTS = 500, 20_000  # barriers and atomics of a sample: half a millisecond if all threads run
# Warm-up passes in sequential and random order: some caches allocate a line only at its reuse (the LLC of Zen 4).
_PASSES, _RANDOM_PASSES = 8, 4
_SINGLE_CORE_WAYS = ("read", "read_ahead")  # of one core among several: the rates of processes with fewer cores
_PACKED_ROWS = 256  # rows of a block, as in a step along k
_FILLED_BYTES = 4 << 20  # of random numbers, repeated
_PACKINGS = {"pack_rows": "rows of a panel copied", "pack_transposed": "squares of a vector's lanes transposed"}


def working_sets(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """Return one thread's working set in bytes for each level.

    It is half of a private cache, a quarter of the thread's part of the shared LLC, and far beyond the LLC for DRAM.
    If a thread's fraction of L3 is less than eight times its L2, the L2 capacity is added: large L2 caches come with a
    victim L3 (Skylake-SP, Zen), so that the working set fits both together but not L2 alone.
    """
    levels = [level for level in reversed(hw.levels) if level.name in CACHES]
    result = [(v.name, v.capacity_bytes // (4 * threads if v.name == "l3" else 2)) for v in levels]
    inner, (last, part) = levels[-2].capacity_bytes, result[-1]
    result[-1] = (last, part if part >= 2 * inner else inner + part)
    dram = min(_DRAM_SIZE_FACTOR * levels[-1].capacity_bytes, _MAX_DRAM_BYTES) // threads
    page = kernels.PAGE_BYTES
    return [*((name, size // page * page) for name, size in result), (DRAM, dram // page * page)]


def _last_cache_bytes(hw: HardwareSpec) -> int:
    return next(level.capacity_bytes for level in hw.levels if level.name in CACHES)


def _cached_sizes(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """Return working sets that stay in caches, and fractions of the LLC that show its effective capacity."""
    last = _last_cache_bytes(hw)
    quarters = [(f"{n}_quarters", n * last // (4 * threads)) for n in (1, 3, 4)]
    page = kernels.PAGE_BYTES
    return [*working_sets(hw, threads)[:-1], *((name, size // page * page) for name, size in quarters)]


def _chase_sizes(hw: HardwareSpec) -> dict[str, int]:
    """Return the bytes of each level's pointer chase. For the LLC at most twice the cache inside it."""
    sets = dict(working_sets(hw, 1))
    caches = [level.capacity_bytes for level in hw.levels if level.name in CACHES]
    last = next(level.name for level in hw.levels if level.name in CACHES)
    return sets | {last: min(sets[last], 2 * caches[1])}


def _memory_parts(hw: HardwareSpec, cores: int, *, for_spec: bool) -> list[int]:
    """Return the bytes of the parts of a benchmark's memory: DRAM's working set, caches', one for each chase.

    Cache benchmarks use their own memory: their cached data must not appear in the DRAM benchmarks.
    """
    sizes_by_threads = {
        threads: working_sets(hw, threads)[:-1] if for_spec else _cached_sizes(hw, threads) for threads in (1, cores)
    }
    cache_bytes = max(
        threads * (max(size for _, size in sizes) + kernels.PAGE_BYTES) for threads, sizes in sizes_by_threads.items()
    )
    dram_bytes = dict(working_sets(hw, 1))[DRAM] + kernels.PAGE_BYTES * (cores + 1)
    return [dram_bytes, cache_bytes, *_chase_sizes(hw).values()]


def required_bytes(hw: HardwareSpec, cores: int, *, for_spec: bool = False) -> int:
    """Return the memory that the benchmarks take."""
    return sum(_memory_parts(hw, cores, for_spec=for_spec))


def pieces(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """Return the bytes of each level that one thread accesses in a sample."""
    *caches, (dram, size) = working_sets(hw, threads)
    piece = min(_PIECE_BYTES // threads, size // 4)
    return [*caches, (dram, piece // kernels.PAGE_BYTES * kernels.PAGE_BYTES)]


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one repetition of a function, and how it is sampled."""

    threads: int
    extra_shape: tuple[int, int] = (0, 0)  # the function-specific part of its shape
    start: int = 0  # byte offset in memory
    warm: int = 1  # repetitions that are not timed
    repeats: int = 0  # repetitions of a sample; 0: as many as take about SAMPLE_S
    pieces: Iterator[int] | None = None  # offsets of samples that access uncached memory once; None: all at `start`
    eviction_pieces: int = 0  # pieces before each sample that are not timed


class Timer:
    """Call a function; each call returns the seconds of one repetition."""

    def __init__(self, call: Callable[[], None], shape: NDArray[np.int64], work: Work) -> None:
        """Time `call`, which reads `shape`."""
        self.call, self._shape, self._work = call, shape, work
        self.repeats = work.repeats

    def __call__(self) -> float:
        work = self._work
        if work.pieces is not None:
            for _ in range(work.eviction_pieces):
                self._time_piece(next(work.pieces))
            return self._time_piece(next(work.pieces))
        self.repeats = self.repeats or self._find_repeats()
        self._seconds(work.warm)
        return self._seconds(self.repeats) / self.repeats

    def _time_piece(self, start: int) -> float:
        self._shape[2] = start
        return self._seconds(1)

    def _find_repeats(self) -> int:
        """Return the repetitions that take about SAMPLE_S on one thread; several threads may wait for each other."""
        self._shape[0], repeats = 1, 1
        self._seconds(self._work.warm)
        while (seconds := self._seconds(repeats)) < SAMPLE_S / 2:
            repeats = max(repeats + 1, min(100 * repeats, round(repeats * SAMPLE_S / seconds)))
        self._shape[0] = self._work.threads
        return repeats

    def _seconds(self, repeats: int) -> float:
        self._shape[1] = repeats
        start = time.perf_counter()
        self.call()
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Rate:
    """The rate of a repetition's amount of work, in one sample."""

    seconds: Callable[[], float]
    amount: float

    def __call__(self) -> float:
        return self.amount / self.seconds()


class CpuKernels:
    """The micro-benchmarks of one spec on one block of memory, larger than DRAM's working set.

    Raises LaunchError if they do not run here, or if there is too little memory (out-of-memory).
    """

    def __init__(self, hw: HardwareSpec, cores: int, compiled: CompiledKernel, *, for_spec: bool = False) -> None:
        """Load the kernels that compile_kernels returned for the spec.

        With `for_spec`, the memory suffices only for the same probes.
        """
        self.hw, self.cores = hw, cores
        dram_bytes = dict(working_sets(hw, 1))[DRAM]
        piece = cores * dict(pieces(hw, cores))[DRAM]
        # shared by all probes, so that a piece has left the caches before it is accessed again
        self._pieces = cycle(range(0, dram_bytes - piece + 1, piece))
        self._eviction_pieces = min(_MAX_EVICTION_PIECES, -(-_EVICTION_FACTOR * _last_cache_bytes(hw) // piece))
        parts = _memory_parts(hw, cores, for_spec=for_spec)
        self._cache_start, chase, *starts = accumulate(parts)
        self._chase_starts = dict(zip(_chase_sizes(hw), (chase, *starts), strict=False))
        self.memory = _memory(sum(parts))
        _fill(self.memory[:chase])
        self._modules = {name: CpuModule(_select_function(compiled, name, self.memory.size)) for name in kernels.function_names()}

    def timer(self, name: str, work: Work) -> Timer:
        return _timer(self._modules[name], self.memory, work)

    def stream_timer(self, name: str, threads: int, level: str, extra_shape: tuple[int, int]) -> Timer:
        """Return a timer over the level's working set; DRAM is accessed in consecutive pieces."""
        if level != DRAM:
            return self.timer(name, Work(threads, extra_shape, self._cache_start, warm=1 if level in OWN_CACHES else _PASSES))
        return self.timer(name, Work(threads, extra_shape, pieces=self._pieces, eviction_pieces=self._eviction_pieces))

    def rate(self, way: str, threads: int, level: str, size: int) -> Rate:
        """Return the bandwidth of reading, writing or copying `size` bytes of that level with each thread."""
        return Rate(self.stream_timer(way, threads, level, (size // self.hw.vector_bytes, 0)), size * threads)

    def latency(self, level: str) -> Timer:
        """Return the time of one step of a pointer chase in that level, after its lines are cached there."""
        lines, start = _chase_sizes(self.hw)[level] // kernels.LINE_BYTES, self._chase_starts[level]
        warm = 1 if level == DRAM else _RANDOM_PASSES * lines
        self.timer("link_lines", Work(1, (lines, 0), start)).call()
        return self.timer("follow_lines", Work(1, (lines, 0), start, warm=warm))


def probes(cpu: CpuKernels, *, for_spec: bool = False) -> tuple[Probe, ...]:
    """Return all micro-benchmarks, those of one core first: changing the number of threads costs microseconds.

    Args:
        cpu: the kernels.
        for_spec: return only those that determine fields of the spec, and of one with fewer cores.
    """
    result: list[Probe] = []
    for cores in sorted({1, cpu.cores}):
        ways = _SINGLE_CORE_WAYS if for_spec and cores < cpu.cores else tuple(kernels.WAY_DESCRIPTIONS)
        result += [_clock(cpu, cores), *_rates(cpu, cores), *_streams(cpu, cores, ways)]
        result += [] if for_spec else [*_quarters(cpu, cores), *_packings(cpu, cores)]
        result += _latencies(cpu) if cores == 1 else []
        result += [_launch(cpu, cores)] if for_spec else [_launch(cpu, cores), *_synchronizations(cpu, cores)]
    return tuple(result)


def _clock(cpu: CpuKernels, cores: int) -> Probe:
    timer = cpu.timer("clock_adds", Work(cores, (0, _WARM_UP_ROUNDS)))
    seconds = cpu.memory[: 512 * cores].view(np.float64)[::64]

    def sample() -> float:
        timer()  # writes each thread's time of the chain to memory
        return kernels.ADDS * timer.repeats / float(np.max(seconds))

    return Probe("clock", "Hz", cores, "dependent additions, one a clock, between multiply-adds of vectors", sample)


def _rates(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    for dtype in kernels.MULTIPLIED:
        name, lanes = kernels.multiply_name(dtype), cpu.hw.vector_bytes // dtype.bytes
        flops = kernels.CHAINS * 2 * lanes * cores
        how = f"{kernels.CHAINS} chains of multiply-adds of {lanes} {dtype.value} in registers"
        yield Probe(name, "1/s", cores, how, Rate(cpu.timer(name, Work(cores)), flops))
    for dtype in kernels.DIVIDED:
        lanes = cpu.hw.vector_bytes // dtype.bytes
        how = f"{kernels.CHAINS} chains of divisions of {lanes} {dtype.value} in registers"
        name = kernels.divide_name(dtype)
        yield Probe(name, "1/s", cores, how, Rate(cpu.timer(name, Work(cores)), kernels.CHAINS * lanes * cores))
    if cores == 1:
        name = kernels.multiply_name(DType.FLOAT32) + "_chain"
        yield Probe(name, "s", 1, "one multiply-add of float32 vectors after the other", cpu.timer(name, Work(1)))


def _streams(cpu: CpuKernels, cores: int, ways: Sequence[str]) -> Iterator[Probe]:
    for level, size in pieces(cpu.hw, cores):
        for way in ways:
            how = kernels.WAY_DESCRIPTIONS[way]
            if way not in kernels.BEYOND_CORE_WAYS or level not in ("l1", "l2"):
                yield Probe(f"{way}_{level}", "bytes/s", cores, how, cpu.rate(way, cores, level, size))


def _quarters(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    for level, size in _cached_sizes(cpu.hw, cores)[-3:]:
        how = f"the last cache read with prefetch, {level.replace('_', ' ')} of it"
        yield Probe(f"read_last_{level}", "bytes/s", cores, how, cpu.rate("read_ahead", cores, level, size))


def _latencies(cpu: CpuKernels) -> Iterator[Probe]:
    for level, size in _chase_sizes(cpu.hw).items():
        how = f"lines of {size >> 10} KiB followed in random order, misses of the TLB included"
        yield Probe(f"latency_{level}", "s", 1, how, cpu.latency(level))


def _launch(cpu: CpuKernels, cores: int) -> Probe:
    empty = cpu.timer("enter_region", Work(cores))

    def launch_time() -> float:
        start = time.perf_counter()
        for _ in range(_EMPTY_CALLS):
            empty.call()
        return (time.perf_counter() - start) / _EMPTY_CALLS

    return Probe("launch", "s", cores, "an empty parallel region called from Python, threads being awake", launch_time)


def _synchronizations(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    if cores > 1:
        barrier = cpu.timer("wait_at_barrier", Work(cores, repeats=_BARRIERS))
        yield Probe("barrier", "s", cores, "a barrier of all threads", barrier)
    atomics = cpu.timer("count_together", Work(cores, repeats=_COUNTS))
    yield Probe("atomic", "s", cores, "an atomic addition to one place, all cores at once", lambda: atomics() / cores)


def _packings(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    wide = kernels.PANEL_VECTORS * cpu.hw.vector_bytes // 4
    for level, size in pieces(cpu.hw, cores):
        apart = (size // (4 * _PACKED_ROWS) // wide - 1) * wide
        if apart <= 0:
            continue
        for name, how in _PACKINGS.items():
            seconds = cpu.stream_timer(name, cores, level, (apart, _PACKED_ROWS))
            amount = 4 * _PACKED_ROWS * apart * cores
            yield Probe(f"{name}_{level}", "bytes/s", cores, f"{how}, from {level}", Rate(seconds, amount))


def compile_kernels(hw: HardwareSpec) -> CompiledKernel:
    """Compile all functions to one binary. Raises BuildError if they do not compile."""
    return compile_source(_source(hw, kernels.function_names()))


def multiply_timer(compiled: CompiledKernel, dtype: DType, threads: int) -> Timer:
    """Return a timer of multiply-adds in registers, with a page of memory for each thread's result."""
    memory = _memory(kernels.PAGE_BYTES * (threads + 1))
    memory.fill(0)
    module = CpuModule(_select_function(compiled, kernels.multiply_name(dtype), memory.size))
    return _timer(module, memory, Work(threads))


def _timer(module: CpuModule, memory: Array, work: Work) -> Timer:
    shape = np.array((work.threads, 1, work.start, *work.extra_shape), np.int64)
    return Timer(module.bind({"shape": shape}, {"memory": memory}), shape, work)


def _memory(size: int) -> Array:
    try:
        return aligned_empty((size,), np.dtype(np.uint8))
    except MemoryError as failure:
        raise LaunchError(f"micro-benchmarks need {size >> 20} MiB of memory", code="out-of-memory") from failure


def _fill(memory: Array) -> None:
    """Fill memory with distinct nonzero lines: some CPUs write lines of zeros several times faster (Zen 4)."""
    some = np.random.default_rng(0).random(min(_FILLED_BYTES, memory.size) // 4, np.float32) + 1
    for start in range(0, memory.size, some.nbytes):
        part = memory[start : start + some.nbytes]
        part[:] = some.view(np.uint8)[: part.size]


def _select_function(compiled: CompiledKernel, name: str, memory_bytes: int) -> CompiledKernel:
    """Return the binary with one of its functions as the only launch."""
    launches = (LaunchSpec(name, ("memory", "shape")),)
    shape, memory = compiled.source.buffers
    buffers = (shape, replace(memory, shape=(memory_bytes,)))
    return replace(compiled, source=replace(compiled.source, launches=launches, buffers=buffers))


def _source(hw: HardwareSpec, names: tuple[str, ...]) -> KernelSource:
    buffers = (
        Buffer("shape", "shape", Role.INPUT, DType.INT64, (_SHAPE,)),
        Buffer("memory", "memory", Role.OUTPUT, DType.UINT8, (1,)),
    )
    wide = (f"-mprefer-vector-width={8 * hw.vector_bytes}",) if hw.arch.prefix == "x86-64-v" else ()
    launches = tuple(LaunchSpec(name, ("memory", "shape")) for name in names)
    text = kernels.kernels_source(hw)
    return KernelSource("calibration", Language.C, hw.arch, text, buffers, launches, (), ("-fopenmp", *wide))
