"""Fragments of the emulator's ldmatrix and mma against the layouts of the PTX ISA manual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from emulator_support import cuda, module, words, wrappers
from reference_kernels import tensor

from roller_svc.errors import WrongAnswerError
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import LaunchSpec, Role

pytestmark = pytest.mark.emulator

RNG = np.random.default_rng(11)
Place = Callable[[int, int, int], tuple[int, int]]  # (groupID, threadID_in_group, i) → (row, column)


@dataclass(frozen=True)
class Layouts:
    """A section "Matrix Fragments for mma.*": elements that a lane holds of each matrix, and where they are."""

    a_count: int
    a: Place
    b_count: int
    b: Place
    c_count: int
    c: Place
    k: int


def m16n8_c(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


def m16n8k8_a(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i in (0, 1) else g + 8), t * 2 + (i & 1)


def m16n8k8_b(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 2 + i, g


def m16n8k8_tf32_a(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i in (0, 2) else g + 8), (t if i in (0, 1) else t + 4)


def m16n8k8_tf32_b(g: int, t: int, i: int) -> tuple[int, int]:
    return (t if i == 0 else t + 4), g


def m16n8k16_a(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if 0 <= i < 2 or 4 <= i < 6 else g + 8), (t * 2 + (i & 1) if i < 4 else t * 2 + (i & 1) + 8)


def m16n8k16_b(g: int, t: int, i: int) -> tuple[int, int]:
    return (t * 2 + (i & 1) if i < 2 else t * 2 + (i & 1) + 8), g


def m16n8k32_a(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if 0 <= i < 4 or 8 <= i < 12 else g + 8), (t * 4 + (i & 3) if i < 8 else t * 4 + (i & 3) + 16)


def m16n8k32_b(g: int, t: int, i: int) -> tuple[int, int]:
    return (t * 4 + (i & 3) if i < 4 else t * 4 + (i & 3) + 16), g


def m8n8k16_a(g: int, t: int, i: int) -> tuple[int, int]:
    return g, t * 4 + i


def m8n8k16_b(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 4 + i, g


def m8n8k4_a(g: int, t: int, i: int) -> tuple[int, int]:
    return g, t


def m8n8k4_b(g: int, t: int, i: int) -> tuple[int, int]:
    return t, g


def m8n8_c(g: int, t: int, i: int) -> tuple[int, int]:
    return g, t * 2 + i


M16N8K8 = Layouts(4, m16n8k8_a, 2, m16n8k8_b, 4, m16n8_c, 8)
M16N8K8_TF32 = Layouts(4, m16n8k8_tf32_a, 2, m16n8k8_tf32_b, 4, m16n8_c, 8)
M16N8K16 = Layouts(8, m16n8k16_a, 4, m16n8k16_b, 4, m16n8_c, 16)
M16N8K32 = Layouts(16, m16n8k32_a, 8, m16n8k32_b, 4, m16n8_c, 32)
M8N8K16 = Layouts(4, m8n8k16_a, 4, m8n8k16_b, 2, m8n8_c, 16)
M8N8K4 = Layouts(1, m8n8k4_a, 1, m8n8k4_b, 2, m8n8_c, 4)

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
S8, U8, E4M3 = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e4m3fn)
E5M2, F64 = np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.float64)
NAMES = {F16: "f16", BF16: "bf16", S8: "s8", U8: "u8", E4M3: "e4m3", E5M2: "e5m2"}
MMA = {
    **{f"mma_m16n8k16_{NAMES[t]}": (M16N8K16, t, t) for t in (F16, BF16)},
    **{f"mma_m16n8k8_{NAMES[t]}": (M16N8K8, t, t) for t in (F16, BF16)},
    "mma_m16n8k8_tf32": (M16N8K8_TF32, F32, F32),
    **{f"mma_m16n8k32_{NAMES[a]}{NAMES[b]}": (M16N8K32, a, b) for a in (S8, U8) for b in (S8, U8)},
    **{f"mma_m8n8k16_{NAMES[a]}{NAMES[b]}": (M8N8K16, a, b) for a in (S8, U8) for b in (S8, U8)},
    **{f"mma_m16n8k32_{NAMES[a]}{NAMES[b]}": (M16N8K32, a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)},
    "mma_m16n8k8_f64": (M16N8K8_TF32, F64, F64),  # one element in a register, as tf32
    "mma_m8n8k4_f64": (M8N8K4, F64, F64),
    # the same through the smaller instructions of sm_75
    "mma_two_m16n8k8_f16": (M16N8K16, F16, F16),
    **{f"mma_four_m8n8k16_{NAMES[a]}{NAMES[b]}": (M16N8K32, a, b) for a in (S8, U8) for b in (S8, U8)},
    # the same through the smaller instruction of sm_80
    "mma_four_m8n8k4_f64": (M16N8K8_TF32, F64, F64),
}
SUMS = {"i": ("int", DType.INT32), F32: ("float", DType.FLOAT32), F64: ("double", DType.FLOAT64)}


def registers(values: np.ndarray) -> tuple[np.ndarray, str, DType]:
    """Return operands as a lane's registers have them, with their types."""
    if values.dtype == F64:
        return values, "double", DType.FLOAT64
    return words(values), "unsigned int", DType.UINT32


def sums_of(operand: np.dtype) -> np.dtype:
    """Return the type of sums of products."""
    return np.dtype(np.int32) if operand.kind in "iu" else F64 if operand == F64 else F32


def fragments(matrices: np.ndarray, count: int, place: Place) -> np.ndarray:
    """Return the elements of each lane, [matrices, 32, count]."""
    places = np.array([[place(lane >> 2, lane % 4, i) for i in range(count)] for lane in range(32)])
    return matrices[:, places[..., 0], places[..., 1]]


def multiplied(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the fragments of D = A x B + C for many matrices, one warp each."""
    layouts, _, _ = MMA[name]
    left, held, held_dtype = registers(fragments(a, layouts.a_count, layouts.a))
    right, _, _ = registers(fragments(b, layouts.b_count, layouts.b))
    sums = fragments(c, layouts.c_count, layouts.c)
    (_, _, a_words), (_, _, b_words), (count, _, c_words) = left.shape, right.shape, sums.shape
    kind, dtype = SUMS["i" if c.dtype.kind == "i" else c.dtype]
    text = f"""{wrappers(name)}
extern "C" __global__ void one(const {held} *a, const {held} *b, const {kind} *c, {kind} *d) {{
  const int lane = (int)(blockIdx.x * 32 + threadIdx.x);
  {held} left[{a_words}], right[{b_words}];
  {kind} sums[{c_words}];
  for (int i = 0; i < {a_words}; i++) left[i] = a[lane * {a_words} + i];
  for (int i = 0; i < {b_words}; i++) right[i] = b[lane * {b_words} + i];
  for (int i = 0; i < {c_words}; i++) sums[i] = c[lane * {c_words} + i];
  {name}(sums, left, right);
  for (int i = 0; i < {c_words}; i++) d[lane * {c_words} + i] = sums[i];
}}
"""
    buffers = (
        tensor("A", "a", Role.INPUT, held_dtype, left.shape), tensor("B", "b", Role.INPUT, held_dtype, right.shape),
        tensor("C", "c", Role.INPUT, dtype, sums.shape), tensor("D", "d", Role.OUTPUT, dtype, sums.shape),
    )  # fmt: skip
    source = cuda(text, buffers, LaunchSpec("one", ("a", "b", "c", "d"), (count, 1, 1), (32, 1, 1)))
    return module(source, seed=3).run({"A": left, "B": right, "C": sums})["D"]


def numbers(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return operands whose sums of products are exact in float32; any integers."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return RNG.integers(-4, 5, shape).astype(dtype)


@pytest.mark.parametrize("name", MMA)
def test_mma_takes_and_gives_fragments_as_the_manual_has_them(name: str) -> None:
    layouts, a_type, b_type = MMA[name]
    rows, sum_type = 8 if layouts.c is m8n8_c else 16, sums_of(a_type)
    a, b = numbers(a_type, (3, rows, layouts.k)), numbers(b_type, (3, layouts.k, 8))
    c = RNG.integers(-1000, 1000, (3, rows, 8)).astype(sum_type)
    expected = (a.astype(np.float64) @ b.astype(np.float64) + c).astype(sum_type)
    np.testing.assert_array_equal(multiplied(name, a, b, c), fragments(expected, layouts.c_count, layouts.c))


@pytest.mark.parametrize("name", [name for name, (_, a, b) in MMA.items() if a == b and a.itemsize <= 2])
def test_mma_knows_every_value_of_its_operands(name: str) -> None:
    """Infinities, NaN and the smallest values, first in A, then in B."""
    layouts, dtype, _ = MMA[name]
    rows, sum_type = 8 if layouts.c is m8n8_c else 16, sums_of(dtype)
    values = np.arange(1 << 8 * dtype.itemsize, dtype=f"uint{8 * dtype.itemsize}").view(dtype)
    count = len(values) // 8
    for column, row in ((np.resize(values, (count, rows)), 1), (1, values.reshape(count, 8))):
        a, b = np.zeros((count, rows, layouts.k), dtype), np.zeros((count, layouts.k, 8), dtype)
        a[:, :, 3], b[:, 3, :] = column, row
        zero = np.zeros((count, rows, 8), sum_type)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            expected = (a[:, :, 3:4].astype(np.float64) * b[:, 3:4, :].astype(np.float64)).astype(sum_type)
        np.testing.assert_array_equal(multiplied(name, a, b, zero), fragments(expected, layouts.c_count, layouts.c))


@pytest.mark.parametrize("of_a", [False, True])
def test_an_operand_not_rounded_to_tf32_is_rejected(of_a: bool) -> None:
    a, b, c = np.ones((1, 16, 8), np.float32), np.ones((1, 8, 8), np.float32), np.zeros((1, 16, 8), np.float32)
    assert (multiplied("mma_m16n8k8_tf32", a, b, c) == np.float32(8)).all()
    (a if of_a else b)[0, 3, 4] += np.float32(2**-11)  # the last bit of a tf32 is 2**-10
    with pytest.raises(WrongAnswerError, match="mma_m16n8k8_tf32 of a word that was not rounded"):
        multiplied("mma_m16n8k8_tf32", a, b, c)


def test_int32_wraps() -> None:
    ones, sums = np.ones((1, 16, 32), np.int8), np.full((1, 16, 8), (1 << 31) - 1, np.int32)
    assert (multiplied("mma_m16n8k32_s8s8", ones, np.ones((1, 32, 8), np.int8), sums) == -(1 << 31) + 31).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_hands_out_rows_as_the_manual_has_them(count: int, transposed: bool) -> None:
    """Lane 8 i + r provides the address of row r of matrix i."""
    matrices = RNG.permutation(np.arange(count * 64, dtype=np.uint16)).reshape(count, 8, 8)
    places = RNG.permutation(count * 8)  # of the rows in shared memory
    memory = np.empty((count * 8, 8), np.uint16)
    memory[places] = matrices.reshape(-1, 8)
    name = f"load_matrix_{count}{'_transposed' if transposed else ''}"
    text = f"""{wrappers(name)}
extern "C" __global__ void one(const unsigned short *m, const int *p, unsigned int *w) {{
  __shared__ __align__(16) unsigned short rows[{count * 64}];
  const int lane = (int)threadIdx.x;
  for (int i = lane; i < {count * 64}; i += 32) rows[i] = m[i];
  __syncthreads();
  unsigned int words[{count}];
  {name}(words, lane < {count * 8} ? &rows[p[lane] * 8] : nullptr);
  for (int i = 0; i < {count}; i++) w[lane * {count} + i] = words[i];
}}
"""
    buffers = (
        tensor("M", "m", Role.INPUT, DType.UINT16, memory.shape),
        tensor("P", "p", Role.INPUT, DType.INT32, (count * 8,)),
        tensor("W", "w", Role.OUTPUT, DType.UINT32, (32, count)),
    )
    source = cuda(text, buffers, LaunchSpec("one", ("m", "p", "w"), (1, 1, 1), (32, 1, 1)))
    found = module(source, seed=2).run({"M": memory, "P": places.astype(np.int32)})["W"]
    for lane in range(32):
        row, column = lane >> 2, 2 * (lane % 4)
        for i in range(count):
            matrix = matrices[i].T if transposed else matrices[i]
            expected = int(matrix[row, column]) | int(matrix[row, column + 1]) << 16
            assert found[lane, i] == expected
