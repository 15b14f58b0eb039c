"""Attention over pages of a key-value cache, and decoding that fills the device."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import IndexRangeError, WrongAnswerError
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

HOPPER, AMPERE, MI250X = (hardware.load(name) for name in ("nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"))
PAGE = 16
PAGED = (
    "S[b, g, h, n] +=! Q[b, g, h, d] * K[T[b, n // 16], n % 16, g, d] where n in {keys};"
    "A[b, g, h, n] = S[b, g, h, n].cast(`float32`) * 0.125; M[b, g, h] >=! A[b, g, h, n];"
    "E[b, g, h, n] = exp(A[b, g, h, n] - M[b, g, h]); L[b, g, h] +=! E[b, g, h, n];"
    "Y[b, g, h, d] +=! (E[b, g, h, n] / L[b, g, h]).cast(`bfloat16`) * V[T[b, n // 16], n % 16, g, d]"
)


def paged(batch: int, heads: tuple[int, int], keys: int, pages: int, head_dim: int = 64) -> TensorProgram:
    """Return decoding: one query of each head; `heads` are those of keys, and of queries for each."""
    groups, rows = heads
    cache = f"bfloat16 {pages} {PAGE} {groups} {head_dim}"
    return program(
        PAGED.format(keys=keys),
        outputs=["Y"],
        Q=f"bfloat16 {batch} {groups} {rows} {head_dim}",
        K=cache,
        V=cache,
        T=f"int32 {batch} {-(-keys // PAGE)}",
    )


def decoding(batch: int, heads: int, keys: int) -> TensorProgram:
    """Return attention of one query for each of four heads that share keys."""
    cache = TensorType(DType.BFLOAT16, (batch, heads, keys, 128))
    query = TensorType(DType.BFLOAT16, (batch, 4 * heads, 1, 128))
    return parse("Y = attention(Q, K, V)", {"Q": query, "K": cache, "V": cache}, None)


def source_of(compute: TensorProgram, target: HardwareSpec, constraints: ScheduleConstraints) -> KernelSource:
    groups = PartitionCache(compute).groups(target)
    candidates = tuple(rank_units(group, target, 1, constraints)[0] for group in groups)
    return emit_plan(best_plans(candidates, 1)[0], compute, groups, target)


def test_pages_are_read_by_one_kernel_and_by_asynchronous_copies() -> None:
    compute = paged(8, (8, 4), 2048, 1034, 128)
    (group,) = PartitionCache(compute).groups(HOPPER)
    assert group.kind is GroupKind.ATTENTION
    source = source_of(compute, HOPPER, ScheduleConstraints())
    gathers = [line for line in source.text.splitlines() if "T[" in line and "copy_async_16(" in line]
    assert len(gathers) >= 2
    assert all("in_range(" in line for line in gathers)


ON = [
    (HOPPER, ScheduleConstraints()), (HOPPER, ScheduleConstraints(op_class=OpClass.MMA)),
    (AMPERE, ScheduleConstraints()), (AMPERE, ScheduleConstraints(tiles=(("split_k", 2),))),
]  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize(("target", "constraints"), ON)
def test_pages_in_any_order_agree_with_the_interpreter(target: HardwareSpec, constraints: ScheduleConstraints) -> None:
    compute = paged(2, (2, 4), 120, 20)  # the last page of each sequence is half used
    source = source_of(compute, target, constraints)
    for seed in (1, 2):
        arrays = random_inputs(compute, seed)
        arrays["T"] = np.random.default_rng(seed).permutation(20)[:16].reshape(2, 8).astype(np.int32)
        got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays))
        assert agreement.ok, agreement.detail


@pytest.mark.emulator
@pytest.mark.parametrize("page", [20, -1])
def test_a_page_that_does_not_exist_is_reported(page: int) -> None:
    compute = paged(2, (2, 4), 120, 20)
    source = source_of(compute, HOPPER, ScheduleConstraints())
    arrays = random_inputs(compute, 1)
    arrays["T"] = np.zeros((2, 8), dtype=np.int32)
    arrays["T"][1, 3] = page
    with pytest.raises(IndexRangeError):
        load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)


def called(queries: int, parameters: str, cache: DType = DType.FLOAT16) -> TensorProgram:
    """Return the operator over 3 sequences of at most 7 pages of 9 keys, whose lengths are data."""
    half, index = DType.FLOAT16, DType.INT32
    inputs = {
        "Q": TensorType(half, (3, queries, 6, 40)),
        "K": TensorType(cache, (20, 9, 2, 40)),
        "V": TensorType(cache, (20, 9, 2, 24)),
        "T": TensorType(index, (3, 7)),
        "L": TensorType(index, (3,)),
        "s": TensorType(DType.FLOAT32, (6,)),
    }
    return parse(f"Y = paged_attention(Q, K, V, T, L, s{parameters})", inputs, None)


@pytest.mark.parametrize("target", [HOPPER, AMPERE, MI250X], ids=lambda spec: spec.id)
@pytest.mark.parametrize("queries", [1, 4, 70])
def test_the_operator_is_one_kernel_on_a_matrix_unit(target: HardwareSpec, queries: int) -> None:
    _, (candidates,), _ = rank_best_partition(called(queries, ", window=20, soft_cap=8.0"), target, 1)
    assert candidates[0].program.unit.is_matrix


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [HOPPER, AMPERE, MI250X], ids=lambda spec: spec.id)
@pytest.mark.parametrize(("queries", "parameters"), [(1, ""), (1, ", window=20, soft_cap=8.0"), (4, ", window=3"), (70, "")])
def test_the_operator_agrees_with_the_interpreter(target: HardwareSpec, queries: int, parameters: str) -> None:
    compute = called(queries, parameters)
    source = source_of(compute, target, ScheduleConstraints())
    arrays = random_inputs(compute, 3)
    arrays["T"] = np.random.default_rng(3).integers(0, 20, (3, 7)).astype(np.int32)
    arrays["L"] = np.array([63, 0, 37], np.int32)  # all keys, none, and a part of a page
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    agreement = agrees(compute, got, evaluate(compute, arrays))
    assert agreement.ok, agreement.detail


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=lambda spec: spec.id)
@pytest.mark.parametrize("split_k", [1, 4])
def test_blocks_beyond_the_length_read_neither_pages_nor_keys(target: HardwareSpec, split_k: int) -> None:
    """Their pages do not exist: a block with a part of the keys, all of them beyond the length, ends at once."""
    half, index, cache = DType.BFLOAT16, DType.INT32, TensorType(DType.BFLOAT16, (32, PAGE, 2, 64))
    inputs = {"Q": TensorType(half, (2, 1, 4, 64)), "K": cache, "V": cache, "T": TensorType(index, (2, 16))}
    compute = parse("Y = paged_attention(Q, K, V, T, L)", inputs | {"L": TensorType(index, (2,))}, None)
    source = source_of(compute, target, ScheduleConstraints(tiles=(("split_k", split_k),)))
    arrays = random_inputs(compute, 3)
    arrays["T"] = np.random.default_rng(3).permutation(32).reshape(2, 16).astype(np.int32)
    arrays["L"] = np.array([19, 0], np.int32)
    want = evaluate(compute, arrays)
    arrays["T"][:, 8:] = 1 << 20  # beyond the tile that has the last key
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    agreement = agrees(compute, got, want)
    assert agreement.ok, agreement.detail
    arrays["L"] = np.array([19, 129], np.int32)  # its last key is in a page that does not exist
    with pytest.raises(IndexRangeError):
        load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)


ENTRY, ROW = r"T\[b \* 16 \+ \(n / 16\)\]", r"\(n % 16\) \* 128"
# Faults in how a kernel finds keys and values by the table, each in all places of its text.
FAULTS = {
    "the page after a key's own": (ENTRY, "T[b * 16 + (n / 16 + 1) % 16]"),
    "pages of the other sequence": (ENTRY, "T[(1 - b) * 16 + (n / 16)]"),
    "pages of the first sequence": (ENTRY, "T[n / 16]"),
    "pages of twice as many keys": (ENTRY, "T[b * 16 + (n / 32)]"),
    "another page for keys than for values": (rf"(K \+ \(inside \? \(int\)\(){ENTRY}", r"\1T[b * 16 + (n / 16 ^ 1)]"),
    "another page for values than for keys": (rf"(V \+ \(inside \? \(int\)\(){ENTRY}", r"\1T[b * 16 + (n / 16 ^ 1)]"),
    "the key after a key's own": (ROW, "((n + 1) % 16) * 128"),
    "the first key of a page": (ROW, "0 * 128"),
    "pages that overlap": (rf"\* 2048 \+ {ROW}", "* 1024 + (n % 16) * 128"),
    "the other head": (r"h_0 \* 64", "(1 - h_0) * 64"),
    "tiles of keys are rounded down": (r"\(unsigned int\)31\), 32\), first_step", "(unsigned int)0), 32), first_step"),
    "a key more than the length": (r"n < L\[b\]\) \? scores", "n <= L[b]) ? scores"),
    "the length of the other sequence": (r"n < L\[b\]\) \? scores", "n < L[1 - b]) ? scores"),
    "a page that does not exist is read": (r"(in_range\(.*?), 32, (\d+)\)", r"\1, 33, \2)"),
    "pages are not checked": (r"inside = in_range\(.*?\);", "inside = true;"),
}


@pytest.mark.slow
@pytest.mark.emulator
def test_every_fault_in_page_tables_is_caught() -> None:
    half, index, cache = DType.BFLOAT16, DType.INT32, TensorType(DType.BFLOAT16, (32, PAGE, 2, 64))
    inputs = {"Q": TensorType(half, (2, 1, 4, 64)), "K": cache, "V": cache, "T": TensorType(index, (2, 16))}
    compute = parse("Y = paged_attention(Q, K, V, T, L)", inputs | {"L": TensorType(index, (2,))}, None)
    source = source_of(compute, AMPERE, ScheduleConstraints(tiles=(("split_k", 4),)))
    arrays = random_inputs(compute, 3)
    arrays["T"] = np.random.default_rng(3).permutation(32).reshape(2, 16).astype(np.int32)
    arrays["L"] = np.array([200, 129], np.int32)
    want = evaluate(compute, arrays)

    def is_right(source: KernelSource, table: np.ndarray) -> bool:
        try:
            got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays | {"T": table})
        except (IndexRangeError, WrongAnswerError):
            return False
        return agrees(compute, got, want).ok

    def with_page(sequence: int, number: int, page: int) -> np.ndarray:
        table = arrays["T"].copy()
        table[sequence, number] = page
        return table

    assert is_right(source, arrays["T"])
    used = [(sequence, number) for sequence, length in enumerate(arrays["L"]) for number in range(-(-length // PAGE))]
    others = [with_page(sequence, number, arrays["T"][1 - sequence, number]) for sequence, number in used]
    assert [place for place, table in zip(used, others, strict=True) if is_right(source, table)] == []
    missing = with_page(1, 8, 32)
    survivors = []
    for fault, change in FAULTS.items():
        text, count = re.subn(*change, source.text)
        assert count, fault
        damaged = replace(source, text=text)
        if is_right(damaged, arrays["T"]) and not is_caught_by_bounds(damaged, arrays | {"T": missing}):
            survivors.append(fault)
    assert survivors == []


def is_caught_by_bounds(source: KernelSource, arrays: dict[str, np.ndarray]) -> bool:
    """Return whether a kernel that reads a page that does not exist is found: the emulator sees it, and not the kernel."""
    try:
        load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    except WrongAnswerError:
        return True
    except IndexRangeError:
        pass
    return False


SCALED = """S[b, h, n]: float32 +=! Q[b, h, d] * K[T[b, n // 16], n % 16, h // 4, d] where n in {keys}, h in {heads};
    A[b, h, n] = where(n < L[b], S[b, h, n] * (ks[h // 4] * 0.125), const(`-inf`));
    M[b, h] >=! A[b, h, n];
    E[b, h, n] = where(n < L[b], exp(A[b, h, n] - M[b, h]), 0.0);
    Z[b, h] +=! E[b, h, n];
    X[b, h, d]: float32 +=! E[b, h, n].cast(`float16`) * V[T[b, n // 16], n % 16, h // 4, d];
    Y[b, h, d] = (X[b, h, d] / Z[b, h] * vs[h // 4]).cast(`float16`)"""


def scaled(batch: int, shared: int, pages: int, head_dim: int) -> TensorProgram:
    """Return decoding with a cache in float8, and scales of its heads."""
    cache = TensorType(DType.FLOAT8_E4M3FN, (batch * pages, PAGE, shared, head_dim))
    index, scales = DType.INT32, TensorType(DType.FLOAT32, (shared,))
    inputs = {"Q": TensorType(DType.FLOAT16, (batch, 4 * shared, head_dim)), "K": cache, "V": cache, "ks": scales, "vs": scales}
    inputs |= {"T": TensorType(index, (batch, pages)), "L": TensorType(index, (batch,))}
    return parse(SCALED.format(keys=pages * PAGE, heads=4 * shared), inputs, ("Y",))


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=lambda spec: spec.id)
def test_keys_and_values_in_float8_are_loaded_in_vectors_and_converted_in_registers(target: HardwareSpec) -> None:
    compute = scaled(8, 8, 128, 128)
    best = rank_best_partition(compute, target, 1)
    assert [group.kind for group in best.groups] == [GroupKind.ATTENTION]
    text = source_of(compute, target, ScheduleConstraints()).text
    for tensor in ("K", "V"):
        loads = [line for line in text.splitlines() if f"{tensor}[(int)(T[" in line]
        assert loads
        assert all("(const uint2 *)" in line for line in loads)


@pytest.mark.parametrize(("head_dim", "columns"), [(128, 128), (192, 96), (256, 128)])
def test_wide_heads_in_float8_have_half_of_the_columns_in_a_block(head_dim: int, columns: int) -> None:
    (group,) = PartitionCache(scaled(64, 8, 128, head_dim)).groups(HOPPER)
    best = rank_units(group, HOPPER, 1)[0][0].program
    assert best.family == "gpu/mma_attention"
    assert dict(best.block.extents)["d_"] == columns


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", [HOPPER, AMPERE, MI250X], ids=lambda spec: spec.id)
def test_a_cache_in_float8_agrees_with_the_interpreter(target: HardwareSpec) -> None:
    programs = [(scaled(3, 2, 7, 64), 21), (called(4, ", window=11", DType.FLOAT8_E5M2), 20)]
    programs += [(scaled(3, 1, 7, 160), 21)]  # Q is not kept in registers
    programs += [(scaled(3, 1, 7, 256), 21)]  # a block has half of the columns
    for compute, pages in programs:
        (group,) = PartitionCache(compute).groups(target)
        assert group.kind is GroupKind.ATTENTION
        source = source_of(compute, target, ScheduleConstraints())
        arrays = random_inputs(compute, 3)
        arrays["T"] = np.random.default_rng(3).integers(0, pages, (3, 7)).astype(np.int32)
        arrays["L"] = np.array([63, 1, 37], np.int32)
        got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays))
        assert agreement.ok, agreement.detail


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=lambda spec: spec.id)
@pytest.mark.parametrize(("batch", "heads"), [(8, 8), (4, 8), (1, 8), (16, 4)])
def test_decoding_splits_the_keys_where_heads_do_not_fill_the_device(batch: int, heads: int, target: HardwareSpec) -> None:
    _, (candidates,), _ = rank_best_partition(decoding(batch, heads, 8192), target, 1)
    best = candidates[0].program
    assert best.split_k > 1
    assert batch * heads * best.split_k >= 0.9 * target.num_cores


def test_decoding_with_enough_heads_does_not() -> None:
    _, (candidates,), _ = rank_best_partition(decoding(32, 8, 2048), HOPPER, 1)
    assert candidates[0].program.split_k == 1
