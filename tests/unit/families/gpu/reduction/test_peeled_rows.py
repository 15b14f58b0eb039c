"""Rows of odd length on a GPU: a head of elements, aligned vectors, a tail of elements."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from roller_svc import hardware
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.families import prepare
from roller_svc.frontend.lang import parse
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.semantics.compare import compare
from roller_svc.semantics.interpreter import evaluate

HW = hardware.load("nvidia-h200-sxm")
ROWS = 9  # more than the elements of a vector: every alignment
SOFTMAX = "m[r] >=! x[r, c]; s[r] +=! exp(x[r, c] - m[r]); y[r, c] = exp(x[r, c] - m[r]) / s[r]"
ARGMAX = "m[r] >=! x[r, c]; y[r] <=! c.when([m[r] == x[r, c]], {n}).cast(`int64`)"
NORM = (
    "s[r] +=! x[r, c]; n[r] = s[r] / {n}.0; q[r] +=! (x[r, c] - n[r]) * (x[r, c] - n[r]); v[r] = q[r] / {n}.0;"
    " y[r, c] = (x[r, c] - n[r]) * g[c]"
)
SUM = "y[r] +=! x[r, c]"
LAYER_NORM = f"{NORM} + b[c]"
RMS_NORM = "q[r] +=! x[r, c] * x[r, c]; n[r] = rsqrt(q[r] / {n}.0 + 0.001); y[r, c] = x[r, c] * n[r] * g[c]"
JOINT = "s[r] +=! x[r, c]; q[r] +=! x[r, c] * g[c]; y[r, c] = x[r, c] * g[c] + s[r] * q[r]"
MASKED_SOFTMAX = (
    "t[h, r, c] = x[h, r, c] + k[h, c]; m[h, r] >=! t[h, r, c]; s[h, r] +=! exp(t[h, r, c] - m[h, r]);"
    " y[h, r, c] = exp(t[h, r, c] - m[h, r]) / s[h, r]"
)
HALVES = (DType.BFLOAT16, DType.FLOAT16)


def program_of(expression: str, dtype: DType, columns: int, rows: int = ROWS) -> TensorProgram:
    types = {"x": TensorType(dtype, (rows, columns)), "g": TensorType(dtype, (columns,))}
    types |= {"b": TensorType(DType.FLOAT32, (columns,)), "k": TensorType(dtype, (2, columns))}
    if "x[h" in expression:
        types["x"] = TensorType(dtype, (2, rows, columns))
    text = expression.replace("{n}", str(columns))
    return parse(text, {name: type_ for name, type_ in types.items() if f"{name}[" in text})


def source_of(program: TensorProgram, flight: int, lanes: int, run: int, serial: int = 1) -> KernelSource:
    (group,) = partition(program, HW)
    heads = [(axis.name, 1) for axis in group.outer if axis.name != "r"]
    block = RTile((*heads, ("r", max(1, 64 // lanes) * serial), ("c", flight * lanes * run)))
    thread = RTile((*heads, ("r", serial), ("c", run)))
    tiles = RProgram(group.space, HW.unit_for(DType.FLOAT32), block, thread, lanes)
    types = stored_types(program)
    stored = [(name, types[name]) for name, _ in group.stored]
    part = GroupLaunches(lower(group, tiles, HW), (*group.inputs, *group.stored))
    return emit("kernel", (part,), tensors_in_memory(program, types, stored), HW, "")


def inputs_of(program: TensorProgram, *, special: bool) -> dict[str, NDArray[np.generic]]:
    rng = np.random.default_rng(7)
    arrays = {name: (rng.standard_normal(type_.shape) * 3).astype(numpy_dtype(type_.dtype)) for name, type_ in program.inputs}
    if special:
        x = arrays["x"]
        x[1, ::3] = -np.inf
        x[2] = -np.inf
        x[3, 0] = np.nan  # in the head
        x[4, -1] = np.inf  # in the tail
        x[5, x.shape[1] // 2] = np.nan
    return arrays


def check(program: TensorProgram, source: KernelSource, arrays: dict[str, NDArray[np.generic]]) -> None:
    compiled = CompiledKernel(source, b"", "", tuple(Resources() for _ in source.launches))
    call = load_emulated(compiled, races=True).bind(arrays)
    call()
    expected = evaluate(program, arrays)
    for name, result in call.results().items():
        agreement = compare(name, result, expected[name])
        assert agreement.ok, agreement


@pytest.mark.emulator
@pytest.mark.parametrize("flight", [1, 3], ids=["streamed", "resident"])
@pytest.mark.parametrize("columns", [37, 255, 257])
@pytest.mark.parametrize("expression", [SOFTMAX, ARGMAX, NORM, SUM], ids=["softmax", "argmax", "norm", "sum"])
def test_peeled_rows_give_the_results_of_the_interpreter(expression: str, columns: int, flight: int) -> None:
    program = program_of(expression, DType.BFLOAT16, columns)
    source = source_of(program, flight, lanes=16, run=8)
    assert "*(const uint4 *)&x[" in source.text
    check(program, source, inputs_of(program, special=expression != NORM))


@pytest.mark.emulator
@pytest.mark.parametrize("lanes", [4, 32, 64])
@pytest.mark.parametrize("flight", [1, 3], ids=["streamed", "resident"])
@pytest.mark.parametrize(("rows", "serial"), [(9, 2), (64, 4), (67, 2)])
@pytest.mark.parametrize("expression", [LAYER_NORM, RMS_NORM, MASKED_SOFTMAX, JOINT], ids=["layer", "rms", "softmax", "joint"])
def test_blocks_stage_operands_of_rows_with_one_alignment(expression: str, rows: int, serial: int, flight: int, lanes: int) -> None:
    program = program_of(expression, DType.BFLOAT16, 263, rows)
    source = source_of(program, flight, lanes, 8, serial)
    staged = "k_staged0" if expression == MASKED_SOFTMAX else "g_staged0"
    assert f"*(const uint4 *)&{staged}[" in source.text
    assert "*(const uint4 *)&x[" in source.text
    check(program, source, inputs_of(program, special=False))


@pytest.mark.emulator
@pytest.mark.parametrize("lanes", [1, 4, 64])
def test_lanes_share_the_head_and_tail(lanes: int) -> None:
    program = program_of(SOFTMAX, DType.FLOAT16, 263)
    check(program, source_of(program, 1, lanes, 8), inputs_of(program, special=True))


@pytest.mark.parametrize(
    ("dtype", "columns", "elements", "bits"),
    [(DType.BFLOAT16, 4097, 8, 128), (DType.FLOAT32, 4097, 4, 128), (DType.INT8, 4097, 16, 128)],
)
def test_long_rows_of_odd_length_are_peeled(dtype: DType, columns: int, elements: int, bits: int) -> None:
    request = build_request(
        SUM,
        {"x": TensorType(dtype, (4096, columns))},
        target="nvidia-h200-sxm",
        select="model",
        top_k=1,
        runtime="emulator",
    )
    winner = build_kernel(request).winner
    assert winner.plan.dominant_choice.program.thread["c"] == elements
    assert bits == elements * dtype.bytes * 8
    assert "*(const uint4 *)&x[" in winner.source.text


def test_rows_of_half_a_warp_of_vectors_may_be_peeled() -> None:
    """197 columns: the tokens of an image of 14 x 14 patches, and one more."""
    request = build_request(
        SOFTMAX,
        {"x": TensorType(DType.BFLOAT16, (200000, 197))},
        target="nvidia-h200-sxm",
        select="model",
        top_k=1,
        runtime="emulator",
    )
    winner = build_kernel(request).winner
    assert winner.plan.dominant_choice.program.thread["c"] == 8
    assert winner.source is not None
    assert "*(const uint4 *)&x[" in winner.source.text


@pytest.mark.parametrize(("weight", "is_staged"), [("g[c]", True), ("g[c].when([c < 4000], 1.0)", False)])
def test_the_model_stages_the_operands_that_the_kernel_does(weight: str, *, is_staged: bool) -> None:
    """Weights that are read under a condition stay in memory."""
    program = program_of(RMS_NORM.replace("g[c]", weight), DType.BFLOAT16, 4097, 4096)
    (group,) = partition(program, HW)
    rows = prepare(group, HW, HW.unit_for(DType.FLOAT32))[1].facts
    (access,) = [a for a in rows.accesses if a.footprint.access.tensor == "g"]
    assert (access.staged_axes is not None) is is_staged
    assert ("g_staged0" in source_of(program, 1, 32, 8, 2).text) is is_staged


@pytest.mark.parametrize(("columns", "elements"), [(37, 1), (4100, 4)])
def test_short_rows_and_rows_of_aligned_vectors_are_not_peeled(columns: int, elements: int) -> None:
    request = build_request(
        SUM,
        {"x": TensorType(DType.BFLOAT16, (4096, columns))},
        target="nvidia-h200-sxm",
        select="model",
        top_k=1,
        runtime="emulator",
    )
    winner = build_kernel(request).winner
    assert winner.plan.dominant_choice.program.thread["c"] == elements
    assert "head" not in winner.source.text
