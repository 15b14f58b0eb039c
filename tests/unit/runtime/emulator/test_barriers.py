"""mbarriers, named barriers, clusters and matrix stores in the emulator: semantics and reported faults."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulator_support import INPUT, module, one_block
from hopper import TOP, hopper, tiled
from reference_kernels import tensor

from roller_svc.errors import LaunchError, WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import KernelSource, LaunchSpec, Role
from roller_svc.ir.tensor_map import Swizzle
from tests.unit.runtime.emulator.test_threads import fault

pytestmark = pytest.mark.emulator

START = """  __shared__ __align__(16) unsigned long long bar[4];
  __shared__ float s[64];
  const int i = (int)threadIdx.x;
  if (i == 0) { barrier_init(&bar[0], 32); barrier_init(&bar[1], 1); fence_barrier_init(); }
  __syncthreads();
"""


def test_waiting_threads_see_writes_before_the_arrivals() -> None:
    """Two warps alternate between writing and reading; each waits for the other's phase."""
    body = (
        START.replace("bar[1], 1)", "bar[1], 32)")
        + """
  float sum = 0;
  for (int turn = 0; turn < 5; turn++) {
    if (i < 32) {
      barrier_wait(&bar[1], turn % 2 ^ 1);
      s[i] = (float)(turn * 32 + i);
      barrier_arrive(&bar[0]);
    } else {
      barrier_wait(&bar[0], turn % 2);
      sum += s[63 - i];
      barrier_arrive(&bar[1]);
    }
  }
  if (i >= 32) c[63 - i] = sum;"""
    )
    source = one_block(body, 64, top=TOP)
    for seed in range(4):
        found = module(source, seed, races=seed == 3).run(INPUT)["C"]
        np.testing.assert_array_equal(found, 320 + 5 * np.arange(32))


RACES = {
    "readers do not wait": ("      barrier_wait(&bar[0], turn % 2);\n", ""),
    "writers do not wait": ("      barrier_wait(&bar[1], turn % 2 ^ 1);\n", ""),
    "writers arrive too early": ("      s[i] = (float)i;\n      barrier_arrive(&bar[0]);\n",
                                 "      barrier_arrive(&bar[0]);\n      s[i] = (float)i;\n"),
    "readers leave too early": ("      sum += s[63 - i];\n      barrier_arrive(&bar[1]);\n",
                                "      barrier_arrive(&bar[1]);\n      sum += s[63 - i];\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_races_behind_phases_are_reported(name: str) -> None:
    body = (
        START.replace("bar[1], 1)", "bar[1], 32)")
        + """
  float sum = 0;
  for (int turn = 0; turn < 2; turn++) {
    if (i < 32) {
      barrier_wait(&bar[1], turn % 2 ^ 1);
      s[i] = (float)i;
      barrier_arrive(&bar[0]);
    } else {
      barrier_wait(&bar[0], turn % 2);
      sum += s[63 - i];
      barrier_arrive(&bar[1]);
    }
  }
  if (i >= 32) c[63 - i] = sum;"""
    )
    old, new = RACES[name]
    assert body.count(old) == 1
    with pytest.raises(WrongAnswerError, match=r"race: |more than 32 threads arrive|a deadlock"):
        module(one_block(body.replace(old, new), 64, top=TOP), races=True).run(INPUT)


FAULTS = {
    "not initialised": ("@barrier_arrive(&bar[2]);", "was not initialised"),
    "initialised twice": ("if (i == 5)@ barrier_init(&bar[1], 1);", "initialises the barrier of line"),
    "for nobody": ("if (i == 5)@ barrier_init(&bar[2], 0);", "for 0 threads"),
    "used before the threads met": ("if (i == 0) barrier_init(&bar[2], 32);\n@barrier_arrive(&bar[2]);",
                                    "nothing orders the two"),
    "not a multiple of 8": ("@barrier_arrive((unsigned long long *)((char *)bar + 4));", "not a multiple of 8"),
    "in memory": ("@barrier_arrive((unsigned long long *)c);", "not in the block's shared memory"),
    "overwritten": ("bar[0] = 0;\n__syncthreads();\n@barrier_arrive(&bar[0]);", "was overwritten"),
    "a parity of 2": ("@barrier_wait(&bar[0], 2);", "a phase of parity 2"),
    "a phase that never ends": ("if (i < 31) barrier_arrive(&bar[0]);\n@barrier_wait(&bar[0], 0);",
                                "waits for phase 0 of the barrier at shared byte"),
    "bytes that never come": ("if (i == 0) barrier_expect(&bar[1], 64);\n@barrier_wait(&bar[1], 0);",
                              "lacks 0 of 1 arrivals and 64 bytes; 32 threads wait"),
    "more arrivals than bytes": ("if (i < 2)@ barrier_expect(&bar[1], 64);", "more than 1 threads arrive"),
    "bytes at the end": ("if (i == 0) barrier_expect(&bar[1], 64);", "the block ends, and phase 0 of this"),
    "too many bytes": ("if (i == 0)@ barrier_expect(&bar[1], 1 << 20);", "cannot expect"),
    "a named barrier of no number": ("@named_barrier(16, 32);", "named barrier 16"),
    "the number of __syncthreads": ("@named_barrier(0, 32);", "named barrier 0"),
    "a part of a warp": ("@named_barrier(1, 16);", "not a number of the block's warps"),
    "more than there are": ("@named_barrier(1, 64);", "not a number of the block's warps"),
    "lanes that part before one is elected": ("if (i < 5)@ elect_one();\nelse elect_one();", "warp divergence"),
    "lanes that part": ("if (i < 5)@ named_barrier(1, 32);\nelse named_barrier(1, 32);", "warp divergence"),
    "lanes that part in a cluster": ("if (i < 5)@ cluster_sync();\nelse cluster_sync();", "warp divergence"),
    "no cluster": ("@barrier_arrive_remote(&bar[0], 1);", "block 1 of a cluster of 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_barriers_are_reported(name: str) -> None:
    body, message = FAULTS[name]
    assert message in fault(START + body, TOP)


def test_named_barriers_wait_for_as_many_as_they_say() -> None:
    body = (
        START
        + """
  if (i < 32) s[i] = (float)i;
  if (i < 64) named_barrier(1, 64);
  else named_barrier(2, 32);
  if (i >= 32 && i < 64) c[63 - i] = s[63 - i];"""
    )
    for seed in range(3):
        found = module(one_block(body, 96, top=TOP), seed, races=seed == 2).run(INPUT)["C"]
        np.testing.assert_array_equal(found, np.arange(32))
    short = body.replace("(1, 64)", "(1, 32)")
    with pytest.raises(WrongAnswerError, match="race: "):
        module(one_block(short, 96, top=TOP), races=True).run(INPUT)
    with pytest.raises(WrongAnswerError, match=r"named barrier 1 for \d+ threads, at line"):
        module(one_block(body.replace("(1, 64)", "(1, i < 2 ? 96 : 64)"), 96, top=TOP)).run(INPUT)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_stores_put_fragments_where_loads_find_them(count: int, *, transposed: bool) -> None:
    """Lane 4 g + t holds halves 2 t and 2 t + 1 of row g, or of column g, of each matrix."""
    name = f"store_matrix_{count}{'_transposed' if transposed else ''}"
    text = f"""
extern "C" __global__ void one(const unsigned int *w, unsigned short *c) {{
  __shared__ __align__(16) unsigned short s[256];
  const int i = (int)threadIdx.x;
  for (int k = i; k < 256; k += 32) s[k] = 0;
  __syncthreads();
  {name}(&s[(31 - i) * 8], w + 4 * i);
  __syncthreads();
  for (int k = i; k < 256; k += 32) c[k] = s[k];
}}
"""
    w = np.arange(256, dtype=np.uint16).reshape(32, 4, 2) + 1
    buffers = (
        tensor("W", "w", Role.INPUT, DType.UINT32, (32, 4)), tensor("C", "c", Role.OUTPUT, DType.UINT16, (32, 8)),
    )  # fmt: skip
    source = hopper(text, buffers, LaunchSpec("one", ("w", "c"), (1, 1, 1), (32, 1, 1)), (name,))
    found = module(source, races=True).run({"W": w.view(np.uint32).reshape(32, 4)})["C"]
    expected = np.zeros((32, 8), np.uint16)
    for matrix in range(count):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for e in range(2):
                row, column = (2 * t + e, g) if transposed else (g, 2 * t + e)
                expected[31 - (8 * matrix + row), column] = w[lane, matrix, e]
    np.testing.assert_array_equal(found, expected)


# clusters -------------------------------------------------------------------------------------------------------------

# C = A B^T by clusters of two blocks: each has 64 rows of A of its own, and loads half of the 64 rows of B for both.
TEXT = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 1)
product(float *c, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ unsigned long long full[2];
  __shared__ unsigned long long empty[2];
  unsigned short *const left = (unsigned short *)memory;             // [2][64][64]
  unsigned short *const right = (unsigned short *)(memory + 16384);  // [2][64][64]
  const int thread = (int)threadIdx.x, rank = (int)cluster_rank();
  if (thread == 0) {
    for (int i = 0; i < 2; i++) barrier_init(&full[i], 1);
    for (int i = 0; i < 2; i++) barrier_init(&empty[i], 8);
    fence_barrier_init();
  }
  cluster_sync();
  if (thread == 128) {
    for (int step = 0; step < STEPS; step++) {
      const int slot = step % 2;
      barrier_wait(&empty[slot], step / 2 % 2 ^ 1);
      barrier_expect(&full[slot], 16384);
      tma_load_2d(left + slot * 4096, &map_a, &full[slot], step * 64, (int)blockIdx.x * 64);
      tma_load_2d_multicast(right + slot * 4096 + rank * 2048, &map_b, &full[slot], step * 64, rank * 32, 3);
    }
  }
  if (thread < 128) {
    float d[32];
    for (int step = 0; step < STEPS; step++) {
      const int slot = step % 2;
      barrier_wait(&full[slot], step / 2 % 2);
      wgmma_fence();
      #pragma unroll
      for (int k = 0; k < 64; k += 16)
        wgmma_m64n64k16_f16_kk(d, matrix_descriptor_128(left + slot * 4096 + k, 16, 1024),
                               matrix_descriptor_128(right + slot * 4096 + k, 16, 1024), step > 0 || k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      if (thread % 32 < 2) barrier_arrive_remote(&empty[slot], (unsigned int)(thread % 32));
    }
    hold_results_32(d);
    const int row = (int)blockIdx.x * 64 + thread / 32 * 16 + thread % 32 / 4;
    for (int i = 0; i < 32; i++) c[(row + i / 2 % 2 * 8) * 64 + i / 4 * 8 + thread % 4 * 2 + i % 2] = d[i];
  }
  cluster_sync();
}
"""
STEPS, ROWS = 5, 256
RNG = np.random.default_rng(29)
A = RNG.integers(-3, 4, (ROWS, STEPS * 64)).astype(np.float16)
B = RNG.integers(-3, 4, (64, STEPS * 64)).astype(np.float16)
EXPECTED = A.astype(np.float32) @ B.astype(np.float32).T


def product() -> KernelSource:
    a, b = tensor("A", "a", Role.INPUT, DType.FLOAT16, A.shape), tensor("B", "b", Role.INPUT, DType.FLOAT16, B.shape)
    c = tensor("C", "c", Role.OUTPUT, DType.FLOAT32, EXPECTED.shape)
    maps = tiled("map_a", a, (64, 64), Swizzle.B128), tiled("map_b", b, (64, 32), Swizzle.B128)
    launch = LaunchSpec("product", ("c",), (ROWS // 64, 1, 1), (256, 1, 1), 32768, tensor_maps=maps, cluster=2)
    text = f"constexpr int STEPS = {STEPS};\n{TEXT}"
    return hopper(text, (a, b, c), launch, ("wgmma_m64n64k16_f16_kk", "hold_results_32"))


@pytest.mark.parametrize("seed", range(5))
def test_a_product_of_clusters_is_right_in_any_order(seed: int) -> None:
    found = module(product(), seed, races=seed == 4).run({"A": A, "B": B})["C"]
    np.testing.assert_array_equal(found, EXPECTED)


END, BEGIN = "  cluster_sync();\n}", "  cluster_sync();\n  if (thread == 128)"
RELEASE = "barrier_arrive_remote(&empty[slot], (unsigned int)(thread % 32))"
ROW = "    const int row = (int)"
PLANTED = {
    "a block leaves the others": (END, "}"),
    "barriers are not known to the cluster": (BEGIN, BEGIN.replace("cluster_sync", "__syncthreads")),
    "barriers are not known to copies": ("    fence_barrier_init();\n", ""),
    "only the own block releases": (RELEASE, "barrier_arrive(&empty[slot])"),
    "only the other block is told": ("thread % 32 < 2", "thread % 32 == 1 - rank"),
    "only the own block is told": ("thread % 32 < 2", "thread % 32 == rank"),
    "half of the releases": ("barrier_init(&empty[i], 8)", "barrier_init(&empty[i], 4)"),
    "one block gets it": ("rank * 32, 3)", "rank * 32, 1)"),
    "a block that is not there": ("rank * 32, 3)", "rank * 32, 7)"),
    "the same half twice": ("step * 64, rank * 32, 3)", "step * 64, 0, 3)"),
    "half of the bytes": ("16384);\n      tma", "12288);\n      tma"),
    "over each other": ("+ rank * 2048", ""),
    "the other block's barrier": (ROW, f"    *map_shared_rank(&full[0], (unsigned int)rank ^ 1u) = 5;\n{ROW}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_seeded_faults_of_clusters_are_detected(name: str) -> None:
    old, new = PLANTED[name]
    assert TEXT.count(old) == 1
    source = product()
    wrong = dataclasses.replace(source, text=source.text.replace(TEXT, TEXT.replace(old, new)))
    assert any(shows(wrong, seed, races=False) for seed in range(3)) or shows(wrong, 0, races=True)


def shows(source: KernelSource, seed: int, *, races: bool) -> bool:
    try:
        found = module(source, seed, races=races).run({"A": A, "B": B})["C"]
    except WrongAnswerError:
        return True
    return not np.array_equal(found, EXPECTED)


def test_blocks_of_a_cluster_reach_each_other_s_memory() -> None:
    text = """
extern "C" __global__ void __cluster_dims__(4, 1, 1) one(float *c) {
  __shared__ float s[32];
  const int i = (int)threadIdx.x, rank = (int)cluster_rank();
  s[i] = (float)(rank * 100 + i);
  cluster_sync();
  c[(int)blockIdx.x * 32 + i] = map_shared_rank(s, (unsigned int)(rank + 1) % 4)[31 - i] + (float)(blockIdx.x / 4);
  cluster_sync();
}
"""
    c = tensor("C", "c", Role.OUTPUT, DType.FLOAT32, (8, 32))
    source = hopper(text, (c,), LaunchSpec("one", ("c",), (8, 1, 1), (32, 1, 1), cluster=4))
    block = np.arange(8)[:, None]
    expected = (block + 1) % 4 * 100 + 31 - np.arange(32) + block // 4
    for seed in range(4):
        np.testing.assert_array_equal(module(source, seed, races=seed == 3).run({})["C"], expected)
    early = dataclasses.replace(source, text=source.text.replace("  cluster_sync();\n}", "}"))
    late = dataclasses.replace(source, text=source.text.replace("100 + i);\n  cluster_sync();", "100 + i);"))
    with pytest.raises(WrongAnswerError, match="has ended"):
        module(early, 0).run({})
    with pytest.raises(WrongAnswerError, match="before the cluster has synchronised"):
        module(late, 0).run({})


def test_a_launch_has_the_clusters_of_its_kernel() -> None:
    source = product()
    launch = dataclasses.replace(source.launches[0], cluster=1)
    with pytest.raises(LaunchError, match="product is for clusters of 2 blocks and launched with 1"):
        module(dataclasses.replace(source, launches=(launch,)))
    text = source.text.replace("__cluster_dims__(2, 1, 1) ", "")
    with pytest.raises(LaunchError, match="product is for clusters of 1 blocks and launched with 2"):
        module(dataclasses.replace(source, text=text))
