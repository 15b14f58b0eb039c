"""Reducing nests on a GPU, whatever their tiles: every way of sharing out rows gives the reference's values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roller_svc
from roller_svc import hardware
from roller_svc.api import load_runner
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory, with_program_indices
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.frontend.lang import parse
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.ir.options import RuntimeChoice
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

pytestmark = pytest.mark.emulator

HW = hardware.load("nvidia-a100-sxm-80gb")
SOFTMAX = "m[r] >=! x[r, c]; s[r] +=! exp(x[r, c] - m[r]); y[r, c] = exp(x[r, c] - m[r]) / s[r]"
NORM = (
    "s[r] +=! x[r, c]; q[r] +=! (x[r, c] - s[r] / 9.0) * (x[r, c] - s[r] / 9.0);"
    " y[r, c] = (x[r, c] - s[r] / 9.0) * rsqrt(q[r] + 0.001) * v[c]"
)
ARGMAX = "m[r] >=! x[r, c]; y[r] <=! c.when([x[r, c] == m[r]], 200).cast(`int64`)"
COLUMNS = "y[c] {sign} x[r, c]"
ROWS = "y[r] {sign} x[r, c]"
SIGNS = ("+=!", "*=!", ">=!", "<=!", "|=!", "&=!")
TYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int8", "int64", "uint8")

Signature = dict[str, tuple[str, tuple[int, ...]]]
Case = tuple[str, Signature]


@st.composite
def rows_and_columns(draw: st.DrawFn) -> Case:
    r, c = draw(st.integers(1, 70)), draw(st.one_of(st.integers(1, 200), st.sampled_from([8, 64, 128, 192])))
    expression = draw(st.sampled_from([SOFTMAX, NORM, ARGMAX, ROWS, COLUMNS, ROWS, COLUMNS]))
    if "{sign}" in expression:
        sign = draw(st.sampled_from(SIGNS))
        types = tuple(t for t in TYPES if sign not in ("|=!", "&=!") or not t.endswith(("16", "32", "64")) or "i" in t)
        return expression.format(sign=sign), {"x": (draw(st.sampled_from(types)), (r, c))}
    dtype = draw(st.sampled_from(TYPES[:4]))
    return expression, {"x": (dtype, (r, c))} | ({"v": (dtype, (c,))} if "v[" in expression else {})


@st.composite
def products(draw: st.DrawFn) -> Case:
    m, n = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    k = draw(st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 256])))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16", "int8"]))
    weights = draw(st.sampled_from([("n, k", (n, k)), ("k, n", (k, n))]))
    return f"y[m, n] +=! x[m, k] * w[{weights[0]}]", {"x": (dtype, (m, k)), "w": (dtype, weights[1])}


def program_of(case: Case) -> TensorProgram:
    expression, signature = case
    return parse(expression, {name: TensorType(DType(d), shape) for name, (d, shape) in signature.items()})


@st.composite
def tiles(draw: st.DrawFn, group: KernelGroup) -> RProgram:
    """Any tiles that are legal at all: whole warps where lanes meet."""
    space = replace(group.space, vector_axis=draw(st.sampled_from([a.name for a in group.space.axes])))
    lanes = draw(st.sampled_from([1, 2, 8, 16, 32, 64, 256]))
    thread, block, points = {}, {}, 1
    for axis in space.spatial:
        thread[axis.name] = draw(st.sampled_from([1, 1, 2, 4, 8]))
        count = draw(st.sampled_from([1, 2, 4])) if points * lanes < 256 else 1
        block[axis.name], points = thread[axis.name] * count, points * count
    if lanes > 1 and points * lanes < 32 and space.spatial:
        grown = 32 // (points * lanes)
        block[space.spatial[0].name] *= grown
    elif lanes > 1 and points * lanes < 32:
        lanes = 32
    for axis in space.reduced:
        thread[axis.name] = draw(st.sampled_from([1, 2, 4, 8]))
        flight = draw(st.sampled_from([1, 2, 1000]))
        block[axis.name] = min(flight * lanes * thread[axis.name], -(-axis.extent // lanes) * lanes)
    unit = HW.unit_for(space.compute_dtype)
    return RProgram(space, unit, RTile(tuple(block.items())), RTile(tuple(thread.items())), lanes)


def source_of(program: TensorProgram, group: KernelGroup, tile: RProgram) -> KernelSource:
    types = stored_types(program)
    views = (*group.inputs, *group.stored)
    stored = [(name, types[name]) for name, _ in group.stored]
    part = GroupLaunches(lower(replace(group, space=tile.space), tile, HW), views)
    return with_program_indices(emit("kernel", (part,), tensors_in_memory(program, types, stored), HW, ""), program)


def judge(program: TensorProgram, source: KernelSource) -> None:
    arrays = random_inputs(program, seed=1)
    call = load_runner(CompiledKernel(source, b"", "", tuple(Resources() for _ in source.launches)), RuntimeChoice.EMULATOR).bind(
        arrays
    )
    call()
    verdict = agrees(program, call.results(), evaluate(program, arrays))
    assert verdict.ok, f"{verdict}\n{source.text}"


def check_any_tiles(case: Case, data: st.DataObject) -> None:
    program = program_of(case)
    groups = partition(program, HW)
    if len(groups) == 1 and groups[0].space.reduces_rows:
        judge(program, source_of(program, groups[0], data.draw(tiles(groups[0]))))


def check_chosen(case: Case, target: str) -> None:
    expression, signature = case
    kernel = roller_svc.compile(expression, signature, target=target, select="model", top_k=1, runtime="emulator")
    program = program_of(case)
    arrays = random_inputs(program, seed=1)
    verdict = agrees(program, kernel(**arrays), evaluate(program, arrays))
    assert verdict.ok, f"{expression} {signature}: {verdict}\n{kernel.source}"


cases = st.one_of(rows_and_columns(), products())


@pytest.mark.slow
@given(cases, st.data())
@settings(max_examples=8)
def test_any_tiles_give_the_reference_s_values(case: Case, data: st.DataObject) -> None:
    check_any_tiles(case, data)


@pytest.mark.slow
@given(cases, st.data())
@settings(max_examples=80)
def test_many_tiles_give_the_reference_s_values(case: Case, data: st.DataObject) -> None:
    check_any_tiles(case, data)


@pytest.mark.slow
@given(cases, st.sampled_from(["nvidia-a100-sxm-80gb", "nvidia-t4"]))
@settings(max_examples=80)
def test_chosen_tiles_give_the_reference_s_values(case: Case, target: str) -> None:
    check_chosen(case, target)


@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"])
def test_integers_are_added_and_multiplied_as_the_floats_that_are_stated(target: str) -> None:
    text = "p[i]: float64 *=! x[i, j]; s[i]: float64 +=! w[i, j]; q[j]: float32 *=! x[i, j]; m[i]: float32 >=! w[i, j]"
    types = {"x": ("int32", (3, 37)), "w": ("int64", (3, 37))}
    x = (np.arange(111, dtype=np.int32) % 9 - 4).reshape(3, 37) | 1
    w = np.full((3, 37), 2**62, np.int64)  # whose sum wraps in 64 bits
    runtime = "auto" if target == "local" else "emulator"
    kernel = roller_svc.compile(text, types, outputs=["p", "s", "q", "m"], target=target, top_k=1, select="model", runtime=runtime)
    found = kernel(x=x, w=w)
    for values in (found, roller_svc.reference(text, types, {"x": x, "w": w}, outputs=["p", "s", "q", "m"])):
        np.testing.assert_allclose(values["p"], np.prod(x, axis=1, dtype=np.float64), rtol=1e-12)
        np.testing.assert_allclose(values["s"], np.sum(w, axis=1, dtype=np.float64), rtol=1e-12)
        np.testing.assert_allclose(values["q"], np.prod(x, axis=0, dtype=np.float64), rtol=1e-6)
        np.testing.assert_allclose(values["m"], np.max(w, axis=1).astype(np.float64), rtol=1e-6)
