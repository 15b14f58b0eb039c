"""Scans on CPUs: rows in chunks, columns in vectors, against the interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
from cases_cpu import Types, cpu_case, skip_where_features_lack

from roller_svc import hardware
from roller_svc.ir.group import GroupKind
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

AVX512 = hardware.load("cpu-x86-avx512")
CASES: dict[str, tuple[str, Types]] = {
    "chunks and a rest": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 1131", {"x": ("float32", (3, 1131))}),
    "reversed": ("y[i, j] +=! exp(x[i, o]).when([o >= j], 0.0) where j in 1100; z[i, j] = y[i, j] + x[i, j]",
                 {"x": ("float64", (3, 1100))}),
    "columns": ("y[b, j, i] +=! x[b, o, i].when([o < j], 0.0) where j in 21; z[b, j, i] = y[b, j, i] * x[b, j, i]",
                {"x": ("float32", (2, 21, 77))}),
    "recurrence": ("h[i, t] = a[i, t] * h[i, t - 1].when([t > 0], s[i]) + x[i, t]; y[i, t] = h[i, t] * a[i, t]",
                   {"a": ("float32", (3, 1131)), "x": ("float32", (3, 1131)), "s": ("float32", (3,))}),
    "recurrences of columns": ("h[t, i] = sigmoid(a[t, i]) * h[t - 1, i].when([t > 0], s[i]) + x[t, i]",
                               {"a": ("bfloat16", (67, 70)), "x": ("bfloat16", (67, 70)), "s": ("bfloat16", (70,))}),
    "segments": ("h[t, i] = where(f[t] != 0, 0.0, h[t - 1, i].when([t > 0], 0.0)) + x[t, i]",
                 {"f": ("bool", (67,)), "x": ("float32", (67, 33))}),
    "gates of blocks": ("h[t, i] = g[t // 4] * h[t - 1, i].when([t > 0], 0.0) + x[t, i] * w[t % 4, i]",
                        {"g": ("float32", (17,)), "x": ("float32", (68, 5)), "w": ("float32", (4, 5))}),
    "extrema": ("y[i, j] >=! x[i, o].when([o < j], -128) where j in 65", {"x": ("int8", (5, 65))}),
}  # fmt: skip
MORE: dict[str, tuple[str, Types]] = {
    "segments of a row": ("h[t] = x[t] + h[t - 1].when([t > 0, f[t] == f[max(t - 1, 0)]], 0.0)",
                          {"f": ("int32", (777,)), "x": ("float64", (777,))}),
    "reversed recurrence": ("h[i, t] = a[i, t] * h[i, t + 1].when([t < 64], 0.0) + (1.0 - a[i, t]) * x[i, t]",
                            {"a": ("float16", (5, 65)), "x": ("float16", (5, 65))}),
    "reversed columns": ("h[t, i] = a[t, i] * h[t + 1, i].when([t < 64], 0.0) + x[t, i]",
                         {"a": ("float64", (65, 5)), "x": ("float64", (65, 5))}),
    "congruences": ("h[i, t] = a[t] * h[i, t - 1].when([t > 0], 1) + x[i, t]",
                    {"a": ("int32", (300,)), "x": ("int32", (3, 300))}),
    "one step": ("h[t, i] = a[t, i] * h[t - 1, i].when([t > 0], 2.0) + x[t, i]",
                 {"a": ("float32", (2, 33)), "x": ("float32", (2, 33))}),
    "short": ("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 3", {"x": ("float32", (1000, 3))}),
    "product": ("y[i, j] *=! x[i, o].when([j < o], 1) where j in 37", {"x": ("int32", (3, 37))}),
    "narrow columns": ("y[j, i] <=! x[o, i].when([o >= j], const(`inf`)) where j in 67", {"x": ("float16", (67, 33))}),
    "one column": ("y[j] +=! x[o].when([o <= j], 0) where j in 1537", {"x": ("int8", (1537,))}),
    "guards": ("y[i, j] +=! (x[i, o] * w[o]).when([o <= j, o > 3, i < 4], 0.0) where j in 65",
               {"x": ("bfloat16", (5, 65)), "w": ("float32", (65,))}),
    "wide": ("y[j, i] +=! x[o, i].when([o <= j], 0.0) where j in 3", {"x": ("float32", (3, 9001))}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_interpreter(name: str) -> None:
    found = cpu_case(*CASES[name])
    assert found.group.kind is GroupKind.SCAN
    found.check_some(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_candidates_of_wide_vectors_match_the_interpreter(name: str) -> None:
    cpu_case(*(CASES | MORE)[name], AVX512).check_some(3)


def test_an_extremum_is_a_chain_and_a_sum_is_not() -> None:
    types: Types = {"x": ("float32", (4, 64))}
    chain = cpu_case("y[i, j] >=! x[i, o].when([o <= j], const(`-inf`)) where j in 64", types)
    steps = cpu_case("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 64", types)
    assert "inside[7]" not in chain.source(chain.ranked[0]).text
    assert "inside[7]" in steps.source(steps.ranked[0]).text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "dtype"),
    [("y[j] +=! x[o].when([o > j], 0.0) where j in 262144; z[j] = y[j] * x[j]", "float32"),
     ("y[j] >=! x[o].when([o < j], -128) where j in 262144", "int8"),
     ("y[j] = x[j] * y[j + 1].when([j < 131071], 0.5) + 1 where j in 131072", "bfloat16")],
)  # fmt: skip
def test_one_row_is_cut_into_pieces_for_the_cores(body: str, dtype: str) -> None:
    size = int(body.partition("where j in ")[2].partition(";")[0])
    found = cpu_case(body, {"x": (dtype, (size,))}, dataclasses.replace(AVX512, num_cores=2))
    split = [c for c in found.ranked if c.program.split_k > 1]
    assert split
    arrays = random_inputs(found.program, 1)
    skip_where_features_lack(AVX512)
    agreement = agrees(found.program, found.results(split[0], arrays), evaluate(found.program, arrays))
    assert agreement.ok, agreement


SPECIAL = (math.inf, -math.inf, math.nan)


@pytest.mark.parametrize(
    ("step", "shape"),
    [("a[t, i] * h[t - 1, i].when([t > 0], s[i]) + x[t, i]", (60, 1)),
     ("where(f[t] != 0, 0.0, a[t, i] * h[t + 1, i].when([t < 59], s[i])) + x[t, i]", (60, 1)),
     ("where(f[t] != 0, 0.0, h[t - 1, i].when([t > 0], s[i])) + x[t, i]", (60, 1)),
     ("where(f[t] != 0, 0.0, a[t, i] * h[t - 1, i].when([t > 0], s[i])) + x[t, i]", (60, 17))],
)  # fmt: skip
def test_states_of_pieces_are_finite_where_those_of_steps_in_order_are(step: str, shape: tuple[int, int]) -> None:
    """Products of gates leave every range; zero, infinite and NaN states and gates occur in all pieces."""
    types: Types = {"a": ("float32", shape), "x": ("float32", shape), "s": ("float32", shape[1:]), "f": ("bool", shape[:1])}
    found = cpu_case(f"h[t, i] = {step}", {name: types[name] for name in types if f"{name}[" in step}, AVX512)
    best = found.ranked[0]
    module = CpuModule(
        compile_source(found.source(dataclasses.replace(best, program=dataclasses.replace(best.program, split_k=6))))
    )
    skip_where_features_lack(AVX512)
    rng = np.random.default_rng(1)
    order = range(59, -1, -1) if "t + 1" in step else range(60)
    for share, scale in itertools.product((0.0, 0.02, 0.1), (1e-30, 0.9, 3.0, 1e20)):
        arrays: dict[str, np.ndarray] = {
            "a": np.float32(scale) * rng.uniform(-1.2, 1.2, shape).astype(np.float32),
            "x": rng.choice(np.array([0, 1e-30, 1, 1e30], np.float32), shape),
            "s": rng.choice(np.array([0, 1e-40, 1, math.nan], np.float32), shape[1:]),
            "f": rng.random(shape[0]) < 0.05,
        }
        for name, values in (("a", (0, 1e-44, 1e38 if scale > 1 else 1, *SPECIAL)), ("x", SPECIAL)):
            at = rng.random(shape) < share
            arrays[name][at] = rng.choice(np.array(values, np.float32), at.sum())
        gates = arrays["a"] if "a[" in step else np.ones_like(arrays["a"])
        if "f[t]" in step:
            gates = np.where(arrays["f"][:, None], 0, gates)
        expected, state = np.empty(shape, np.float32), arrays["s"]
        with np.errstate(all="ignore"):
            for t in order:
                is_reset = (gates[t] == 0) & ("f[t]" in step)
                state = expected[t] = np.where(is_reset, 0, gates[t] * state) + arrays["x"][t]
        results = module.run({name: arrays[name] for name, _ in found.program.inputs})["h"]
        is_finite = np.isfinite(expected)
        assert np.isfinite(results[is_finite]).all()
        if scale <= 1:  # otherwise states overflow in one order and not in the other
            assert not np.isfinite(results[~is_finite]).any()
        np.testing.assert_allclose(
            results[is_finite], expected[is_finite], rtol=1e-4, atol=1e-4 * np.abs(expected[is_finite]).max(initial=0.0)
        )


def test_rows_for_every_core_stay_whole() -> None:
    types: Types = {"x": ("float32", (2, 262144))}
    hw = dataclasses.replace(AVX512, num_cores=2)
    found = cpu_case("y[i, j] +=! x[i, o].when([o <= j], 0.0) where j in 262144", types, hw)
    assert {c.program.split_k for c in found.ranked} == {1}
