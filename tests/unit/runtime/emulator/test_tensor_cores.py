"""A hand-written tensor-core kernel in the emulator: correct as it is, and every part of its pipeline is necessary."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulator_support import cuda, module, wrappers
from reference_kernels import tensor

from roller_svc.errors import WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import KernelSource, LaunchSpec, Role

pytestmark = pytest.mark.emulator

# C = A B in tiles of 64 x 64, k in steps of 32 through three stages of asynchronous copies, four warps of 32 x 32.
# Rows in shared memory are padded by 16 bytes.
TEXT = """
extern "C" __global__ void __launch_bounds__(128)
product(const unsigned short *a, const unsigned short *b, float *c) {
  extern __shared__ __align__(16) unsigned char memory[];
  unsigned short *const left = (unsigned short *)memory;  // [3][64][40]
  unsigned short *const right = left + 3 * 64 * 40;       // [3][32][72]
  const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int row0 = (int)blockIdx.y * 64, column0 = (int)blockIdx.x * 64;
  const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
  float sums[2][4][4];
  #pragma unroll
  for (int i = 0; i < 32; i++) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
  const auto load = [&](int step) {
    const int stage = step % 3;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = thread / 4 + 32 * i, k = thread % 4 * 8;
      copy_async_16(left + (stage * 64 + row) * 40 + k, a + (row0 + row) * K + step * 32 + k,
                    row0 + row < M && step * 32 + k < K);
    }
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int k = thread / 8 + 16 * i, column = thread % 8 * 8;
      copy_async_16(right + (stage * 32 + k) * 72 + column, b + (step * 32 + k) * N + column0 + column,
                    step * 32 + k < K && column0 + column < N);
    }
  };
  for (int step = 0; step < 2; step++) {
    if (step < STEPS) load(step);
    commit_copies();
  }
  for (int step = 0; step < STEPS; step++) {
    await_copies<1>();
    __syncthreads();
    if (step + 2 < STEPS) load(step + 2);
    commit_copies();
    const int stage = step % 3;
    #pragma unroll
    for (int k = 0; k < 32; k += 16) {
      unsigned int a_words[2][4], b_words[4][2];
      #pragma unroll
      for (int i = 0; i < 2; i++)
        load_matrix_4(a_words[i], left + (stage * 64 + warp_row + i * 16 + lane % 16) * 40 + k + lane / 16 * 8);
      #pragma unroll
      for (int j = 0; j < 4; j++)
        load_matrix_2_transposed(b_words[j], right + (stage * 32 + k + lane % 16) * 72 + warp_column + j * 8);
      #pragma unroll
      for (int i = 0; i < 2; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) mma_m16n8k16_f16(sums[i][j], a_words[i], b_words[j]);
    }
  }
  #pragma unroll
  for (int i = 0; i < 2; i++)
    #pragma unroll
    for (int j = 0; j < 4; j++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = row0 + warp_row + i * 16 + lane / 4 + 8 * half;
        const int column = column0 + warp_column + j * 8 + lane % 4 * 2;
        if (row < M && column < N)
          *(float2 *)&c[row * N + column] = make_float2(sums[i][j][2 * half], sums[i][j][2 * half + 1]);
      }
}
"""
SHARED_BYTES = 3 * (64 * 40 + 32 * 72) * 2


def product(m: int, n: int, k: int) -> KernelSource:
    names = (
        "copy_async_16", "commit_copies", "await_copies", "load_matrix_4", "load_matrix_2", "load_matrix_2_transposed",
        "mma_m16n8k16_f16",
    )  # fmt: skip
    sizes = f"constexpr int M = {m}, N = {n}, K = {k}, STEPS = {-(-k // 32)};\n"
    buffers = (
        tensor("A", "a", Role.INPUT, DType.FLOAT16, (m, k)), tensor("B", "b", Role.INPUT, DType.FLOAT16, (k, n)),
        tensor("C", "c", Role.OUTPUT, DType.FLOAT32, (m, n)),
    )  # fmt: skip
    grid = (-(-n // 64), -(-m // 64), 1)
    launch = LaunchSpec("product", ("a", "b", "c"), grid, (128, 1, 1), SHARED_BYTES)
    return cuda(wrappers(*names) + sizes + TEXT, buffers, launch)


RNG = np.random.default_rng(3)
M, N, K = 72, 80, 104  # edges in every direction, four steps of k
A = RNG.integers(-3, 4, (M, K)).astype(np.float16)
B = RNG.integers(-3, 4, (K, N)).astype(np.float16)
EXPECTED = A.astype(np.float32) @ B.astype(np.float32)


@pytest.mark.parametrize("seed", range(6))
def test_a_product_on_tensor_cores_is_right_in_any_order_of_threads(seed: int) -> None:
    np.testing.assert_array_equal(module(product(M, N, K), seed).run({"A": A, "B": B})["C"], EXPECTED)


BARRIER, LOAD = "    __syncthreads();\n", "    if (step + 2 < STEPS) load(step + 2);\n"
STAGE, FIRST = "stage = step % 3;\n    #pragma unroll\n    for (int ", "stage = 0;\n    #pragma unroll\n    for (int "


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    await_copies<1>();\n", ""),
        ("await_copies<1>", "await_copies<2>"),
        (BARRIER, ""),
        (BARRIER + LOAD, LOAD + BARRIER),
        ("    commit_copies();\n  }\n  for", "  }\n  for"),
        ("    commit_copies();\n    const int stage", "    const int stage"),
        (f"{STAGE}i", f"{FIRST}i"),
        (f"{STAGE}i", f"{STAGE}i".replace("3", "2")),
        (f"{STAGE}k", f"{FIRST}k"),
        ("if (step + 2 < STEPS) load", "load"),
        ("step < STEPS; step++", "step < STEPS - 1; step++"),
        ("row0 + row < M && step", "step"),
        ("&& step * 32 + k < K);\n    }\n    #pragma", ");\n    }\n    #pragma"),
        ("step * 32 + k < K && column0", "column0"),
        (" && column0 + column < N", ""),
        ("row < M && column < N", "row < M"),
        ("row < M && column < N", "column < N"),
        ("i * 16 + lane % 16) * 40 + k", "i * 16 + lane % 8) * 40 + k"),
        ("lane / 16 * 8", "lane / 16 * 4"),
        ("_2_transposed(b_words[j], right", "_2(b_words[j], right"),
        ("lane / 4 + 8 * half", "lane / 4 + 4 * half"),
        ("= 0.0f;", "= sums[0][0][0];"),
    ],
)
def test_seeded_faults_are_detected(old: str, new: str) -> None:
    source = product(M, N, K)
    assert TEXT.count(old) == 1
    wrong = dataclasses.replace(source, text=source.text.replace(TEXT, TEXT.replace(old, new)))
    assert any(shows(wrong, seed) for seed in range(4))


def shows(source: KernelSource, seed: int) -> bool:
    """Whether this thread schedule reveals the fault."""
    try:
        found = module(source, seed).run({"A": A, "B": B})["C"]
    except WrongAnswerError:
        return True
    return not np.array_equal(found, EXPECTED)
