"""Attention whose row maxima and sums have other readers, wide results, values in keys, float8 operands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from sampling import every

from roller_svc import hardware
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache, partition
from roller_svc.compiler.plans import estimate_program
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import require
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

CDNA3 = hardware.load("amd-mi300x")
HOPPER, AMPERE = hardware.load("nvidia-h200-sxm"), hardware.load("nvidia-a100-sxm-80gb")
ON_WARPGROUPS, ON_WARPS = ScheduleConstraints(op_class=OpClass.WGMMA), ScheduleConstraints(op_class=OpClass.MMA)
Arrays = dict[str, np.ndarray[Any, Any]]

EXP = "exp(c[h, i, j] - m[h, i])"
QUOTIENT = "y[h, i, e] = o[h, i, e] / t[h, i]"
LSE = QUOTIENT + "; L[h, i] = m[h, i] + log(t[h, i])"
CAUSAL, WINDOW = "[j <= i]", "[j <= i, i - j < 7]"


def text(after: str, score: str = "s[h, i, j] * 0.3", exp: str = EXP, maximum: str = "m[h, i] >=! c[h, i, j];") -> str:
    return (
        f"s[h, i, j] +=! q[h, i, d] * k[h, j, d]; c[h, i, j] = {score}; {maximum} p[h, i, j] = {exp};"
        f"t[h, i] +=! p[h, i, j]; o[h, i, e] +=! p[h, i, j] * v[h, j, e]; {after}"
    )


def masked(mask: str, fill: float, after: str = LSE) -> str:
    return text(after, f"(s[h, i, j] * 0.3).when({mask}, {fill})", f"{EXP}.when({mask}, 0.0)")


SINK = "y[h, i, e] = o[h, i, e] / (t[h, i] + exp(z[h] - {}))"
# the program, its outputs, inputs beside q, k and v
CASES: dict[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {
    "log-sum-exp": (text(LSE), ("y", "L"), {}),
    "a sink that is part of the maximum": (
        text(SINK.format("max(m[h, i], z[h])"), exp="exp(c[h, i, j] - max(m[h, i], z[h]))"),
        ("y",),
        {"z": "float32 H"},
    ),
    "undivided, with maximum and sum": (text(""), ("o", "m", "t"), {}),
    "a sink": (text(SINK.format("m[h, i]")), ("y",), {"z": "float16 H"}),
    "a sink before the second product": (
        text("").replace(
            "o[h, i, e] +=! p[h, i, j]",
            "w[h, i, j] = p[h, i, j] / (t[h, i] + exp(z[h] - m[h, i])); y[h, i, e] +=! w[h, i, j]",
        )
        + "L[h, i] = log(t[h, i]) + m[h, i]",
        ("y", "L"),
        {"z": "float32 H"},
    ),
    "transposed, and a map of it": (
        text(QUOTIENT + "; L[i, h] = m[h, i] + log(t[h, i]); M[i, h] = L[i, h] * 2.0"), ("y", "M"), {}
    ),
    "zero without a sum": (text("y[h, i, e] = (o[h, i, e] / t[h, i]).when([t[h, i] > 0.0], 0.0)"), ("y",), {}),
    "times a reciprocal": (text("r[h, i] = 1.0 / t[h, i]; y[h, i, e] = o[h, i, e] * r[h, i] + 1.0"), ("y",), {}),
    "twice in a map": (text("y[h, i, e] = o[h, i, e] / t[h, i] / (1.0 + exp(-(o[h, i, e] / t[h, i])))"), ("y",), {}),
    "divided by one reader only": (text(QUOTIENT + "; g[h, i, e] = o[h, i, e] * 2.0"), ("y", "g"), {}),
    "no maximum": (text(QUOTIENT, exp="exp(c[h, i, j])", maximum=""), ("y", "t"), {}),
    "a reader of all rows": (text(LSE + "; R[h] +=! L[h, i]; w[h, i, e] = y[h, i, e] * R[h]"), ("w",), {}),
    "causal, the maximum of masked scores": (masked(CAUSAL, -60000.0), ("y", "L", "m", "t"), {}),
    "window, the same": (masked(WINDOW, -0.5), ("y", "L", "m"), {}),
    "lengths": (masked("[j < n[h]]", -60000.0), ("y", "L"), {"n": "int32 H"}),
    "finite scores of rows without keys": (text(LSE, "(s[h, i, j] * 0.3).when([j + 4 <= i], -100.0)"), ("y", "L", "m"), {}),
}  # fmt: skip


def program(case: str, sizes: tuple[int, int, int, int, int] = (2, 21, 45, 16, 24)) -> TensorProgram:
    heads, queries, keys, features, columns = sizes
    expression, outputs, more = CASES[case]
    inputs = {
        "q": f"float16 {heads} {queries} {features}", "k": f"float16 {heads} {keys} {features}",
        "v": f"float16 {heads} {keys} {columns}", **{t: said.replace("H", str(heads)) for t, said in more.items()},
    }  # fmt: skip
    return parsed(expression, inputs, outputs)


def parsed(expression: str, inputs: Mapping[str, str], outputs: tuple[str, ...] | None = None) -> TensorProgram:
    types = {}
    for name, said in inputs.items():
        dtype, *shape = said.split()
        types[name] = TensorType(DType(dtype), tuple(map(int, shape)))
    return parse(expression, types, outputs)


def attention_of(groups: tuple[KernelGroup, ...]) -> KernelGroup:
    return require(next((g for g in groups if g.kind is GroupKind.ATTENTION), None), "attention")


def judge(
    compute: TensorProgram,
    hw: HardwareSpec,
    constraints: ScheduleConstraints,
    groups: tuple[KernelGroup, ...] | None = None,
    change: Callable[[Arrays], None] = lambda _: None,
) -> str:
    """Compare the model's first plan with the interpreter, and look for races. Returns the source."""
    groups = groups or partition(compute, hw)
    attention = attention_of(groups)
    plain = ScheduleConstraints(allow_tf32=constraints.allow_tf32)
    chosen = tuple(rank_units(g, hw, 1, constraints if g is attention else plain)[0][0] for g in groups)
    arrays = {name: np.array(array) for name, array in random_inputs(compute, seed=3).items()}
    change(arrays)
    source = emit_plan(Plan(chosen), compute, groups, hw)
    got = load_emulated(CompiledKernel(source, b"", "", ()), 1, races=True).run(arrays)
    with np.errstate(all="ignore"):
        agreement = agrees(compute, got, evaluate(compute, arrays, allow_tf32=constraints.allow_tf32))
    assert agreement.ok, agreement.detail
    return source.text


def with_lengths(arrays: Arrays) -> None:
    if "n" in arrays:
        arrays["n"][:] = [33, 45]


@pytest.mark.parametrize("case", CASES)
def test_one_kernel_computes_all_of_it(case: str) -> None:
    groups = partition(program(case), HOPPER)
    attention_of(groups)
    separate = {"divided by one reader only": 2, "a reader of all rows": 3}
    assert len(groups) <= separate.get(case, 1)


@pytest.mark.emulator
@pytest.mark.parametrize("case", every(6, CASES))
def test_warpgroups_agree_with_the_interpreter(case: str) -> None:
    judge(program(case), HOPPER, ON_WARPGROUPS, change=with_lengths)


@pytest.mark.emulator
@pytest.mark.parametrize("case", every(9, CASES))
def test_warps_agree_with_the_interpreter(case: str) -> None:
    judge(program(case), AMPERE, ON_WARPS, change=with_lengths)


@pytest.mark.emulator
@pytest.mark.parametrize("case", every(20, CASES))
def test_mfma_agrees_with_the_interpreter(case: str) -> None:
    judge(program(case), CDNA3, ON_WARPS, change=with_lengths)


@pytest.mark.emulator
@pytest.mark.parametrize("case", every(20, CASES))
def test_split_keys_agree_with_the_interpreter(case: str) -> None:
    compute = program(case, (2, 3, 2100, 16, 16))
    assert "t_partial" in judge(compute, AMPERE, ON_WARPS, change=with_lengths)


SECOND = "{q}2[h, i, j] +=! {q}[h, i, d] * k2[h, j, d]; ".replace("{q}2", "s2") + (
    "m2[h, i] >=! s2[h, i, j]{more}; p2[h, i, j] = exp(s2[h, i, j]{more} - m2[h, i]); t2[h, i] +=! p2[h, i, j];"
    "o2[h, i, e] +=! p2[h, i, j] * v2[h, j, e]; y2[h, i, e] = o2[h, i, e] / t2[h, i]"
)
MORE = {"k2": "float16 2 16 16", "v2": "float16 2 16 16"}


@pytest.mark.emulator
@pytest.mark.parametrize("hw", [HOPPER, AMPERE, CDNA3], ids=lambda hw: hw.id)
@pytest.mark.parametrize(("q", "more", "features"), [("y", "", 16), ("y", "", 32), ("q", " + y[h, i, j]", 16)])
def test_two_attentions_agree_with_the_interpreter(q: str, more: str, features: int, hw: HardwareSpec) -> None:
    inputs = {"q": f"float16 2 16 {features}", "k": f"float16 2 16 {features}", "v": "float16 2 16 16"} | MORE
    after = f"{QUOTIENT}; {SECOND.replace('{q}', q).replace('{more}', more)}"
    judge(parsed(text(after), inputs, ("y2",)), hw, ScheduleConstraints())


@pytest.mark.emulator
@pytest.mark.parametrize(
    "after",
    [
        "y[h, i, e] = o[h, i + 1, e] / t[h, i] where i in 20", "y[h, i, e] = o[h, i // 2, e] / t[h, i]",
        "y[h, e, i] = o[h, e, i // 2] / t[h, i] where e in 21, i in 21",
    ],
)  # fmt: skip
def test_quotients_of_different_rows_agree_with_the_interpreter(after: str) -> None:
    inputs = {"q": "float16 2 21 16", "k": "float16 2 45 16", "v": "float16 2 45 24"}
    compute = parsed(text(after), inputs, ("y",))
    groups = partition(compute, AMPERE)
    chosen = tuple(rank_units(g, AMPERE, 1, ScheduleConstraints())[0][0] for g in groups)
    arrays = random_inputs(compute, seed=3)
    got = load_emulated(CompiledKernel(emit_plan(Plan(chosen), compute, groups, AMPERE), b"", "", ()), 1).run(arrays)
    assert agrees(compute, got, evaluate(compute, arrays)).ok


@pytest.mark.emulator
def test_rows_without_keys_are_zero_below_a_sink() -> None:
    case = text(SINK.format("mm[h, i]"), "s[h, i, j] * 0.3 + b[i, j]", "exp(c[h, i, j] - mm[h, i])",
                "m[h, i] >=! c[h, i, j]; mm[h, i] = max(m[h, i], z[h]);")  # fmt: skip
    inputs = {"q": "float16 2 20 16", "k": "float16 2 40 16", "v": "float16 2 40 16", "z": "float32 2", "b": "float16 20 40"}

    def hide(arrays: Arrays) -> None:
        arrays["b"][:7] = -np.inf
        arrays["b"][9, :30] = -np.inf

    judge(parsed(case, inputs, ("y",)), HOPPER, ON_WARPGROUPS, change=hide)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("t[h, i] +=! p[h, i, j]", "t[h, i] +=! p[h, i, j] + 1.0"),
        ("exp(c[h, i, j] - m[h, i])", "exp(c[h, i, j] - m[h, i] - b[j])"),
    ],
)
def test_other_exponentials_stay_several_kernels(old: str, new: str) -> None:
    inputs = {"q": "float16 2 20 16", "k": "float16 2 40 16", "v": "float16 2 40 16", "b": "float16 40"}
    compute = parsed(text(LSE).replace(old, new), inputs, ("y", "L"))
    assert all(g.attention is None for g in partition(compute, HOPPER))


def test_a_log_sum_exp_costs_little() -> None:
    inputs = dict.fromkeys(("q", "k", "v"), "float16 64 4096 128")
    plain, with_lse = (
        estimate_program(PartitionCache(parsed(text(after), inputs, outputs)), HOPPER).plans[0].ranking_seconds
        for after, outputs in ((QUOTIENT, ("y",)), (LSE, ("y", "L")))
    )
    assert with_lse < 1.05 * plain


# lengths --------------------------------------------------------------------------------------------------------------
PAGED = (
    "s[b, h, j] +=! q[b, h, d] * k[w[b, j // 16], j % 16, d] where j in {keys};"
    "c[b, h, j] = (s[b, h, j] * 0.3).when([{mask}], {fill}); m[b, h] >=! c[b, h, j];"
    "p[b, h, j] = exp(c[b, h, j] - m[b, h]){guard}; t[b, h] +=! p[b, h, j];"
    "o[b, h, e] +=! p[b, h, j] * v[w[b, j // 16], j % 16, e]; y[b, h, e] = o[b, h, e] / t[b, h]"
)


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("mask", "fill", "guard", "keys"),
    every(
        2,
        [
            ("j < n[b]", "const(`-inf`)", "", 64),
            ("j <= n[b]", "-60000.0", ".when([j <= n[b]], 0.0)", 64),
            ("j < n[b]", "-60000.0", "", 64),  # rows of length 0 are the mean of all values
            ("j <= n[b]", "-60000.0", "", 2048),
        ],
    ),
)
def test_keys_beyond_a_length_from_data_are_not_read(mask: str, fill: str, guard: str, keys: int) -> None:
    pages = 3 * keys // 16
    inputs = {"q": "float16 3 4 32", "k": f"float16 {pages} 16 32", "v": f"float16 {pages} 16 32",
              "w": f"int32 3 {keys // 16}", "n": "int32 3"}  # fmt: skip
    compute = parsed(PAGED.format(mask=mask, fill=fill, guard=guard, keys=keys), inputs)

    def change(arrays: Arrays) -> None:
        arrays["w"][:] = np.arange(pages).reshape(3, -1)
        arrays["n"][:] = [0, 33, keys]

    target = (AMPERE, ON_WARPS) if keys > 64 else (HOPPER, ON_WARPGROUPS)
    text = judge(compute, *target, change=change)
    assert re.search(r"seen_steps = .*\bn\[", text)


# wide results ---------------------------------------------------------------------------------------------------------
LATENT = (
    "s[b, h, j] +=! q[b, h, d] * kv[b, j, d]; m[b, h] >=! s[b, h, j] * 0.05; p[b, h, j] = exp(s[b, h, j] * 0.05 - m[b, h]);"
    "t[b, h] +=! p[b, h, j]; o[b, h, e] +=! p[b, h, j] * kv[b, j, e] where e in {columns}; y[b, h, e] = o[b, h, e] / t[b, h];"
    "L[b, h] = m[b, h] + log(t[b, h])"
)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize(("features", "columns"), every(2, [(192, 128), (448, 384), (576, 512)]))
def test_values_are_read_from_the_stages_of_keys(features: int, columns: int) -> None:
    compute = parsed(LATENT.format(columns=columns), {"q": f"float16 1 70 {features}", "kv": f"float16 1 75 {features}"})
    assert "v_shared" not in judge(compute, HOPPER, ON_WARPGROUPS)


@pytest.mark.emulator
def test_warpgroups_share_the_columns_of_wide_results() -> None:
    inputs = {"q": "float16 1 70 32", "k": "float16 1 75 32", "v": "float16 1 75 300"}
    assert "v_shared" in judge(parsed("o = attention(q, k, v)", inputs), HOPPER, ON_WARPGROUPS)


# float8 ---------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize(
    ("dtype", "features", "allow_tf32", "unit"),
    every(
        2,
        [
            ("float8_e4m3fn", 80, True, "wgmma_e4m3"),
            ("float8_e5m2", 64, True, "wgmma_e5m2"),
            ("float8_e4m3fn", 64, False, "wgmma_f16"),
            ("float8_e4m3fn", 144, True, "wgmma_f16"),  # more products than are summed without promotion
        ],
    ),
)
def test_float8_is_multiplied_as_it_is_or_converted_first(dtype: str, features: int, allow_tf32: bool, unit: str) -> None:
    inputs = {"q": f"{dtype} 1 2 70 {features}", "k": f"{dtype} 1 1 150 {features}", "v": f"{dtype} 1 1 150 {features}"}
    compute = parsed("o = attention(q, k, v, causal=1)", inputs)
    constraints = ScheduleConstraints(op_class=OpClass.WGMMA, allow_tf32=allow_tf32)
    cache = PartitionCache(compute)
    (groups,) = cache.with_operand_copies(cache.groups(HOPPER), HOPPER, constraints)
    assert len(groups) == (2 if unit != "wgmma_f16" else 4)
    assert rank_units(attention_of(groups), HOPPER, 1, constraints)[0][0].program.unit.name == unit
    judge(compute, HOPPER, constraints, groups)
