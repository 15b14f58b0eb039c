"""Attention by wgmma: tiles, legality, unmasked KV tiles, cost model, NVRTC, emulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from cases_matrix import chosen, unit
from sampling import every

from roller_svc import hardware
from roller_svc.analysis.index_ranges import fold
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import best_plans, estimate_program, rank_best_partition
from roller_svc.compiler.rank import construct, rank_units
from roller_svc.errors import InvariantError, NoCandidateError, ScheduleError
from roller_svc.families import prepare
from roller_svc.families.common.gpu.attention.kv_loop import KvTileLoop
from roller_svc.families.common.gpu.attention.mask import exact_bounds, key_bounds
from roller_svc.families.common.gpu.matrix.mainloop import ACC
from roller_svc.families.gpu.wgmma_attention.workload import wgmma_attention_facts, wgmma_attention_tile
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, OpKind, substitute
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.index import conjuncts, num
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile
from roller_svc.ir.schedule import CpAsync, CpAsyncWaitGroup, Node, PackFragment, ScheduleTree, iter_nodes
from roller_svc.ir.schedule_hopper import (
    FenceProxyAsync,
    MbarrierInit,
    MbarrierWait,
    RegisterMatrix,
    TmaLoad,
    TmaStore,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)
from roller_svc.ir.schedule_text import render
from roller_svc.perf.occupancy import block_registers
from roller_svc.schedule.legality import check
from roller_svc.toolchain import compile_source
from roller_svc.toolchain.nvrtc import ptxas_warnings
from roller_svc.verify.kernel_stats import summarize_kernels
from roller_svc.verify.lint import PlannedKernel, lint
from tests.unit.families.gpu.mma_attention.test_mma_attention import (
    FILLED,
    FLOAT_MASK,
    LLAMA,
    LLAMA_INPUTS,
    MASKED,
    MASKS,
    NORMALISED,
    SCALED_BELOW,
    Arrays,
    Change,
    Inputs,
    check_a_score_of,
    check_rows_without_a_finite_score,
    check_tiles_with_large_negative_scores,
    flat,
    judged,
    operator,
    program,
    written,
)
from tests.unit.families.gpu.mma_contraction.test_schedule import changed, without

HOPPER = hardware.load("nvidia-h200-sxm")
Case = tuple[str, Inputs]


@dataclass(frozen=True)
class Tiles:
    """Consumers of a block, keys of a step; columns of a block: None is all of them. `blocks` that stay."""

    consumers: int = 2
    keys: int = 32
    stages: int = 2
    columns: int | None = None
    blocks: int = 0


def tiled(group: KernelGroup, tiles: Tiles) -> RProgram:
    names = {role: group.space.role(role)[0] for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER)}
    columns = tiles.columns or -(-names[AxisRole.N].extent // 16) * 16
    features = -(-names[AxisRole.INNER].extent // 16) * 16

    def tile(rows: int) -> RTile:
        of_role = dict(zip(names, (rows, columns, tiles.keys, features), strict=True))
        return RTile(tuple((axis.name, of_role.get(axis.role, 1)) for axis in group.space.axes))

    assert group.attention is not None
    on = unit(HOPPER, "wgmma_f16" if group.attention.dtype is DType.FLOAT16 else "wgmma_bf16")
    return RProgram(
        group.space,
        on,
        tile(64 * tiles.consumers),
        tile(64),
        reduce_threads=128,
        pipeline=PipelineOptions(tiles.stages, persistent_blocks=tiles.blocks),
    )


def planned(case: Case, tiles: Tiles) -> tuple[TensorProgram, KernelGroup, Plan]:
    compute = program(*case)
    (group,) = partition(compute, HOPPER)
    return compute, group, Plan((chosen(tiled(group, tiles)),))


def kernel(case: Case, tiles: Tiles) -> tuple[TensorProgram, KernelSource]:
    compute, group, plan = planned(case, tiles)
    return compute, emit_plan(plan, compute, (group,), HOPPER)


def tree(case: Case, tiles: Tiles) -> ScheduleTree:
    _, group, plan = planned(case, tiles)
    (found,) = lower(group, plan.choices[0].program, HOPPER)
    return found


def judge(case: Case, tiles: Tiles, change: Change = lambda _: None, *, races: bool = False) -> Arrays:
    return judged(*kernel(case, tiles), change, races=races)


def narrow(case: Case) -> Case:
    """36 features: rows of 72 bytes, which TMA does not take and cp.async does."""
    return case[0], {name: said.removesuffix("32") + "36" for name, said in case[1].items()}


CAUSAL = ", causal=1"
CASES = {
    "whole tiles": (operator("2, 1", "128, 64", "32, 32"), Tiles()),
    "odd lengths": (operator("2, 1", "37, 53", "32, 32"), Tiles()),
    "causal, more keys than queries": (operator("2, 1", "150, 190", "32, 32", more=CAUSAL), Tiles(stages=3)),
    "one consumer": (operator("1, 1", "70, 60", "64, 64", dtype="bfloat16"), Tiles(1, 48)),
    "seven heads share keys": (operator("7, 1", "30, 100", "80, 80"), Tiles(3)),
    "two panels": (operator("1, 1", "70, 200", "128, 128"), Tiles(keys=64)),
    "256 features": (operator("1, 1", "33, 50", "256, 256"), Tiles(1, 16)),
    "columns in parts": (operator("1, 1", "33, 50", "32, 64"), Tiles(columns=32)),
    "mask": (operator("2, 1", "37, 53", "32, 32", mask="37 53"), Tiles()),
    "mask of heads, causal": (operator("2, 1", "37, 53", "32, 32", mask="2 1 1 53", more=CAUSAL), Tiles()),
    "finite scores under the mask": (written(FILLED.format("j <= i", -60000.0), 2, 4, 150, 150), Tiles()),
    "rows that see no key": (written(FILLED.format("j < i - 20", -60000.0), 2, 4, 150, 150), Tiles()),
    "near scores under the mask": (written(FILLED.format("j <= i", 1.0), 2, 4, 100, 100), Tiles(stages=3)),
    "window": (written(FILLED.format("j <= i, j > i - 20", -60000.0), 1, 2, 150, 150), Tiles(keys=16)),
    "blocks that stay": (operator("6, 3", "150, 53", "32, 32"), Tiles(blocks=3)),
    "one block stays": (operator("2, 1", "300, 100", "64, 64"), Tiles(stages=3, blocks=1)),
    "copied by threads": (operator("2, 1", "70, 150", "36, 36", more=CAUSAL), Tiles(stages=3)),
    "copied by threads, blocks that stay": (operator("2, 1", "70, 53", "36, 36"), Tiles(blocks=2)),
    "copied by threads, a second pass": (
        narrow(written(FILLED.format("j < i - 20", -60000.0), 2, 4, 100, 100)), Tiles(),
    ),
    "values copied by threads": (operator("2, 1", "70, 150", "64, 36"), Tiles(stages=3)),
    "queries and keys copied by threads": (operator("2, 1", "70, 150", "36, 64"), Tiles(stages=3, blocks=1)),
    "sixteen heads share keys, rows beyond the end": (
        written(FILLED.format("j <= i + 40", -60000.0), 16, 32, 20, 60), Tiles()
    ),
    "normalised before": ((NORMALISED, flat()), Tiles()),
    "scaled below": ((SCALED_BELOW, flat("bfloat16")), Tiles()),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", every(2, CASES))
def test_kernel_agrees_with_the_interpreter(name: str) -> None:
    judge(*CASES[name])


RACING = (
    "sixteen heads share keys, rows beyond the end",
    "causal, more keys than queries", "rows that see no key", "blocks that stay", "copied by threads, a second pass",
    "values copied by threads", "queries and keys copied by threads",
)  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", every(2, RACING))
def test_kernels_have_no_data_races(name: str) -> None:
    judge(*CASES[name], races=True)


@pytest.mark.emulator
def test_rows_without_a_finite_score_are_nan_and_late_ones_are_not() -> None:
    check_rows_without_a_finite_score(lambda change: judge(MASKED, Tiles(), change))


@pytest.mark.emulator
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nan_and_infinite_scores_affect_only_their_row(value: float) -> None:
    check_a_score_of(value, lambda change: judge(MASKED, Tiles(), change))


@pytest.mark.emulator
@pytest.mark.parametrize("score", [-1e4, -1e30, -3.4e38])
def test_tiles_with_large_negative_scores_do_not_count(score: float) -> None:
    check_tiles_with_large_negative_scores(score, lambda change: judge(FLOAT_MASK, Tiles(), change))


# trees ----------------------------------------------------------------------------------------------------------------
def weights_packed_early(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Before the products that read the old ones have been awaited."""
    packs = [node for node in iter_nodes(nodes) if isinstance(node, PackFragment)]
    return changed(nodes, lambda node: (packs[0], node) if node == WgmmaWaitGroup(0, ACC) else None)


@pytest.mark.parametrize("name", CASES)
def test_trees_are_legal(name: str) -> None:
    found = tree(*CASES[name])
    check(found.body)
    assert "await products, 1 pending" in render(found.body)
    products = [node for node in iter_nodes(found.body) if isinstance(node, WarpgroupMma)]
    assert {isinstance(node.a, RegisterMatrix) for node in products} == {True, False}
    loaded = {node.tensor_map for node in iter_nodes(found.body) if isinstance(node, TmaLoad | TmaStore)}
    assert loaded == {map_.symbol for map_ in found.tensor_maps}
    assert ("copied by threads" in name) == any(isinstance(node, CpAsync) for node in iter_nodes(found.body))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[("whole tiles", kind) for kind in (MbarrierInit, MbarrierWait, WgmmaWaitGroup, WgmmaCommitGroup)],
        ("whole tiles", WgmmaFence),
        *[("copied by threads", kind) for kind in (CpAsyncWaitGroup, FenceProxyAsync)],
    ],
)
def test_broken_tree_is_rejected(name: str, kind: type) -> None:
    with pytest.raises(ScheduleError) as refused:
        check(changed(tree(*CASES[name]).body, without(kind)))
    assert refused.value.code == "schedule-order"


def test_wgmma_owns_the_probabilities_it_reads() -> None:
    with pytest.raises(ScheduleError, match=r"is written before wgmma\.wait_group"):
        check(weights_packed_early(tree(*CASES["whole tiles"]).body))


def test_qk_is_awaited_before_row_max() -> None:
    late = changed(
        tree(*CASES["whole tiles"]).body,
        lambda node: (WgmmaWaitGroup(2),) if node == WgmmaWaitGroup(1, ".scores") else None,
    )
    with pytest.raises(ScheduleError, match=r"is read before wgmma\.wait_group"):
        check(late)


def test_persistent_blocks_reject_masks() -> None:
    with pytest.raises(InvariantError, match="do not support masks"):
        tree(CASES["causal, more keys than queries"][0], Tiles(blocks=2))


def holds(cond: Expr | None, known: dict[str, int]) -> bool:
    """Whether comparisons hold together."""

    def value(expr: Expr) -> int:
        found = fold(substitute(expr, {name: num(number) for name, number in known.items()}), {})
        assert isinstance(found, Const), found
        return int(found.value)

    def compared(part: Expr) -> bool:
        assert isinstance(part, Op)
        assert part.kind in (OpKind.LT, OpKind.LE)
        a, b = (value(arg) for arg in part.args)
        return a < b or (a == b and part.kind is OpKind.LE)

    return all(compared(part) for part in conjuncts(cond))


@pytest.mark.parametrize("cond", MASKS)
def test_unmasked_tiles_are_fully_visible(cond: str) -> None:
    text, inputs = written(f"s[b, h, i, j].when([{cond}], -60000.0)", 3, 6, 40, 50)
    (group,) = partition(program(text, inputs), HOPPER)
    found = tiled(group, Tiles(consumers=1, keys=16))
    tile = wgmma_attention_tile(found, wgmma_attention_facts(group, found.unit, HOPPER.arch))
    (rows,), (keys,) = group.space.role(AxisRole.M), group.space.role(AxisRole.K)
    exact = exact_bounds(group)
    assert (exact is None) == ("2 *" in cond)
    kv_loop = KvTileLoop(tile, rows, keys, key_bounds(group))
    for block in range(2):
        last = min(rows.extent, 64 * block + 64)
        for step in range(4):
            unmasked = all(
                j < 50 and MASKS[cond](row // 3, j) for row in range(64 * block, last) for j in range(16 * step, 16 * step + 16)
            )
            assert exact is None or holds(kv_loop.is_unmasked(num(step), exact), {"m.block": block}) == unmasked


# choice ---------------------------------------------------------------------------------------------------------------
def test_the_model_expects_warpgroups_to_be_faster_where_there_are_many_rows() -> None:
    compute = program(LLAMA, LLAMA_INPUTS)
    groups, ranked, _ = rank_best_partition(compute, HOPPER, 4)
    (found,) = summarize_kernels(groups, best_plans(ranked, 1)[0], HOPPER)
    assert (found["kind"], found["family"]) == ("attention", "wgmma")
    assert [operand["load"] for operand in found["operands"]] == ["tma"] * 3
    _, on_warps, _ = rank_best_partition(compute, HOPPER, 1, ScheduleConstraints(op_class=OpClass.MMA))
    assert on_warps[0][0].program.unit.takes_fragments
    assert on_warps[0][0].estimate.seconds > ranked[0][0].estimate.seconds


def test_one_row_stays_on_warps_whose_blocks_share_the_keys() -> None:
    decode = operator("8, 2", "1, 4096", "128, 128")
    _, ranked, _ = rank_best_partition(program(*decode), HOPPER, 1)
    assert ranked[0][0].program.unit.takes_fragments
    assert ranked[0][0].program.split_k > 1


def test_one_row_is_rejected_as_all_warps_would_write_it() -> None:
    decode = program(*operator("4, 4", "1, 64", "64, 64"))
    (group,) = partition(decode, HOPPER)
    with pytest.raises(NoCandidateError, match="one row, which the warps would all write"):
        rank_units(group, HOPPER, 1, ScheduleConstraints(op_class=OpClass.WGMMA))
    _, ranked, _ = rank_best_partition(decode, HOPPER, 1)
    assert ranked[0][0].program.unit.takes_fragments


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        ((("split_k", 2),), "share"),
        ((("cluster_m", 2),), "clusters"),
        ((("blocks", 4),), "under a mask"),
        ((("raster", 2),), "one order"),
        ((("stages", 40),), "shared memory"),
    ],
)
def test_unsupported_attention_is_rejected(tiles: tuple[tuple[str, int], ...], reason: str) -> None:
    (group,) = partition(program(LLAMA, LLAMA_INPUTS), HOPPER)
    with pytest.raises(NoCandidateError, match=reason):
        rank_units(group, HOPPER, 1, ScheduleConstraints(op_class=OpClass.WGMMA, tiles=tiles))


def test_operands_through_registers_use_mma_attention() -> None:
    odd = program(*operator("1, 1", "200, 300", "9, 11"))
    (group,) = partition(odd, HOPPER)
    with pytest.raises(NoCandidateError, match="queries and keys and values through registers"):
        rank_units(group, HOPPER, 1, ScheduleConstraints(op_class=OpClass.WGMMA))
    groups, ranked, _ = rank_best_partition(odd, HOPPER, 1)
    assert any(choices[0].program.unit.takes_fragments for g, choices in zip(groups, ranked, strict=True) if g.attention)


def test_every_tile_fits_the_device_and_no_estimate_is_below_its_roofline() -> None:
    compute = program(LLAMA, LLAMA_INPUTS)
    (group,) = partition(compute, HOPPER)
    on = unit(HOPPER, "wgmma_f16")
    programs = construct(group, HOPPER, on).programs
    assert {p.block[group.space.role(AxisRole.M)[0].name] for p in programs} == {64, 128, 192}
    family, workload = prepare(group, HOPPER, on)
    model, limits = family.model(workload), HOPPER.limits
    for found in programs:
        needs = model.resources(found)
        assert needs is not None
        assert needs.shared_bytes <= limits.shared_bytes_per_block
        assert block_registers(needs.threads, needs.registers_per_thread, limits) <= limits.registers_per_core
        assert model.estimate(found).seconds >= workload.lower_bound_s
    best = estimate_program(PartitionCache(compute), HOPPER)
    assert best.plans[0].estimate.seconds >= max(roof.seconds for roof in best.roofline)


def test_unmasked_attention_is_persistent() -> None:
    on = unit(HOPPER, "wgmma_f16")
    for more, stays in ((", causal=0", True), (CAUSAL, False)):
        (group,) = partition(program(*operator("32, 8", "2048, 2048", "64, 64", more=more)), HOPPER)
        assert all((p.pipeline.persistent_blocks > 0) == stays for p in construct(group, HOPPER, on).programs)


# compiled -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        ((LLAMA, LLAMA_INPUTS), Tiles(2, 128)),
        (operator("8, 8", "512, 512", "64, 64"), Tiles(3, 112, 3, blocks=132)),
        (operator("8, 4", "500, 512", "256, 256", dtype="bfloat16", more=CAUSAL), Tiles(2, 64)),
        (operator("2, 1", "300, 500", "36, 36"), Tiles(2, 128)),
    ],
)
def test_kernels_do_not_spill_and_wgmma_overlaps(case: Case, tiles: Tiles) -> None:
    compute, group, plan = planned(case, tiles)
    compiled = compile_source(emit_plan(plan, compute, (group,), HOPPER))
    assert ptxas_warnings(compiled.log) == ()
    (report,) = lint([PlannedKernel(compiled, plan, (group,))], HOPPER)
    assert report.findings == ()
