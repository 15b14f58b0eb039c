"""Dual GEMM: matching, model, results."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from cases_matrix import AMPERE, TURING, chosen, tiles, unit
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import every
from schedule_support import program

from roller_svc import hardware
from roller_svc.analysis.operand import all_operands, operands
from roller_svc.analysis.wide_values import Array
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.estimates.batch import Item, estimate_item, plan_sensitivity_json
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.compiler.rank import construct
from roller_svc.errors import WrongAnswerError
from roller_svc.families import prepare, prepare_model
from roller_svc.families.common.gpu.matrix.tile import mma_tile
from roller_svc.families.common.gpu.warpgroups.tile import wgmma_tile
from roller_svc.fusion.split.reduction import may_split
from roller_svc.ir.accumulation import AccumulatorPrecision, accumulator_precision
from roller_svc.ir.constraints import OpClass, ScheduleConstraints, tile_value
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, UnitKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.verify.kernel_stats import summarize_kernels

MI250X = hardware.load("amd-mi250x")
HOPPER = hardware.load("nvidia-h200-sxm")
SUMS = "g[m, f] +=! x[m, k] * w[f, k]; u[m, f] +=! x[m, k] * v[f, k]"
SILU = f"{SUMS}; y[m, f] = g[m, f] / (1.0 + exp(-g[m, f])) * u[m, f]"
GELU = SILU.replace("g[m, f] / (1.0 + exp(-g[m, f]))", "gelu(g[m, f])")
TURNED = SILU.replace("w[f, k]", "w[k, f]").replace("v[f, k]", "v[k, f]")


def mlp(text: str, m: int, f: int, k: int, dtype: str = "float16", **more: str) -> TensorProgram:
    weights = f"{dtype} {k} {f}" if "w[k, f]" in text else f"{dtype} {f} {k}"
    return program(text, **{"x": f"{dtype} {m} {k}", "w": weights, "v": weights, **more})


def ways(compute: TensorProgram, hw: HardwareSpec = AMPERE) -> tuple[tuple[KernelGroup, ...], ...]:
    """Groupings that have a pair."""
    partitions = PartitionCache(compute).partitions(hw)
    return tuple(groups for groups in partitions if any(group.is_dual_gemm for group in groups))


def pair(compute: TensorProgram, hw: HardwareSpec = AMPERE) -> KernelGroup:
    """Of the grouping that is one kernel: others copy factors to aligned rows first."""
    ((group,),) = (groups for groups in ways(compute, hw) if len(groups) == 1)
    return group


# what is recognised ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        SILU,
        GELU,
        TURNED,
        SILU.replace("u[m, f] +=! x[m, k] * v[f, k]", "u[a, b] +=! v[b, c] * x[a, c]"),  # other names and order
        f"{SUMS}; s[m, f] = relu(g[m, f]); h[m, f] = s[m, f] + s[m, f] * 0.5; y[m, f] = h[m, f] * u[m, f]",
    ],
)
def test_a_gated_product_is_one_kernel(text: str) -> None:
    group = pair(mlp(text, 64, 48, 32))
    assert (group.space.num_accumulators, [name for name, _ in group.stored]) == (2, ["y"])
    assert not may_split(group)
    assert group.row_reduction is None


@pytest.mark.parametrize(
    "text",
    [
        f"{SUMS}; y[m, f] = relu(g[m, f]); t[m, f] = relu(u[m, f])",  # nothing reads both
        SILU.replace("x[m, k] * v[f, k]", "z[m, k] * v[f, k]"),  # another left factor
        SILU.replace("x[m, k] * v[f, k]", "x[m, k] * x[m, k] * v[f, k]"),
        SILU.replace("x[m, k] * v[f, k]", "x[m, k] * v[f, k] * g[m, f]"),  # the second needs the first
    ],
)
def test_others_stay_apart(text: str) -> None:
    assert not ways(mlp(text, 64, 48, 32, z="float16 64 32"))


def test_second_gemm_that_reads_a_later_kernel_is_not_fused() -> None:
    text = SILU.replace("u[m, f]", "h[f, k] +=! v[f, j] * q[j, k]; u[m, f]", 1).replace("* v[f, k]", "* h[f, k]")
    assert not ways(program(text, x="float16 64 32", w="float16 48 32", v="float16 48 40", q="float16 40 32"))


def test_dual_gemm_stores_accumulators_that_are_outputs() -> None:
    compute = program(SILU, ["g", "y"], x="float16 64 32", w="float16 48 32", v="float16 48 32")
    assert [name for name, _ in pair(compute).stored] == ["g", "y"]


# construction and model -----------------------------------------------------------------------------------------------
LLAMA = mlp(SILU, 256, 14336, 4096)


def test_the_model_expects_one_kernel_to_be_faster() -> None:
    groups, ranked, _ = rank_best_partition(LLAMA, AMPERE, 4)
    plan = best_plans(ranked, 1)[0]
    (found,) = summarize_kernels(groups, plan, AMPERE)
    assert (found["kind"], found["family"], found["split_k"], found["stream_k"]) == ("contraction", "mma", 1, 0)
    assert [operand["load"] for operand in found["operands"]] == ["async16"] * 3
    assert found["epilogue"] == ["activation"]


@pytest.mark.parametrize(("dtype", "kernels_of_it"), [("float16", 1), ("float32", 2)])
def test_what_resources_would_save_is_asked_of_the_kernels_that_were_chosen(dtype: str, kernels_of_it: int) -> None:
    item = Item(SILU, {name: {"dtype": dtype, "shape": type_.shape} for name, type_ in LLAMA.inputs})
    (found,) = estimate_item(item, [AMPERE], 1)
    assert len(found.plans[0].choices) == kernels_of_it
    assert plan_sensitivity_json(item, AMPERE, found.plans[0])


def test_scalar_lanes_compute_it_in_two_kernels() -> None:
    groups, _, _ = rank_best_partition(LLAMA, HOPPER, 1, ScheduleConstraints(op_class=OpClass.SIMT))
    assert [group.is_dual_gemm for group in groups] == [False, False]


@pytest.mark.parametrize("text", [SILU, TURNED])
def test_on_hopper_warpgroups_compute_it_in_one_kernel(text: str) -> None:
    groups, ranked, _ = rank_best_partition(mlp(text, 256, 14336, 4096), HOPPER, 1)
    (found,) = summarize_kernels(groups, best_plans(ranked, 1)[0], HOPPER)
    assert (found["family"], found["split_k"], found["stream_k"]) == ("wgmma", 1, 0)
    assert [operand["load"] for operand in found["operands"]] == ["tma"] * 3


def test_dual_gemm_is_slower_on_mma_of_hopper() -> None:
    best = [rank_best_partition(LLAMA, HOPPER, 1, ScheduleConstraints(op_class=family))[1] for family in (None, OpClass.MMA)]
    free, on_warps = (sum(candidates[0].estimate.seconds for candidates in ranked) for ranked in best)
    assert free < on_warps


def test_operands_with_different_layouts_are_not_fused() -> None:
    text = SILU.replace("v[f, k]", "v[k, f]")
    compute = program(text, x="float16 256 512", w="float16 512 512", v="float16 512 512")
    assert ways(compute)
    groups, _, _ = rank_best_partition(compute, AMPERE, 1)
    assert len(groups) == 2


@pytest.mark.parametrize("way", ["split_k", "stream_k"])
def test_what_shares_out_steps_is_two_kernels(way: str) -> None:
    groups, ranked, _ = rank_best_partition(LLAMA, AMPERE, 1, ScheduleConstraints(tiles=((way, 2),)))
    assert [group.is_dual_gemm for group in groups] == [False, False]
    assert [tile_value(candidates[0].program, way) for candidates in ranked] == [2, 2]


def test_dual_gemm_tile_has_twice_the_columns() -> None:
    """Shared memory, registers and multiply-adds are those of a plain contraction with 2 n columns."""
    both, wide = pair(mlp(SILU, 256, 512, 1024)), mlp(SILU, 256, 1024, 1024)
    (first, _) = PartitionCache(wide).groups(AMPERE)
    on = unit(AMPERE, "mma_f16")
    narrow = tiles(both, on, (128, 64, 32), (64, 32), stages=3)
    plain = tiles(first, on, (128, 128, 32), (64, 64), stages=3)
    assert mma_tile(narrow, *operands(both)) == mma_tile(plain, *operands(first))
    one, two = (prepare_model(group, AMPERE, on) for group in (both, first))
    assert one.resources(narrow) == two.resources(plain)
    spent = ({stage.name: stage.seconds for stage in m.estimate(p).stages} for m, p in ((one, narrow), (two, plain)))
    of_pair, of_plain = spent
    assert of_pair["mma"] == pytest.approx(of_plain["mma"])
    assert of_pair["shared"] == pytest.approx(of_plain["shared"])


def test_wgmma_dual_gemm_tile_has_twice_the_columns() -> None:
    """Rings, registers and multiply-adds are those of a plain contraction with 2 n columns."""
    both = pair(mlp(SILU, 256, 512, 1024), HOPPER)
    (first, _) = PartitionCache(mlp(SILU, 256, 1024, 1024)).groups(HOPPER)
    on = unit(HOPPER, "wgmma_f16")
    narrow = tiles(both, on, (128, 128, 64), (64, 128), reduce_threads=128, stages=4)
    plain = tiles(first, on, (128, 256, 64), (64, 256), reduce_threads=128, stages=4)
    mine, its = (wgmma_tile(p, all_operands(g), HOPPER.arch) for p, g in ((narrow, both), (plain, first)))
    assert (mine.n, mine.group_n, mine.columns, mine.group_columns) == (256, 256, 128, 128)
    assert (mine.b.bytes, mine.b.num_parts, mine.b.copies, its.b.copies) == (its.b.bytes, 2, 2, 1)
    assert (mine.shared_bytes, mine.accumulator_registers) == (its.shared_bytes, its.accumulator_registers)
    one, two = (prepare_model(group, HOPPER, on) for group in (both, first))
    assert one.resources(narrow) == two.resources(plain)
    of_pair, of_plain = ({stage.name: stage.seconds for stage in m.estimate(p).stages} for m, p in ((one, narrow), (two, plain)))
    assert of_pair["mma"] == pytest.approx(of_plain["mma"])
    assert of_pair["shared"] == pytest.approx(of_plain["shared"])


@given(m=st.integers(8, 400), f=st.integers(8, 400), k=st.integers(8, 300), text=st.sampled_from([SILU, TURNED]))
@settings(max_examples=15)
def test_every_candidate_of_warpgroups_keeps_the_contract(m: int, f: int, k: int, text: str) -> None:
    group = pair(mlp(text, m, f, k), HOPPER)
    found = construct(group, HOPPER, unit(HOPPER, "wgmma_f16")).programs
    assert found
    p = prepare(group, HOPPER, found[0].unit)[1]
    for candidate in found:
        tile = wgmma_tile(candidate, all_operands(group), HOPPER.arch)
        assert candidate.split_k == candidate.pipeline.cluster_k == 1
        assert not candidate.pipeline.stream_k_blocks
        assert tile.group_n == 2 * tile.group_columns <= 256
        assert tile.accumulator_registers < tile.consumer_registers
        assert tile.shared_bytes <= HOPPER.limits.shared_bytes_per_block
        assert tile.b.k_major or tile.group_columns % 16 == 0
        along_m, along_n = candidate.pipeline.cluster
        assert along_m == 1 or p.facts.loads.can_multicast(1, tile.b, along_m)
        assert along_n == 1 or p.facts.loads.can_multicast(0, tile.a, along_n)


# the kernel -----------------------------------------------------------------------------------------------------------
Tiling = tuple[tuple[int, int, int], tuple[int, int]]  # a block's along m, n, k, a warp's along m, n
WHOLE = mlp(SILU, 64, 64, 64)
LINEAR = f"{SUMS}; y[m, f] = relu(g[m, f]) * u[m, f] + b[f]"
BIASED = SILU.replace("y[m, f] =", "y[m, f] = b[f] +")
CASES: dict[str, tuple[TensorProgram, HardwareSpec, str, Tiling]] = {
    "whole tiles": (WHOLE, AMPERE, "mma_f16", ((32, 32, 32), (16, 16))),
    "one fragment of columns a sum": (WHOLE, AMPERE, "mma_f16", ((16, 8, 32), (16, 8))),
    "an odd number of fragments": (mlp(SILU, 40, 72, 64), AMPERE, "mma_f16", ((32, 72, 32), (32, 24))),
    "odd lengths": (mlp(GELU, 37, 61, 45), AMPERE, "mma_f16", ((32, 32, 16), (16, 16))),
    "rows along n": (mlp(TURNED, 50, 72, 40, "bfloat16"), AMPERE, "mma_bf16", ((32, 40, 32), (16, 40))),
    "odd rows along n": (mlp(TURNED, 50, 71, 40, "bfloat16"), AMPERE, "mma_bf16", ((32, 40, 32), (16, 40))),
    "sums wanted too": (
        program(SILU, ["g", "y"], x="float16 40 48", w="float16 56 48", v="float16 56 48"), AMPERE, "mma_f16",
        ((32, 32, 16), (16, 32)),
    ),
    "bias, loads through registers": (
        mlp(BIASED, 40, 48, 64, b="float16 48"), TURING, "mma_f16", ((32, 32, 32), (16, 16)),
    ),
    "batched": (
        program(
            "g[e, m, f] +=! x[e, m, k] * w[e, f, k]; u[e, m, f] +=! x[e, m, k] * v[e, f, k];"
            "y[e, m, f] = relu(g[e, m, f]) * u[e, m, f]", x="float16 3 20 32", w="float16 3 24 32", v="float16 3 24 32",
        ), AMPERE, "mma_f16", ((16, 16, 32), (16, 16)),
    ),
    "MFMA": (mlp(SILU, 40, 50, 64), MI250X, "mfma_f16", ((32, 32, 32), (16, 16))),
    "warpgroups, whole tiles": (mlp(SILU, 128, 64, 128), HOPPER, "wgmma_f16", ((64, 32, 64), (64, 32))),
    "warpgroups along n": (mlp(GELU, 90, 150, 136), HOPPER, "wgmma_f16", ((64, 144, 64), (64, 72))),
    "warpgroups, rows along n": (
        mlp(TURNED, 100, 136, 72, "bfloat16"), HOPPER, "wgmma_bf16", ((64, 128, 32), (64, 64)),
    ),
    "warpgroups, copied by threads": (mlp(SILU, 100, 72, 74), HOPPER, "wgmma_f16", ((64, 48, 64), (64, 24))),
    "warpgroups, copied by threads along n": (mlp(TURNED, 100, 74, 72), HOPPER, "wgmma_f16", ((64, 64, 64), (64, 32))),
    "warpgroups, through registers": (mlp(SILU, 70, 50, 77), HOPPER, "wgmma_f16", ((64, 64, 64), (64, 32))),
    "warpgroups, stored by TMA": (
        mlp(LINEAR, 100, 72, 136, b="float16 72"), HOPPER, "wgmma_f16", ((128, 32, 64), (64, 32)),
    ),
    "warpgroups, sums wanted too": (
        program(SILU, ["g", "y"], x="float16 100 72", w="float16 56 72", v="float16 56 72"), HOPPER, "wgmma_f16",
        ((64, 56, 64), (64, 56)),
    ),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", every(2, CASES))
def test_kernel_agrees_with_the_interpreter(name: str) -> None:
    compute, hw, on, (block, warp) = CASES[name]
    judge(compute, hw, on, block, warp, races=name in ("whole tiles", "odd rows along n"))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("hw", "on", "block", "warp"),
    [
        (AMPERE, "mma_s8", (32, 32, 32), (16, 16)),
        (HOPPER, "wgmma_s8", (64, 48, 64), (64, 24)),
    ],
)
def test_integers_are_exact(hw: HardwareSpec, on: str, block: tuple[int, int, int], warp: tuple[int, int]) -> None:
    text = f"{SUMS}; y[m, f] = max(g[m, f], 0) * u[m, f]"
    judge(mlp(text, 40, 50, 64, "int8"), hw, on, block, warp)


@pytest.mark.emulator
def test_dual_gemm_promotes_both_float8_accumulators() -> None:
    text = "g[m, f] +=! x[m, k] * w[f, k]; u[m, f] +=! x[m, k] * v[f, k]; y[m, f] = g[m, f] * u[m, f]"
    compute = mlp(text.replace(", k]", ", k].cast(`float32`)"), 70, 40, 128, "float8_e4m3fn")
    judge(compute, HOPPER, "wgmma_e4m3", (64, 48, 64), (64, 24))


RUN: dict[str, tuple[TensorProgram, Tiling, dict[str, object]]] = {
    "shared along m": (mlp(SILU, 300, 72, 136), ((64, 64, 64), (64, 32)), {"stages": 3, "cluster": (2, 1)}),
    "rows along n, shared along m": (
        mlp(TURNED, 300, 136, 72), ((64, 128, 32), (64, 128)), {"stages": 3, "cluster": (2, 1)},
    ),
    "shared along n, persistent": (
        mlp(SILU, 300, 122, 136), ((128, 32, 64), (64, 32)), {"stages": 3, "cluster": (1, 2), "persistent_blocks": 4},
    ),
    "persistent, stored by TMA": (
        mlp(LINEAR, 300, 72, 136, b="float16 72"), ((64, 32, 64), (64, 32)), {"stages": 3, "persistent_blocks": 3},
    ),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", RUN)
def test_blocks_of_warpgroups_that_stay_and_share(name: str) -> None:
    compute, (block, warp), more = RUN[name]
    group = pair(compute, HOPPER)
    by_hand = tiles(group, unit(HOPPER, "wgmma_f16"), block, warp, reduce_threads=128, **more)
    agree(emit_plan(Plan((chosen(by_hand),)), compute, (group,), HOPPER), compute, races=True)


def judge(
    compute: TensorProgram,
    hw: HardwareSpec,
    on: str,
    block: tuple[int, int, int],
    warp: tuple[int, int],
    *,
    races: bool = False,
) -> None:
    group, by = pair(compute, hw), unit(hw, on)
    lanes = WARPGROUP_THREADS if by.kind is UnitKind.WGMMA else hw.limits.warp_size
    program = tiles(group, by, block, warp, reduce_threads=lanes, stages=3)
    agree(
        emit_plan(Plan((chosen(program),)), compute, (group,), hw),
        compute,
        accumulator_precision(by, hw.arch),
        races=races,
    )


def agree(source: KernelSource, compute: TensorProgram, sums: AccumulatorPrecision | None = None, *, races: bool) -> None:
    for seed in (1, 2):
        arrays = random_inputs(compute, seed)
        got = load_emulated(CompiledKernel(source, b"", "", ()), seed, races=races).run(arrays)
        agreement = agrees(compute, got, evaluate(compute, arrays, accumulation=sums))
        assert agreement.ok, agreement.detail


BUGS = {
    "the second half is read from the first factor": (r"(b_shared[^;]*\(row \+ 32\)[^;]*, )v \+", r"\1w +"),
    "the second half is stored over the first": (r"b_shared((?: \+ 1 \* 2048)?) \+ \(row \+ 32\)", r"b_shared\1 + row"),
    "the second half is swizzled by the next row": (r"\(\(\(row \+ 32\) / 2\)", "(((row + 33) / 2)"),
    "the second sum is the first": (r"element \+ 32\)\]", "element + 0)]"),
    "sums change places": (r"sums\[row \* 72 \+ element\]", "sums[row * 72 + (element ^ 1)]"),
    "warps multiply the first half alone": (r"\(n_warp \* 32\) \+ \(\(pair", "(n_warp * 0) + ((pair"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", BUGS)
def test_what_can_be_wrong_in_halves_shows(name: str) -> None:
    compute = mlp(SILU, 37, 61, 48)
    group = pair(compute)
    program = tiles(group, unit(AMPERE, "mma_f16"), (32, 32, 32), (16, 16), stages=3)
    source = emit_plan(Plan((chosen(program),)), compute, (group,), AMPERE)
    text, count = re.subn(*BUGS[name], source.text)
    assert count
    arrays = random_inputs(compute, 1)
    assert run(source, arrays, compute)
    assert not run(replace(source, text=text), arrays, compute)


BUGS_OF_WARPGROUPS = {
    "the second half comes by the first's map": (r"&b_map_2,", "&b_map,"),
    "the second half comes to the first's place": (r" \+ 32 \* 64, &b_map_2", ", &b_map_2"),
    "halves of the second warpgroup change places": (
        r"(b_shared \+ slot \* 8192 \+) 64( \* 64, &b_map,.*\n.*b_shared \+ slot \* 8192 \+) 96",
        r"\1 96\2 64",
    ),
    "the second warpgroup's columns are the first's": (r"\(\(n_block \* 64\) \+ 32\)\);", "(n_block * 64));"),
    "bytes of one right factor": (r"full \+ slot\), 24576\)", "full + slot), 16384)"),
    "products read the first warpgroup's columns": (
        r"\(group % 2\) \* 64\) \* 64, 16384",
        "(group % 2) * 0) * 64, 16384",
    ),
    "both warpgroups have the same columns of results": (r"\(\(n_block \* 2\) \+ \(group % 2\)\)", "(n_block * 2)"),
    "the second sum is the first": (r"\] = acc\[\(16 \+", "] = acc[(0 +"),
    "the second sum is of the next columns": (r"\] = acc\[\(16 \+", "] = acc[(20 +"),
}


@pytest.mark.emulator
@pytest.mark.parametrize("name", BUGS_OF_WARPGROUPS)
def test_what_can_be_wrong_in_halves_of_warpgroups_shows(name: str) -> None:
    compute = mlp(SILU, 100, 72, 136)
    group = pair(compute, HOPPER)
    by_hand = tiles(group, unit(HOPPER, "wgmma_f16"), (64, 64, 64), (64, 32), reduce_threads=128, stages=3)
    source = emit_plan(Plan((chosen(by_hand),)), compute, (group,), HOPPER)
    text, count = re.subn(*BUGS_OF_WARPGROUPS[name], source.text)
    assert count
    arrays = random_inputs(compute, 1)
    assert run(source, arrays, compute)
    assert not run(replace(source, text=text), arrays, compute)


def run(source: KernelSource, arrays: Mapping[str, Array], compute: TensorProgram) -> bool:
    """Whether the emulator finds nothing wrong."""
    try:
        got = load_emulated(CompiledKernel(source, b"", "", ()), 1).run(arrays)
    except WrongAnswerError:
        return False
    return agrees(compute, got, evaluate(compute, arrays)).ok
