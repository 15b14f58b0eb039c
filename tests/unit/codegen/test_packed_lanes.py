"""Packed integers, float8 and looked-up values, unpacked in pairs: which programs, results, instructions."""

from __future__ import annotations

import numpy as np
import pytest
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import availability, compile_source

HOPPER, AMPERE = hardware.load("nvidia-h200-sxm"), hardware.load("nvidia-a100-sxm-80gb")


def unpacked(bits: int, per: int, more: str, dtype: str = "float16") -> str:
    """Return a map of packed integers of a row, `per` in an element of Q."""
    mask = (1 << bits) - 1
    field = f"(Q[n, k // {per}] >> (k % {per} * {bits})).call(`bitwise_and`, [{mask}])"
    return f"W[n, k] = {more.format(q=field, t=dtype)} where n in 512, k in 1024"


def along_n(bits: int, word: str, place: str, zeros: str = "") -> str:
    """Return a map whose rows are along n, of integers at places of a word, less 2^(bits - 1) or zero points."""
    mask = (1 << bits) - 1
    field = "({word} >> ({place} * {bits})).call(`bitwise_and`, [{mask}]).cast(`int32`)"
    value = field.format(word=word, place=place, bits=bits, mask=mask)
    zero = field.format(word=zeros, place=place, bits=bits, mask=mask) if zeros else 1 << bits - 1
    return f"W[k, n] = ({value} - {zero}).cast(`float16`) * S[k // 32, n] where k in 256, n in 256"


E8M0 = "exp2(E[n, k // 32].cast(`float32`) - 127.0)"
FIRST_HIGH = "(Q[n, k // 2] >> ((1 - k % 2) * 4)).call(`bitwise_and`, [15])"
SCALED = "({q} - 8).cast(`{t}`) * S[n, k // 32]"
ZEROS = "({q} - (Z[n] >> 8).call(`bitwise_and`, [15])).cast(`{t}`) * S[n, k // 32]"
PACKED = {
    "int4": (unpacked(4, 8, SCALED), {"Q": "int32 512 128", "S": "float16 512 32"}),
    "int4, unsigned words": (
        unpacked(4, 8, "{q}.cast(`{t}`) * S[n, k // 32]"), {"Q": "uint32 512 128", "S": "float16 512 32"}),
    "int4 in bytes": (unpacked(4, 2, "({q}.cast(`int32`) - 8).cast(`{t}`) * S[n, k // 32]"),
                      {"Q": "uint8 512 512", "S": "float16 512 32"}),
    "int4 with zero points": (unpacked(4, 8, ZEROS), {"Q": "int32 512 128", "S": "float16 512 32", "Z": "int32 512"}),
    "int4 to bfloat16": (unpacked(4, 8, SCALED, "bfloat16"), {"Q": "int32 512 128", "S": "bfloat16 512 32"}),
    "int2": (unpacked(2, 16, "({q} - 2).cast(`{t}`) * S[n, k // 32]"), {"Q": "int32 512 64", "S": "float16 512 32"}),
    "int1": (unpacked(1, 32, "{q}.cast(`{t}`) * S[n, k // 32]"), {"Q": "int32 512 32", "S": "float16 512 32"}),
    "int8": ("W[n, k] = Q[n, k].cast(`float16`) * S[n]", {"Q": "int8 512 1024", "S": "float16 512"}),
    "uint8 with zero points": (
        "W[n, k] = (Q[n, k].cast(`int32`) - Z[n].cast(`int32`)).cast(`float16`) * S[n]",
        {"Q": "uint8 512 1024", "Z": "uint8 512", "S": "float16 512"}),
    "float8": ("W[n, k] = Q[n, k].cast(`float16`)", {"Q": "float8_e4m3fn 512 1024"}),
    "float8 with block scales": (
        "W[n, k] = Q[n, k].cast(`float16`) * S[n, k // 32]", {"Q": "float8_e5m2 512 1024", "S": "float16 512 32"}),
    "from the highest bits": (
        "W[n, k] = (Q[n, k // 8] >> ((7 - k % 8) * 4)).call(`bitwise_and`, [15]).cast(`float16`) "
        "where n in 512, k in 1024", {"Q": "int32 512 128"}),
    "int4 in AWQ's order": (along_n(4, "Q[k, n // 8]", "(n % 2 * 4 + n % 8 // 2)", "Z[k // 32, n // 8]"),
                            {"Q": "int32 256 32", "Z": "int32 8 32", "S": "float16 8 256"}),
    "int4 in GPTQ's order": (along_n(4, "Q[k // 8, n]", "(k % 8)"), {"Q": "int32 32 256", "S": "float16 8 256"}),
    "int2 along k in bytes": (along_n(2, "Q[k // 4, n]", "(k % 4)"), {"Q": "uint8 64 256", "S": "float16 8 256"}),
    "two scales": (unpacked(4, 8, "({q} - 8).cast(`{t}`) * S[n, k // 32] * R[n]"),
                   {"Q": "int32 512 128", "S": "float16 512 32", "R": "float16 512"}),
    "a scale in float32": (unpacked(4, 8, "(({q} - 8).cast(`float32`) * S[n, k // 32]).cast(`{t}`)"),
                           {"Q": "int32 512 128", "S": "float32 512 32"}),
    "zero points in float": (unpacked(4, 8, "({q}.cast(`{t}`) - Z[n, k // 32]) * S[n, k // 32]"),
                             {"Q": "int32 512 128", "S": "float16 512 32", "Z": "float16 512 32"}),
    "offsets in float": (unpacked(4, 8, "{q}.cast(`{t}`) * S[n, k // 32] + Z[n, k // 32]"),
                         {"Q": "int32 512 128", "S": "float16 512 32", "Z": "float16 512 32"}),
    "float16 by a table": (unpacked(4, 8, "T[{q}]"), {"Q": "int32 512 128", "T": "float16 16"}),
    "float16 by the first part of a table": (
        unpacked(4, 8, "T[{q}.cast(`int8`)]"), {"Q": "int32 512 128", "T": "float16 37"}),
    "float16 by a table, scaled": (
        unpacked(4, 8, "T[{q}] * S[n, k // 32]"), {"Q": "int32 512 128", "T": "float16 16", "S": "float16 512 32"}),
    "NVFP4": (unpacked(4, 2, "T[{q}] * S[n, k // 16].cast(`{t}`)"),
              {"Q": "uint8 512 512", "T": "float16 16", "S": "float8_e4m3fn 512 64"}),
    "NVFP4 with scales of rows": (
        unpacked(4, 2, "T[{q}].cast(`{t}`) * S[n, k // 16].cast(`{t}`) * R[n]"),
        {"Q": "uint8 512 512", "T": "float8_e5m2 16", "S": "float8_e4m3fn 512 64", "R": "float16 512"}),
    "MXFP4 to bfloat16": (unpacked(4, 2, f"(T[{{q}}].cast(`float32`) * {E8M0}).cast(`{{t}}`)", "bfloat16"),
                          {"Q": "uint8 512 512", "T": "float8_e5m2 16", "E": "uint8 512 32"}),
    "MXFP4 with rounded scales": (
        unpacked(4, 2, f"T[{{q}}] * {E8M0}.cast(`{{t}}`)", "bfloat16"),
        {"Q": "uint8 512 512", "T": "bfloat16 16", "E": "uint8 512 32"}),
    "NF4": (f"W[n, k] = (T[{FIRST_HIGH}] * S[n, k // 64]).cast(`bfloat16`) where n in 512, k in 1024",
            {"Q": "uint8 512 512", "T": "float16 16", "S": "float32 512 16"}),
    "e4m3 by a table": (unpacked(4, 8, "T[{q}].cast(`{t}`)"), {"Q": "int32 512 128", "T": "float8_e4m3fn 16"}),
    "a table in AWQ's order": (
        "W[k, n] = T[(Q[k, n // 8] >> ((n % 2 * 4 + n % 8 // 2) * 4)).call(`bitwise_and`, [15])] * S[k // 32, n] "
        "where k in 256, n in 256", {"Q": "int32 256 32", "T": "float16 16", "S": "float16 8 256"}),
}  # fmt: skip
# Programs whose bits pairs of 16-bit floats do not give.
OTHERS = {
    "a scale of each element": (unpacked(4, 8, "({q} - 8).cast(`{t}`) * (S[n, k] + 1.0)"),
                                {"Q": "int32 512 128", "S": "float16 512 1024"}),
    "float32 by a table": (unpacked(4, 8, "(T[{q}] * S[n, k // 32]).cast(`{t}`)"),
                           {"Q": "int32 512 128", "T": "float32 16", "S": "float32 512 32"}),
    "a table in GPTQ's order": (
        "W[k, n] = T[(Q[k // 8, n] >> (k % 8 * 4)).call(`bitwise_and`, [15])] * S[k // 32, n] "
        "where k in 256, n in 256", {"Q": "int32 32 256", "T": "float16 16", "S": "float16 8 256"}),
    "a remainder that wraps": ("W[n, k] = Q[n, k] + k * 1610612736 % 3 where n in 512, k in 1024",
                               {"Q": "int32 512 1024"}),
    "a large offset": (unpacked(4, 8, "({q} + 3000).cast(`{t}`) * S[n, k // 32]"),
                       {"Q": "int32 512 128", "S": "float16 512 32"}),
    "int8 to bfloat16": ("W[n, k] = Q[n, k].cast(`bfloat16`) * S[n]", {"Q": "int8 512 1024", "S": "bfloat16 512"}),
}  # fmt: skip


def inputs_of(compute: TensorProgram, seed: int) -> dict[str, np.ndarray]:
    """Return random inputs, with all bits of packed words, and exponents near 0."""
    rng, arrays = np.random.default_rng(seed), dict(random_inputs(compute, seed))
    for name in {"Q", "E"} & {name for name, type_ in compute.inputs if not type_.dtype.is_float}:
        info = np.iinfo(arrays[name].dtype)
        low, high = (info.min, info.max) if name == "Q" else (120, 134)
        arrays[name] = rng.integers(low, high, arrays[name].shape, arrays[name].dtype, endpoint=True)
    return arrays


def source_of(compute: TensorProgram, target: hardware.HardwareSpec = HOPPER) -> KernelSource:
    groups, candidates, _ = rank_best_partition(compute, target, 1)
    return emit_plan(best_plans(candidates, 1)[0], compute, groups, target)


def unpacks_pairs(source: KernelSource) -> bool:
    return any(text in source.text for text in ("__byte_perm(", "0x64006400u", "x2_to_f16x2("))


@pytest.mark.parametrize("name", PACKED)
def test_elements_are_unpacked_in_pairs(name: str) -> None:
    text, inputs = PACKED[name]
    assert unpacks_pairs(source_of(program(text, **inputs)))


@pytest.mark.emulator
def test_words_under_the_guard_of_a_split_reduction_are_unpacked_in_pairs() -> None:
    weights, _ = PACKED["int4"]
    text = f"{weights.replace('n in 512, k in 1024', 'n in 72, k in 1024')}; C[m, n] +=! A[m, k] * W[n, k]"
    compute = program(text, A="float16 16 1024", Q="int32 72 128", S="float16 72 32")
    constraints = ScheduleConstraints(tiles=(("split_k", 3),))
    groups, candidates, _ = rank_best_partition(compute, AMPERE, 1, constraints)
    source = emit_plan(best_plans(candidates, 1)[0], compute, groups, AMPERE)
    assert "k_piece_" in source.text
    assert unpacks_pairs(source)
    arrays = random_inputs(compute, 1)
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    assert agrees(compute, got, evaluate(compute, arrays)).ok


@pytest.mark.parametrize("name", OTHERS)
def test_other_elements_are_computed_one_by_one(name: str) -> None:
    text, inputs = OTHERS[name]
    assert not unpacks_pairs(source_of(program(text, **inputs)))


def test_places_in_words_are_known_in_every_lane() -> None:
    text, inputs = OTHERS["float32 by a table"]
    _, kernel = source_of(program(text, **inputs)).text.split("__global__")
    assert "shr_i32(" in kernel
    assert "mod_i32(" not in kernel
    text, inputs = OTHERS["a remainder that wraps"]
    assert "mod_i32(" in source_of(program(text, **inputs)).text.split("__global__")[1]


@pytest.mark.emulator
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=lambda spec: spec.id)
@pytest.mark.parametrize("name", [*PACKED, *OTHERS])
def test_results_have_the_bits_of_the_elements_one_by_one(name: str, target: hardware.HardwareSpec) -> None:
    text, inputs = (PACKED | OTHERS)[name]
    compute = program(text, **inputs)
    source = source_of(compute, target)
    for seed in (1, 2):
        arrays = inputs_of(compute, seed)
        got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays))
        assert agreement.ok, agreement.detail


@pytest.mark.parametrize("target", ["local", "cpu-x86-avx2"])
@pytest.mark.parametrize("name", [*PACKED, *OTHERS])
def test_cpus_compute_the_same(name: str, target: str) -> None:
    text, inputs = (PACKED | OTHERS)[name]
    compute = program(text, **inputs)
    arrays = inputs_of(compute, 1)
    module = CpuModule(compile_source(source_of(compute, hardware.load(target))))
    agreement = agrees(compute, module.run(arrays), evaluate(compute, arrays))
    assert agreement.ok, agreement.detail


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "nvidia-t4"])
@pytest.mark.parametrize("name", ["int4 to bfloat16", "float8", "uint8 with zero points", "NVFP4", "NF4"])
def test_wrappers_compile_for_devices_with_and_without_the_instructions(name: str, target: str) -> None:
    spec = hardware.load(target)
    if not (toolchain := availability(spec)).ok:
        pytest.skip(toolchain.reason)
    text, inputs = PACKED[name]
    assert compile_source(source_of(program(text, **inputs), spec)).binary


PARTIAL_TILES = {
    "int4": ("((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * S[n, k // 128]", "n, k",
             {"Q": "int32 200 128", "S": "float16 200 8"}),
    "zero points": (
        "((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - (Z[n] >> 8).call(`bitwise_and`, [15]))"
        ".cast(`float16`) * S[n, k // 128]", "n, k", {"Q": "int32 200 128", "S": "float16 200 8", "Z": "int32 200"}),
    "int4 in GPTQ's order": (
        "((Q[k // 8, n] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - (Z[k // 128, n // 8] >> (n % 8 * 4))"
        ".call(`bitwise_and`, [15])).cast(`float16`) * S[k // 128, n]", "k, n",
        {"Q": "int32 128 200", "S": "float16 8 200", "Z": "int32 8 25"}),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", PARTIAL_TILES)
def test_rows_beyond_a_partial_tile_are_not_read(name: str) -> None:
    """The emulator stops a kernel that reads beyond a tensor."""
    value, index, inputs = PARTIAL_TILES[name]
    text = f"W[{index}] = {value} where n in 200, k in 1024; Y[m, n] +=! X[m, k] * W[{index}]"
    compute = program(text, X="float16 16 1024", **inputs)
    source = source_of(compute)
    assert unpacks_pairs(source)
    assert "__cluster_dims__" in source.text, "expected tiles of warpgroups, of which the last is partial"
    arrays = random_inputs(compute, 1)
    agreement = agrees(
        compute, load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays), evaluate(compute, arrays)
    )
    assert agreement.ok, agreement.detail
