"""A CPU → the probes that measure it: clock, multiply-adds, bandwidths and latencies of levels, threads, packing.

The C kernels are compiled for the spec's instructions and vector registers, and run on as many threads as it has cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
SAMPLE_S = 0.003  # a thousand times what a call costs
# A working set in DRAM: so many times the last level, which keeps a part of what is streamed through it.
_BEYOND_CACHES = 4
_DRAM_BYTES_MOST = 512 << 20  # for all threads
_PIECE_BYTES = 16 << 20  # of it, for all threads, in one sample
# Pieces before it: so many times what the last cache holds, and no more than that many. Lines that others wrote leave
# it meanwhile, as the piece's own do ever after. It does not drop what was used longest ago: behind as much as it holds
# stores of 16 MB had 28.6 GB/s and those past the caches 26.5, behind four times as much 27.1 and 28.4 (Zen 4).
_CACHES_BEFORE, _PIECES_BEFORE = 4, 8
_SHAPE = 5
_VECTORS_BEFORE = 1000  # rounds of multiply-adds before each piece of the clock's chain: some microseconds
_CALLS = 200  # of an empty region, one after the other
_MEETINGS, _COUNTS = 500, 20_000  # of threads that wait for each other: half a millisecond where all of them run
# Until caches that take a line only when it comes again have it, in order or not: the last of Zen 4 delivers 30 GB/s of
# 8 MB at first, 70 in the third pass, 90 from the eighth on.
_PASSES, _RANDOM_PASSES = 8, 4
_PACKED_ROWS = 256  # a block's rows, as deep as a step along k
_FILLED_BYTES = 4 << 20  # of random numbers, again and again
_PACKINGS = {"pack_rows": "rows of a panel copied", "pack_turned": "squares of a vector's lanes turned"}


def working_sets(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """Bytes of one thread for each level: half of its own caches, a quarter of its part of the last, which others
    share, and well beyond that.

    Of an L3 of which a thread has less than eight times its L2, that quarter beside the whole L2: such large L2s stand
    before an L3 that keeps what they evict (Skylake-SP, Zen), so that both together hold it, and L2 alone does not.
    """
    levels = [level for level in reversed(hw.levels) if level.name in CACHES]
    result = [(v.name, v.capacity_bytes // (4 * threads if v.name == "l3" else 2)) for v in levels]
    within, (last, part) = levels[-2].capacity_bytes, result[-1]
    result[-1] = (last, part if part >= 2 * within else within + part)
    dram = min(_BEYOND_CACHES * levels[-1].capacity_bytes, _DRAM_BYTES_MOST) // threads
    page = kernels.PAGE_BYTES
    return [*((name, size // page * page) for name, size in result), (DRAM, dram // page * page)]


def _last_cache_bytes(hw: HardwareSpec) -> int:
    return next(level.capacity_bytes for level in hw.levels if level.name in CACHES)


def _cached(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """Working sets that stay in caches, and of the last one parts and all of it: how much of it there really is."""
    last = _last_cache_bytes(hw)
    quarters = [(f"{n}_quarters", n * last // (4 * threads)) for n in (1, 3, 4)]
    page = kernels.PAGE_BYTES
    return [*working_sets(hw, threads)[:-1], *((name, size // page * page) for name, size in quarters)]


def _chased(hw: HardwareSpec) -> dict[str, int]:
    """Bytes whose lines are followed for a latency. Of the last cache twice what the one within it has: more of it is
    hardly ever one core's own."""
    sets = dict(working_sets(hw, 1))
    caches = [level.capacity_bytes for level in hw.levels if level.name in CACHES]
    last = next(level.name for level in hw.levels if level.name in CACHES)
    return sets | {last: min(sets[last], 2 * caches[1])}


def pieces(hw: HardwareSpec, threads: int) -> list[tuple[str, int]]:
    """What one thread touches of these in a sample."""
    *caches, (dram, size) = working_sets(hw, threads)
    piece = min(_PIECE_BYTES // threads, size // 4)
    return [*caches, (dram, piece // kernels.PAGE_BYTES * kernels.PAGE_BYTES)]


@dataclass(frozen=True, slots=True)
class Work:
    """What one repetition of a function is done on. `own`: the rest of its shape. `warm`: repetitions that are not
    timed. `repeats`: how often a sample repeats it; 0: as often as takes about SAMPLE_S. `pieces`: where each sample
    begins, where it is once over memory that no cache has, after as many as `before` that are not timed; None: all at
    `start`."""

    threads: int
    own: tuple[int, int] = (0, 0)
    start: int = 0
    warm: int = 1
    repeats: int = 0
    pieces: Iterator[int] | None = None
    before: int = 0


class Timer:
    """Calls of a function; each gives the seconds of one repetition."""

    def __init__(self, call: Callable[[], None], shape: NDArray[np.int64], work: Work) -> None:
        """`shape` is the array that the call reads."""
        self.call, self._shape, self._work = call, shape, work
        self.repeats = work.repeats

    def __call__(self) -> float:
        work = self._work
        if work.pieces is not None:
            for _ in range(work.before):
                self._once(next(work.pieces))
            return self._once(next(work.pieces))
        self.repeats = self.repeats or self._enough()
        self._seconds(work.warm)
        return self._seconds(self.repeats) / self.repeats

    def _once(self, start: int) -> float:
        self._shape[2] = start
        return self._seconds(1)

    def _enough(self) -> int:
        """Repetitions that take about SAMPLE_S, on one thread: several may have to wait for each other to run."""
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
    """Of what one repetition does, in one sample."""

    seconds: Callable[[], float]
    amount: float

    def __call__(self) -> float:
        return self.amount / self.seconds()


class CpuKernels:
    """The micro-benchmarks of one spec on one block of memory, of DRAM's working set and more. Raises LaunchError where
    they do not run here, or there is not so much memory (out-of-memory)."""

    def __init__(self, hw: HardwareSpec, cores: int, compiled: CompiledKernel) -> None:
        """`compiled` is what compiled_kernels gives for the spec."""
        self.hw, self.cores = hw, cores
        chased = _chased(hw)
        far = dict(working_sets(hw, 1))[DRAM]
        piece = cores * dict(pieces(hw, cores))[DRAM]
        # of all probes together: what one has touched is no longer in a cache when it comes round again
        self._pieces = cycle(range(0, far - piece + 1, piece))
        self._before = min(_PIECES_BEFORE, -(-_CACHES_BEFORE * _last_cache_bytes(hw) // piece))
        # caches have memory of their own: what they hold must not be met again as if it were far
        held = {threads: max(size for _, size in _cached(hw, threads)) for threads in (1, cores)}
        near = max(threads * (size + kernels.PAGE_BYTES) for threads, size in held.items())
        parts = [far + kernels.PAGE_BYTES * (cores + 1), near, *chased.values()]
        self._near, chase, *starts = accumulate(parts)
        self._chased = dict(zip(chased, (chase, *starts), strict=False))
        self.memory = _memory(sum(parts))
        _fill(self.memory[:chase])
        self._modules = {name: CpuModule(_only(compiled, name, self.memory.size)) for name in kernels.names()}

    def timer(self, name: str, work: Work) -> Timer:
        return _timer(self._modules[name], self.memory, work)

    def streamed(self, name: str, threads: int, level: str, own: tuple[int, int]) -> Timer:
        """On that level's working set; what is in DRAM piece after piece."""
        if level != DRAM:
            return self.timer(name, Work(threads, own, self._near, warm=1 if level in OWN_CACHES else _PASSES))
        return self.timer(name, Work(threads, own, pieces=self._pieces, before=self._before))

    def rate(self, way: str, threads: int, level: str, size: int) -> Rate:
        """Bytes a second of reading, writing or copying `size` bytes of that level with each thread."""
        return Rate(self.streamed(way, threads, level, (size // self.hw.vector_bytes, 0)), size * threads)

    def latency(self, level: str) -> Timer:
        """One step through lines of that level's, which are where they belong when time begins."""
        lines, start = _chased(self.hw)[level] // kernels.LINE_BYTES, self._chased[level]
        warm = 1 if level == DRAM else _RANDOM_PASSES * lines
        self.timer("link_lines", Work(1, (lines, 0), start)).call()
        return self.timer("follow_lines", Work(1, (lines, 0), start, warm=warm))


def probes(cpu: CpuKernels) -> tuple[Probe, ...]:
    """All micro-benchmarks, those of one core first: a change in the number of threads costs some microseconds."""
    found: list[Probe] = []
    for cores in sorted({1, cpu.cores}):
        found += [_clock(cpu, cores), *_rates(cpu, cores), *_streams(cpu, cores), *_quarters(cpu, cores)]
        found += _packings(cpu, cores)
        found += _latencies(cpu) if cores == 1 else []
        found += _threads(cpu, cores)
    return tuple(found)


def _clock(cpu: CpuKernels, cores: int) -> Probe:
    timer = cpu.timer("clock_adds", Work(cores, (0, _VECTORS_BEFORE)))
    seconds = cpu.memory[: 512 * cores].view(np.float64)[::64]

    def sample() -> float:
        timer()  # leaves in memory what of it the chain took on each thread
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


def _streams(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    for level, size in pieces(cpu.hw, cores):
        for way, how in kernels.WAYS_TOLD.items():
            if way not in kernels.BEYOND_CORE or level not in ("l1", "l2"):
                yield Probe(f"{way}_{level}", "bytes/s", cores, how, cpu.rate(way, cores, level, size))


def _quarters(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    for level, size in _cached(cpu.hw, cores)[-3:]:
        how = f"the last cache read with hints, {level.replace('_', ' ')} of it"
        yield Probe(f"read_last_{level}", "bytes/s", cores, how, cpu.rate("read_ahead", cores, level, size))


def _latencies(cpu: CpuKernels) -> Iterator[Probe]:
    for level, size in _chased(cpu.hw).items():
        how = f"lines of {size >> 10} KiB followed in random order, misses of the TLB included"
        yield Probe(f"latency_{level}", "s", 1, how, cpu.latency(level))


def _threads(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    empty = cpu.timer("enter_region", Work(cores))

    def launched() -> float:
        start = time.perf_counter()
        for _ in range(_CALLS):
            empty.call()
        return (time.perf_counter() - start) / _CALLS

    yield Probe("launch", "s", cores, "an empty parallel region called from Python, threads being awake", launched)
    if cores > 1:
        yield Probe(
            "barrier", "s", cores, "a barrier of all threads", cpu.timer("meet", Work(cores, repeats=_MEETINGS))
        )
    counted = cpu.timer("count_together", Work(cores, repeats=_COUNTS))
    yield Probe("atomic", "s", cores, "an atomic addition to one place, all cores at once", lambda: counted() / cores)


def _packings(cpu: CpuKernels, cores: int) -> Iterator[Probe]:
    wide = kernels.PANEL_VECTORS * cpu.hw.vector_bytes // 4
    for level, size in pieces(cpu.hw, cores):
        apart = (size // (4 * _PACKED_ROWS) // wide - 1) * wide
        if apart <= 0:
            continue
        for name, how in _PACKINGS.items():
            seconds = cpu.streamed(name, cores, level, (apart, _PACKED_ROWS))
            amount = 4 * _PACKED_ROWS * apart * cores
            yield Probe(f"{name}_{level}", "bytes/s", cores, f"{how}, from {level}", Rate(seconds, amount))


def compiled_kernels(hw: HardwareSpec) -> CompiledKernel:
    """All of them in one binary. Raises BuildError where nothing compiles for the spec."""
    return compile_source(_source(hw, kernels.names()))


def multiply_timer(compiled: CompiledKernel, dtype: DType, threads: int) -> Timer:
    """Of multiply-adds in registers, with a page of memory for each thread's result and no more."""
    memory = _memory(kernels.PAGE_BYTES * (threads + 1))
    memory.fill(0)
    module = CpuModule(_only(compiled, kernels.multiply_name(dtype), memory.size))
    return _timer(module, memory, Work(threads))


def _timer(module: CpuModule, memory: Array, work: Work) -> Timer:
    shape = np.array((work.threads, 1, work.start, *work.own), np.int64)
    return Timer(module.bind({"shape": shape}, {"memory": memory}), shape, work)


def _memory(size: int) -> Array:
    try:
        return aligned_empty((size,), np.dtype(np.uint8))
    except MemoryError as failure:
        raise LaunchError(f"micro-benchmarks need {size >> 20} MiB of memory", code="out-of-memory") from failure


def _fill(memory: Array) -> None:
    """No zeros, and no lines alike: some CPUs write lines of zeros several times faster than others (Zen 4: three)."""
    some = np.random.default_rng(0).random(min(_FILLED_BYTES, memory.size) // 4, np.float32) + 1
    for start in range(0, memory.size, some.nbytes):
        part = memory[start : start + some.nbytes]
        part[:] = some.view(np.uint8)[: part.size]


def _only(compiled: CompiledKernel, name: str, memory_bytes: int) -> CompiledKernel:
    """The same binary with one of its functions to launch."""
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
    text = kernels.kernels_text(hw)
    return KernelSource("calibration", Language.C, hw.arch, text, buffers, launches, (), ("-fopenmp", *wide))
