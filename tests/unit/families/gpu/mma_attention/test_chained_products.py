"""Chained products as one kernel: gradients of attention, tiles, periods of keys, emulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from cases_hip import MI250X
from cases_matrix import AMPERE, TURING, chosen, unit

from roller_svc import hardware, toolchain
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import estimate_program, rank_best_partition
from roller_svc.errors import NoCandidateError, require
from roller_svc.families.common.gpu.attention.mask import key_bounds
from roller_svc.families.common.gpu.attention.tile import mma_attention_tile, prepare_attention_operands
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel, KernelSource
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import PipelineOptions, RProgram, RTile
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

Case = tuple[str, Mapping[str, Sequence[Any]], tuple[str, ...]]
HOPPER = hardware.load("nvidia-h200-sxm")


def gradients(
    sizes: str, *, mask: str = "", group: int = 1, dtype: str = "float16", wanted: str = "dq dk dv", values: int | None = None
) -> Case:
    """Gradients of attention of 'batch heads queries keys features', from the log-sum-exp and the row sums of dO O."""
    b, h, m, n, d = map(int, sizes.split())
    head, e = "h" if group == 1 else f"h // {group}", values or d
    guard = f".when([{mask}], 0.0)" if mask else ""
    weight = f"exp(s[b,h,m,n] * 0.125 - l[b,h,m]){guard}"
    of_key = "[b,h,m,n]" if group == 1 else f"[b,a*{group}+r,m,n]"
    row, end = ("h", "") if group == 1 else (f"a*{group}+r", f" where a in {h // group}, r in {group}")
    to = "h" if group == 1 else "a"
    text = (
        f"s[b,h,m,n] +=! q[b,h,m,d] * k[b,{head},n,d]; p[b,h,m,n] = {weight};"
        f"dv[b,{to},n,e] +=! p{of_key}.cast(`{dtype}`) * do[b,{row},m,e]{end}; dp[b,h,m,n] +=! do[b,h,m,e] * v[b,{head},n,e];"
        f"ds[b,h,m,n] = (p[b,h,m,n] * (dp[b,h,m,n] - delta[b,h,m]) * 0.125){guard};"
        f"dq[b,h,m,d] +=! ds[b,h,m,n].cast(`{dtype}`) * k[b,{head},n,d];"
        f"dk[b,{to},n,d] +=! ds{of_key}.cast(`{dtype}`) * q[b,{row},m,d]{end}"
    )
    keys = (b, h // group, n)
    inputs = {"q": (dtype, b, h, m, d), "k": (dtype, *keys, d), "v": (dtype, *keys, e), "do": (dtype, b, h, m, e)}
    return text, {**inputs, "l": ("float32", b, h, m), "delta": ("float32", b, h, m)}, tuple(wanted.split())


LINEAR = (  # attention without softmax, causal
    "s[i, j] +=! q[i, d] * k[j, d]; w[i, j] = s[i, j].when([j <= i], 0.0); y[i, e] +=! w[i, j] * v[j, e]",
    {"q": ("float16", 70, 32), "k": ("float16", 70, 32), "v": ("float16", 70, 64)},
    ("y",),
)


def program(case: Case) -> TensorProgram:
    text, inputs, outputs = case
    used = {name: TensorType(DType(dtype), tuple(shape)) for name, (dtype, *shape) in inputs.items()}
    return parse(text, used, outputs)


def kinds(case: Case, hw: HardwareSpec = AMPERE) -> list[str]:
    return [group.kind.value for group in partition(program(case), hw)]


# what is recognised ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "case",
    [
        gradients("1 2 40 56 64"),
        gradients("2 4 40 40 128", mask="n <= m", group=2),
        gradients("1 4 40 40 64", mask="n <= m, n > m - 9", group=4, dtype="bfloat16"),
    ],
)
def test_gradients_are_one_kernel_each_without_a_workspace(case: Case) -> None:
    groups = partition(program(case), AMPERE)
    assert [group.kind.value for group in groups] == ["attention"] * 3
    assert {name for group in groups for name, _ in group.stored} == {"dq", "dk", "dv"}


def test_attention_without_softmax_is_one_kernel() -> None:
    assert kinds(LINEAR) == ["attention"]
    assert kinds(LINEAR, MI250X) == ["attention"]
    assert kinds(LINEAR, TURING) == ["contraction", "contraction"]  # keys are copied asynchronously


@pytest.mark.parametrize(
    ("old", "new", "outputs"),
    [
        ("", "", ("y", "s")),  # the product is wanted
        ("", "", ("y", "w")),  # weights are wanted
        ("", "; z[i] +=! w[i, j] * 1.0", ("y", "z")),  # another sum reads them
        ("w[i, j] = s[i, j]", "w[i, j] = s[i, j] * f[i]", ("y",)),  # 16 bits would round them
        ("w[i, j] * v[j, e]", "w[i, j] * w[i, j] * v[j, e]", None),  # still one operand: fused
        ("w[i, j] = s[i, j]", "w[i, j] = s[i, j] * u[j, i]", ("y",)),
        ("q[i, d] * k[j, d]", "q[i, d] * k[i, d] * k[j, d]", None),
        ("q[i, d] * k[j, d]", "q[i, d] * k[j, d] * t[i, j, d]", ("y",)),  # no factor of rows alone
    ],
)
def test_other_programs(old: str, new: str, outputs: tuple[str, ...] | None) -> None:
    text = LINEAR[0].replace(old, new) if old else LINEAR[0] + new
    more = {"f": ("float32", 70), "u": ("float16", 70, 70), "t": ("float16", 70, 70, 32)}
    inputs = LINEAR[1] | {name: type_ for name, type_ in more.items() if f"{name}[" in text}
    is_fused = outputs is None or "u[" in text
    assert (kinds((text, inputs, outputs or ("y",))) == ["attention"]) is is_fused


MOVED = (  # reads of a product
    "s[i, j+1].when([j+1 < 70], 1.0)",
    "s[i, j-1].when([j > 0], 0.0)",
    "s[i+1, j].when([i+1 < 70], 1.0)",
    "s[i, j*2].when([j*2 < 70], 0.0)",
)


@pytest.mark.parametrize("read", MOVED)
def test_products_that_a_guard_keeps_inside_stay_kernels(read: str) -> None:
    text = LINEAR[0].replace("s[i, j].when([j <= i], 0.0)", f"{read} where j in 70, i in 70")
    assert kinds((text, LINEAR[1], ("y",))) == ["contraction", "contraction"]


@pytest.mark.emulator
def test_products_at_other_places_inside_are_read_there() -> None:
    text = "s[i, j] +=! q[i, d] * k[j, d]; y[i, e] +=! s[i+1, j+2].when([j < i], 0.0) * v[j, e] where i in 69, j in 68"
    inputs = LINEAR[1] | {"v": ("float16", 68, 64)}
    judge((text, inputs, ("y",)))


@pytest.mark.parametrize("features", [256, 272])
def test_products_of_more_features_stay_kernels(features: int) -> None:
    inputs = LINEAR[1] | dict.fromkeys("qk", ("float16", 70, features))
    assert (kinds((LINEAR[0], inputs, ("y",))) == ["attention"]) is (features == 256)


def test_two_products_of_different_features_stay_kernels() -> None:
    assert kinds(gradients("1 1 40 40 64", values=128)) == ["contraction"] * 5
    assert kinds(gradients("1 1 40 40 64", values=128, wanted="dv")) == ["attention"]


@pytest.mark.parametrize(("mask", "uppers", "lowers"), [("n <= m", 0, 1), ("n <= m, n > m - 9", 1, 1), ("n <= h", 0, 0)])
def test_bounds_of_keys_hold_again_for_each_head_of_a_group(mask: str, uppers: int, lowers: int) -> None:
    (group,) = partition(program(gradients("1 4 40 40 64", mask=mask, group=2, wanted="dk")), AMPERE)
    bounds = key_bounds(group)
    assert (bounds.period, len(bounds.uppers), len(bounds.lowers)) == (40, uppers, lowers)
    assert bounds.of_tiles(8) == bounds
    assert not bounds.of_tiles(16).lowers


@pytest.mark.parametrize(
    ("weight", "has_bounds"),
    [
        ("s[i, j].when([j <= i], 0.0)", True),
        ("s[i, j].when([j <= i], 0.0).cast(`float16`)", True),
        ("(s[i, j].when([j <= i], 0.0) * 0.5).cast(`float16`)", True),
        ("(s[i, j].when([j <= i], 0.0) * r[i, j]).when([j <= i], 0.0)", True),
        ("s[i, j].when([j <= i], 1.0)", False),
        ("s[i, j].when([j <= i], 0.0) * r[i, j]", False),  # r may be infinite where the guard fails
        ("s[i, j].when([j <= i], 0.0) * g[i]", False),
        ("s[i, j].when([j <= i], 0.0) * const(`inf`, `float16`)", False),
        ("(s[i, j] * where(j <= i, 1.0, 0.0)).cast(`float16`)", False),
    ],
)
def test_a_guard_bounds_keys_if_weights_are_0_elsewhere(weight: str, has_bounds: bool) -> None:
    more = {"r": ("float16", 70, 70), "g": ("float16", 70)}
    inputs = LINEAR[1] | {name: type_ for name, type_ in more.items() if f"{name}[" in weight}
    (group,) = partition(program((LINEAR[0].replace("s[i, j].when([j <= i], 0.0)", weight), inputs, ("y",))), AMPERE)
    assert group.attention is not None
    assert bool(key_bounds(group).uppers) is has_bounds


@pytest.mark.emulator
def test_an_infinite_factor_of_a_masked_weight_makes_nan() -> None:
    text = LINEAR[0].replace("w[i, j] = s[i, j].when([j <= i], 0.0)", "w[i, j] = s[i, j].when([j <= i], 0.0) * r[i, j]")
    compute, source = kernel((text, LINEAR[1] | {"r": ("float16", 70, 70)}, ("y",)), AMPERE, 16)
    arrays = arrays_of(compute)
    arrays["r"][5, 69] = math.inf
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1).run(arrays)["y"]
    assert np.isnan(got[5]).all()
    assert np.isfinite(np.delete(got, 5, axis=0)).all()


# the kernel -----------------------------------------------------------------------------------------------------------
def tiled(group: KernelGroup, hw: HardwareSpec, keys: int, rows: int = 16) -> RProgram:
    axes = {role: group.space.role(role)[0] for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER)}
    columns, features = (-(-axes[role].extent // 16) * 16 for role in (AxisRole.N, AxisRole.INNER))

    def tile(rows: int) -> RTile:
        of_role = dict(zip(axes, (rows, columns, keys, features), strict=True))
        return RTile(tuple((axis.name, of_role.get(axis.role, 1)) for axis in group.space.axes))

    kind = "mma" if hw is AMPERE else "mfma"
    dtype = require(group.attention, "attention").dtype
    on = unit(hw, f"{kind}_f16" if dtype is DType.FLOAT16 else f"{kind}_bf16")
    return RProgram(*(group.space, on, tile(2 * rows), tile(rows)), reduce_threads=hw.limits.warp_size, pipeline=PipelineOptions(2))


def kernel(case: Case, hw: HardwareSpec, keys: int, rows: int = 16) -> tuple[TensorProgram, KernelSource]:
    compute = program(case)
    groups = partition(compute, hw)
    assert {group.kind.value for group in groups} == {"attention"}
    return compute, emit_plan(Plan(tuple(chosen(tiled(g, hw, keys, rows)) for g in groups)), compute, groups, hw)


def arrays_of(compute: TensorProgram) -> dict[str, np.ndarray[Any, Any]]:
    """Random inputs, with exponentials that are probabilities."""
    arrays = {name: np.array(array) for name, array in random_inputs(compute, seed=3).items()}
    if "l" in arrays:
        arrays["l"] += math.log(arrays["k"].shape[2])
    return arrays


def judge(case: Case, hw: HardwareSpec = AMPERE, keys: int = 16, rows: int = 16, *, races: bool = False) -> None:
    compute, source = kernel(case, hw, keys, rows)
    arrays = arrays_of(compute)
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=races).run(arrays)
    agreement = agrees(compute, got, evaluate(compute, arrays))
    assert agreement.ok, agreement.detail


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("case", "keys", "rows"),
    [
        (gradients("1 2 32 64 64"), 32, 16),
        (gradients("1 1 37 53 128", mask="n <= m + 16"), 16, 16),
        (gradients("1 1 21 60 64", mask="n <= m", dtype="bfloat16"), 16, 32),  # keys that no row sees
        (gradients("1 1 60 21 64", mask="n <= m, n > m - 20"), 32, 16),  # rows that see no key
        (gradients("1 4 48 32 64", mask="n <= m", group=2), 16, 16),  # whole tiles in a period
        (gradients("1 4 40 32 64", mask="n <= m", group=4), 16, 16),  # tiles cross periods
        (gradients("1 1 33 33 256", wanted="dv"), 16, 16),
        (gradients("1 1 33 40 40"), 16, 16),
        (LINEAR, 32, 16),
    ],
)
def test_kernels_agree_with_the_interpreter(case: Case, keys: int, rows: int) -> None:
    judge(case, AMPERE, keys, rows)


@pytest.mark.emulator
def test_kernels_have_no_data_races() -> None:
    judge(gradients("1 2 32 40 64", mask="n <= m", group=2), races=True)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("case", [gradients("1 1 37 53 64", mask="n <= m"), gradients("1 2 32 32 64", group=2), LINEAR])
def test_mfma_kernels_agree_with_the_interpreter(case: Case) -> None:
    judge(case, MI250X)


@pytest.mark.emulator
def test_what_no_row_sees_is_not_read_and_what_rows_read_may_be_infinite() -> None:
    compute, source = kernel(gradients("1 1 64 64 64", mask="n <= m", wanted="dq"), AMPERE, 16)
    arrays = arrays_of(compute)
    arrays["k"][:, :, 32:] = math.nan
    arrays["l"][:, :, 3] = -math.inf
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1).run(arrays)["dq"].astype(np.float32)
    assert np.isnan(got[:, :, 32:]).all()
    assert not np.isfinite(got[:, :, 3]).all()
    assert np.isfinite(np.delete(got[:, :, :32], 3, axis=2)).all()


# choice ---------------------------------------------------------------------------------------------------------------
LONG = gradients("2 8 2048 2048 128", mask="n <= m")


def test_the_model_takes_one_kernel_for_each_gradient() -> None:
    for hw in (AMPERE, HOPPER):
        found = estimate_program(PartitionCache(program(LONG)), hw)
        assert [group.kind.value for group in found.ranked.groups] == ["attention"] * 3
        assert found.plans[0].estimate.seconds >= max(roof.seconds for roof in found.roofline)


def test_heads_of_a_group_visit_the_keys_that_a_mask_leaves() -> None:
    times = {}
    for mask in ("", "n <= m"):
        case = gradients("1 8 2048 2048 64", mask=mask, group=4, wanted="dk dv")
        times[mask] = estimate_program(PartitionCache(program(case)), AMPERE).plans[0].estimate.seconds
    assert times["n <= m"] < 0.7 * times[""]


def test_neither_warpgroups_nor_split_keys_compute_chains() -> None:
    constraints = ScheduleConstraints(op_class=OpClass.WGMMA)
    groups = rank_best_partition(program(LONG), HOPPER, 1, constraints)[0]
    assert all(group.attention is None for group in groups)
    with pytest.raises(NoCandidateError):
        rank_best_partition(program(LONG), AMPERE, 1, ScheduleConstraints(op_class=OpClass.MMA, tiles=(("split_k", 10**6),)))


@pytest.mark.skipif(not toolchain.availability(AMPERE).ok, reason="NVRTC is not installed")
@pytest.mark.parametrize("features", [64, 128])
def test_the_models_choice_spills_nothing(features: int) -> None:
    compute = program(gradients(f"2 16 2048 2048 {features}", mask="n <= m"))
    ranked = rank_best_partition(compute, AMPERE, 1)
    plan = Plan(tuple(each[0] for each in ranked.candidates))
    compiled = toolchain.compile_source(emit_plan(plan, compute, ranked.groups, AMPERE))
    for group, candidate, used in zip(ranked.groups, plan.choices, compiled.resources, strict=True):
        needs = mma_attention_tile(candidate.program, prepare_attention_operands(group, candidate.program.unit, AMPERE.arch))
        assert used.shared_bytes == needs.shared_bytes
        assert used.spill_bytes == 0
