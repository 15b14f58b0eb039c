"""Sums with packed weights on a GPU: which are unpacked in pairs, their results, and what the model prices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.packed_sums import packed_sum
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.families.common.gpu.row_cost import thread_instructions
from roller_svc.families.gpu.reduction import REDUCTION
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.perf.model import read_launch
from roller_svc.perf.workload import prepare_workload
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import availability, compile_source
from roller_svc.toolchain.binaries.sass import sass_functions

Arrays = dict[str, NDArray[Any]]
HOPPER, AMPERE = hardware.load("nvidia-h200-sxm"), hardware.load("nvidia-a100-sxm-80gb")
INSTRUCTIONS_OF_REDO = 120  # of eight rows
FIELD = "({word} >> ({place} * 4)).call(`bitwise_and`, [15])"
SUM = "y[m, n] +=! x[m, k] * w[{index}]"


def rows(weight: str, k: int = 256, m: int = 1, n: int = 67, **inputs: str) -> TensorProgram:
    """Return a product with weights w[n, k]."""
    text = f"w[n, k] = {weight} where n in {n}, k in {k}; {SUM.format(index='n, k')}"
    return program(text, ["y"], **{"x": f"float16 {m} {k}"} | inputs)


def columns(weight: str, k: int = 256, m: int = 1, n: int = 2048, **inputs: str) -> TensorProgram:
    """Return a product with weights w[k, n]."""
    text = f"w[k, n] = {weight} where k in {k}, n in {n}; {SUM.format(index='k, n')}"
    return program(text, ["y"], **{"x": f"float16 {m} {k}"} | inputs)


INT4 = FIELD.format(word="Q[n, k // 8]", place="(k % 8)")
BYTE4 = FIELD.format(word="Q[n, k // 2]", place="(k % 2)")
ZERO4 = FIELD.format(word="Z[n, k // 32 // 8]", place="(k // 32 % 8)")
AWQ_ORDER = "(n % 2 * 4 + n % 8 // 2)"
AWQ = FIELD.format(word="Q[k, n // 8]", place=AWQ_ORDER)
AWQ_ZERO = FIELD.format(word="Z[k // 32, n // 8]", place=AWQ_ORDER)
GPTQ = FIELD.format(word="Q[k // 8, n]", place="(k % 8)")
GPTQ_ZERO = FIELD.format(word="Z[k // 32, n // 8]", place="(n % 8)")
GROUPS = {"Q": "int32 67 32", "S": "float16 67 8"}
PACKED = {
    "int4": rows(f"({INT4} - 8).cast(`float16`) * S[n, k // 32]", **GROUPS),
    "int4, x begins later": program(
        f"w[n, k] = ({INT4} - 8).cast(`float16`) * S[n, k // 32] where n in 67, k in 256; "
        "y[m, n] +=! x[m, k - 12].when([k >= 12], 0.0) * w[n, k]", ["y"], x="float16 1 244", **GROUPS),
    "int4, three rows of x": rows(f"({INT4} - 8).cast(`float16`) * S[n, k // 32]", m=3, **GROUPS),
    "int4, groups of 24": rows(
        f"({INT4} - 8).cast(`float16`) * S[n, k // 24]", 264, Q="int32 67 33", S="float16 67 11"),
    "int4, more than one chunk": rows(
        f"({INT4} - 8).cast(`float16`) * S[n, k // 128]", 4096 + 32, n=5, Q="int32 5 516", S="float16 5 33"),
    "int4 of bfloat16": rows(
        f"({INT4} - 8).cast(`bfloat16`) * S[n, k // 32]", x="bfloat16 1 256", Q="int32 67 32", S="bfloat16 67 8"),
    "int4 of float32": rows(
        f"({INT4} - 8).cast(`float32`) * S[n, k // 32]", x="float32 1 256", Q="int32 67 32", S="float32 67 8"),
    "int4 in unsigned words": rows(
        f"({INT4}.cast(`int32`) - 8).cast(`float16`) * S[n, k // 32]", Q="uint32 67 32", S="float16 67 8"),
    "int4 that four lanes share": rows(
        "((Q[n, k // 8] >> (k % 8 // 4 * 16)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * S[n, k // 32]",
        **GROUPS),
    "int4, subtracted as float": rows(f"({INT4}.cast(`float16`) - 8.0) * S[n, k // 32]", **GROUPS),
    "int4 in bytes": rows(
        "((Q[n, k // 2] >> (k % 2 * 4)).call(`bitwise_and`, [15]).cast(`int32`) - 8).cast(`float16`) * S[n, k // 32]",
        Q="uint8 67 128", S="float16 67 8"),
    "int4 with zero points": rows(
        f"({INT4} - {ZERO4}).cast(`float16`) * S[n, k // 32]", Z="int32 67 1", **GROUPS),
    "int2": rows(
        "((Q[n, k // 16] >> (k % 16 * 2)).call(`bitwise_and`, [3]) - 2).cast(`float16`) * S[n, k // 64]",
        Q="int32 67 16", S="float16 67 4"),
    "int8": rows("Q[n, k].cast(`float16`) * S[n]", m=2, Q="int8 67 256", S="float16 67"),
    "uint8 with zero points": rows(
        "(Q[n, k].cast(`int32`) - Z[n].cast(`int32`)).cast(`float16`) * S[n]",
        Q="uint8 67 256", Z="uint8 67", S="float16 67"),
    "float8": rows("Q[n, k].cast(`float16`) * S[n]", Q="float8_e4m3fn 67 256", S="float16 67"),
    "float8 e5m2 of float32": rows(
        "Q[n, k].cast(`float32`) * S[n]", x="float32 1 256", Q="float8_e5m2 67 256", S="float32 67"),
    "NVFP4": rows(
        f"T[{BYTE4}] * S[n, k // 16].cast(`float16`)", Q="uint8 67 128", T="float16 16", S="float8_e4m3fn 67 16"),
    "NVFP4 by float8, scales of rows": rows(
        f"T[{BYTE4}].cast(`float16`) * S[n, k // 16].cast(`float16`) * R[n]", m=2,
        Q="uint8 67 128", T="float8_e5m2 16", S="float8_e4m3fn 67 16", R="float16 67"),
    "MXFP4 of bfloat16": rows(
        f"T[{BYTE4}].cast(`bfloat16`) * exp2(E[n, k // 32].cast(`float32`) - 127.0).cast(`bfloat16`)",
        x="bfloat16 1 256", Q="uint8 67 128", T="float8_e5m2 16", E="uint8 67 8"),
    "values of bfloat16 by a table": rows(
        f"T[{INT4}] * S[n, k // 32]", x="bfloat16 1 256", Q="int32 67 32", T="bfloat16 16", S="bfloat16 67 8"),
    "values by a table, at int8 indices": rows(
        f"T[{INT4}.cast(`int8`)] * S[n, k // 32]", T="float16 16", **GROUPS),
    "int4, zero points subtracted as int8": rows(
        f"({INT4}.cast(`int8`) - 8).cast(`float16`) * S[n, k // 32]", **GROUPS),
    "NF4": rows(
        f"T[{BYTE4.replace('(k % 2', '((1 - k % 2)')}] * S[n, k // 64]",
        Q="uint8 67 128", T="float16 16", S="float16 67 4"),
    "AWQ": columns(
        f"({AWQ} - {AWQ_ZERO}).cast(`float16`) * S[k // 32, n]",
        Q="int32 256 256", Z="int32 8 256", S="float16 8 2048"),
    "AWQ, two rows of x": columns(
        f"({AWQ} - {AWQ_ZERO}).cast(`float16`) * S[k // 32, n]", m=2,
        Q="int32 256 256", Z="int32 8 256", S="float16 8 2048"),
    "GPTQ": columns(
        f"({GPTQ} - {GPTQ_ZERO} - 1).cast(`float16`) * S[k // 32, n]",
        Q="int32 32 2048", Z="int32 8 256", S="float16 8 2048"),
}  # fmt: skip
# Programs with packed weights that pairs do not give.
OTHERS = {
    "a table of float32": rows(f"T[{INT4}] * S[n, k // 32]", T="float32 16", **GROUPS),
    "a table of float16 that is rounded": rows(
        f"T[{INT4}].cast(`bfloat16`) * S[n, k // 32]", x="bfloat16 1 256", Q="int32 67 32", T="float16 16",
        S="bfloat16 67 8"),
    "an odd k": rows(f"({INT4} - 8).cast(`float16`) * S[n, k // 32]", 251, Q="int32 67 32", S="float16 67 8"),
    "unsigned arithmetic wraps": rows(
        f"({INT4}.cast(`uint32`) - 8).cast(`float32`) * S[n, k // 32]", **GROUPS),
    "an integer that float16 rounds": rows(f"({INT4} + 3000).cast(`float16`) * S[n, k // 32]", **GROUPS),
    "a rounded product": rows(f"(({INT4} - 8).cast(`float16`) * S[n, k // 32]).cast(`float16`)", **GROUPS),
}  # fmt: skip


def source_of(compute: TensorProgram, target: hardware.HardwareSpec = HOPPER) -> KernelSource:
    groups, candidates, _ = rank_best_partition(compute, target, 1)
    return emit_plan(best_plans(candidates, 1)[0], compute, groups, target)


def is_packed(source: KernelSource) -> bool:
    return "y_weights[" in source.text


def inputs_of(compute: TensorProgram, seed: int) -> Arrays:
    """Return random inputs, with all bits of packed words."""
    rng = np.random.default_rng(seed)
    arrays = dict(random_inputs(compute, seed))
    for name in set(arrays) & {"Q", "Z", "E"}:
        words = arrays[name]
        if words.dtype.kind in "iu":
            info = np.iinfo(words.dtype)
            low, high = (120, 134) if name == "E" else (info.min, info.max)
            arrays[name] = rng.integers(low, high, words.shape, words.dtype, endpoint=True)
    return arrays


def check(compute: TensorProgram, source: KernelSource, arrays: Arrays, seed: int = 1) -> Arrays:
    got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(arrays)
    with np.errstate(all="ignore"):
        agreement = agrees(compute, got, evaluate(compute, arrays))
    assert agreement.ok, agreement.detail
    return got


@pytest.mark.parametrize("name", PACKED)
def test_weights_are_unpacked_in_pairs(name: str) -> None:
    source = source_of(PACKED[name])
    assert is_packed(source)
    assert "f32_to_f16((float)" not in source.text.split("y_chunk[", 1)[1].split("__builtin_expect")[0]


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_are_computed_one_by_one(name: str) -> None:
    assert not is_packed(source_of(OTHERS[name]))


def test_float8_is_unpacked_in_pairs_where_the_device_converts_them() -> None:
    assert not is_packed(source_of(PACKED["float8"], AMPERE))
    assert is_packed(source_of(PACKED["float8 e5m2 of float32"], AMPERE))
    assert is_packed(source_of(PACKED["NVFP4"], AMPERE))  # its scales are converted one by one


def test_amd_devices_compute_weights_one_by_one() -> None:
    assert not is_packed(source_of(PACKED["int4"], hardware.load("amd-mi300x")))


@pytest.mark.emulator
@pytest.mark.parametrize("name", [*PACKED, *OTHERS])
def test_results_are_those_of_the_reference(name: str) -> None:
    compute = (PACKED | OTHERS)[name]
    check(compute, source_of(compute), inputs_of(compute, 1))


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["int4", "AWQ", "GPTQ", "int8", "NF4"])
def test_infinite_and_nan_factors_have_the_reference_s_results(name: str) -> None:
    """A shared infinite scale times a sum differs from the sum of its products: these are computed one by one."""
    compute = PACKED[name]
    arrays = inputs_of(compute, 2)
    arrays["x"] = np.abs(arrays["x"])
    scales = arrays["S"].reshape(-1)
    scales[[3, 17, 40]] = np.inf, -np.inf, np.nan
    assert not np.isfinite(check(compute, source_of(compute), arrays)["y"]).all()
    arrays["x"].reshape(-1)[5] = np.inf
    check(compute, source_of(compute), arrays)


@pytest.mark.emulator
def test_sum_that_exceeds_float32_before_its_scale_is_computed_one_by_one() -> None:
    compute = PACKED["int4 of float32"]
    arrays = inputs_of(compute, 3)
    arrays["Q"][:] = 0x7FFFFFFF
    arrays["x"][:], arrays["S"][:] = 3e38, 1e-30
    assert np.isfinite(check(compute, source_of(compute), arrays)["y"]).all()


def test_model_counts_the_instructions_of_the_machine_code() -> None:
    """One chunk of eight rows, without a loop; the code that computes infinite sums again seldom runs."""
    if not (toolchain := availability(HOPPER)).ok:
        pytest.skip(toolchain.reason)
    compute = rows(f"({INT4} - 8).cast(`float16`) * S[n, k // 128]", 4096, n=4096, Q="int32 4096 512", S="float16 4096 32")
    groups, candidates, _ = rank_best_partition(compute, HOPPER, 1)
    (choice,) = best_plans(candidates, 1)[0].choices
    workload = REDUCTION.prepare(groups[0], prepare_workload(groups[0].space, HOPPER, choice.program.unit))
    launch = read_launch(workload, choice.program)
    row_space = workload.facts
    iteration = row_space.row_iteration(launch.block, launch.thread, launch.reduce_threads)
    assert iteration.iterations == 1
    expected = thread_instructions(workload, row_space, launch, iteration)
    compiled = compile_source(emit_plan(best_plans(candidates, 1)[0], compute, groups, HOPPER))
    (functions,) = sass_functions([compiled.binary], HOPPER.arch)
    (function,) = functions.values()
    assert expected == pytest.approx(function.instructions - INSTRUCTIONS_OF_REDO, rel=0.1)


@pytest.mark.parametrize(
    ("name", "shared"),
    [("NVFP4", 1), ("NVFP4 by float8, scales of rows", 2), ("MXFP4 of bfloat16", 1), ("values of bfloat16 by a table", 0)],
)
def test_scale_is_not_shared_where_float32_would_round_products_to_zero(name: str, shared: int) -> None:
    groups, _, _ = rank_best_partition(PACKED[name], HOPPER, 1)
    packed = packed_sum(groups[0].statements[0], "k", 16)
    assert packed is not None
    assert len(packed.shared_factors("k", 16)) == shared


def test_scale_of_a_group_is_shared_by_chunks_within_it() -> None:
    groups, _, _ = rank_best_partition(PACKED["int4"], HOPPER, 1)
    packed = packed_sum(groups[0].statements[0], "k", 32)
    assert packed is not None
    assert [len(packed.shared_factors("k", chunk)) for chunk in (8, 32)] == [1, 1]
    wide = packed_sum(groups[0].statements[0], "k", 64)
    assert wide is not None
    assert not wide.shared_factors("k", 64)
