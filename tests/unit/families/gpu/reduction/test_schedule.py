"""Reductions on a GPU: reads of rows, NaN and infinities, generated source."""

from __future__ import annotations

import re

import numpy as np
import pytest
from numpy.typing import NDArray

from roller_svc import hardware
from roller_svc.analysis.online_reduction import OnlineReductionKind, online_reductions
from roller_svc.api import load_runner
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.compiler.lower_and_emit import lower
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.families.common.gpu.row_space import exceeds_registers
from roller_svc.frontend.lang import parse
from roller_svc.fusion.partition import stored_types
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.ir.options import RuntimeChoice
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.semantics.compare import compare
from roller_svc.semantics.interpreter import evaluate

HW = hardware.load("nvidia-a100-sxm-80gb")
SOFTMAX = "m[r] >=! x[r, c]; s[r] +=! exp(x[r, c] - m[r]); y[r, c] = exp(x[r, c] - m[r]) / s[r]"
SQUARES = (
    "s[r] +=! x[r, c]; n[r] = s[r] / 256.0; q[r] +=! (x[r, c] - n[r]) * (x[r, c] - n[r]); v[r] = q[r] / 256.0;"
    " y[r, c] = x[r, c] - n[r]"
)
PLACES = "m[r] >=! x[r, c]; y[r] <=! c.when([m[r] == x[r, c]], 256).cast(`int64`)"
ROWS, COLUMNS = 6, 256


def program_of(expression: str, dtype: DType = DType.FLOAT32) -> TensorProgram:
    return parse(expression, {"x": TensorType(dtype, (ROWS, COLUMNS))})


def source_of(program: TensorProgram, flight: int, lanes: int = 32, run: int = 4) -> KernelSource:
    (group,) = partition(program, HW)
    block = RTile((("r", max(1, 64 // lanes)), ("c", flight * lanes * run)))
    tiles = RProgram(group.space, HW.unit_for(DType.FLOAT32), block, RTile((("r", 1), ("c", run))), lanes)
    types = stored_types(program)
    stored = [(name, types[name]) for name, _ in group.stored]
    part = GroupLaunches(lower(group, tiles, HW), (*group.inputs, *group.stored))
    return emit("kernel", (part,), tensors_in_memory(program, types, stored), HW, "")


def run_on(program: TensorProgram, source: KernelSource, x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    compiled = CompiledKernel(source, b"", "", tuple(Resources() for _ in source.launches))
    call = load_runner(compiled, RuntimeChoice.EMULATOR).bind({"x": x})
    call()
    return call.results()


def special_rows() -> NDArray[np.float32]:
    x = np.random.default_rng(3).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    x[1, ::3] = -np.inf
    x[2] = -np.inf
    x[3, 77] = np.nan
    x[4, 200] = np.inf
    x[5, [13, 90, 255]] = 9.0  # ties
    return x


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        (SOFTMAX, OnlineReductionKind.SOFTMAX),
        (SQUARES, OnlineReductionKind.VARIANCE),
        (PLACES, OnlineReductionKind.ARG),
    ],
)
def test_online_reductions_are_found(expression: str, kind: OnlineReductionKind) -> None:
    (joint,) = online_reductions(program_of(expression).statements)
    assert joint.kind is kind


@pytest.mark.parametrize(
    "expression",
    [
        "m[r] >=! x[r, c]; s[r] +=! exp(x[r, c] + m[r])",
        "m[r] <=! x[r, c]; s[r] +=! exp(x[r, c] - m[r])",
        "m[r] >=! x[r, c]; y[r] <=! c.when([m[r] == x[r, c]], 9).cast(`int64`)",  # 9 is a better place than 10
        "s[r] +=! x[r, c]; q[r] +=! (x[r, c] - s[r]) * x[r, c]",
    ],
)
def test_other_pairs_are_not_online_reductions(expression: str) -> None:
    assert online_reductions(program_of(expression).statements) == ()


@pytest.mark.emulator
@pytest.mark.parametrize("flight", [1, 2])
@pytest.mark.parametrize("expression", [SOFTMAX, PLACES])
def test_online_pass_matches_two_passes_with_nan(expression: str, flight: int) -> None:
    program, x = program_of(expression), special_rows()
    found = run_on(program, source_of(program, flight, lanes=16), x)
    for name, expected in evaluate(program, {"x": x}).items():
        np.testing.assert_allclose(found[name], expected.wide, rtol=2e-6, atol=1e-30)


@pytest.mark.emulator
def test_variance_is_accurate_far_from_zero() -> None:
    program = program_of(SQUARES)
    x = (np.random.default_rng(5).standard_normal((ROWS, COLUMNS)) + 4096).astype(np.float32)
    found = run_on(program, source_of(program, flight=1, lanes=16), x)
    np.testing.assert_allclose(found["v"], x.astype(np.float64).var(axis=1), rtol=1e-3)


@pytest.mark.parametrize(("flight", "reads"), [(1, 2), (2, 1)])
def test_resident_rows_are_read_once(flight: int, reads: int) -> None:
    text = source_of(program_of(SOFTMAX), flight).text
    assert text.count("(const uint4 *)&x[") == reads
    assert text.count("*(uint4 *)&y[") == 1


def test_lanes_of_a_warp_reduce_without_shared_memory() -> None:
    text = source_of(program_of(SOFTMAX), 2).text
    assert "lane_max_f32(m_acc, 32)" in text
    assert "__syncthreads" not in text
    assert "__shared__" not in text


def test_warps_of_a_row_synchronise_once_per_reduction() -> None:
    text = source_of(program_of(SOFTMAX), 1, lanes=64).text
    assert text.count("__syncthreads") == 2


LONG = 50_257
LONG_TYPES = pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32], ids=lambda d: d.value)


@LONG_TYPES
def test_rows_too_long_for_registers_are_read_once(dtype: DType) -> None:
    report = build_kernel(
        build_request(
            SOFTMAX,
            {"x": TensorType(dtype, (4096, LONG))},
            target="nvidia-h200-sxm",
            select="model",
            top_k=1,
            runtime="emulator",
        )
    )
    source = report.winner.source
    (launch,) = source.launches
    assert LONG * dtype.bytes <= launch.shared_bytes <= 227 << 10
    loads = [line for line in source.text.splitlines() if re.search(r"\bx\[r_", line)]
    stores = source.text.count("*(uint4 *)&x_loaded0[")
    assert len(loads) == stores + 1, "later statements read the kept row and its edges"
    assert sum("x_edge0[" in line for line in loads) == 1


@pytest.mark.emulator
@LONG_TYPES
def test_rows_in_shared_memory_give_the_results_of_the_interpreter(dtype: DType) -> None:
    program = parse(SOFTMAX, {"x": TensorType(dtype, (2, LONG))})
    x = (np.random.default_rng(1).standard_normal((2, LONG)) * 4).astype(numpy_dtype(dtype))
    found = run_on(program, source_of(program, flight=50, lanes=1024, run=1), x)
    agreement = compare("y", found["y"], evaluate(program, {"x": x})["y"])
    assert agreement.ok, agreement


@pytest.mark.parametrize(("elements", "threads", "is_shared"), [(50, 1024, True), (50, 256, False), (100, 64, True)])
def test_registers_hold_a_row_if_all_threads_have_enough(elements: int, threads: int, is_shared: bool) -> None:
    assert exceeds_registers(elements, 1, threads, 1, HW.limits) == is_shared
