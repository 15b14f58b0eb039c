"""Attention as one kernel: matching, tiles, cost model, emulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases_hip import MI50, MI250X, built, needs_hipcc
from cases_matrix import AMPERE, TURING, chosen, unit
from sampling import every

from roller_svc import hardware, toolchain
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import best_plans, estimate_program, rank_best_partition
from roller_svc.errors import NoCandidateError, require
from roller_svc.families import prepare
from roller_svc.families.common.gpu.attention.mask import exact_bounds, key_bounds, unmasked_keys, visible_keys
from roller_svc.families.common.gpu.attention.tile import mma_attention_tile, prepare_attention_operands
from roller_svc.frontend.parse import parse
from roller_svc.ir.attention import mask, unmasked
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Load
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.verify.kernel_stats import summarize_kernels

Inputs = Mapping[str, str]
Arrays = dict[str, np.ndarray[Any, Any]]
Change = Callable[[Arrays], None]  # of the inputs, in place

SOFTMAX = (
    "s[b, h, i, j] +=! q[b, h, i, d] * k[b, h{group}, j, d]; p[b, h, i, j] = {score};"
    "high[b, h, i] >=! p[b, h, i, j]; e[b, h, i, j] = exp(p[b, h, i, j] - high[b, h, i]);"
    "z[b, h, i] +=! e[b, h, i, j]; y[b, h, i, d] +=! e[b, h, i, j] * v[b, h{group}, j, d];"
    "o[b, h, i, d] = y[b, h, i, d] / z[b, h, i]"
)
NORMALISED = (  # before the second contraction, scores written twice, axes of other names
    "s[h, i, j] +=! q[h, i, d] * k[h, j, d]; t[a, x, y] = s[a, x, y] * 0.2; high[h, i] >=! t[h, i, j];"
    "z[h, i] +=! exp(t[h, i, j] - high[h, i]); w[h, i, j] = exp(t[h, i, j] - high[h, i]) / z[h, i];"
    "o[h, i, e] +=! w[h, i, j] * v[h, j, e]"
)
SCALED_BELOW = (  # the scale behind the difference, values divided one by one
    "s[h, i, j] +=! q[h, i, d] * k[h, j, d]; m[h, i] >=! s[h, i, j]; e[h, i, j] = exp((s[h, i, j] - m[h, i]) * 0.125);"
    "z[h, i] +=! e[h, i, j]; o[h, i, d] +=! e[h, i, j] * v[h, j, d] / z[h, i]"
)


def program(text: str, inputs: Inputs, outputs: tuple[str, ...] | None = None) -> TensorProgram:
    types = {}
    for name, said in inputs.items():
        dtype, *shape = said.split()
        types[name] = TensorType(DType(dtype), tuple(map(int, shape)))
    return parse(text, types, outputs)


def operator(
    heads: str, lengths: str, features: str, *, dtype: str = "float16", mask: str = "", more: str = ""
) -> tuple[str, Inputs]:
    """The named operator: 'q heads, k heads', 'queries, keys', 'of q and k, of v'."""
    (h, g), (i, j), (d, e) = (map(int, said.split(",")) for said in (heads, lengths, features))
    inputs = {"q": f"{dtype} 2 {h} {i} {d}", "k": f"{dtype} 2 {g} {j} {d}", "v": f"{dtype} 2 {g} {j} {e}"}
    if mask:
        inputs["m"] = f"{dtype} {mask}"
    return f"o = attention(q, k, v{', m' if mask else ''}{more})", inputs


def written(score: str, group: int, heads: int, queries: int, keys: int) -> tuple[str, Inputs]:
    """Statement by statement, `group` heads sharing keys, 32 features."""
    text = SOFTMAX.format(score=score, group=f" // {group}" if group > 1 else "")
    sizes = f"{keys} 32"
    return text, {
        "q": f"float16 1 {heads} {queries} 32",
        "k": f"float16 1 {heads // group} {sizes}",
        "v": f"float16 1 {heads // group} {sizes}",
    }


def flat(dtype: str = "float16") -> Inputs:
    return {"q": f"{dtype} 3 40 64", "k": f"{dtype} 3 50 64", "v": f"{dtype} 3 50 64"}


def kinds(text: str, inputs: Inputs, outputs: tuple[str, ...] | None = None) -> list[str]:
    return [group.kind.value for group in partition(program(text, inputs, outputs), AMPERE)]


# what is recognised ---------------------------------------------------------------------------------------------------
PLAIN = written("s[b, h, i, j] * 0.2", 2, 4, 20, 30)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        PLAIN,
        written("(s[b, h, i, j] * 0.2).when([j <= i], -60000.0)", 1, 2, 20, 20),
        operator("6, 3", "20, 30", "16, 24", mask="20 30", more=", causal=1"),
        (NORMALISED, flat()),
        (SCALED_BELOW, flat("bfloat16")),
    ],
)
def test_attention_is_one_kernel(text: str, inputs: Inputs) -> None:
    assert kinds(text, inputs) == ["attention"]


def test_maps_of_results_go_with_it_and_other_products_do_not() -> None:
    text = f"{PLAIN[0]}; r[b, h, i, d] = relu(o[b, h, i, d]); w[b, i, f] +=! r[b, h, i, d] * u[h, d, f]"
    assert kinds(text, {**PLAIN[1], "u": "float16 4 32 16"}) == ["attention", "contraction"]


def test_what_a_product_divides_by_the_sum_is_divided_at_once() -> None:
    quotient = "y[b, h, i, d] / z[b, h, i]"
    text = PLAIN[0].replace(f"o[b, h, i, d] = {quotient}", f"w[b, i, f] +=! {quotient} * u[h, d, f]")
    assert kinds(text, {**PLAIN[1], "u": "float16 4 32 16"}) == ["attention", "contraction"]


@pytest.mark.parametrize(
    ("old", "new", "outputs"),
    [
        ("", "", ("o", "p")),  # scores are wanted
        ("p[b, h, i, j] - high[b, h, i])", "high[b, h, i] - p[b, h, i, j])", None),
        ("exp(p[b, h, i, j] - high[b, h, i])", "exp((p[b, h, i, j] - high[b, h, i]) * -1.0)", None),
        ("high[b, h, i] >=!", "high[b, h, i] <=!", None),
        ("e[b, h, i, j] * v", "(e[b, h, i, j] + 1.0) * v", None),
        ("z[b, h, i] +=! e[b, h, i, j]", "z[b, h, i] +=! exp(p[b, h, i, j] * 0.5 - high[b, h, i])", None),
    ],
)
def test_other_groups_stay_several_kernels(old: str, new: str, outputs: tuple[str, ...] | None) -> None:
    text = PLAIN[0].replace(old, new)
    assert old == "" or text != PLAIN[0]
    assert "attention" not in kinds(text, PLAIN[1], outputs)


@pytest.mark.parametrize(
    ("score", "scale", "fill"),
    [
        ("s[b, h, i, j] * 0.125", 0.125, None),
        ("s[b, h, i, j] / 4.0", 0.25, None),
        ("(s[b, h, i, j] * 0.125).when([j <= i], -1000.0)", 0.125, -8000.0),
        ("(s[b, h, i, j] * 0.125).when([j <= i], -3e38)", 1.0, -3e38),  # -24e38 is no float32
        ("s[b, h, i, j] * -0.125", 1.0, None),
    ],
)
def test_a_constant_factor_of_scores_is_part_of_the_scale(score: str, scale: float, fill: float | None) -> None:
    text, inputs = written(score, 1, 2, 20, 20)
    types = {name: type_.replace("float16", "bfloat16") for name, type_ in inputs.items()}
    (group,) = partition(program(text, types), AMPERE)
    attention = require(group.attention, "attention")
    assert attention.scale == pytest.approx(scale)
    hidden = mask(attention)
    assert (None if hidden is None else hidden.fill_value) == fill
    assert isinstance(unmasked(attention), Load) is (scale != 1.0)


def test_float32_and_devices_without_asynchronous_copies_keep_several_kernels() -> None:
    assert "attention" not in kinds(NORMALISED, flat("float32"))
    assert all(g.attention is None for hw in (TURING, MI50) for g in partition(program(*PLAIN), hw))


def test_gqa_heads_are_rows_and_masked_axes_are_outermost() -> None:
    (group,) = partition(program(*written("s[b, h, i, j].when([j <= i], -9.0)", 3, 6, 20, 20)), AMPERE)
    axes = {role: [(a.name, a.extent) for a in group.space.role(role)] for role in AxisRole}
    assert axes[AxisRole.BATCH] == [("h.0", 2)]
    assert axes[AxisRole.M] == [("i_h.1", 60)]
    assert axes[AxisRole.K] == [("j", 20)]
    assert [extent for _, extent in axes[AxisRole.INNER]] == [32]


MASKS: dict[str, Callable[[int, int], bool]] = {
    "j <= i": lambda i, j: j <= i,
    "j < i + 7": lambda i, j: j < i + 7,
    "j <= i, j > i - 9": lambda i, j: i - 9 < j <= i,
    "i - j >= 3": lambda i, j: i - j >= 3,
    "3 * i >= j": lambda i, j: 3 * i >= j,
    "2 * j <= i": lambda i, j: 2 * j <= i,  # no bound is found: all keys are seen
}


@pytest.mark.parametrize("cond", MASKS)
def test_visible_keys_cover_the_unmasked_ones(cond: str) -> None:
    text, inputs = written(f"s[b, h, i, j].when([{cond}], -60000.0)", 3, 6, 40, 50)
    (group,) = partition(program(text, inputs), AMPERE)
    bounds, (rows,) = key_bounds(group), group.space.role(AxisRole.M)
    for first in range(0, rows.extent, 16):
        last = min(rows.extent, first + 16) - 1
        begin, end = visible_keys(bounds, rows, 50, first, last)
        unmasked = [j for j in range(50) for row in range(first, last + 1) if MASKS[cond](row // 3, j)]
        assert all(begin <= j < end for j in unmasked)
        assert begin == 0
        if "2 *" not in cond and unmasked:
            assert end == max(unmasked) + 1


@pytest.mark.parametrize("cond", [cond for cond in MASKS if cond != "2 * j <= i"])
def test_keys_that_no_row_masks_are_those_of_the_condition(cond: str) -> None:
    text, inputs = written(f"s[b, h, i, j].when([{cond}], -60000.0)", 3, 6, 40, 50)
    (group,) = partition(program(text, inputs), MI250X)
    bounds, (rows,) = require(exact_bounds(group), "bounds"), group.space.role(AxisRole.M)
    for first in range(0, rows.extent, 16):
        last = min(rows.extent, first + 16) - 1
        begin, end = unmasked_keys(bounds, rows, 50, first, last)
        kept = [j for j in range(50) if all(MASKS[cond](row // 3, j) for row in range(first, last + 1))]
        assert kept == list(range(begin, end))


@pytest.mark.parametrize("cond", [cond for cond in MASKS if cond != "2 * j <= i"])
def test_operations_are_those_of_keys_up_to_the_last_that_a_row_keeps(cond: str) -> None:
    text, inputs = written(f"s[b, h, i, j].when([{cond}], -60000.0)", 2, 4, 40, 50)
    (group,) = partition(program(text, inputs), AMPERE)
    seen = sum(max((j + 1 for j in range(50) if MASKS[cond](i, j)), default=0) for i in range(40))
    expected = 4 * seen * 2 * (32 + 32)  # of four heads: products with keys and with values, of 32 features each
    found = prepare(group, AMPERE, unit(AMPERE, "mma_f16"))[1].operations
    assert abs(found / expected - 1) < 0.03  # blocks of rows are sampled


# the kernel -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tiles:
    """Rows and keys of a block and of a warp; columns of a block: None is all of them."""

    rows: int = 32
    keys: int = 32
    warp_rows: int = 16
    warp_keys: int = 32
    columns: int | None = None
    stages: int = 2
    parts: int = 1


def tiled(group: KernelGroup, tiles: Tiles, hw: HardwareSpec = AMPERE) -> RProgram:
    names = {role: group.space.role(role)[0] for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER)}
    columns = tiles.columns or -(-names[AxisRole.N].extent // 16) * 16
    features = -(-names[AxisRole.INNER].extent // 16) * 16

    def tile(rows: int, keys: int) -> RTile:
        of_role = dict(zip(names, (rows, columns, keys, features), strict=True))
        return RTile(tuple((axis.name, of_role.get(axis.role, 1)) for axis in group.space.axes))

    assert group.attention is not None
    kind = "mma" if hw is AMPERE else "mfma"
    on = unit(hw, f"{kind}_f16" if group.attention.dtype is DType.FLOAT16 else f"{kind}_bf16")
    return RProgram(
        group.space,
        on,
        tile(tiles.rows, tiles.keys),
        tile(tiles.warp_rows, tiles.warp_keys),
        reduce_threads=hw.limits.warp_size * tiles.keys // tiles.warp_keys,
        split_k=tiles.parts,
        pipeline=PipelineOptions(tiles.stages),
    )


def kernel(case: tuple[str, Inputs], tiles: Tiles, hw: HardwareSpec = AMPERE) -> tuple[TensorProgram, KernelSource]:
    compute = program(*case)
    groups = partition(compute, hw)
    (group,) = groups
    return compute, emit_plan(Plan((chosen(tiled(group, tiles, hw)),)), compute, groups, hw)


def judge(
    case: tuple[str, Inputs],
    tiles: Tiles,
    change: Change = lambda _: None,
    *,
    races: bool = False,
    hw: HardwareSpec = AMPERE,
) -> Arrays:
    return judged(*kernel(case, tiles, hw), change, races=races)


def judged(compute: TensorProgram, source: KernelSource, change: Change, *, races: bool) -> Arrays:
    """The kernel's results, once they agree with the interpreter's."""
    arrays = {name: np.array(array) for name, array in random_inputs(compute, seed=3).items()}
    change(arrays)
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=races).run(arrays)
    with np.errstate(all="ignore"):
        agreement = agrees(compute, got, evaluate(compute, arrays))
    assert agreement.ok, agreement.detail
    return got


FILLED = "(s[b, h, i, j] * 0.2).when([{}], {})"
CASES = {
    "whole tiles": (operator("2, 1", "32, 64", "32, 32"), Tiles()),
    "odd lengths": (operator("2, 1", "37, 53", "32, 32"), Tiles()),
    "causal, more keys than queries": (operator("2, 1", "37, 90", "32, 32", more=", causal=1"), Tiles(stages=3)),
    "two fragments of rows": (operator("1, 1", "70, 60", "48, 48", dtype="bfloat16"), Tiles(64, 32, 32, 32)),
    "seven heads share keys": (operator("7, 1", "1, 150", "80, 80"), Tiles(16, 32, 16, 32, parts=3)),
    "256 features": (operator("1, 1", "33, 50", "256, 256"), Tiles(32, 16, 16, 16)),
    "odd features": (operator("1, 1", "20, 37", "9, 11", more=", causal=1"), Tiles(16, 16, 16, 16)),
    "columns in parts": (operator("1, 1", "33, 50", "32, 64"), Tiles(columns=32)),
    "keys shared by warps": (operator("8, 2", "1, 150", "32, 40"), Tiles(16, 64, 16, 16)),
    "keys shared by warps and blocks": (operator("8, 2", "1, 250", "32, 40"), Tiles(16, 64, 16, 32, parts=2)),
    "mask": (operator("2, 1", "37, 53", "32, 32", mask="37 53", more=", causal=0"), Tiles()),
    "mask of heads, causal": (operator("2, 1", "37, 53", "32, 32", mask="2 1 1 53", more=", causal=1"), Tiles()),
    "finite scores under the mask": (written(FILLED.format("j <= i", -60000.0), 2, 4, 60, 60), Tiles()),
    "the same, keys shared": (written(FILLED.format("j <= i + 9", -60000.0), 2, 4, 60, 69), Tiles(parts=2)),
    "rows that see no key": (written(FILLED.format("j < i - 20", -60000.0), 2, 4, 60, 60), Tiles()),
    "near scores under the mask": (written(FILLED.format("j <= i", 1.0), 2, 4, 60, 60), Tiles()),
    "window": (written(FILLED.format("j <= i, j > i - 20", -60000.0), 1, 2, 60, 60), Tiles(32, 16, 16, 16)),
    "normalised before": ((NORMALISED, flat()), Tiles()),
    "scaled below": ((SCALED_BELOW, flat()), Tiles()),
}  # fmt: skip


@pytest.mark.emulator
@pytest.mark.parametrize("name", every(2, CASES))
def test_kernel_agrees_with_the_interpreter(name: str) -> None:
    judge(*CASES[name])


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["causal, more keys than queries", "rows that see no key", "keys shared by warps"])
def test_kernels_have_no_data_races(name: str) -> None:
    judge(*CASES[name], races=True)


@pytest.mark.emulator
@pytest.mark.parametrize("name", every(4, CASES))
def test_mfma_kernels_agree_with_the_interpreter_without_races(name: str) -> None:
    judge(*CASES[name], hw=MI250X, races=True)


MASKED = operator("1, 1", "40, 90", "32, 32", mask="40 90")


def check_rows_without_a_finite_score(judge: Callable[[Change], Arrays]) -> None:
    """`judge`: results for MASKED."""

    def change(arrays: Arrays) -> None:
        arrays["m"][:, :40] = -math.inf
        arrays["m"][3, :] = -math.inf

    got = judge(change)["o"].astype(np.float32)
    assert np.isnan(got[:, :, 3]).all()
    assert not np.isnan(np.delete(got, 3, axis=2)).any()


def check_a_score_of(value: float, judge: Callable[[Change], Arrays]) -> None:
    """`judge`: results for MASKED."""

    def change(arrays: Arrays) -> None:
        arrays["m"][5, 70] = value

    got = judge(change)["o"].astype(np.float32)
    assert np.isnan(got[:, :, 5]).all()
    assert not np.isnan(np.delete(got, 5, axis=2)).any()


FLOAT_MASK = (
    "s[i, j] +=! q[i, d] * k[j, d]; p[i, j] = s[i, j].cast(`float32`) * 0.2 + m[i, j]; high[i] >=! p[i, j];"
    "e[i, j] = exp(p[i, j] - high[i]); z[i] +=! e[i, j]; y[i, d] +=! (e[i, j] / z[i]).cast(`float16`) * v[j, d]",
    {"q": "float16 40 32", "k": "float16 90 32", "v": "float16 90 32", "m": "float32 40 90"},
)


def check_tiles_with_large_negative_scores(score: float, judge: Callable[[Change], Arrays]) -> None:
    """`judge`: results for FLOAT_MASK. Keys from 40 on are seen, those before vanish, as after padding on the left."""

    def change(arrays: Arrays) -> None:
        arrays["m"][:, :40] = score
        arrays["m"][3, :] = score  # the row's scores are equal: it is the mean of v

    got = judge(change)["y"].astype(np.float32)
    assert np.isfinite(got).all()


@pytest.mark.emulator
@pytest.mark.parametrize("score", [-1e4, -1e30, -3.4e38])
@pytest.mark.parametrize("parts", [1, 3])
def test_tiles_with_large_negative_scores_do_not_count(score: float, parts: int) -> None:
    check_tiles_with_large_negative_scores(score, lambda change: judge(FLOAT_MASK, Tiles(parts=parts), change))


@pytest.mark.emulator
@pytest.mark.parametrize(("hw", "parts"), [(AMPERE, 1), (AMPERE, 3), (MI250X, 1)])
def test_rows_without_a_finite_score_are_nan_and_late_ones_are_not(hw: HardwareSpec, parts: int) -> None:
    check_rows_without_a_finite_score(lambda change: judge(MASKED, Tiles(parts=parts), change, hw=hw))


@pytest.mark.emulator
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_nan_and_infinite_scores_affect_only_their_row(value: float) -> None:
    check_a_score_of(value, lambda change: judge(MASKED, Tiles(), change))


@pytest.mark.emulator
def test_masked_values_are_not_read() -> None:
    """KV tiles beyond the diagonal are skipped, even if the statements would multiply NaN by 0."""
    compute, source = kernel(operator("1, 1", "64, 64", "32, 32", more=", causal=1"), Tiles())
    arrays = {name: np.array(array) for name, array in random_inputs(compute, seed=3).items()}
    arrays["v"][:, :, 32:] = math.nan
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1).run(arrays)["o"].astype(np.float32)
    assert not np.isnan(got[:, :, :32]).any()
    assert np.isnan(got[:, :, 32:]).all()


@needs_hipcc
@pytest.mark.parametrize(("features", "dtype"), every(8, [(d, t) for d in (128, 64, 72, 256) for t in ("float16", "bfloat16")]))
def test_the_models_choice_on_mfma_spills_nothing(features: int, dtype: str) -> None:
    types = dict.fromkeys("QKV", (dtype, (1, 8, 1000, features)))
    winner = built("Y = attention(Q, K, V, causal=1)", types, "amd-mi250x").winner
    assert winner.compiled is not None
    assert "__builtin_amdgcn_mfma" in winner.source.text
    assert not any(used.spill_bytes for used in winner.compiled.resources)


@needs_hipcc
def test_shared_memory_of_mfma_kernels_is_that_of_the_rules() -> None:
    for name in ("whole tiles", "finite scores under the mask"):
        case, tiles = CASES[name]
        compute = program(*case)
        (group,) = partition(compute, MI250X)
        chosen_tile = tiled(group, tiles, MI250X)
        needs = mma_attention_tile(chosen_tile, prepare_attention_operands(group, chosen_tile.unit, MI250X.arch))
        (used,) = toolchain.compile_source(kernel(case, tiles, MI250X)[1]).resources
        assert used.shared_bytes == needs.shared_bytes


# choice ---------------------------------------------------------------------------------------------------------------
LLAMA = SOFTMAX.format(score="(s[b, h, i, j] * 0.088).when([j <= i], -60000.0)", group=" // 4")
LLAMA_INPUTS = {"q": "float16 1 32 1024 128", "k": "float16 1 8 1024 128", "v": "float16 1 8 1024 128"}


def test_the_model_expects_one_kernel_to_be_faster() -> None:
    compute = program(LLAMA, LLAMA_INPUTS)
    groups, ranked, _ = rank_best_partition(compute, AMPERE, 4)
    (group,) = groups
    assert group.attention is not None
    _, apart = PartitionCache(compute).partitions(AMPERE)
    assert len(apart) > 1
    (found,) = summarize_kernels(groups, best_plans(ranked, 1)[0], AMPERE)
    assert (found["kind"], found["family"]) == ("attention", "mma")
    assert [operand["load"] for operand in found["operands"]] == ["async16"] * 3


def test_scalar_lanes_compute_attention_in_several_kernels() -> None:
    constraints = ScheduleConstraints(op_class=OpClass.SIMT)
    groups, _, _ = rank_best_partition(program(LLAMA, LLAMA_INPUTS), AMPERE, 1, constraints)
    assert all(group.attention is None for group in groups)


def test_kv_split_constraint_is_met() -> None:
    groups, ranked, _ = rank_best_partition(program(LLAMA, LLAMA_INPUTS), AMPERE, 1, ScheduleConstraints(tiles=(("split_k", 2),)))
    assert groups[0].attention is not None
    assert ranked[0][0].program.split_k == 2
    with pytest.raises(NoCandidateError):
        rank_best_partition(
            program(LLAMA, LLAMA_INPUTS),
            AMPERE,
            1,
            ScheduleConstraints(op_class=OpClass.MMA, tiles=(("split_k", 10**6),)),
        )


def test_a_mask_makes_it_faster_and_no_estimate_is_below_its_roofline() -> None:
    whole = LLAMA.replace(".when([j <= i], -60000.0)", "")
    times = {}
    for text in (LLAMA, whole):
        found = estimate_program(PartitionCache(program(text, LLAMA_INPUTS)), AMPERE)
        times[text] = found.plans[0].estimate.seconds
        assert times[text] >= max(roof.seconds for roof in found.roofline)
    assert times[LLAMA] < 0.75 * times[whole]


@pytest.mark.parametrize("spec", hardware.shipped_specs(), ids=lambda spec: spec.id)
def test_every_device_has_an_estimate(spec: HardwareSpec) -> None:
    seconds = estimate_program(PartitionCache(program(LLAMA, LLAMA_INPUTS)), spec).plans[0].estimate.seconds
    assert 0 < seconds < 10


def test_construction_tells_the_bytes_that_each_step_moves() -> None:
    _, _, (construction,) = rank_best_partition(program(LLAMA, LLAMA_INPUTS), AMPERE, 1)
    visits = [visit for search in construction.searches for visit in search.visits]
    assert visits
    assert all(0 < visit.metrics.traffic < math.inf for visit in visits)


PUBLISHED = [  # of FlashAttention-2, which uses `mma.sync`, on an H100: arXiv:2407.08608, figure 5
    ((4, 32, 4096, 64), 1, 968e-6),
    ((1, 32, 16384, 64), 1, 3677e-6),
    ((4, 16, 4096, 128), 0, 1494e-6),
    ((1, 16, 16384, 128), 1, 3282e-6),
]


@pytest.mark.parametrize(("shape", "causal", "seconds"), PUBLISHED)
def test_estimates_are_near_published_times(shape: tuple[int, ...], causal: int, seconds: float) -> None:
    inputs = dict.fromkeys("QKV", f"float16 {' '.join(map(str, shape))}")
    compute = program(f"Y = attention(Q, K, V, causal={causal})", inputs)
    ranked = rank_best_partition(compute, hardware.load("nvidia-h100-sxm"), 1, ScheduleConstraints(op_class=OpClass.MMA))
    found = best_plans(ranked.candidates, 1)[0].estimate.seconds
    assert 0.85 * seconds < found < 1.15 * seconds
