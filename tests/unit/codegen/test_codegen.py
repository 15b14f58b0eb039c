"""Kernel source: names, indices, output by language."""

from __future__ import annotations

import re

import numpy as np
import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.codegen.names import Names
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.plans import best_plans, rank_best_partition
from roller_svc.errors import IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

HOSTILE = ["int", "for", "status", "expf", "max_f32", "task", "float", "blockIdx", "v", "main", "main_", "lane",
           "vf32x16", "checked", "acc", "thread", "define", "__syncthreads", "_", "__x"]  # fmt: skip


def text_for(expression: str, target: str, **inputs: tuple[str, tuple[int, ...]]) -> str:
    hw = hardware.load(target)
    program = parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in inputs.items()})
    groups, ranked, _ = rank_best_partition(program, hw, 1)
    return emit_plan(best_plans(ranked, 1)[0], program, groups, hw).text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_mean_something_in_c_are_only_names(name: str) -> None:
    """As a tensor, as an output and as an axis at once, on both languages."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    expression = f"y[{name}] +=! exp({name}x[{name}, k] - {name}x[{name}, k])"
    kernel = roller_svc.compile(expression, {f"{name}x": ("float32", (3, 4))}, select="model", top_k=1)
    np.testing.assert_array_equal(kernel.run({f"{name}x": x})["y"], 4.0)
    expression = f"{name}[n, k] = x[n, k] * 2.0"
    kernel = roller_svc.compile(expression, {"x": ("float32", (3, 4))}, select="model", top_k=1)
    np.testing.assert_array_equal(kernel(x=x)[name], x * 2)
    cuda = roller_svc.compile(expression, {"x": ("float32", (3, 4))}, target="nvidia-t4", top_k=1)
    assert cuda.binary


def test_an_axis_and_a_tensor_of_one_name_are_two_things() -> None:
    kernel = roller_svc.compile("M[M] = x[M] + 1.0", {"x": ("float32", (5,))}, select="model", top_k=1)
    assert kernel(x=np.zeros(5, np.float32))["M"].tolist() == [1.0] * 5


def test_names_are_unique() -> None:
    names = Names()
    names.reserve("C")
    given = [names.of(n) for n in ("C", "C.acc", "C_acc", ".lane", "lane", "n.step", "n_step", "9")]
    assert len(set(given)) == len(given)
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", n) for n in given)


def test_elements_of_an_array_have_names_of_their_own() -> None:
    names = Names()
    before = names.of("acc_0_1")
    array = names.of_elements("acc", ["_0_0", "_0_1"])
    elements = {array + "_0_0", array + "_0_1"}
    assert before == "acc_0_1"
    assert not elements & {before, names.of(f"{array}_0_0.")}
    assert names.of_elements("acc", ["_0_0"]) == array  # an edge tile declares fewer of them
    assert names.of_elements("other", ["_0_0"]) == "other"


def test_the_text_says_what_it_is() -> None:
    text = text_for("C[m,n] +=! A[m,k]*B[k,n]", "nvidia-h200-sxm", A=("float32", (256, 64)), B=("float32", (64, 256)))
    header = text[: text.index("*/")]
    assert "C[m, n] +=! A[m, k] * B[k, n]" in header
    assert "target: nvidia-h200-sxm (sm_90a)\n" in header
    assert "shared tile [m=" in header
    assert "estimate: " in header


def test_indices_are_wide_exactly_where_a_tensor_needs_them() -> None:
    wide = text_for("y[n] = x[n] + 1.0", "nvidia-h200-sxm", x=("float32", (1 << 31,)))
    narrow = text_for("y[n] = x[n] + 1.0", "nvidia-h200-sxm", x=("float32", ((1 << 31) - 512,)))
    assert "const long long n" in wide
    assert "long long" not in narrow
    # 2^40 multiply-adds over small tensors need no wide index
    big = text_for(
        "C[m,n] +=! A[m,k]*B[k,n]", "nvidia-h200-sxm", A=("float32", (1 << 14, 1 << 13)), B=("float32", (1 << 13, 1 << 14))
    )
    assert "long long" not in big


def test_assembly_stands_only_in_named_wrappers() -> None:
    half = ("float16", (64, 64))
    text = text_for("C[m,n] +=! A[m,k]*B[k,n]", "nvidia-a100-sxm-80gb", A=half, B=half)
    kernels = text[text.index('extern "C"') :]
    assert "asm" not in kernels
    assert all(f"{name}(" in kernels for name in ("mma_m16n8k16_f16", "load_matrix_4", "copy_async_16"))


def test_a_gather_checks_its_index_where_it_runs() -> None:
    inputs = {"t": ("float32", (10, 4)), "i": ("int32", (6,))}
    assert "checked(" in text_for("y[n,c] = t[i[n],c]", "local", **inputs)
    assert "in_range(" in text_for("y[n,c] = t[i[n],c]", "nvidia-t4", **inputs)


@pytest.mark.parametrize("target", ["local", "nvidia-t4"])
@pytest.mark.parametrize(("link", "inner"), [("j[{}]", "n"), ("isnan({}) + x[n]", "x[n]")])
def test_long_chains_do_not_double_at_every_link(link: str, inner: str, target: str) -> None:
    value = inner
    for _ in range(40):
        value = link.format(value)
    text = text_for(f"y[n] = {value} + x[n]", target, j=("int32", (50,)), x=("float32", (50,)))
    assert len(text) < 50_000  # doubled forty times it would have 10^12


@pytest.mark.parametrize("options", [{}, {"target": "nvidia-t4", "runtime": "emulator"}])
def test_gathers_behind_gathers_read_and_check_each_index(options: dict[str, str]) -> None:
    rng = np.random.default_rng(3)
    j, k = rng.integers(0, 50, 50, dtype=np.int32), rng.integers(0, 9, 50, dtype=np.int64)
    x = rng.uniform(-1, 1, (9, 3, 50)).astype(np.float16)
    inputs = {"j": ("int32", (50,)), "k": ("int64", (50,)), "x": ("float16", (9, 3, 50))}
    expression = "y[n, c] = x[k[j[n]], c, j[j[k[j[n]]]]]"
    kernel = roller_svc.compile(expression, inputs, select="model", top_k=1, **options)
    want = np.stack([x[k[j], c, j[j[k[j]]]] for c in range(3)], 1)
    np.testing.assert_array_equal(kernel(j=j, k=k, x=x)["y"], want)
    j[7] = 77
    with pytest.raises(IndexRangeError, match="index 77 is outside dimension 0"):
        kernel(j=j, k=k, x=x)


def test_an_axis_may_be_longer_than_int32() -> None:
    text = text_for("y[n] = x[n // 3] where n in 3000000000", "nvidia-t4", x=("float32", (1_000_000_000,)))
    assert "(n_first < 3000000000)" in text


@pytest.mark.parametrize("target", ["local", "nvidia-t4"])
@pytest.mark.parametrize("expression", ["y[a, b] = x[a, b] + 1.0", "y[] +=! x[a, b]", "y[a] >=! x[a, b]"])
def test_indices_beyond_int32_do_not_wrap(expression: str, target: str) -> None:
    text = text_for(expression, target, x=("float32", (70001, 70003)))
    assert not re.search(r"\(int\)(?!blockIdx|threadIdx)[^;{]*4900280003", text.split("*/", 1)[1])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("(x[i] * 2.0).cast(`float16`)", "f32_to_f16((x_wide0[i_lane] * 2.0f))"),
        ("x[i].cast(`float8_e4m3`).cast(`float16`)", "f32_to_f16(e4m3_to_f32(f32_to_e4m3(x_wide0[i_lane])))"),
        ("x[i].cast(`float16`).cast(`bfloat16`)", "f32_to_bf16(f16_to_f32(f32_to_f16(x_wide0[i_lane])))"),
    ],
)
def test_values_are_rounded_once_to_a_type(value: str, text: str) -> None:
    source = text_for(f"y[i] = {value}", "nvidia-h200-sxm", x=("float32", (1 << 20,)))
    (line,) = (line for line in source.splitlines() if re.search(r"y_wide0\[i_lane\] = ", line))
    assert line.strip().removeprefix("y_wide0[i_lane] = ") == f"{text};"
