"""CUDA C++ source of the micro-benchmarks of an NVIDIA device, one kernel each, with its amount of work.

Sizes are constants of the source. A kernel's parameters are therefore arrays alone, as in generated kernels, and the
same runtime launches them. Loads and stores are 16 bytes wide, four per thread in flight. `__ldcg` bypasses L1, which
would hold a block's part of an L2 working set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from roller_svc.codegen.cuda.instructions import instruction, mma_wrapper
from roller_svc.ir.dtype import DType
from roller_svc.ir.event_state import EPOCH, EVENT_WORDS
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, UnitKind
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role
from roller_svc.ir.schedule_hopper import WARP_THREADS

THREADS = 256
OCCUPANCIES = (1, 2, 4, 8)  # blocks per core
CHAINS = 8  # independent multiply-adds of a thread, or MMAs of a warp
VECTOR_BYTES, IN_FLIGHT = 16, 4
LINE_BYTES = 128  # stride of a pointer chase: at least the fetch granularity
WORD_BYTES = 4
FIRST_PROGRAMMATIC = 90  # the first architecture with programmatic edges: sm_90
SHARED_VECTORS = 1024  # 16 KiB of shared memory
BYTES, OPERATIONS = "bytes/s", "1/s"
SECONDS = "s"
LAST_CACHE_FRACTION = 0.5  # working set of L2 benchmarks, over L2's capacity
DRAM_CACHES = 8  # working set of DRAM benchmarks, over L2's capacity
_TYPES = {
    DType.FLOAT32: "float", DType.FLOAT64: "double", DType.INT32: "int",
    DType.INT64: "long long", DType.UINT32: "unsigned int", DType.UINT64: "unsigned long long",
}  # fmt: skip
# CUDA C++ has this function in a header that NVRTC does not find.
_FMA_F16X2 = """__device__ __forceinline__ unsigned int fma_f16x2(unsigned int x, unsigned int a, unsigned int b) {
  asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(a), "r"(b));
  return x;
}
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the kernels for one device."""

    cores: int
    last_cache_bytes: int
    dram_bytes: int
    rounds: int = 4096  # iterations of inner loops that compute or read caches
    steps: int = 4096  # of a pointer chase


class Timing(Enum):
    """How the launches of a sample follow each other."""

    CAPTURED = "nodes of a CUDA graph"
    PROGRAMMATIC = "nodes of a CUDA graph with programmatic edges"
    QUEUED = "launches in a stream"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One micro-benchmark."""

    name: str
    unit: str
    amount: float  # of `unit` in one run; for seconds, the number of timed operations
    how: str
    source: KernelSource
    field: str = ""  # spec field that the best benchmark with this field determines; '': none
    timing: Timing = Timing.CAPTURED
    part: Kernel | None = None  # a benchmark in seconds whose value is subtracted


def sizes_of(hw: HardwareSpec) -> Sizes:
    last = hw.level("l2").capacity_bytes
    return Sizes(hw.num_cores, int(last * LAST_CACHE_FRACTION), min(DRAM_CACHES * last, hw.dram.capacity_bytes // 8))


def kernels(hw: HardwareSpec, sizes: Sizes) -> Iterator[Kernel]:
    """Yield all micro-benchmarks of a device."""
    yield from _launches(hw, sizes)
    yield _clock(hw, sizes)
    for unit in hw.units:
        if unit.kind is UnitKind.FMA:
            yield _multiply(hw, sizes, unit)
        elif unit.kind is UnitKind.MMA and unit.in_dtype is not DType.FLOAT64:
            yield _matrix(hw, sizes, unit)
    yield _dependent(hw, sizes)
    for blocks in OCCUPANCIES:
        yield _read(hw, sizes, "dram", blocks)
        yield _write(hw, sizes, blocks)
        yield _copy(hw, sizes, blocks)
        yield _read(hw, sizes, "l2", blocks)
        yield _read_shared(hw, sizes, blocks)
    yield _chase(hw, sizes, "dram", "")
    yield _chase(hw, sizes, "l2", "levels.l2.latency_s")
    yield _chase_shared(hw, sizes)
    yield _barrier(hw, sizes)
    yield _atomic(hw, sizes, spread=False)
    yield _atomic(hw, sizes, spread=True)
    signal = _events(hw, sizes, waits=False)
    yield signal
    yield replace(_events(hw, sizes, waits=True), part=signal)


# one kernel ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Grid:
    blocks: int
    threads: int = THREADS

    @property
    def all(self) -> int:
        return self.blocks * self.threads


def _source(hw: HardwareSpec, name: str, buffers: tuple[Buffer, ...], body: str, grid: _Grid) -> KernelSource:
    """Return a kernel. `body` uses the buffers by name, and `thread`, the index in the grid."""
    parameters = ", ".join(f"{'const ' if b.role is Role.INPUT else ''}{_c_type(b)} *{b.symbol}" for b in buffers)
    text = (
        f'extern "C" __global__ void __launch_bounds__({grid.threads}) {name}({parameters}) {{\n'
        f"  const int thread = blockIdx.x * {grid.threads} + threadIdx.x;\n{body}}}\n"
    )
    launch = LaunchSpec(name, tuple(b.symbol for b in buffers), (grid.blocks, 1, 1), (grid.threads, 1, 1))
    return KernelSource(name, Language.CUDA, hw.arch, text, buffers, (launch,))


def _with_functions(functions: str, source: KernelSource) -> KernelSource:
    """Return the kernel preceded by the functions that it calls."""
    return replace(source, text=functions + source.text)


def _c_type(buffer: Buffer) -> str:
    if buffer.shape[-1] == VECTOR_BYTES // WORD_BYTES and len(buffer.shape) == 2:
        return "uint4"
    return _TYPES[buffer.dtype]


def _values(dtype: DType, count: int) -> Buffer:
    return Buffer("values", "values", Role.INPUT, dtype, (count,))


def _results(dtype: DType, count: int) -> Buffer:
    return Buffer("results", "results", Role.OUTPUT, dtype, (count,))


def _vectors(name: str, role: Role, count: int) -> Buffer:
    return Buffer(name, name, role, DType.UINT32, (count, VECTOR_BYTES // WORD_BYTES))


def _launches(hw: HardwareSpec, sizes: Sizes) -> Iterator[Kernel]:
    """Yield empty kernels between two others: in a stream, in a graph, cooperative."""
    source = _source(hw, "empty", (), "  (void)thread;\n", _Grid(1, WARP_THREADS))
    how = "an empty kernel between two others, "
    yield Kernel("launch", SECONDS, 1, f"{how}in a stream", source, "limits.launch_overhead_s", Timing.QUEUED)
    yield Kernel("graph_node", SECONDS, 1, f"{how}in a graph", source, "limits.graph_node_s")
    if hw.arch.number >= FIRST_PROGRAMMATIC:
        body = (
            '  (void)thread;\n  asm volatile("griddepcontrol.launch_dependents;");\n'
            '  asm volatile("griddepcontrol.wait;" ::: "memory");\n'
        )
        dependent = _source(hw, "programmatic", (), body, _Grid(1, WARP_THREADS))
        how_dependent = f"{how}in a graph with programmatic edges"
        yield Kernel("pdl_node", SECONDS, 1, how_dependent, dependent, "limits.pdl_node_s", Timing.PROGRAMMATIC)
    together = _cooperative(_source(hw, "together", (), "  (void)thread;\n", _Grid(sizes.cores)))
    how_together = f"{how}cooperative with a block a core"
    yield Kernel("cooperative_launch", SECONDS, 1, how_together, together, "limits.cooperative_launch_s", Timing.QUEUED)


def _cooperative(source: KernelSource) -> KernelSource:
    return replace(source, launches=tuple(replace(launch, cooperative=True) for launch in source.launches))


def delay(hw: HardwareSpec) -> KernelSource:
    """Return a kernel of one thread that runs for as many nanoseconds as `time` has."""
    body = "  const unsigned long long began = timer_ns();\n  while (timer_ns() - began < time[thread]) {}\n"
    time = Buffer("time", "time", Role.INPUT, DType.UINT64, (1,))
    return _with_functions(_wrapper("timer_ns"), _source(hw, "delay", (time,), body, _Grid(1, 1)))


def _events(hw: HardwareSpec, sizes: Sizes, *, waits: bool) -> Kernel:
    """Return arrivals of a block a core at one event, by the wrappers of persistent kernels; with waits for all of them.

    The counts go on from one run to the next, as those of persistent kernels do.
    """
    grid, rounds = _Grid(sizes.cores), sizes.rounds
    wait = (
        f"    if (threadIdx.x == 0) is_over = !event_wait(sync, 0, (epoch * {rounds} + i + 1) * gridDim.x, i);\n"
        "    if (__syncthreads_or(is_over)) return;\n"
    )
    body = (
        f"  const unsigned int epoch = sync[{EPOCH}];\n  int is_over = 0;\n  (void)thread; (void)is_over;\n"
        f"#pragma unroll 1\n  for (unsigned int i = 0; i < {rounds}; ++i) {{\n"
        "    __syncthreads();\n"
        "    if (threadIdx.x == 0) event_arrive(sync, 0, 1);\n"
        f"{wait if waits else ''}  }}\n"
        f"  if (threadIdx.x == 0 && event_finish(sync, 1) + 1 == (epoch + 1) * gridDim.x) sync[{EPOCH}] = epoch + 1;\n"
    )
    name = "wait" if waits else "signal"
    sync = Buffer("sync", "sync", Role.OUTPUT, DType.UINT32, (3 * EVENT_WORDS,))
    wrappers = ("event_arrive", "event_finish", *(("event_wait",) if waits else ()))
    source = _with_functions("".join(map(_wrapper, wrappers)), _cooperative(_source(hw, f"{name}s", (sync,), body, grid)))
    how = "until every block has seen that all have arrived at an event" if waits else "an arrival at an event"
    return Kernel(name, SECONDS, rounds, f"{how}, a block a core", source, f"limits.{name}_s", Timing.QUEUED)


def _clock(hw: HardwareSpec, sizes: Sizes) -> Kernel:
    """Return a kernel that writes the cycles it counted to `results`."""
    grid = _Grid(sizes.cores)
    body = (
        "  const long long start = clock64();\n"
        "  float x = values[threadIdx.x % 8];\n"
        f"  for (int i = 0; i < {64 * sizes.rounds}; ++i) x = x * values[0] + values[1];\n"
        "  if (thread == 0) results[0] = (unsigned long long)(clock64() - start) + (x == 123.0f);\n"
    )
    source = _source(hw, "clock_cycles", (_values(DType.FLOAT32, 8), _results(DType.UINT64, 1)), body, grid)
    return Kernel("clock", "Hz", 1, "cycles that a kernel counts over its time", source, "clock_hz")


def _multiply(hw: HardwareSpec, sizes: Sizes, unit: ComputeUnit) -> Kernel:
    """Return independent multiply-adds; float16 uses packed pairs, as units with a float16 rate do."""
    half = unit.in_dtype is DType.FLOAT16
    dtype = DType.UINT32 if half else unit.in_dtype
    of_type = _TYPES[dtype]
    grid = _Grid(sizes.cores * OCCUPANCIES[-1])
    step = "fma_f16x2(x[c], a, b)" if half else "x[c] * a + b"
    body = (
        f"  const {of_type} a = values[0], b = values[1];\n"
        f"  {of_type} x[{CHAINS}];\n"
        f"  for (int c = 0; c < {CHAINS}; ++c) x[c] = values[(threadIdx.x + c) % 8];\n"
        f"#pragma unroll 8\n  for (int i = 0; i < {sizes.rounds}; ++i)\n"
        f"#pragma unroll\n    for (int c = 0; c < {CHAINS}; ++c) x[c] = {step};\n"
        f"  for (int c = 1; c < {CHAINS}; ++c) x[0] += x[c];\n"
        "  results[thread] = x[0];\n"
    )
    buffers = (_values(dtype, 8), _results(dtype, grid.all))
    source = _with_functions(_FMA_F16X2 if half else "", _source(hw, f"multiply_{unit.name}", buffers, body, grid))
    each = 4 if half else 2
    return Kernel(
        f"multiply_{unit.name}",
        OPERATIONS,
        each * CHAINS * sizes.rounds * grid.all,
        f"multiply-adds of {unit.in_dtype.value}, {CHAINS} chains a thread",
        source,
        f"units.{unit.name}.flops_per_s",
    )


def _dependent(hw: HardwareSpec, sizes: Sizes) -> Kernel:
    grid = _Grid(1, WARP_THREADS)
    body = (
        "  const float a = values[0], b = values[1];\n  float x = values[2];\n"
        f"#pragma unroll 16\n  for (int i = 0; i < {16 * sizes.rounds}; ++i) x = x * a + b;\n"
        "  results[thread] = x;\n"
    )
    source = _source(hw, "dependent", (_values(DType.FLOAT32, 8), _results(DType.FLOAT32, WARP_THREADS)), body, grid)
    return Kernel(
        "multiply_dependent",
        SECONDS,
        16 * sizes.rounds,
        "a multiply-add that needs the one before",
        source,
        "levels.register.latency_s",
    )


def _matrix(hw: HardwareSpec, sizes: Sizes, unit: ComputeUnit) -> Kernel:
    """Return MMAs with fragments in registers: 16 x 8 results over 32 bytes of k, by the wrapper that kernels call."""
    name = mma_wrapper(unit.in_dtype, unit.in_dtype, hw.arch)
    dtype = unit.acc_dtype
    grid = _Grid(sizes.cores * 4)
    body = (
        "  unsigned int a[4], b[2];\n"
        "  for (int i = 0; i < 4; ++i) a[i] = values[(threadIdx.x + i) % 8];\n"
        "  for (int i = 0; i < 2; ++i) b[i] = values[(threadIdx.x + 3 * i) % 8];\n"
        f"  {'float' if dtype is DType.FLOAT32 else 'int'} d[{CHAINS}][4];\n"
        f"  for (int i = 0; i < {4 * CHAINS}; ++i) d[i / 4][i % 4] = threadIdx.x + i;  // no two chains alike\n"
        f"#pragma unroll 2\n  for (int i = 0; i < {sizes.rounds}; ++i)\n"
        f"#pragma unroll\n    for (int c = 0; c < {CHAINS}; ++c) {name}(d[c], a, b);\n"
        f"  for (int c = 1; c < {CHAINS}; ++c)\n    for (int i = 0; i < 4; ++i) d[0][i] += d[c][i];\n"
        "  results[thread] = d[0][0] + d[0][1] + d[0][2] + d[0][3];\n"
    )
    buffers = (_values(DType.UINT32, 8), _results(dtype, grid.all))
    source = _with_functions(_wrapper(name), _source(hw, f"matrix_{unit.name}", buffers, body, grid))
    flops = 2 * 16 * 8 * (32 // unit.in_dtype.bytes) * CHAINS * sizes.rounds * grid.all // WARP_THREADS
    return Kernel(
        f"matrix_{unit.name}",
        OPERATIONS,
        flops,
        f"{name}, {CHAINS} chains a warp",
        source,
        f"units.{unit.name}.flops_per_s",
    )


def _wrapper(name: str) -> str:
    """Return the source of a wrapper and of those that it calls."""
    wrapper = instruction(name)
    if wrapper is None:
        return ""
    return "".join(_wrapper(need) for need in wrapper.needs) + wrapper.text + "\n"


def _read(hw: HardwareSpec, sizes: Sizes, level: str, blocks: int) -> Kernel:
    grid = _Grid(sizes.cores * blocks)
    count, passes = _access_plan(sizes, level, grid)
    body = (
        "  uint4 sum = {};\n"
        f"  for (int pass = 0; pass < {passes}; ++pass)\n"
        f"    for (int i = thread; i < {count}; i += {IN_FLIGHT * grid.all}) {{\n"
        f"      uint4 found[{IN_FLIGHT}];\n"
        f"#pragma unroll\n      for (int n = 0; n < {IN_FLIGHT}; ++n) found[n] = __ldcg(source + i + n * {grid.all});\n"
        f"#pragma unroll\n      for (int n = 0; n < {IN_FLIGHT}; ++n) {{\n"
        "        sum.x += found[n].x; sum.y += found[n].y; sum.z += found[n].z; sum.w += found[n].w;\n      }\n    }\n"
        "  results[thread] = sum.x ^ sum.y ^ sum.z ^ sum.w;\n"
    )
    buffers = (_vectors("source", Role.INPUT, count), _results(DType.UINT32, grid.all))
    figure = "levels.l2.bandwidth_bytes_per_s" if level == "l2" else ""
    return Kernel(
        f"read_{level}_{blocks}",
        BYTES,
        float(count) * VECTOR_BYTES * passes,
        f"reads of {level}, {blocks} blocks a core",
        _source(hw, f"read_{level}", buffers, body, grid),
        figure,
    )


def _write(hw: HardwareSpec, sizes: Sizes, blocks: int) -> Kernel:
    grid = _Grid(sizes.cores * blocks)
    count, _ = _access_plan(sizes, "dram", grid)
    body = f"  for (int i = thread; i < {count}; i += {grid.all})\n    target[i] = make_uint4(thread, thread, thread, thread);\n"
    source = _source(hw, "write_dram", (_vectors("target", Role.OUTPUT, count),), body, grid)
    return Kernel(f"write_dram_{blocks}", BYTES, float(count) * VECTOR_BYTES, f"writes of dram, {blocks} blocks a core", source)


def _copy(hw: HardwareSpec, sizes: Sizes, blocks: int) -> Kernel:
    grid = _Grid(sizes.cores * blocks)
    count, _ = _access_plan(sizes, "dram", grid)
    body = (
        f"  for (int i = thread; i < {count}; i += {IN_FLIGHT * grid.all}) {{\n"
        f"    uint4 found[{IN_FLIGHT}];\n"
        f"#pragma unroll\n    for (int n = 0; n < {IN_FLIGHT}; ++n) found[n] = __ldcg(source + i + n * {grid.all});\n"
        f"#pragma unroll\n    for (int n = 0; n < {IN_FLIGHT}; ++n) target[i + n * {grid.all}] = found[n];\n  }}\n"
    )
    buffers = (_vectors("source", Role.INPUT, count), _vectors("target", Role.OUTPUT, count))
    return Kernel(
        f"copy_dram_{blocks}",
        BYTES,
        2.0 * count * VECTOR_BYTES,
        f"a copy, both ways counted, {blocks} blocks a core",
        _source(hw, "copy_dram", buffers, body, grid),
        "levels.dram.bandwidth_bytes_per_s",
    )


def _access_plan(sizes: Sizes, level: str, grid: _Grid) -> tuple[int, int]:
    """Return the number of vectors, a multiple of the grid's stride, and the number of passes over them."""
    nbytes, passes = (sizes.dram_bytes, 1) if level == "dram" else (sizes.last_cache_bytes, max(1, sizes.rounds // 128))
    stride = IN_FLIGHT * grid.all
    return max(1, nbytes // (VECTOR_BYTES * stride)) * stride, passes


def _read_shared(hw: HardwareSpec, sizes: Sizes, blocks: int) -> Kernel:
    grid = _Grid(sizes.cores * blocks)
    reads = 8
    body = (
        f"  __shared__ uint4 tile[{SHARED_VECTORS}];\n"
        f"  for (int i = threadIdx.x; i < {SHARED_VECTORS}; i += {THREADS})\n"
        "    tile[i] = make_uint4(values[0], i, values[1], i);\n"
        "  __syncthreads();\n  uint4 sum = {};\n"
        f"  for (int i = 0; i < {sizes.rounds}; ++i) {{\n"
        f"    const uint4 *from = tile + ((threadIdx.x + {WARP_THREADS} * i) & {SHARED_VECTORS // 2 - 1});\n"
        f"#pragma unroll\n    for (int n = 0; n < {reads}; ++n) {{\n"
        f"      const uint4 found = from[n * {SHARED_VECTORS // 2 // reads}];\n"
        "      sum.x ^= found.x; sum.y ^= found.y; sum.z ^= found.z; sum.w ^= found.w;\n    }\n  }\n"
        "  results[thread] = sum.x ^ sum.y ^ sum.z ^ sum.w;\n"
    )
    buffers = (_values(DType.UINT32, 8), _results(DType.UINT32, grid.all))
    return Kernel(
        f"read_shared_{blocks}",
        BYTES,
        float(reads) * VECTOR_BYTES * sizes.rounds * grid.all,
        f"reads of shared memory, {blocks} blocks a core",
        _source(hw, "read_shared", buffers, body, grid),
        "levels.shared.bandwidth_bytes_per_s",
    )


def _chase_buffers(count: int) -> tuple[Buffer, Buffer]:
    """Return the buffers of a pointer chase: the index of the next element, and the current position."""
    return (
        Buffer("next", "next", Role.INPUT, DType.UINT32, (count,)),
        Buffer("place", "place", Role.OUTPUT, DType.UINT32, (1,)),
    )


def _chase(hw: HardwareSpec, sizes: Sizes, level: str, figure: str) -> Kernel:
    """Return a pointer chase that continues where the last run ended, because lines just read are cached."""
    nbytes = sizes.dram_bytes if level == "dram" else sizes.last_cache_bytes
    count = max(2, nbytes // LINE_BYTES) * (LINE_BYTES // WORD_BYTES)
    body = f"  unsigned int at = place[0];\n  for (int i = 0; i < {sizes.steps}; ++i) at = __ldcg(next + at);\n  place[0] = at;\n"
    return Kernel(
        f"latency_{level}",
        SECONDS,
        sizes.steps,
        f"a load of {level} that needs the one before, nothing else running",
        _source(hw, f"chase_{level}", _chase_buffers(count), body, _Grid(1, 1)),
        figure,
    )


def _chase_shared(hw: HardwareSpec, sizes: Sizes) -> Kernel:
    count = 1024
    body = (
        f"  __shared__ unsigned int tile[{count}];\n"
        f"  for (int i = 0; i < {count}; ++i) tile[i] = next[i];\n"
        "  unsigned int at = place[0];\n"
        f"  for (int i = 0; i < {16 * sizes.steps}; ++i) at = tile[at];\n"
        "  place[0] = at;\n"
    )
    return Kernel(
        "latency_shared",
        SECONDS,
        16 * sizes.steps,
        "a load of shared memory that needs the one before",
        _source(hw, "chase_shared", _chase_buffers(count), body, _Grid(1, 1)),
        "levels.shared.latency_s",
    )


def _barrier(hw: HardwareSpec, sizes: Sizes) -> Kernel:
    body = f"  (void)thread;\n#pragma unroll 1\n  for (int i = 0; i < {sizes.rounds}; ++i) __syncthreads();\n"
    source = _source(hw, "barriers", (), body, _Grid(sizes.cores))
    return Kernel("barrier", SECONDS, sizes.rounds, f"a barrier of {THREADS} threads", source)


def _atomic(hw: HardwareSpec, sizes: Sizes, *, spread: bool) -> Kernel:
    """Return atomic additions of float32, which compilers do not aggregate in a warp."""
    grid = _Grid(sizes.cores * 2)
    rounds = max(1, sizes.rounds // 64)
    name = "atomic_spread" if spread else "atomic_same"
    body = f"  for (int i = 0; i < {rounds}; ++i) atomicAdd(results + {'thread' if spread else 0}, values[i % 8]);\n"
    buffers = (_values(DType.FLOAT32, 8), _results(DType.FLOAT32, grid.all))
    how = "atomic additions, " + ("each thread to an element of its own" if spread else "all to one element")
    return Kernel(name, OPERATIONS, float(rounds) * grid.all, how, _source(hw, name, buffers, body, grid))
