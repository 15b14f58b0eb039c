"""Aligned copies of misaligned TMA operands: which contractions, when they pay, results."""

from __future__ import annotations

import pytest
from cases_matrix import AMPERE
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import RankedPartition, best_plans, rank_best_partition, rank_partitions
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.verify.kernel_stats import summarize_kernels
from tests.unit.fusion.test_dual_gemm import SILU, TURNED, mlp

HOPPER = hardware.load("nvidia-h200-sxm")
NT, NN = "C[m, n] +=! A[m, k] * B[n, k]", "C[m, n] +=! A[m, k] * B[k, n]"
TN = "C[m, n] +=! A[k, m] * B[k, n]"


def ways(compute: TensorProgram, hw: HardwareSpec = HOPPER) -> tuple[tuple[KernelGroup, ...], ...]:
    """Groupings that make a tensor of which the program knows nothing."""
    known = compute.types
    found = PartitionCache(compute).partitions(hw)
    return tuple(groups for groups in found if any(t not in known for group in groups for t, _ in group.stored))


# which ----------------------------------------------------------------------------------------------------------------
def test_rows_of_odd_length_are_copied() -> None:
    ((first, second, product),) = ways(program(NT, A="float16 70 77", B="bfloat16 40 77"))
    assert [group.kind for group in (first, second, product)] == [GroupKind.NEST, GroupKind.NEST, GroupKind.CONTRACTION]
    assert dict(product.inputs) == {
        "A.aligned": TensorType(DType.FLOAT16, (70, 80)), "B.aligned": TensorType(DType.BFLOAT16, (40, 80)),
    }  # fmt: skip


def test_what_is_aligned_is_read_where_it_is() -> None:
    ((copy, product),) = ways(program(NN, A="float16 64 72", B="float16 72 41"))
    assert [name for name, _ in copy.stored] == ["B.aligned"]
    assert [name for name, _ in product.inputs] == ["A", "B.aligned"]


def test_dual_gemm_reads_one_aligned_copy() -> None:
    pairs, plain = ways(mlp(SILU, 64, 48, 77))
    assert [group.is_dual_gemm for group in pairs] == [False, False, False, True]
    assert [name for group in pairs[:3] for name, _ in group.stored] == ["x.aligned", "w.aligned", "v.aligned"]
    assert sum(group.kind is GroupKind.CONTRACTION for group in plain) == 2


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        (NT, {"A": "float16 70 72", "B": "float16 40 72"}),  # whole 16 bytes
        (NT, {"A": "float32 70 77", "B": "float32 40 77"}),
        (NT, {"A": "float16 70 15", "B": "float16 40 15"}),  # shorter than what is swizzled
        (NT, {"A": "float16 4 77", "B": "float16 40 77"}),  # a thin product streams its rows
        ("C[m, n] +=! relu(A[m, k]) * B[k, n]", {"A": "float16 70 77", "B": "float16 77 40"}),  # computed
        ("C[m, k] = relu(A[m, k])", {"A": "float16 70 77"}),
    ],
)
def test_others_are_not(text: str, inputs: dict[str, str]) -> None:
    assert not ways(program(text, **inputs))


def test_devices_without_bulk_copies_make_none() -> None:
    assert not ways(program(NT, A="float16 70 77", B="float16 40 77"), AMPERE)


# when -----------------------------------------------------------------------------------------------------------------
def families(found: RankedPartition) -> list[str]:
    return [kernel["family"] for kernel in summarize_kernels(found.groups, best_plans(found.candidates, 1)[0], HOPPER)]


def test_a_large_product_is_worth_its_copies() -> None:
    first, second = rank_partitions(
        PartitionCache(program(NT, A="float16 6567 1235", B="float16 3355 1235")), HOPPER, 1
    )
    assert families(first) == ["simt", "simt", "wgmma"]
    assert len(second.groups) == 1
    plan = best_plans(first.candidates, 1)[0]
    (*_, product) = summarize_kernels(first.groups, plan, HOPPER)
    assert [operand["load"] for operand in product["operands"]] == ["tma", "tma"]


def test_a_small_one_is_not_worth_their_launches() -> None:
    assert len(rank_best_partition(program(NT, A="float16 128 77", B="float16 128 77"), HOPPER, 1).groups) == 1


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
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_interpreter(name: str) -> None:
    compute = CASES[name]
    found = next(r for r in rank_partitions(PartitionCache(compute), HOPPER, 1) if r.groups in ways(compute))
    source = emit_plan(best_plans(found.candidates, 1)[0], compute, found.groups, HOPPER)
    for seed in (1, 2):
        arrays = random_inputs(compute, seed)
        got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays))
        assert agreement.ok, agreement.detail
