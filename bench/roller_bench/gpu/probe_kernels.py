"""CUDA C++ sources of the probes: micro-benchmarks of undocumented properties of a device.

They call the same instruction wrappers as generated kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from roller_svc.calibration.cuda.kernels import OPERATIONS, SECONDS, Kernel
from roller_svc.codegen.cuda.instructions import instruction
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.kernel import Buffer, KernelSource, Language, LaunchSpec, Role
from roller_svc.ir.schedule_hopper import WARP_THREADS
from roller_svc.ir.tensor_map import MapMode, Swizzle, TensorMap

BYTES = "bytes/s"
BLOCK_THREADS = 256
STAGES = 4  # boxes in flight per block
BOX_BYTES = 8192
ELEMENT_BYTES = 2
# One thread of a warp, as CUTLASS chooses it (cute::elect_one_sync).
_ELECT = """__device__ __forceinline__ int elect_one() {
  int leader;
  asm volatile("{\\n.reg .pred chosen;\\nelect.sync _|chosen, 0xffffffff;\\nselp.b32 %0, 1, 0, chosen;\\n}"
               : "=r"(leader) :: "memory");
  return leader;
}
"""


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """Sizes of the probes."""

    cores: int
    rounds: int = 1024  # iterations of every loop
    rows: int = 1 << 16  # of 128 bytes, of the tensor that TMA loads
    bins: int = 64  # that atomics share


def barrier_probes(hw: HardwareSpec, sizes: ProbeSizes) -> Iterator[Kernel]:
    yield _round_trip(hw, sizes)
    yield _empty_grid(hw, sizes, cluster=1)
    yield _empty_grid(hw, sizes, cluster=2)
    yield _cluster_sync(hw, sizes)


def tma_probes(hw: HardwareSpec, sizes: ProbeSizes) -> Iterator[Kernel]:
    """Yield TMA loads by issuing thread and by length of box rows."""
    for leader in ("thread", "elect"):
        yield _tma_copies(hw, sizes, leader, 128)
    yield _tma_copies(hw, sizes, "thread", 32)


def atomic_probes(hw: HardwareSpec, sizes: ProbeSizes) -> Iterator[Kernel]:
    for name in ("red", "cas"):
        yield _atomic_additions(hw, sizes, name)


def box_copy(
    arch: Arch,
    view: TensorMap,
    elements: int,
    dtype: DType = DType.UINT32,
    *,
    coordinates: tuple[int, ...] = (),
    offsets: tuple[int, ...] = (),
) -> KernelSource:
    """Load one box by TMA from X to shared memory and write it to Y, both of this unsigned type.

    The map's buffer is `x`. `coordinates` default to the origin; `offsets` are those of im2col maps.
    """
    type_ = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}[dtype.bytes]
    count = view.bytes // dtype.bytes
    numbers = "".join(f", {n}" for n in (*(coordinates or (0,) * view.rank), *offsets))
    load = f"tma_load_{'im2col_' if view.mode is MapMode.IM2COL else ''}{view.rank}d"
    text = (
        wrappers("barrier_init", "fence_barrier_init", "barrier_expect", "barrier_wait", load)
        + f"""extern "C" __global__ void __launch_bounds__({WARP_THREADS}, 1)
box_copy(const {type_} *__restrict__ x, {type_} *__restrict__ y, const __grid_constant__ TensorMap view) {{
  __shared__ __align__(1024) {type_} box[{count}];
  __shared__ __align__(8) unsigned long long full[1];
  if ((int)threadIdx.x == 0) {{
    barrier_init(&full[0], 1);
    fence_barrier_init();
  }}
  __syncthreads();
  if ((int)threadIdx.x == 0) {{
    barrier_expect(&full[0], {view.bytes});
    {load}(&box[0], &view, &full[0]{numbers});
  }}
  barrier_wait(&full[0], 0);
  for (int i = (int)threadIdx.x; i < {count}; i += {WARP_THREADS}) y[i] = box[i];
}}
"""
    )
    buffers = (
        Buffer("X", "x", Role.INPUT, dtype, (elements,)),
        Buffer("Y", "y", Role.OUTPUT, dtype, (count,)),
    )
    launch = LaunchSpec("box_copy", ("x", "y"), (1, 1, 1), (WARP_THREADS, 1, 1), tensor_maps=(view,))
    return KernelSource("box_copy", Language.CUDA, arch, text, buffers, (launch,))


def rounded_box() -> TensorMap:
    """Return a map of 8 rows of 32 float32 numbers that TMA converts to tf32."""
    return TensorMap("view", "x", DType.FLOAT32, MapMode.TILED, (32, 8), (128,), (32, 8), (1, 1), tf32=True)


def small_box(rows: int) -> TensorMap:
    """Return a map of 64 columns of 16 bits with a box that may exceed the last row."""
    return TensorMap("view", "x", DType.FLOAT16, MapMode.TILED, (64, rows), (128,), (64, 64), (1, 1), swizzle=Swizzle.NONE)


def wrappers(*names: str) -> str:
    """Return the sources of instruction wrappers and of all wrappers that they call, each once."""
    texts: dict[str, str] = {}

    def add(names: Iterable[str]) -> None:
        for name in names:
            found = instruction(name)
            if found is not None:
                add(found.needs)
                texts.setdefault(name, found.text)

    add(names)
    return "\n".join(texts.values()) + "\n"


def _round_trip(hw: HardwareSpec, sizes: ProbeSizes) -> Kernel:
    """Time a ping-pong: a thread arrives at a barrier of another warp, which arrives at a barrier of the first."""
    text = (
        wrappers("barrier_init", "barrier_arrive", "barrier_wait")
        + f"""extern "C" __global__ void
__launch_bounds__({2 * WARP_THREADS}) round_trip() {{
  __shared__ __align__(8) unsigned long long there[1], back[1];
  if (threadIdx.x == 0) {{ barrier_init(&there[0], 1); barrier_init(&back[0], 1); }}
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < {sizes.rounds}; ++i) {{
    if (threadIdx.x == 0) {{ barrier_arrive(&there[0]); barrier_wait(&back[0], i & 1); }}
    if (threadIdx.x == {WARP_THREADS}) {{ barrier_wait(&there[0], i & 1); barrier_arrive(&back[0]); }}
  }}
}}
"""
    )
    return _kernel(
        hw,
        "mbarrier_round_trip",
        SECONDS,
        sizes.rounds,
        "an arrival, a wait, an arrival back, a wait",
        "round_trip",
        text,
        (),
        1,
        2 * WARP_THREADS,
    )


def _empty_grid(hw: HardwareSpec, sizes: ProbeSizes, cluster: int) -> Kernel:
    name = f"launch_cluster_{cluster}"
    declared = f"__cluster_dims__({cluster}, 1, 1) " if cluster > 1 else ""
    text = f'extern "C" __global__ void {declared}__launch_bounds__({WARP_THREADS}) {name}() {{}}\n'
    how = f"an empty kernel with one block per SM, in clusters of {cluster}, between two others"
    return _kernel(hw, name, SECONDS, 1, how, name, text, (), sizes.cores // 2 * 2, WARP_THREADS, cluster=cluster)


def _cluster_sync(hw: HardwareSpec, sizes: ProbeSizes) -> Kernel:
    text = (
        wrappers("cluster_sync")
        + f"""extern "C" __global__ void __cluster_dims__(2, 1, 1)
__launch_bounds__({BLOCK_THREADS}) meet() {{
#pragma unroll 1
  for (int i = 0; i < {sizes.rounds}; ++i) cluster_sync();
}}
"""
    )
    how = f"a barrier of two blocks of {BLOCK_THREADS} threads, with release and acquire"
    return _kernel(hw, "cluster_sync", SECONDS, sizes.rounds, how, "meet", text, (), sizes.cores // 2 * 2, BLOCK_THREADS, cluster=2)


def _tma_copies(hw: HardwareSpec, sizes: ProbeSizes, leader: str, row_bytes: int) -> Kernel:
    """Time TMA loads of an L2-resident tensor: each block keeps a few boxes in flight and does nothing else."""
    name = f"tma_{leader}_rows_{row_bytes}"
    box_rows = min(256, BOX_BYTES // row_bytes)
    box_bytes = box_rows * row_bytes
    rows = sizes.rows * 128 // row_bytes
    view = TensorMap(
        "view",
        "source",
        DType.FLOAT16,
        MapMode.TILED,
        (row_bytes // ELEMENT_BYTES, rows),
        (row_bytes,),
        (row_bytes // ELEMENT_BYTES, box_rows),
        (1, 1),
        swizzle=Swizzle(row_bytes),
    )
    chosen = "(int)threadIdx.x == 0" if leader == "thread" else "elect_one()"
    text = (
        wrappers("barrier_init", "fence_barrier_init", "barrier_expect", "barrier_wait", "tma_load_2d")
        + (_ELECT if leader == "elect" else "")
        + f"""extern "C" __global__ void __launch_bounds__({WARP_THREADS})
{name}(const unsigned int *__restrict__ source, const __grid_constant__ TensorMap view) {{
  __shared__ __align__(1024) unsigned char boxes[{STAGES * box_bytes}];
  __shared__ __align__(8) unsigned long long full[{STAGES}];
  if ((int)threadIdx.x == 0) {{
    for (int s = 0; s < {STAGES}; ++s) barrier_init(&full[s], 1);
    fence_barrier_init();
  }}
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < {sizes.rounds + STAGES}; ++i) {{
    const int s = i % {STAGES};
    if (i >= {STAGES}) barrier_wait(&full[s], (i / {STAGES} - 1) & 1);
    __syncwarp();
    if (i < {sizes.rounds} && {chosen}) {{
      barrier_expect(&full[s], {box_bytes});
      tma_load_2d(&boxes[s * {box_bytes}], &view, &full[s], 0,
                  ((int)blockIdx.x * {sizes.rounds} + i) % {rows // box_rows} * {box_rows});
    }}
    __syncwarp();
  }}
}}
"""
    )
    blocks = 2 * sizes.cores
    source = Buffer("source", "source", Role.INPUT, DType.UINT32, (sizes.rows * 32,))
    how = f"boxes of rows of {row_bytes} bytes from L2, issued by "
    how += "lane 0" if leader == "thread" else "the lane that elect.sync chooses"
    return _kernel(
        hw, name, BYTES, float(box_bytes) * sizes.rounds * blocks, how, name, text, (source,), blocks, WARP_THREADS, maps=(view,)
    )


def _atomic_additions(hw: HardwareSpec, sizes: ProbeSizes, name: str) -> Kernel:
    """Time atomic additions: all threads add to few elements, neighbouring threads to different ones."""
    red = "    atomicAdd(results + at, values[i % 8]);\n"
    cas = """    unsigned int *place = (unsigned int *)(results + at);
    unsigned int seen = *(volatile unsigned int *)place, before;
    do {
      before = seen;
      seen = atomicCAS(place, before, __float_as_uint(__uint_as_float(before) + values[i % 8]));
    } while (seen != before);
"""
    text = f"""extern "C" __global__ void __launch_bounds__({BLOCK_THREADS})
add_{name}(const float *values, float *results) {{
  const int thread = blockIdx.x * {BLOCK_THREADS} + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < {max(1, sizes.rounds // 64)}; ++i) {{
    const int at = (thread * 7 + i) % {sizes.bins};
{red if name == "red" else cas}  }}
}}
"""
    blocks = 2 * sizes.cores
    buffers = (
        Buffer("values", "values", Role.INPUT, DType.FLOAT32, (8,)),
        Buffer("results", "results", Role.OUTPUT, DType.FLOAT32, (sizes.bins,)),
    )
    amount = float(max(1, sizes.rounds // 64)) * blocks * BLOCK_THREADS
    how = f"additions of float32 to {sizes.bins} elements by " + ("red" if name == "red" else "compare-and-swap")
    return _kernel(hw, f"atomic_{name}_{sizes.bins}", OPERATIONS, amount, how, f"add_{name}", text, buffers, blocks, BLOCK_THREADS)


def _kernel(
    hw: HardwareSpec,
    name: str,
    unit: str,
    amount: float,
    how: str,
    function: str,
    text: str,
    buffers: tuple[Buffer, ...],
    blocks: int,
    threads: int,
    *,
    maps: tuple[TensorMap, ...] = (),
    cluster: int = 1,
) -> Kernel:
    args = tuple(b.symbol for b in buffers)
    launch = LaunchSpec(function, args, (blocks, 1, 1), (threads, 1, 1), tensor_maps=maps, cluster=cluster)
    return Kernel(name, unit, amount, how, KernelSource(name, Language.CUDA, hw.arch, text, buffers, (launch,)))
