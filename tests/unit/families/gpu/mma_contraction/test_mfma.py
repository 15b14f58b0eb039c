"""Contractions by MFMA: fragments, staging, tiles of all kinds, hipcc's code."""

from __future__ import annotations

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from cases_hip import MI250X, MI300X, built, needs_hipcc
from cases_matrix import chosen, contraction, operands_of, tiles, unit
from numpy.typing import NDArray
from reference_kernels import tensor
from schedule_support import program

from roller_svc import toolchain
from roller_svc.analysis.operand import operands_unsupported_reason
from roller_svc.codegen.cuda.instructions import mfma, mfma_wrapper
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import partition
from roller_svc.families.common.gpu.matrix.tile import (
    LoadKind,
    fragment_of,
    mfma_unsupported_reason,
    mma_tile,
    plan_operand_loads,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import Arch
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Language, LaunchSpec, Role
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

GFX90A = Arch("gfx", 0x90A)
MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
BYTES = "C[m, n] +=! A[m, k].cast(`int32`) * B[k, n].cast(`int32`)"
# wrapper → type of a, b, of the sums, and the extent along k
WRAPPERS = {
    "mfma_16x16x16_f16": (DType.FLOAT16, DType.FLOAT32, 16), "mfma_16x16x16_bf16": (DType.BFLOAT16, DType.FLOAT32, 16),
    "mfma_16x16x4_f32": (DType.FLOAT32, DType.FLOAT32, 4), "mfma_16x16x16_s8": (DType.INT8, DType.INT32, 16),
    "mfma_16x16x32_s8": (DType.INT8, DType.INT32, 32), "mfma_16x16x4_f64": (DType.FLOAT64, DType.FLOAT64, 4),
}  # fmt: skip
NUMPY = {DType.FLOAT16: np.float16, DType.BFLOAT16: ml_dtypes.bfloat16, DType.FLOAT32: np.float32,
         DType.INT8: np.int8, DType.FLOAT64: np.float64}  # fmt: skip


# one instruction --------------------------------------------------------------------------------------------------


def laid_out(matrix: NDArray[np.generic]) -> NDArray[np.generic]:
    """[16, k] → [lane, element]: the MI200 ISA's layout of A, and of B by columns."""
    k = matrix.shape[1]
    return np.concatenate([matrix[:, k // 4 * quarter : k // 4 * (quarter + 1)] for quarter in range(4)])


@pytest.mark.emulator
@pytest.mark.parametrize("name", WRAPPERS)
def test_fragments_match_the_isa_manual(name: str) -> None:
    dtype, sums, k = WRAPPERS[name]
    values = np.random.default_rng(5)
    a, b = (values.integers(-4, 5, (16, k)).astype(NUMPY[dtype]) for _ in "ab")
    type_ = {DType.INT32: "int", DType.FLOAT32: "float", DType.FLOAT64: "double"}[sums]
    held = {16: "unsigned short", 8: "signed char", 32: "float", 64: "double"}[dtype.bits]
    wrapper = mfma(name)
    assert wrapper is not None
    text = (
        f'{wrapper.text}\nextern "C" __global__ void one(const {held} *a, const {held} *b, {type_} *c) {{\n'
        f"  {type_} d[4] = {{}};\n"
        f"  {name}(d, a + threadIdx.x * {k // 4}, b + threadIdx.x * {k // 4});\n"
        f"  for (int i = 0; i < 4; i++) c[threadIdx.x * 4 + i] = d[i];\n}}\n"
    )
    buffers = (
        tensor("A", "a", Role.INPUT, dtype, (64, k // 4)), tensor("B", "b", Role.INPUT, dtype, (64, k // 4)),
        tensor("C", "c", Role.OUTPUT, sums, (64, 4)),
    )  # fmt: skip
    launch = LaunchSpec("one", ("a", "b", "c"), block=(64, 1, 1))
    source = KernelSource("one", Language.HIP, GFX90A, text, buffers, (launch,))
    found = load_emulated(CompiledKernel(source, b"", "", ()), 1).run({"A": laid_out(a), "B": laid_out(b)})["C"]
    product = a.astype(np.int64) @ b.astype(np.int64).T
    # lane l: rows 4 (l / 16) ... of column l % 16; of float64, rows l / 16, l / 16 + 4, ...
    order = (2, 0, 1) if sums is DType.FLOAT64 else (0, 2, 1)
    assert np.array_equal(found.reshape(4, 16, 4).transpose(order).reshape(16, 16), product)


def test_wrappers_are_of_the_instructions_that_devices_have() -> None:
    assert {mfma_wrapper(d, GFX90A) for d in NUMPY} == {n for n in WRAPPERS if n != "mfma_16x16x32_s8"}
    assert mfma_wrapper(DType.INT8, MI300X.arch) == "mfma_16x16x32_s8"
    for hw in (MI250X, MI300X):
        for one in (u for u in hw.units if u.takes_fragments):
            assert f"{one.shape[2]}_" in mfma_wrapper(one.in_dtype, hw.arch)


def test_lanes_hold_whole_words() -> None:
    held = {u.name: (fragment_of(u).step_bytes, fragment_of(u).a_words) for u in MI250X.units if u.takes_fragments}
    assert held == {
        "mfma_f16": (32, 2),
        "mfma_bf16": (32, 2),
        "mfma_f32": (16, 1),
        "mfma_s8": (16, 1),
        "mfma_f64": (32, 2),
    }
    half = unit(MI250X, "mfma_f16")
    assert mfma_unsupported_reason(dataclasses.replace(half, shape=(32, 32, 8))).startswith("instructions of 32 x 32")
    assert mfma_unsupported_reason(dataclasses.replace(half, shape=(16, 16, 4))).startswith("lanes do not hold whole words")


# operands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("mfma_f32", "float32", ""),  # in full, whatever tf32 may be
        ("mfma_f16", "float16", ""),
        ("mfma_f16", "float8_e4m3fn", ""),
        ("mfma_f16", "bfloat16", "operand a is bfloat16"),
        ("mfma_s8", "int8", ""),
        ("mfma_s8", "bool", ""),
        ("mfma_s8", "uint8", "operand a is uint8, the unit takes int8"),
    ],
)
def test_supported_operand_types(name: str, dtype: str, reason: str) -> None:
    of = unit(MI250X, name)
    text = BYTES if of.acc_dtype is DType.INT32 else MATMUL
    factors = operands_of(text, A=f"{dtype} 64 64", B=f"{dtype} 64 64")
    assert operands_unsupported_reason(of, of.acc_dtype, factors, allow_tf32=False).startswith(reason)
    assert bool(reason) is bool(operands_unsupported_reason(of, of.acc_dtype, factors, allow_tf32=False))


def test_operands_are_staged_along_k_and_go_through_registers() -> None:
    factors = operands_of(MATMUL, A="float16 64 64", B="float16 64 64")
    a, b = plan_operand_loads(unit(MI250X, "mfma_f16"), factors, MI250X.arch)
    assert (a.load.kind, b.load.kind) == (LoadKind.VECTOR, LoadKind.ELEMENT)
    group = contraction(MATMUL, MI250X, A="float16 64 64", B="float16 64 64")
    tile = mma_tile(tiles(group, unit(MI250X, "mfma_f16"), (32, 32, 32), (16, 16), reduce_threads=64), *factors)
    assert tile.a.k_major
    assert tile.b.k_major
    assert (tile.threads, tile.fragments, tile.k_steps) == (256, (1, 1), 2)


# kernels ----------------------------------------------------------------------------------------------------------

Extents = tuple[int, int, int]
CASES: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "halves": ("mfma_f16", MATMUL, "float16", {}),
    "bfloat16, three stages": ("mfma_bf16", MATMUL, "bfloat16", {"stages": 3}),
    "float32": ("mfma_f32", MATMUL, "float32", {}),
    "bytes": ("mfma_s8", BYTES, "int8", {}),
    "float64": ("mfma_f64", MATMUL, "float64", {}),
    "float64, split": ("mfma_f64", MATMUL, "float64", {"split_k": 2}),
    "float64, streamed": ("mfma_f64", MATMUL, "float64", {"stream_k_blocks": 3}),
    "along k": ("mfma_f16", "C[m, n] +=! A[m, k] * B[n, k]", "float16", {}),
    "split": ("mfma_f16", MATMUL, "float16", {"split_k": 2}),
    "streamed": ("mfma_f16", MATMUL, "float16", {"stream_k_blocks": 3}),
    "rastered": ("mfma_f16", MATMUL, "float16", {"raster": 2}),
    "with an epilogue": ("mfma_f16", f"{MATMUL}; Y[m, n] = relu(C[m, n] + v[n])", "float16", {}),
    "rows reduced": ("mfma_f16", f"{MATMUL}; Y[m] >=! C[m, n]", "float16", {}),
}


def program_of(name: str) -> TensorProgram:
    """Sizes that no tile divides."""
    _, text, dtype, _ = CASES[name]
    inputs = {"A": "70 72", "B": "72 90" if "B[k" in text else "90 72"} | ({"v": "90"} if "v[n]" in text else {})
    return program(text, **{tensor_name: f"{dtype} {shape}" for tensor_name, shape in inputs.items()})


def source_of(name: str, block: Extents, warp: tuple[int, int]) -> KernelSource:
    unit_name, _, _, more = CASES[name]
    found = program_of(name)
    (group,) = partition(found, MI250X)
    by_hand = tiles(group, unit(MI250X, unit_name), block, warp, **{"reduce_threads": 64} | more)
    return emit_plan(Plan((chosen(by_hand),)), found, (group,), MI250X)


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("block", "warp"),
    [((32, 32, 32), (16, 16)), pytest.param((64, 96, 64), (32, 48), marks=pytest.mark.slow)],
)
def test_kernels_match_the_interpreter(name: str, block: Extents, warp: tuple[int, int]) -> None:
    if name == "rows reduced":
        block, warp = (16, 96, 32), (16, 48)  # all of a row in one tile
    source, found = source_of(name, block, warp), program_of(name)
    assert "mfma_16x16x" in source.text
    arrays = random_inputs(found, 2)
    module = load_emulated(CompiledKernel(source, b"", "", ()), 2, races=True)
    verdict = agrees(found, module.run(arrays), evaluate(found, arrays))
    assert verdict.ok, f"{verdict}\n{source.text}"


@needs_hipcc
@pytest.mark.parametrize("name", ["halves", "bfloat16, three stages", "float32", "bytes", "float64"])
def test_compiled_kernels_have_the_instruction(name: str) -> None:
    compiled = toolchain.compile_source(source_of(name, (64, 64, 64), (32, 32)))
    assert all(not used.spill_bytes for used in compiled.resources)


@needs_hipcc
@pytest.mark.slow
def test_the_models_choice_for_a_large_product_spills_nothing() -> None:
    types = {"A": ("float16", (4096, 4096)), "B": ("float16", (4096, 4096))}
    winner = built(MATMUL, types, "amd-mi250x").winner
    assert winner.compiled is not None
    assert winner.plan.dominant_choice.program.unit.name == "mfma_f16"
    assert not any(used.spill_bytes for used in winner.compiled.resources)
    assert re.search(r"__builtin_amdgcn_mfma_f32_16x16x16f16", winner.source.text)
