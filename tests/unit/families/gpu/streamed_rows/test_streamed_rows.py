"""Products of few rows whose matrix streams: which nests they are, their results, faults of the ring, the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from schedule_support import program

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import RollerError, WrongAnswerError
from roller_svc.families.gpu.streamed_rows import STREAMED_ROWS
from roller_svc.families.gpu.streamed_rows.product import find_streamed_product, order_statements
from roller_svc.families.gpu.streamed_rows.workload import StreamedRows
from roller_svc.ir.expr import Expr, Load, Op, OpKind, rewrite
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.schedule import Scope, Storage, iter_nodes, shared_bytes
from roller_svc.perf.workload import Workload, prepare_workload
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import availability, compile_source
from roller_svc.toolchain.binaries.sass import sass_functions

Arrays = dict[str, NDArray[Any]]
HOPPER, AMPERE = hardware.load("nvidia-h200-sxm"), hardware.load("nvidia-a100-sxm-80gb")
TARGETS = {"H200": HOPPER, "A100": AMPERE}
SUM = "y[m, n] +=! x[m, k] * w[n, k]"
INT4_FIELD = "((Q[n, k // 8] >> (k % 8 * 4)).call(`bitwise_and`, [15]))"
ZERO4 = "((Z[n, k // 128 // 8] >> (k // 128 % 8 * 4)).call(`bitwise_and`, [15]))"
INT4 = f"({INT4_FIELD} - 8)"


def unpacked(weight: str, m: int, n: int, k: int, **inputs: str) -> TensorProgram:
    """Return a product with weights w[n, k]."""
    text = f"w[n, k] = {weight} where n in {n}, k in {k}; {SUM}"
    return program(text, ["y"], **{"x": f"float16 {m} {k}"} | inputs)


GATED = f"g[m, n] +=! x[m, k] * w[n, k]; r[m, n] = relu(g[m, n]); {SUM.replace('w[', 'v[')}; z[m, n] = r[m, n] * y[m, n] + b[n]"
GATED_INT4 = "; ".join((
    f"w[n, k] = {INT4}.cast(`float16`) * S[n, k // 128] where n in 40, k in 512",
    f"v[n, k] = {INT4.replace('Q', 'P')}.cast(`float16`) * R[n, k // 128] where n in 40, k in 512", GATED))  # fmt: skip


def gated(m: int, n: int, k: int, dtype: str = "bfloat16", outputs: tuple[str, ...] = ("z",)) -> TensorProgram:
    """Return two products of one x, and what their results make."""
    return program(GATED, list(outputs), x=f"{dtype} {m} {k}", w=f"{dtype} {n} {k}", v=f"{dtype} {n} {k}", b=f"{dtype} {n}")


PRODUCTS = {
    "two matrices, one row": gated(1, 40, 512),
    "two matrices, rows beyond the edge, sums that are results": gated(3, 67, 256, "float16", ("g", "y", "z")),
    "two matrices, eight rows, points of k beyond the edge": gated(8, 24, 1120),
    "two matrices of int4": program(
        GATED_INT4, ["z"], x="float16 2 512", Q="int32 40 64", P="int32 40 64", S="float16 40 4", R="float16 40 4", b="float16 40"),
    "bfloat16, one row, rows beyond the edge": program(SUM, ["y"], x="bfloat16 1 512", w="bfloat16 67 512"),
    "float16, three rows, then other statements": program(
        f"{SUM}; z[m, n] = relu(y[m, n] + b[n]) * 0.5", ["y", "z"], x="float16 3 256", w="float16 48 256", b="float16 48"),
    "a vector, points of k beyond the edge": program("y[n] +=! w[n, k] * x[k]", ["y"], x="float16 1120", w="float16 40 1120"),
    "rows of two axes": program("y[b, n, c] +=! x[b, c, k] * w[n, k]", ["y"], x="bfloat16 2 3 256", w="bfloat16 32 256"),
    "eight rows, a contraction otherwise": program(
        f"{SUM}; z[m, n] = y[m, n] + b[n]", ["z"], x="float16 8 256", w="float16 48 256", b="float16 48"),
    "int4, eight rows": unpacked(
        f"{INT4}.cast(`float16`) * S[n, k // 128]", 8, 64, 512, Q="int32 64 64", S="float16 64 4"),
    "x of another type": program(SUM, ["y"], x="float16 1 256", w="bfloat16 32 256"),
    "x with a guard": program(
        "y[m, n] +=! x[m, k - 12].when([k >= 12], 0.0) * w[n, k]", ["y"], x="float16 2 244", w="float16 32 256"),
    "int4": unpacked(f"{INT4}.cast(`float16`) * S[n, k // 128]", 2, 67, 1024, Q="int32 67 128", S="float16 67 8"),
    "int4, scales of 32": unpacked(f"{INT4}.cast(`float16`) * S[n, k // 32]", 7, 20, 256, Q="int32 20 32", S="float16 20 8"),
    "int4, scales of groups and rows": unpacked(
        f"{INT4}.cast(`float16`) * S[n, k // 128] * R[n]", 1, 40, 256, Q="int32 40 32", S="float16 40 2", R="float16 40"),
    "int4 of bfloat16": unpacked(
        f"{INT4}.cast(`bfloat16`) * S[n, k // 128]", 1, 32, 512, x="bfloat16 1 512", Q="int32 32 64", S="bfloat16 32 4"),
    "NF4": unpacked(
        "T[((Q[n, k // 2] >> ((1 - k % 2) * 4)).call(`bitwise_and`, [15]))] * S[n, k // 64]", 2, 40, 256,
        Q="uint8 40 128", T="float16 16", S="float16 40 4"),
    "int4 with zero points": unpacked(
        f"({INT4_FIELD} - {ZERO4}).cast(`float16`) * S[n, k // 128]", 1, 24, 512,
        Q="int32 24 64", Z="int32 24 1", S="float16 24 4"),
    "float8": unpacked("Q[n, k].cast(`float16`) * S[n]", 5, 40, 512, Q="float8_e4m3fn 40 512", S="float16 40"),
    "float8 by bfloat16": unpacked(
        "Q[n, k].cast(`bfloat16`) * S[n]", 2, 32, 512, x="bfloat16 2 512", Q="float8_e5m2 32 512", S="bfloat16 32"),
    "int8": unpacked("Q[n, k].cast(`float16`) * S[n]", 2, 33, 256, Q="int8 33 256", S="float16 33"),
}  # fmt: skip
RACED = (
    "two matrices, rows beyond the edge, sums that are results",
    "two matrices of int4",
    "bfloat16, one row, rows beyond the edge",
    "int4",
    "int4, eight rows",
    "float8",
)
OTHERS = {
    "x of float32": program(SUM, ["y"], x="float32 1 256", w="float16 32 256"),
    "a matrix along n": program("y[m, n] +=! x[m, k] * w[k, n]", ["y"], x="float16 1 256", w="float16 256 32"),
    "an odd k": program(SUM, ["y"], x="float16 1 250", w="float16 32 250"),
    "rows that begin unaligned": program("y[m, n] +=! x[m, k] * w[n, k + 1]", ["y"], x="float16 1 256", w="float16 32 257"),
    "rows that data choose": program(
        "y[m, n] +=! x[m, k] * w[ids[n], k]", ["y"], x="float16 1 256", w="float16 32 256", ids="int32 9"),
    "a batch": program("y[b, n] +=! x[b, k] * w[b, n, k]", ["y"], x="float16 2 256", w="float16 2 32 256"),
    "scales of 16": unpacked(f"{INT4}.cast(`float16`) * S[n, k // 16]", 1, 32, 256, Q="int32 32 32", S="float16 32 16"),
    "a rounded weight": unpacked(
        f"({INT4}.cast(`float16`) * S[n]).cast(`float16`)", 1, 32, 256, Q="int32 32 32", S="float16 32"),
    "x that is computed": program("y[m, n] +=! exp(x[m, k]) * w[n, k]", ["y"], x="float16 1 256", w="float16 32 256"),
    "x that is computed beneath a guard": program(
        "y[m, n] +=! (x[m, k] * x[m, k]).when([k < 99], 0.0) * w[n, k]",
        ["y"], x="float16 1 256", w="float16 32 256"),
    "a maximum": program("y[m, n] >=! x[m, k] * w[n, k]", ["y"], x="float16 1 256", w="float16 32 256"),
}  # fmt: skip


def streamed(compute: TensorProgram, target: HardwareSpec, **pipeline: int) -> KernelSource:
    """Return a kernel of the family, whatever the model prefers."""
    groups, candidates, _ = rank_best_partition(compute, target, 100)
    own = next(one for one in candidates[-1] if one.program.family == STREAMED_ROWS.name)
    own = replace(own, program=own.program.with_pipeline(**pipeline))
    plan = best_plans((*candidates[:-1], (own,)), 1)[0]
    return emit_plan(plan, compute, groups, target)


def inputs_of(compute: TensorProgram, seed: int) -> Arrays:
    """Return random inputs, with all bits of packed words."""
    arrays, rng = dict(random_inputs(compute, seed)), np.random.default_rng(seed)
    if "Q" in arrays and arrays["Q"].dtype.kind in "iu":
        info = np.iinfo(arrays["Q"].dtype)
        arrays["Q"] = rng.integers(info.min, info.max, arrays["Q"].shape, arrays["Q"].dtype, endpoint=True)
    return arrays


def check(compute: TensorProgram, source: KernelSource, arrays: Arrays, seed: int = 1) -> Arrays:
    got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=True).run(dict(arrays))
    with np.errstate(all="ignore"):
        agreement = agrees(compute, got, evaluate(compute, arrays))
    assert agreement.ok, agreement.detail
    return got


def is_streamed(compute: TensorProgram) -> bool:
    try:
        groups, _, _ = rank_best_partition(compute, HOPPER, 1)
    except RollerError:
        return False
    return any(find_streamed_product(group) is not None for group in groups)


@pytest.mark.emulator
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_are_those_of_the_reference(name: str, target: str) -> None:
    compute = PRODUCTS[name]
    check(compute, streamed(compute, TARGETS[target]), inputs_of(compute, 1))


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RACED)
def test_blocks_with_several_tiles_have_no_races_under_twenty_schedules(name: str, target: str) -> None:
    """The ring goes on from one tile of a block to its next."""
    compute = PRODUCTS[name]
    source, arrays = streamed(compute, TARGETS[target], persistent_blocks=2), inputs_of(compute, 1)
    for seed in range(20):
        check(compute, source, arrays, seed)


SEVERAL_PAGES = program(SUM, ["y"], x="bfloat16 1 2048", w="bfloat16 67 2048")
FAULTS = {
    "no wait for copies": (r"(?<=page\+\+\) \{\n) *await_copies<1>\(\);", ""),
    "one page too few is waited for": (r"await_copies<1>", "await_copies<2>"),
    "no barrier before a page is read and the one before it filled again": (r"(?<=await_copies<1>\(\);\n) *__syncthreads\(\);", ""),
    "sums are read before all warps have stored them": (r"(?<=sums\[3\];\n) *__syncthreads\(\);", ""),
    "a page is filled while it is read": (r"(?<=copy_async_16\(\(ring \+ \()\((.*?)\) % 3", r"(\1 + 1) % 3"),
    "a page is read one stage too late": (r"(?<=const int slot = )\(", "(1 + "),
    "a request without a group": (r"commit_copies\(\);(?=\n *const int slot)", ""),
    "the next tile has the rows of this one": (r"(?<=const int coming = block \+ \(\().*? / ", "0 / "),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_ring_are_caught(fault: str) -> None:
    """Without any one of its parts the kernel races, or reads data that has not arrived."""
    source = streamed(SEVERAL_PAGES, AMPERE, persistent_blocks=2, stages=3)
    text, count = re.subn(*FAULTS[fault], source.text, count=1)
    assert count == 1
    arrays = inputs_of(SEVERAL_PAGES, 1)
    with pytest.raises((WrongAnswerError, AssertionError)):
        check(SEVERAL_PAGES, replace(source, text=text), arrays)


@pytest.mark.parametrize("name", OTHERS)
def test_other_nests_are_not_streamed(name: str) -> None:
    assert not is_streamed(OTHERS[name])


def test_two_products_share_pages_where_they_differ_in_their_matrices_alone() -> None:
    (group,) = next(each for each in PartitionCache(gated(1, 40, 512)).partitions(HOPPER) if len(each) == 1)
    product = find_streamed_product(group)
    assert product is not None
    assert [each.streamed.tensor for each in product.all] == ["w", "v"]
    (first, second), _ = order_statements(group)

    def with_second(change: Callable[[Expr], Expr]) -> KernelGroup:
        changed = replace(second, body=rewrite(second.body, change))
        inputs = (*group.inputs, ("u", dict(group.inputs)["x"]))
        return replace(group, statements=tuple(changed if each is second else each for each in group.statements), inputs=inputs)

    def renamed(before: str, after: str) -> Callable[[Expr], Expr]:
        return lambda each: replace(each, tensor=after) if isinstance(each, Load) and each.tensor == before else each

    def scaled(each: Expr) -> Expr:  # by a sum of the first product
        if not isinstance(each, Load) or each.tensor != "x":
            return each
        return Op(OpKind.MUL, (each, Load(first.output, first.index, each.dtype)), each.dtype)

    assert find_streamed_product(with_second(lambda each: each)) == product
    for change in (renamed("x", "u"), renamed("v", first.output), scaled):
        assert find_streamed_product(with_second(change)) is None


def test_nine_rows_are_not_streamed() -> None:
    groups, _, _ = rank_best_partition(PRODUCTS["rows of two axes"], HOPPER, 1)
    assert find_streamed_product(groups[0]) is not None
    assert not is_streamed(program("y[b, n, c] +=! x[b, c, k] * w[n, k]", ["y"], x="float16 3 3 256", w="float16 32 256"))


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["int4", "int4, scales of groups and rows"])
def test_infinite_and_nan_scales_have_the_reference_s_results(name: str) -> None:
    """A shared infinite scale times a sum differs from the sum of its products: these are computed one by one."""
    compute = PRODUCTS[name]
    arrays, source = inputs_of(compute, 2), streamed(compute, HOPPER)
    scales = arrays["S"].reshape(-1)
    scales[[3, 17, 33]] = np.inf, -np.inf, np.nan
    assert not np.isfinite(check(compute, source, arrays)["y"]).all()


@pytest.mark.emulator
def test_sum_that_exceeds_float32_before_its_scale_is_computed_one_by_one() -> None:
    compute = PRODUCTS["int4 of bfloat16"]
    arrays, source = inputs_of(compute, 3), streamed(compute, HOPPER)
    arrays["x"][:], arrays["S"][:] = 3e38, 1e-30
    arrays["Q"][:] = 0x7FFFFFFF
    assert np.isfinite(check(compute, source, arrays)["y"].astype(np.float32)).all()


def workload_of(compute: TensorProgram, target: HardwareSpec) -> tuple[Workload[StreamedRows], Any]:
    groups, _, _ = rank_best_partition(compute, target, 1)
    unit = next(u for u in target.units if u.name == f"mma_{'bf16' if 'bfloat16' in str(compute.inputs) else 'f16'}")
    workload = STREAMED_ROWS.prepare(groups[-1], prepare_workload(groups[-1].space, target, unit))
    assert workload is not None
    return workload, groups[-1]


@pytest.mark.parametrize("name", ["bfloat16, one row, rows beyond the edge", "int4", "int4, scales of 32"])
def test_model_assumes_the_shared_memory_of_the_tree(name: str) -> None:
    workload, group = workload_of(PRODUCTS[name], HOPPER)
    programs = STREAMED_ROWS.construct(group, workload, 36).programs
    for tiles in programs[::5]:
        (tree,) = lower(group, tiles, HOPPER)
        buffers = [n for n in iter_nodes(tree.body) if isinstance(n, Storage) and n.scope is Scope.SHARED]
        needs = STREAMED_ROWS.model(workload).resources(tiles)
        assert needs is not None
        assert needs.shared_bytes == shared_bytes(replace(b, body=()) for b in buffers)
        assert needs.threads == tiles.threads


INT4_LARGE = unpacked(f"{INT4}.cast(`float16`) * S[n, k // 128]", 4, 28672, 4096, Q="int32 28672 512", S="float16 28672 32")
PLAIN_LARGE = program(SUM, ["y"], x="bfloat16 1 4096", w="bfloat16 28672 4096")
PEAK_SHARE = 0.85  # of 4.8 TB/s, without the launch


@pytest.mark.parametrize(("compute", "weight_bits"), [(INT4_LARGE, 4.125), (PLAIN_LARGE, 16)], ids=["int4", "bfloat16"])
def test_llama_s_largest_product_streams_near_the_peak(compute: TensorProgram, weight_bits: float) -> None:
    _, candidates, _ = rank_best_partition(compute, HOPPER, 1)
    best = candidates[-1][0]
    assert best.program.family == STREAMED_ROWS.name
    seconds = best.estimate.seconds - HOPPER.limits.launch_overhead_s
    peak = HOPPER.dram.peak_bandwidth_bytes_per_s
    assert peak is not None
    assert 28672 * 4096 * weight_bits / 8 / seconds > (PEAK_SHARE if weight_bits == 16 else 0.8) * peak


@pytest.mark.parametrize(
    ("x", "shape", "loads"),
    [
        *(("x[m, k]", "4 4096", 1), ("x[k, m]", "4096 4", 8), ("x[m, k - 1].when([k >= 1], 0.0)", "4 4095", 8)),
        *(("x[ids[m], k]", "9 4096", 1), ("x[m, places[k]]", "4 4096", 10)),
    ],
)
def test_loads_of_strided_elements_of_x_are_counted(x: str, shape: str, loads: float) -> None:
    ids = {name: type_ for name, type_ in (("ids", "int32 4"), ("places", "int32 4096")) if name in x}
    compute = program(f"y[m, n] +=! {x} * w[n, k] where m in 4", ["y"], x=f"bfloat16 {shape}", w="bfloat16 64 4096", **ids)
    workload, _ = workload_of(compute, HOPPER)
    assert workload.facts.product.x_loads == loads * workload.facts.product.chunk / 8


def test_row_reduction_stays_where_the_model_prefers_it() -> None:
    _, candidates, _ = rank_best_partition(program(SUM, ["y"], x="bfloat16 1 4096", w="bfloat16 4096 4096"), HOPPER, 40)
    families = [one.program.family for one in candidates[-1]]
    assert families[0] == "gpu/reduction"
    assert STREAMED_ROWS.name in families


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("compute", [INT4_LARGE, PLAIN_LARGE], ids=["int4", "bfloat16"])
def test_machine_code_loads_sixteen_bytes_and_spills_nothing(compute: TensorProgram, target: str) -> None:
    if not (toolchain := availability(TARGETS[target])).ok:
        pytest.skip(toolchain.reason)
    compiled = compile_source(streamed(compute, TARGETS[target]))
    assert all(launch.spill_bytes == 0 for launch in compiled.resources)
    (functions,) = sass_functions([compiled.binary], TARGETS[target].arch)
    (function,) = functions.values()
    assert function.count("LDGSTS.128") == function.count("LDGSTS") > 0
    assert function.count("LDS.128") > 0
    assert function.count("HMMA") > 0
    assert function.count("STL", "LDL") == 0
