"""A hand-written sm_90a kernel in the emulator: correct as it is, and every part of its pipeline is necessary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulator_support import module
from hopper import hopper, tiled
from reference_kernels import tensor

from roller_svc.errors import WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import KernelSource, LaunchSpec, Role
from roller_svc.ir.tensor_map import Swizzle

pytestmark = pytest.mark.emulator

# C = A B^T in tiles of 128 x 64, k in steps of 64 through a ring of three slots: a warpgroup loads, two multiply, and
# the result leaves through shared memory. Blocks take several tiles.
TEXT = """
extern "C" __global__ void __launch_bounds__(384, 1)
product(float *c, const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
        const __grid_constant__ TensorMap map_c) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned short *const left = (unsigned short *)memory;               // [3][128][64]
  unsigned short *const right = (unsigned short *)(memory + 49152);    // [3][64][64]
  float *const results = (float *)(memory + 73728);                    // [2][2][64][32]
  unsigned long long *const full = (unsigned long long *)(memory + 106496);
  unsigned long long *const empty = full + 3;
  const int thread = (int)threadIdx.x, group = thread / 128;
  if (thread == 0) {
    for (int i = 0; i < 3; i++) barrier_init(&full[i], 1);
    for (int i = 0; i < 3; i++) barrier_init(&empty[i], 8);
    fence_barrier_init();
  }
  __syncthreads();
  if (group == 2) {
    registers_decrease<40>();
    int round = 0;
    if (thread == 256) {
      for (int tile = (int)blockIdx.x; tile < TILES; tile += BLOCKS) {
        for (int step = 0; step < STEPS; step++, round++) {
          const int slot = round % 3;
          barrier_wait(&empty[slot], round / 3 % 2 ^ 1);
          barrier_expect(&full[slot], 24576);
          tma_load_2d(left + slot * 8192, &map_a, &full[slot], step * 64, tile / TILES_N * 128);
          tma_load_2d(right + slot * 4096, &map_b, &full[slot], step * 64, tile % TILES_N * 64);
        }
      }
    }
  } else {
    registers_increase<232>();
    float d[32];
    int round = 0;
    for (int tile = (int)blockIdx.x; tile < TILES; tile += BLOCKS) {
      for (int step = 0; step < STEPS; step++, round++) {
        const int slot = round % 3;
        barrier_wait(&full[slot], round / 3 % 2);
        wgmma_fence();
        #pragma unroll
        for (int k = 0; k < 64; k += 16)
          wgmma_m64n64k16_f16_kk(d, matrix_descriptor_128(left + slot * 8192 + group * 4096 + k, 16, 1024),
                                 matrix_descriptor_128(right + slot * 4096 + k, 16, 1024), step > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0 && thread % 32 == 0) barrier_arrive(&empty[(round - 1) % 3]);
      }
      wgmma_wait<0>();
      hold_results_32(d);
      if (thread % 32 == 0) barrier_arrive(&empty[(round - 1) % 3]);
      const int row = thread % 128 / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
      if (thread % 128 == 0) bulk_wait_read<0>();
      named_barrier(1 + group, 128);
      #pragma unroll
      for (int i = 0; i < 16; i++) {
        const int r = row + i % 2 * 8, x = i / 2 * 8 + column;
        *(float2 *)&results[(group * 2 + x / 32) * 2048 + r * 32 + ((x % 32 / 4 ^ r % 8) * 4 + x % 4)]
            = make_float2(d[2 * i], d[2 * i + 1]);
      }
      fence_async();
      named_barrier(1 + group, 128);
      if (thread % 128 == 0) {
        for (int half = 0; half < 2; half++)
          tma_store_2d(&map_c, results + (group * 2 + half) * 2048, tile % TILES_N * 64 + half * 32,
                       tile / TILES_N * 128 + group * 64);
        bulk_commit();
      }
    }
    if (thread % 128 == 0) bulk_wait<0>();
  }
}
"""


def product(m: int, n: int, k: int, blocks: int) -> KernelSource:
    a, b = tensor("A", "a", Role.INPUT, DType.FLOAT16, (m, k)), tensor("B", "b", Role.INPUT, DType.FLOAT16, (n, k))
    c = tensor("C", "c", Role.OUTPUT, DType.FLOAT32, (m, n))
    maps = (
        tiled("map_a", a, (64, 128), Swizzle.B128), tiled("map_b", b, (64, 64), Swizzle.B128),
        tiled("map_c", c, (32, 64), Swizzle.B128),
    )  # fmt: skip
    tiles = (-(-m // 128), -(-n // 64))
    sizes = f"constexpr int TILES_N = {tiles[1]}, TILES = {tiles[0] * tiles[1]}, STEPS = {-(-k // 64)}, BLOCKS = {blocks};\n"
    launch = LaunchSpec("product", ("c",), (blocks, 1, 1), (384, 1, 1), 106544, tensor_maps=maps)
    return hopper(sizes + TEXT, (a, b, c), launch, ("wgmma_m64n64k16_f16_kk", "hold_results_32"))


RNG = np.random.default_rng(3)
M, N, K = 136, 152, 264  # edges in every direction, five steps of k, six tiles
A = RNG.integers(-3, 4, (M, K)).astype(np.float16)
B = RNG.integers(-3, 4, (N, K)).astype(np.float16)
EXPECTED = A.astype(np.float32) @ B.astype(np.float32).T


@pytest.mark.parametrize("seed", range(6))
def test_a_product_of_warpgroups_is_right_in_any_order(seed: int) -> None:
    np.testing.assert_array_equal(module(product(M, N, K, 2), seed).run({"A": A, "B": B})["C"], EXPECTED)


@pytest.mark.parametrize("seed", range(2))
def test_a_product_of_warpgroups_has_no_race(seed: int) -> None:
    found = module(product(M, N, K, 2), seed, races=True).run({"A": A, "B": B})["C"]
    np.testing.assert_array_equal(found, EXPECTED)


BEFORE = "&empty[(round - 1) % 3]"
FULL = "barrier_wait(&full[slot], round / 3 % 2)"
LOOP = "    for (int tile = (int)blockIdx.x; tile < TILES; tile += BLOCKS) {\n"
READ = "      if (thread % 128 == 0) bulk_wait_read<0>();\n"
FENCE, MEET = "      fence_async();\n", "      named_barrier(1 + group, 128);\n"
LEFT = "step * 64, tile / TILES_N * 128);\n"
PLANTED = {
    "nothing makes the barriers known to copies": ("    fence_barrier_init();\n", ""),
    "barriers are used before all threads met": ("  __syncthreads();\n", ""),
    "full for two": ("barrier_init(&full[i], 1)", "barrier_init(&full[i], 2)"),
    "empty for seven": ("barrier_init(&empty[i], 8)", "barrier_init(&empty[i], 7)"),
    "empty for nine": ("barrier_init(&empty[i], 8)", "barrier_init(&empty[i], 9)"),
    "one barrier short": ("i < 3; i++) barrier_init(&empty", "i < 2; i++) barrier_init(&empty"),
    "the producer does not wait": ("          barrier_wait(&empty[slot], round / 3 % 2 ^ 1);\n", ""),
    "the producer waits for the other phase": ("round / 3 % 2 ^ 1", "round / 3 % 2"),
    "too few bytes": ("24576", "24560"),
    "too many bytes": ("24576", "24592"),
    "bytes of one operand": ("24576", "16384"),
    "a copy to the next slot": ("left + slot * 8192, &map_a", "left + (slot + 1) % 3 * 8192, &map_a"),
    "a copy that signals another slot": ("&map_b, &full[slot]", "&map_b, &full[(slot + 1) % 3]"),
    "coordinates of rows and k swapped": ("step * 64, tile / TILES_N * 128)", "tile / TILES_N * 128, step * 64)"),
    "coordinates in bytes": (LEFT, LEFT.replace("step * 64", "step * 128")),
    "the other operand's map": ("right + slot * 4096, &map_b", "right + slot * 4096, &map_a"),
    "consumers do not wait": ("        barrier_wait(&full[slot], round / 3 % 2);\n", ""),
    "consumers wait for the other phase": (FULL, FULL.replace("% 2", "% 2 ^ 1")),
    "the phase of a slot is forgotten": (FULL, "barrier_wait(&full[slot], 0)"),
    "the round begins again at each tile": (f"{LOOP}      for", f"{LOOP}      round = 0;\n      for"),
    "no fence of the registers": ("        wgmma_fence();\n", ""),
    "another start of a": ("group * 4096 + k, 16", "group * 4096 + 2 * k, 16"),
    "k steps of b": ("right + slot * 4096 + k,", "right + slot * 4096,"),
    "both groups multiply the same rows": ("left + slot * 8192 + group * 4096 + k", "left + slot * 8192 + k"),
    "the stride of a": ("group * 4096 + k, 16, 1024)", "group * 4096 + k, 16, 512)"),
    "the swizzle of b": ("matrix_descriptor_128(right", "matrix_descriptor_64(right"),
    "not from zero": ("step > 0 || k > 0", "1"),
    "always from zero": ("step > 0 || k > 0", "k > 0"),
    "no commit": ("        wgmma_commit();\n", ""),
    "a slot is released while it is read": ("wgmma_wait<1>", "wgmma_wait<2>"),
    "the slot in use is released": (f"if (step > 0 && thread % 32 == 0) barrier_arrive({BEFORE})",
                                    "if (step > 0 && thread % 32 == 0) barrier_arrive(&empty[slot])"),
    "the last slot is never released": (f"      if (thread % 32 == 0) barrier_arrive({BEFORE});\n", ""),
    "all lanes release": (f"if (step > 0 && thread % 32 == 0) barrier_arrive({BEFORE})",
                          f"if (step > 0) barrier_arrive({BEFORE})"),
    "results are not awaited": ("      wgmma_wait<0>();\n", ""),
    "results are read too early": ("      wgmma_wait<0>();\n      hold_results_32(d);\n", ""),
    "results under a store": (READ, ""),
    "results under a store of others": (READ + MEET, READ),
    "results not visible to the store": (FENCE, ""),
    "results visible too late": (FENCE + MEET, MEET + FENCE),
    "a store before all have written": (FENCE + MEET, FENCE),
    "named barriers of both groups": (READ + MEET, READ + MEET.replace("1 + group", "1")),
    "a named barrier for too many": (FENCE + MEET, FENCE + MEET.replace("128", "256")),
    "no swizzle of results": ("(x % 32 / 4 ^ r % 8)", "(x % 32 / 4)"),
    "rows of results": ("thread % 128 / 32 * 16 + thread % 32 / 4,", "thread % 128 / 32 * 16 + thread % 16 / 4,"),
    "the store of half a tile": ("half < 2; half++", "half < 1; half++"),
    "stores are not committed": ("        bulk_commit();\n", ""),
    "stores are not awaited": ("    if (thread % 128 == 0) bulk_wait<0>();\n", ""),
    "all threads load": ("    if (thread == 256) {", "    if (thread >= 256) {"),
    "more registers than there are": ("registers_increase<232>", "registers_increase<240>"),
    "registers that nobody gave": ("    registers_decrease<40>();\n", ""),
    "a warp less gives registers": ("    registers_decrease", "    if (thread >= 288) registers_decrease"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_seeded_faults_are_detected(name: str) -> None:
    old, new = PLANTED[name]
    source = product(M, N, K, 2)
    assert TEXT.count(old) == 1
    wrong = dataclasses.replace(source, text=source.text.replace(TEXT, TEXT.replace(old, new)))
    assert any(shows(wrong, seed, races=False) for seed in range(3)) or shows(wrong, 0, races=True)


def test_a_race_with_a_copy_names_the_same_block() -> None:
    """Only one warp waits for the data: the others' products race with copies."""
    source = product(M, N, K, 2)
    wrong = dataclasses.replace(source, text=source.text.replace(FULL, f"if (thread % 128 < 32) {FULL}"))
    with pytest.raises(WrongAnswerError, match=r"race: thread \d+ reads byte .*, a bulk copy writes it at line \d+"):
        module(wrong, races=True).run({"A": A, "B": B})


def shows(source: KernelSource, seed: int, *, races: bool) -> bool:
    """Whether this thread schedule reveals the fault."""
    try:
        found = module(source, seed, races=races).run({"A": A, "B": B})["C"]
    except WrongAnswerError:
        return True
    return not np.array_equal(found, EXPECTED)
