"""Copies of operands that no copy engine loads: which operands, when they pay, results."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cases_matrix import AMPERE
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import RankedPartition, best_plans, rank_best_partition, rank_partitions
from roller_svc.compiler.rank import rank_units
from roller_svc.ir.constraints import NO_CONSTRAINTS, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source
from roller_svc.verify.kernel_stats import summarize_kernels
from tests.unit.fusion.test_dual_gemm import SILU, TURNED, mlp

HOPPER = hardware.load("nvidia-h200-sxm")
TF32 = ScheduleConstraints(allow_tf32=True)
NT, NN = "C[m, n] +=! A[m, k] * B[n, k]", "C[m, n] +=! A[m, k] * B[k, n]"
TN = "C[m, n] +=! A[k, m] * B[k, n]"
TRIANGLE = "C[m, n] +=! where(k <= m, A[m, k] * B[k, n], 0.0)"
CAST = "C[m, n] +=! A[m, k].cast(`{to}`) * B[{b}].cast(`{to}`)"
FLOAT8, INT8 = CAST.format(to="float32", b="n, k"), CAST.format(to="int32", b="k, n")
INT4 = (
    "W[n, k] = ((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * S[n, k // {group}] "
    "where k in {depth}; C[m, n] +=! X[m, k] * W[n, k]"
)
NCHW = (
    "Y[b, f, y, x] +=! X[b, c, y + r - 1, x + s - 1].when([y + r >= 1, y + r < {h}, x + s >= 1, x + s < {w}], 0.0) "
    "* W[f, c, r, s] where y in {size}, x in {size}"
)


def int4(m: int, n: int, k: int, group: int = 128) -> TensorProgram:
    """Return a product of weights of four bits, eight in a word, with a scale for each group along k."""
    return program(INT4.format(group=group, depth=k), X=f"float16 {m} {k}", Q=f"int32 {n} {k // 8}", S=f"float16 {n} {k // group}")


def nchw(batch: int, channels: int, size: int, filters: int) -> TensorProgram:
    return program(
        NCHW.format(h=size + 1, w=size + 1, size=size),
        X=f"float16 {batch} {channels} {size} {size}",
        W=f"float16 {filters} {channels} 3 3",
    )


def ways(
    compute: TensorProgram, hw: HardwareSpec = HOPPER, constraints: ScheduleConstraints = NO_CONSTRAINTS
) -> tuple[tuple[KernelGroup, ...], ...]:
    """Return the partitions with copies."""
    cache = PartitionCache(compute)
    return tuple(way for groups in cache.partitions(hw) for way in cache.with_operand_copies(groups, hw, constraints))


# which ----------------------------------------------------------------------------------------------------------------
def test_rows_of_odd_length_are_copied() -> None:
    ((first, second, product),) = ways(program(NT, A="float16 70 77", B="float16 40 77"))
    assert [group.kind for group in (first, second, product)] == [GroupKind.NEST, GroupKind.NEST, GroupKind.CONTRACTION]
    assert dict(product.inputs) == {
        "A.copy": TensorType(DType.FLOAT16, (70, 80)),
        "B.copy": TensorType(DType.FLOAT16, (40, 80)),
    }


def test_what_is_aligned_is_read_where_it_is() -> None:
    ((copy, product),) = ways(program(NN, A="float16 64 72", B="float16 72 41"))
    assert [name for name, _ in copy.stored] == ["B.copy"]
    assert [name for name, _ in product.inputs] == ["A", "B.copy"]


def test_dual_gemm_reads_one_copy() -> None:
    pairs, plain = ways(mlp(SILU, 64, 48, 77))
    assert [group.is_dual_gemm for group in pairs] == [False, False, False, True]
    assert [name for group in pairs[:3] for name, _ in group.stored] == ["x.copy", "w.copy", "v.copy"]
    assert sum(group.kind is GroupKind.CONTRACTION for group in plain) == 2


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        (NT, {"A": "float16 70 72", "B": "float16 40 72"}),  # whole 16 bytes
        (NT, {"A": "float32 70 77", "B": "float32 40 77"}),
        (NT, {"A": "float16 70 15", "B": "float16 40 15"}),  # shorter than what is swizzled
        (NT, {"A": "float16 4 77", "B": "float16 40 77"}),  # a thin product streams its rows
        ("C[m, k] = relu(A[m, k])", {"A": "float16 70 77"}),
    ],
)
def test_others_are_not(text: str, inputs: dict[str, str]) -> None:
    assert not ways(program(text, **inputs))


def test_devices_without_tma_cannot_load_rows_of_odd_length() -> None:
    assert not ways(program(NT, A="float16 70 77", B="float16 40 77"), AMPERE)


@pytest.mark.parametrize(
    ("compute", "constraints", "copies"),
    [
        (int4(64, 48, 128), NO_CONSTRAINTS, {"C.b": "float16 48 128"}),  # computed
        (
            program(FLOAT8, A="float8_e4m3fn 64 96", B="float8_e4m3fn 48 96"),
            NO_CONSTRAINTS,
            {"A.copy": "float16 64 96", "B.copy": "float16 48 96"},
        ),  # the unit's type
        (program(FLOAT8, A="float8_e4m3fn 64 96", B="float8_e4m3fn 48 96"), TF32, {}),
        (program(INT8, A="int8 64 96", B="int8 96 48"), NO_CONSTRAINTS, {"B.copy": "int8 48 96"}),  # K-major
        (program(NN, A="float32 64 96", B="float32 96 48"), TF32, {"B.copy": "float32 48 96"}),
        # the condition is computed once
        (program(TRIANGLE, A="float16 64 96", B="float16 96 48"), NO_CONSTRAINTS, {"C.term0.a": "float16 64 96"}),
        (nchw(2, 16, 12, 32), NO_CONSTRAINTS, {"W.copy": "float16 32 3 3 16", "X.copy": "float16 2 12 12 16"}),
    ],
)
def test_copies_have_the_type_and_layout_of_the_unit(
    compute: TensorProgram, constraints: ScheduleConstraints, copies: dict[str, str]
) -> None:
    found = [way for way in ways(compute, HOPPER, constraints) if way[-1].space.scale_runs is None]
    assert len(found) == bool(copies)
    read = {name: type_ for groups in found for name, type_ in groups[-1].inputs if "." in name}
    assert {n: f"{t.dtype.value} {' '.join(map(str, t.shape))}" for n, t in read.items()} == copies


def test_a_window_that_is_also_read_by_its_axes_is_not_copied() -> None:
    odd = program(
        "Y[b, y, f] +=! (X[b, c, y + r] + P[b, c, y]) * W[f, c, r] where r in 3, y in 16",
        X="float16 2 16 18",
        P="float16 2 16 16",
        W="float16 32 16 3",
    )
    assert not ways(odd)


# when -----------------------------------------------------------------------------------------------------------------
def families(found: RankedPartition) -> list[str]:
    return [kernel["family"] for kernel in summarize_kernels(found.groups, best_plans(found.candidates, 1)[0], HOPPER)]


def test_a_large_product_is_worth_its_copies() -> None:
    first, second = rank_partitions(PartitionCache(program(NT, A="float16 6567 1235", B="float16 3355 1235")), HOPPER, 1)
    assert families(first) == ["simt", "simt", "wgmma"]
    assert len(second.groups) == 1
    plan = best_plans(first.candidates, 1)[0]
    (*_, product) = summarize_kernels(first.groups, plan, HOPPER)
    assert [operand["load"] for operand in product["operands"]] == ["tma", "tma"]


def test_a_small_one_is_not_worth_their_launches() -> None:
    assert len(rank_best_partition(program(NT, A="float16 128 77", B="float16 128 77"), HOPPER, 1).groups) == 1


@pytest.mark.parametrize(
    ("compute", "target", "constraints", "fraction"),
    [
        (program(INT8, A="int8 4096 4096", B="int8 4096 4096"), HOPPER, NO_CONSTRAINTS, 0.6),
        (program(NN, A="float32 4096 4096", B="float32 4096 4096"), HOPPER, TF32, 0.8),
        (nchw(32, 256, 56, 256), HOPPER, NO_CONSTRAINTS, 0.6),
        (program(TRIANGLE, A="float16 4096 4096", B="float16 4096 4096"), HOPPER, NO_CONSTRAINTS, 0.8),
    ],
)
def test_large_products_are_faster_with_copies(
    compute: TensorProgram, target: HardwareSpec, constraints: ScheduleConstraints, fraction: float
) -> None:
    first, *others = rank_partitions(PartitionCache(compute), target, 1, constraints)
    (plain,) = (ranked for ranked in others if len(ranked.groups) == 1)
    assert len(first.groups) > 1
    assert predicted_s(first) < fraction * predicted_s(plain)


@pytest.mark.parametrize(
    ("compute", "fraction"),
    [
        (int4(4096, 4096, 4096), 1.1),
        (program(FLOAT8, A="float8_e4m3fn 4096 4096", B="float8_e4m3fn 4096 4096"), 1.2),
    ],
)
def test_large_packed_products_are_one_kernel_where_words_are_prefetched(compute: TensorProgram, fraction: float) -> None:
    best = rank_best_partition(compute, HOPPER, 1)
    plain = rank_best_partition(program(NT, A="float16 4096 4096", B="float16 4096 4096"), HOPPER, 1)
    assert len(best.groups) == 1
    assert predicted_s(best) < fraction * predicted_s(plain)


def predicted_s(ranked: RankedPartition) -> float:
    return best_plans(ranked.candidates, 1)[0].estimate.seconds


def test_variants_that_cannot_pay_are_not_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("ranked")

    monkeypatch.setattr(PartitionCache, "with_operand_copies", refuse)
    small = program(INT8, A="int8 128 64", B="int8 64 128")
    assert len(rank_partitions(PartitionCache(small), HOPPER, 1)) == 1


# quantised cases of the public corpus, AWQ, GPTQ ---------------------------------------------------------------------
WEIGHTS = (
    "w[N, K] = ((qw[N, K / 8] >> (K % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * scales[N, K / 128] where K in 4096"
)
NIBBLE = "({word} >> ({place} * 4)).call(`bitwise_and`, [15])"
ALONG_N = "w[K, N] = ({q} - {z}).cast(`float16`) * scales[K / 128, N] where K in 4096"
AWQ_PLACE = "(N % 2 * 4 + N % 8 / 2)"
AWQ = ALONG_N.format(
    q=NIBBLE.format(word="qw[K, N / 8]", place=AWQ_PLACE),
    z=NIBBLE.format(word="zeros[K / 128, N / 8]", place=AWQ_PLACE),
)
GPTQ = ALONG_N.format(
    q=NIBBLE.format(word="qw[K / 8, N]", place="(K % 8)"),
    z=NIBBLE.format(word="zeros[K / 128, N / 8]", place="(N % 8)") + " - 1",
)
UNPACKED = (
    "v[S, N] = (q[S / 8, N] >> (S % 8 * 4)).call(`bitwise_and`, [15]) where S in 4096; "
    "w[S, N] = scales[S / 128, N] * (v[S, N] - 8) "
    "where S in 4096"
)
# Values of four bits by a table of 16. NVFP4: e2m1, float8 scales of 16, and one of the row; MXFP4: e2m1, powers of two
# for 32; NF4 of bitsandbytes: quantiles of a normal distribution, the greatest magnitude of 64.
LOOKED_UP = {
    "NVFP4": (
        "table[{q}] * scales[N, K / 16].cast(`float16`) * row[N]",
        {"table": "float16 16", "scales": "float8_e4m3fn 4096 256", "row": "float16 4096"},
    ),
    "NVFP4, float32": (
        "(table[{q}] * scales[N, K / 16].cast(`float32`) * row[N]).cast(`float16`)",
        {"table": "float32 16", "scales": "float8_e4m3fn 4096 256", "row": "float32 4096"},
    ),
    "MXFP4": (
        "(table[{q}] * exp2((scales[N, K / 32].cast(`int32`) - 127).cast(`float32`))).cast(`bfloat16`)",
        {"table": "bfloat16 16", "scales": "uint8 4096 128"},
    ),
    "NF4": (
        "(table[{q}] * scales[N, K / 64]).cast(`float16`)", {"table": "float32 16", "scales": "float32 4096 64"},
    ),
}  # fmt: skip
CORPUS = (
    {
        f"{rows} x {columns}": (
            WEIGHTS,
            "output0[M, N] +=! x[M, K] * w[N, K]",
            {"x": f"float16 {rows} 4096", "qw": f"int32 {columns} 512", "scales": f"float16 {columns} 32"},
        )
        for rows in (1, 16)
        for columns in (6144, 12288)
    }
    | {
        f"packed along k, {dtype}": (
            UNPACKED,
            "y[N] +=! x[S] * w[S, N].cast(`float32`)",
            {"x": "float32 4096", "q": "int32 512 12288", "scales": f"{dtype} 32 12288"},
        )
        for dtype in ("float32", "float16")
    }
    | {
        f"{rows} rows in {order}'s order": (
            weights,
            "output0[M, N] +=! x[M, K] * w[K, N]",
            {"x": f"float16 {rows} 4096", "qw": words, "zeros": "int32 32 512", "scales": "float16 32 4096"},
        )
        for order, weights, words in (("AWQ", AWQ, "int32 4096 512"), ("GPTQ", GPTQ, "int32 512 4096"))
        for rows in (16, 1024)
    }
    | {
        f"{rows} rows, zero points in float": (
            f"w[N, K] = ({NIBBLE.format(word='qw[N, K / 8]', place='(K % 8)')}.cast(`float16`) - zeros[N, K / 64]) "
            "* scales[N, K / 64] where K in 4096",
            "output0[M, N] +=! x[M, K] * w[N, K]",
            {"x": f"float16 {rows} 4096", "qw": "int32 4096 512", "zeros": "float16 4096 64", "scales": "float16 4096 64"},
        )
        for rows in (1, 16, 256, 4096)
    }
    | {
        f"{rows} rows of {form}": (
            f"w[N, K] = {value.format(q=NIBBLE.format(word='qw[N, K / 8]', place='(K % 8)'))} where K in 4096",
            "output0[M, N] +=! x[M, K] * w[N, K]",
            {"x": f"{'bfloat16' if form == 'MXFP4' else 'float16'} {rows} 4096", "qw": "int32 4096 512", **inputs},
        )
        for form, (value, inputs) in LOOKED_UP.items()
        for rows in (1, 16, 256, 4096)
    }
)


@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "cpu-x86-avx2", "cpu-x86-avx512"])
@pytest.mark.parametrize("name", CORPUS)
def test_no_quantised_case_is_slower_than_with_weights_written_out(name: str, target: str) -> None:
    weights, product, inputs = CORPUS[name]
    spec = hardware.load(target)
    fused = program(f"{weights}; {product}", **inputs)
    written = program(weights, outputs=["w"], **{k: v for k, v in inputs.items() if k != "x"})
    type_ = written.types["w"]
    whole = " ".join(map(str, (type_.dtype.value, *type_.shape)))
    plain = program(product, x=inputs["x"], w=whole)
    apart_s = sum(predicted_s(rank_best_partition(part, spec, 1)) for part in (written, plain))
    assert predicted_s(rank_best_partition(fused, spec, 1)) <= 1.001 * apart_s


@pytest.mark.parametrize("rows", [256, 1024, 4096])
def test_large_quantised_products_are_within_twice_the_roofline(rows: int) -> None:
    best = rank_best_partition(int4(rows, 4096, 4096), HOPPER, 1)
    (unit,) = (unit for unit in HOPPER.units if unit.name == "wgmma_f16")
    assert predicted_s(best) < 2 * 2 * rows * 4096 * 4096 / unit.flops_per_s


# the kernels ----------------------------------------------------------------------------------------------------------
CASES = {
    "both along k": program(NT, A="float16 130 77", B="float16 70 77"),
    "one along n": program(NN, A="bfloat16 130 72", B="bfloat16 72 71"),
    "both, k and n": program(NN, A="float16 70 75", B="float16 75 71"),
    "along m and n": program(TN, A="float16 90 77", B="float16 90 35"),
    "bytes": program(
        "C[m, n] +=! A[m, k].cast(`int32`) * B[n, k].cast(`int32`)", A="int8 70 99", B="int8 40 99"
    ),
    "batched": program("C[b, m, n] +=! A[b, m, k] * B[b, k, n]", A="float16 3 70 33", B="float16 3 33 49"),
    "a pair": mlp(SILU, 70, 50, 77),
    "a pair along n": mlp(TURNED, 70, 51, 80),
    "an epilogue": program(f"{NT}; Y[m, n] = relu(C[m, n] + A[m, n])", A="float16 70 77", B="float16 77 77"),
    "a window": program(
        "Y[b, y, x, f] +=! X[b, y + r, x + s, c] * W[f, r, s, c] where r in 3, s in 3, y in 8, x in 8",
        X="float16 2 10 10 20", W="float16 32 3 3 20",
    ),
    "computed": program("C[m, n] +=! relu(A[m, k]) * B[k, n]", A="float16 70 77", B="float16 77 40"),
    "a triangle": program(TRIANGLE, A="float16 70 64", B="float16 64 40"),
    "rows shorter than k": program(
        "C[m, n] +=! where(k < 77, A[m, k], 0.0) * B[k, n] where k in 96", A="float16 70 77", B="float16 96 40"
    ),
    "packed": int4(70, 40, 128, 32),
    "float8": program(FLOAT8, A="float8_e4m3fn 70 96", B="float8_e5m2 40 96"),
    "bytes along n": program(INT8, A="int8 70 96", B="int8 96 48"),
    "tf32 along n": program(NN, A="float32 70 72", B="float32 72 40"),
    "channels first": nchw(2, 16, 9, 40),
    "looked up": program(
        "W[n, k] = T[(Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15])] * S[n, k // 16] where k in 96; "
        "C[m, n] +=! X[m, k] * W[n, k]",
        X="float16 70 96", Q="int32 40 12", T="float16 16", S="float16 40 6",
    ),
    "zero points in float": program(
        "W[n, k] = ((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]).cast(`float16`) - Z[n, k // 32]) "
        "* S[n, k // 32] where k in 96; C[m, n] +=! X[m, k] * W[n, k]",
        X="float16 70 96", Q="int32 40 12", Z="float16 40 3", S="float16 40 3",
    ),
    "offsets in float": program(
        "W[n, k] = Q[n, k].cast(`float16`) * S[n, k // 32] + Z[n, k // 32]; C[m, n] +=! X[m, k] * W[n, k]",
        X="float16 70 96", Q="int8 40 96", Z="float16 40 3", S="float16 40 3",
    ),
    "channels first, a stride": program(
        "Y[b, f, y, x] +=! X[b, c, 2 * y + r, 2 * x + s] * W[f, c, r, s] where y in 6, x in 6",
        X="float16 2 24 13 13", W="float16 24 24 3 3",
    ),
}  # fmt: skip
ON_WARPS = ("packed", "zero points in float", "bytes along n", "float8", "channels first")


@pytest.mark.emulator
@pytest.mark.parametrize(("name", "target"), [*((name, HOPPER) for name in CASES), *((name, AMPERE) for name in ON_WARPS)])
def test_kernels_agree_with_the_interpreter(name: str, target: HardwareSpec) -> None:
    compute = CASES[name]
    constraints = TF32 if "tf32" in name else NO_CONSTRAINTS
    groups = ways(compute, target, constraints)[0]
    candidates = tuple(rank_units(group, target, 1, constraints)[0] for group in groups)
    source = emit_plan(best_plans(candidates, 1)[0], compute, groups, target)
    for seed in (1, 2):
        arrays = random_inputs(compute, seed)
        got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays, allow_tf32=constraints.allow_tf32))
        assert agreement.ok, agreement.detail


GPTQ_ROWS = (
    "W[k, n] = ((Q[k // 8, n] >> (k % 8 * 4)).call(`bitwise_and`, [15]) - 8).cast(`float16`) * S[k // 32, n] "
    "where k in 256; C[m, n] +=! X[m, k] * W[k, n]"
)


@pytest.mark.parametrize(
    ("compute", "shape"),
    [
        (int4(1, 64, 256, 32), (64, 256)),
        (int4(20, 64, 256, 32), (64, 256)),
        (program(GPTQ_ROWS, X="float16 20 256", Q="int32 32 64", S="float16 8 64"), (256, 64)),
    ],
    ids=["one row", "rows along k", "rows along n"],
)
def test_cpus_unpack_once_as_words_lie(compute: TensorProgram, shape: tuple[int, ...]) -> None:
    local = hardware.load("local")
    groups = next(way for way in ways(compute, local) if "C.b" in dict(way[-1].inputs))
    assert dict(groups[-1].inputs)["C.b"].shape == shape
    candidates = tuple(rank_units(group, local, 1)[0] for group in groups)
    source = emit_plan(best_plans(candidates, 1)[0], compute, groups, local)
    arrays = random_inputs(compute, 1)
    agreement = agrees(compute, CpuModule(compile_source(source)).run(arrays), evaluate(compute, arrays))
    assert agreement.ok, agreement.detail


def test_cpus_pack_constants_as_they_are() -> None:
    weights = replace(int4(20, 64, 256, 32), constants=("Q", "S"))
    assert not ways(weights, hardware.load("local"))
