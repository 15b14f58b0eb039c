"""CUDA source on a CPU: correct kernels give correct results, seeded faults are detected."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import pytest
from emulator_support import INPUT, cuda, module, one_block
from reference_kernels import cuda_scale, tensor

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import IndexRangeError, KernelTimeoutError, LaunchError, WrongAnswerError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, KernelSource, LaunchSpec, Role
from roller_svc.ir.program import TensorType
from roller_svc.runtime.emulator import EmulatorLimits, EmulatorModule
from roller_svc.toolchain import compile_cxx

pytestmark = pytest.mark.emulator

SEEDS = (0, 1, 2, 3)


A100, V100 = "nvidia-a100-sxm-80gb", "nvidia-v100-sxm2"


def generated(expression: str, inputs: dict[str, TensorType], target: str = A100) -> KernelSource:
    """Return the source that the pipeline generates."""
    program, spec = parse(expression, inputs, None), hardware.load(target)
    groups, ranked, _ = rank_best_partition(program, spec, 1)
    return emit_plan(best_plans(ranked, 1)[0], program, groups, spec)


def mutated(source: KernelSource, old: str, new: str, count: int = 1) -> KernelSource:
    """Return the kernel with a seeded fault."""
    assert old in source.text
    return dataclasses.replace(source, text=source.text.replace(old, new, count))


def caught(source: KernelSource, arrays: dict[str, np.ndarray], name: str, expected: np.ndarray) -> bool:
    """Whether some thread schedule reveals the fault."""
    for seed in SEEDS:
        try:
            found = module(source, seed).run(arrays)[name]
        except WrongAnswerError:
            return True
        if not np.allclose(found, expected, rtol=1e-4, atol=1e-6):
            return True
    return False


# A small tiled product: 20 x 24 = (20 x 12) (12 x 24), tiles of 8 x 8, edges in every direction.
TILED = """
extern "C" __global__ void __launch_bounds__(64, 1)
product(const float *__restrict__ a, const float *__restrict__ b, float *__restrict__ c) {
  __shared__ __align__(16) float left[64];
  __shared__ __align__(16) float right[64];
  const int y = (int)threadIdx.x / 8, x = (int)threadIdx.x % 8;
  const int row = (int)blockIdx.x / 3 * 8 + y, column = (int)blockIdx.x % 3 * 8 + x;
  float sum = 0.0f;
  for (int step = 0; step < 2; step++) {
    left[y * 8 + x] = ((row < 20) && (step * 8 + x < 12)) ? a[row * 12 + step * 8 + x] : 0.0f;
    right[y * 8 + x] = (step * 8 + y < 12) ? b[(step * 8 + y) * 24 + column] : 0.0f;
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 8; k++) sum += left[y * 8 + k] * right[k * 8 + x];
    __syncthreads();  // the tiles are read
  }
  if (row < 20) c[row * 24 + column] = sum;
}
"""
RNG = np.random.default_rng(5)
A = RNG.standard_normal((20, 12)).astype(np.float32)
B = RNG.standard_normal((12, 24)).astype(np.float32)
ARRAYS = {"A": A, "B": B}


def tiled() -> KernelSource:
    buffers = (
        tensor("A", "a", Role.INPUT, shape=(20, 12)),
        tensor("B", "b", Role.INPUT, shape=(12, 24)),
        tensor("C", "c", Role.OUTPUT, shape=(20, 24)),
    )
    return cuda(TILED, buffers, LaunchSpec("product", ("a", "b", "c"), (9, 1, 1), (64, 1, 1)))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tiled_product_is_right_in_any_order_of_threads(seed: int) -> None:
    np.testing.assert_allclose(module(tiled(), seed).run(ARRAYS)["C"], A @ B, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    __syncthreads();\n    #pragma", "    #pragma"),
        ("    __syncthreads();  // the tiles are read\n", ""),
        ("if (row < 20) c", "if (row <= 20) c"),
        ("if (row < 20) c", "c"),
        ("((row < 20) && ", "((row <= 20) && "),
        ("((row < 20) && (step * 8 + x < 12))", "(step * 8 + x < 12)"),
        ("(step * 8 + x < 12)", "(step * 8 + x < 13)"),
        ("(step * 8 + y < 12)", "(step * 8 + y <= 12)"),
        ("step < 2", "step < 1"),
        ("float sum = 0.0f", "float sum"),
        ("k < 8", "k <= 8"),
    ],
)
def test_seeded_faults_are_detected(old: str, new: str) -> None:
    assert caught(mutated(tiled(), old, new), ARRAYS, "C", A @ B)


GENERATED = {
    "product": ("C[m, n] +=! A[m, k] * B[k, n]", {"A": (70, 50), "B": (50, 90)}, lambda a: a["A"] @ a["B"]),
    "shares": (
        "S[i] +=! A[i, k]; C[i, k] = A[i, k] / S[i]", {"A": (3, 9000)}, lambda a: a["A"] / a["A"].sum(1, keepdims=True)
    ),
    "transpose": ("C[j, i] = A[i, j]", {"A": (70, 90)}, lambda a: a["A"].T),
}  # fmt: skip


@pytest.mark.parametrize("target", [A100, V100])
@pytest.mark.parametrize("name", GENERATED)
def test_no_barrier_of_a_generated_kernel_can_go(name: str, target: str) -> None:
    expression, shapes, reference = GENERATED[name]
    types = {n: TensorType(DType.FLOAT32, shape) for n, shape in shapes.items()}
    source = generated(expression, types, target)
    arrays = {n: RNG.uniform(1, 2, shape).astype(np.float32) for n, shape in shapes.items()}
    np.testing.assert_allclose(module(source, races=True).run(arrays)["C"], reference(arrays), rtol=1e-4)
    barriers = [found.start() for found in re.finditer(r"__syncthreads\(\);", source.text)]
    assert barriers
    missed = []
    for at in barriers:
        text = source.text[:at] + source.text[at:].replace("__syncthreads();", "", 1)
        try:
            module(dataclasses.replace(source, text=text), races=True).run(arrays)
        except WrongAnswerError:
            continue
        missed.append(source.text.count("\n", 0, at) + 1)
    assert len(missed) < len(barriers)
    # the last of several only keeps a later use of the array apart from this one, and there is none
    assert missed in ([], [source.text.count("\n", 0, barriers[-1]) + 1])


def test_no_guard_of_a_generated_kernel_can_go() -> None:
    types = {"A": TensorType(DType.FLOAT32, (7, 50)), "B": TensorType(DType.FLOAT32, (50, 9))}
    source = generated("C[m, n] +=! A[m, k] * B[k, n]", types)
    arrays = {n: RNG.standard_normal(t.shape).astype(np.float32) for n, t in types.items()}
    expected = arrays["A"] @ arrays["B"]
    assert not caught(source, arrays, "C", expected)
    guards = re.findall(r"\(\w+ < (?:7|9|50)\)", source.text)
    assert guards
    for guard in set(guards):
        assert caught(mutated(source, guard, "(1)", -1), arrays, "C", expected), guard


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("c[threadIdx.x + 3] = 1.0f;", "byte 128 of C, which has 128 bytes"),
        ("if (a[threadIdx.x + 2] < 7.0f) c[0] = 1.0f;", "byte 128 of A, which has 128 bytes"),
        ("c[(int)threadIdx.x - 16400] = 1.0f;", "byte -65600 of C, which has 128 bytes"),
        ("c[(int)threadIdx.x - 5] = 1.0f;", "before the first byte of C"),
        ("if (threadIdx.x == 0) ((float *)a)[3] = 1.0f;", "an input is written"),
        (
            "__shared__ float s[32]; s[threadIdx.x + 1] = 1.0f; c[threadIdx.x] = s[threadIdx.x];",
            "line 2.*leaves its local or shared array",
        ),
        ("extern __shared__ unsigned char s[]; s[threadIdx.x + 1] = 0;", "behind dynamic shared memory"),
        ("int big = 2000000000 + (int)a[3]; c[0] = (float)(big + 2000000000);", "overflows"),
        ("c[0] = (float)(1 << ((int)a[3] + 29));", "shift"),
        ("c[0] = (float)(7 / (int)a[0]);", "division by zero"),
        ("if (threadIdx.x < 5) __syncthreads();", "barrier divergence.*deadlock"),
        ("if (threadIdx.x < 5)\n__syncthreads();\nelse\n__syncthreads();", "barrier divergence.*line 3.*line 5"),
    ],
)
def test_faults_of_kernels_are_reported(body: str, message: str) -> None:
    with pytest.raises(WrongAnswerError, match=message) as raised:
        module(one_block(body, shared_bytes=32)).run(INPUT)
    assert raised.value.code == "emulator-fault"
    assert "one, block (0, 0, 0), thread (" in raised.value.message


def test_outputs_and_shared_memory_are_nan_at_first() -> None:
    body = "__shared__ float s[32]; if (threadIdx.x < 10) c[threadIdx.x] = s[threadIdx.x] == s[threadIdx.x];"
    found = module(one_block(body)).run(INPUT)["C"]
    assert (found[:10] == 0).all()
    assert np.isnan(found[10:]).all()


def test_dynamic_shared_memory_and_many_barriers() -> None:
    body = """  extern __shared__ __align__(16) unsigned char memory[];
  float *const s = (float *)(memory + 64);
  s[threadIdx.x] = a[threadIdx.x];
  for (int step = 16; step; step /= 2) {
    __syncthreads();
    if ((int)threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
  }
  __syncthreads();
  c[threadIdx.x] = s[0];"""
    for seed in SEEDS:
        found = module(one_block(body, shared_bytes=64 + 128), seed).run(INPUT)["C"]
        assert (found == INPUT["A"].sum()).all()


def test_launches_follow_each_other_and_three_dimensions_are_counted() -> None:
    text = """
extern "C" __global__ void where(int *w) {
  w[(blockIdx.z * gridDim.y + blockIdx.y) * 24 + (threadIdx.z * blockDim.y + threadIdx.y) * 4 + threadIdx.x] += 1;
}
extern "C" __global__ void twice(const int *w, int *c) {
  int i = blockIdx.x * 24 + threadIdx.x;
  c[i] = 2 * w[i];
}
"""
    buffers = (tensor("W", "w", Role.WORKSPACE, DType.INT32, (96,)), tensor("C", "c", Role.OUTPUT, DType.INT32, (96,)))
    source = cuda(
        text,
        buffers,
        LaunchSpec("where", ("w",), (1, 2, 2), (4, 3, 2), zeroed=("w",)),
        LaunchSpec("twice", ("w", "c"), (4, 1, 1), (24, 1, 1)),
    )
    assert (module(source).run({})["C"] == 2).all()


def test_the_handwritten_kernels_of_the_other_runtimes() -> None:
    a = np.arange(256, dtype=np.float32)
    np.testing.assert_array_equal(module(cuda_scale(), 3).run({"A": a})["C"], 2 * a[::-1])


@pytest.mark.parametrize(("allowed", "fits"), [(64, True), (32, False)])
def test_a_launch_beyond_the_launch_bounds_is_rejected(allowed: int, fits: bool) -> None:
    source = one_block("  if (threadIdx.x < 32) c[threadIdx.x] = a[threadIdx.x];", threads=64)
    bounded = dataclasses.replace(source, text=source.text.replace("one(", f"__launch_bounds__({allowed}, 1)\none("))
    if fits:
        np.testing.assert_array_equal(module(bounded).run(INPUT)["C"], INPUT["A"])
    else:
        with pytest.raises(LaunchError, match="one is for blocks of 32 threads and launched with 64"):
            module(bounded)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "uint8", "float8_e4m3fn"])
def test_atomic_scatters_of_every_width(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype)
    types = {name: TensorType(DType(dtype), (extent,)) for name, extent in (("T", 7), ("X", 40))}
    source = generated("T[I[i]] +=. X[i]", types | {"I": TensorType(DType.INT64, (40,))})
    target, values, places = np.arange(7).astype(kind), (np.arange(40) % 2).astype(kind), np.arange(40) % 7
    expected = np.arange(7.0)
    np.add.at(expected, places, values.astype(np.float64))
    found = module(source, 2).run({"T": target, "X": values, "I": places.astype(np.int64)})["T"]
    np.testing.assert_array_equal(found.astype(np.float64), expected)


@pytest.mark.parametrize("value", [10, -1, 1 << 32, -(1 << 63)])
@pytest.mark.parametrize("expression", ["C[i] = A[I[i]]", "T[I[i]] +=. A[i]"])
def test_an_index_from_data_that_is_out_of_range(expression: str, value: int) -> None:
    types = {"A": TensorType(DType.FLOAT32, (10,)), "I": TensorType(DType.INT64, (10,))}
    if "T" in expression:
        types["T"] = TensorType(DType.FLOAT32, (10,))
    arrays = {n: np.zeros(t.shape, t.dtype.value) for n, t in types.items()}
    arrays["I"][3] = value
    with pytest.raises(IndexRangeError, match=rf"index {value} is outside dimension 0 \(axis i\) of [AT],"):
        module(generated(expression, types)).run(arrays)


def test_an_endless_kernel_is_ended() -> None:
    source = one_block("volatile int stop = 0; while (!stop) {}")
    endless = EmulatorModule(CompiledKernel(source, b"", "", ()), compile_cxx, limits=EmulatorLimits(timeout_s=0.3))
    with pytest.raises(KernelTimeoutError):
        endless.run(INPUT)


ORDER = """
__shared__ unsigned int count;
if (threadIdx.x == 0) count = 0;
__syncthreads();
c[threadIdx.x] = (float)atomicAdd(&count, 1u);
"""


def order(module: EmulatorModule, offset: float = 0.0) -> list[float]:
    """Return the order in which the threads of a block run."""
    return list(module.run({"A": INPUT["A"] + np.float32(offset)})["C"])


def test_each_call_has_an_order_of_threads_of_its_own() -> None:
    compiled = CompiledKernel(one_block(ORDER), b"", "", ())
    one, other, fixed = load_emulated(compiled), load_emulated(compiled), load_emulated(compiled, seed=7)
    first, second = order(one), order(one)
    assert first != second
    assert sorted(first) == list(range(32))
    assert order(one, 1.0) not in (first, second)
    assert order(other) == first  # the same inputs, the same order, in any process
    assert order(fixed) == order(fixed)
    assert order(load_emulated(compiled, seed=0)) == list(range(32))


def test_a_report_names_the_seed() -> None:
    wrong = one_block("c[threadIdx.x + 1] = 0;")
    with pytest.raises(WrongAnswerError, match=r"the emulator stopped kernel, seed 5: one, block"):
        module(wrong, seed=5).run(INPUT)


@pytest.mark.slow
def test_a_kernel_is_built_once() -> None:
    built = []

    def counting(name: str, files: Mapping[str, bytes], arguments: Sequence[str]) -> bytes:
        built.append(name)
        return compile_cxx(name, files, arguments)

    for _ in range(3):  # none of the modules outlives its turn
        compiled = CompiledKernel(one_block("c[threadIdx.x] = 12.0f;"), b"", "", ())
        assert (EmulatorModule(compiled, counting).run(INPUT)["C"] == 12).all()
    assert sorted(built) == ["emulator", "kernel", "kernel"]


def test_the_api_emulates() -> None:
    kernel = roller_svc.compile(
        "C[i, j] = A[i, j] + B[j]",
        {"A": ("bfloat16", (9, 21)), "B": ("bfloat16", (21,))},
        target="nvidia-a100-sxm-80gb",
        runtime="emulator",
        top_k=1,
    )
    a, b = (RNG.integers(-8, 8, shape).astype(ml_dtypes.bfloat16) for shape in ((9, 21), (21,)))
    np.testing.assert_array_equal(kernel(A=a, B=b)["C"], a + b)
    assert kernel.language == "cuda"
    assert kernel.binary


def test_a_target_that_nothing_compiles_for_is_emulated_too() -> None:
    kernel = roller_svc.compile(
        "C[i] = A[i] * A[i] + 1", {"A": ("float32", (300,))}, target="nvidia-k80", runtime="emulator", top_k=1
    )
    a = RNG.standard_normal(300).astype(np.float32)
    np.testing.assert_allclose(kernel(A=a)["C"], a * a + 1, rtol=1e-6)
    assert not kernel.binary
    assert "not compiled" in kernel.parts.compiled.log
