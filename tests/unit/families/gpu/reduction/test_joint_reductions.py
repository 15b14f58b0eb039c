"""Independent reductions over the same points on a GPU: one loop over a row, split together."""

from __future__ import annotations

import numpy as np
import pytest

from roller_svc import hardware
from roller_svc.analysis.online_reduction import joint_reductions
from roller_svc.compiler.backends import load_emulated
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.request import build_request
from roller_svc.frontend.lang import parse
from roller_svc.fusion.split.reduction import may_split
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import BuildReport
from roller_svc.runtime.binding import numpy_dtype
from roller_svc.semantics.compare import compare
from roller_svc.semantics.interpreter import evaluate

HW = hardware.load("nvidia-h200-sxm")
STATISTICS = "s[j] +=! x[i, j]; q[j] +=! x[i, j] * x[i, j]; m[j] >=! x[i, j]; y[j] = q[j] / {n}.0 - s[j] / {n}.0 + m[j]"
IMAGES = "s[c] +=! x[b, c, h]; q[c] +=! x[b, c, h] * x[b, c, h]"
RESIDUAL = (
    "z[i, j] = x[i, j] + w[i, j]; q[i] +=! z[i, j] * z[i, j]; r[i] = rsqrt(q[i] / {n}.0 + 0.001); y[i, j] = z[i, j] * r[i] * g[j]"
)
ROWS = "s[i] +=! x[i, j]; q[i] +=! x[i, j] * x[i, j]; y[i] = q[i] - s[i]"


def build(expression: str, dtype: DType, shape: tuple[int, ...], outputs: tuple[str, ...]) -> BuildReport:
    request = build_request(
        expression.replace("{n}", str(shape[0])),
        {"x": TensorType(dtype, shape)},
        outputs=outputs,
        target="nvidia-h200-sxm",
        select="model",
        top_k=1,
        runtime="emulator",
    )
    return build_kernel(request)


def check(report: BuildReport) -> None:
    compiled = report.winner.compiled
    assert compiled is not None
    rng = np.random.default_rng(3)
    arrays = {name: rng.standard_normal(type_.shape).astype(numpy_dtype(type_.dtype)) for name, type_ in report.program.inputs}
    call = load_emulated(compiled, races=True).bind(arrays)
    call()
    expected = evaluate(report.program, arrays)
    for name, result in call.results().items():
        agreement = compare(name, result, expected[name])
        assert agreement.ok, agreement


@pytest.mark.parametrize("columns", [8192, 4096])
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "cpu-x86-avx2"])
def test_sums_of_rows_and_of_columns_are_separate(target: str, columns: int) -> None:
    """One pass over a square tensor serves one of them alone."""
    request = build_request(
        "s[i] +=! x[i, j]; q[j] +=! x[i, j] * x[i, j]",
        {"x": TensorType(DType.BFLOAT16, (8192, columns))},
        target=target,
        select="model",
        top_k=1,
    )
    assert len(build_kernel(request).groups) == 2


@pytest.mark.emulator
@pytest.mark.parametrize("columns", [41, 47, 4097])
def test_a_norm_of_equal_elements_is_zero(columns: int) -> None:
    report = build(
        f"s[i] +=! x[i, j]; u[i] = s[i] / {columns}.0; q[i] +=! (x[i, j] - u[i]) * (x[i, j] - u[i]);"
        f"y[i, j] = (x[i, j] - u[i]) * rsqrt(q[i] / {columns}.0 + 1e-05)",
        DType.FLOAT32,
        (3, columns),
        ("y",),
    )
    compiled = report.winner.compiled
    assert compiled is not None
    result = load_emulated(compiled).run({"x": np.full((3, columns), 1000.0, np.float32)})["y"]
    np.testing.assert_array_equal(result, np.zeros_like(result))


@pytest.mark.emulator
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("columns", [16, 13])
def test_statistics_of_columns_are_split_together(columns: int, dtype: DType) -> None:
    report = build(STATISTICS, dtype, (4099, columns), ("s", "y"))
    (group,) = report.groups
    assert may_split(group)
    assert report.winner.plan.dominant_choice.program.split_k > 1
    assert report.winner.source is not None
    assert len(report.winner.source.launches) == 2
    check(report)


@pytest.mark.emulator
def test_statistics_over_several_axes_are_split_together() -> None:
    report = build(IMAGES, DType.FLOAT32, (9, 6, 1500), ("s", "q"))
    (group,) = report.groups
    assert may_split(group)
    check(report)


@pytest.mark.emulator
@pytest.mark.parametrize("columns", [64, 1000, 1025])
def test_reductions_of_rows_share_a_loop(columns: int) -> None:
    check(build(ROWS, DType.BFLOAT16, (300, columns), ("s", "y")))


@pytest.mark.emulator
@pytest.mark.parametrize("columns", [512, 515])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_a_sum_that_a_norm_reads_is_stored_by_the_norm(columns: int, dtype: DType) -> None:
    """The sum of a residual is an output too: one kernel reads its operands once."""
    types = {"x": TensorType(dtype, (300, columns)), "w": TensorType(dtype, (300, columns))}
    request = build_request(
        RESIDUAL.replace("{n}", str(columns)),
        {**types, "g": TensorType(dtype, (columns,))},
        outputs=("z", "y"),
        target="nvidia-h200-sxm",
        select="model",
        top_k=1,
        runtime="emulator",
    )
    report = build_kernel(request)
    assert len(report.groups) == 1
    check(report)


def test_statistics_read_their_input_once() -> None:
    source = build(STATISTICS, DType.BFLOAT16, (65536, 1024), ("s", "y")).winner.source
    assert source is not None
    partial, _ = source.text.split("kernel0_combine(")
    assert partial.count("= *(const uint4 *)&x[") <= 2  # a loop, and the rest of the rows


@pytest.mark.parametrize("shape", [(1000000, 64), (65536, 1024), (4096, 4096), (1000000, 63)])
def test_column_sums_keep_memory_busy(shape: tuple[int, int]) -> None:
    """Estimates without launches: at least 0.8 of the bandwidth of the device's memory."""
    estimate = build("y[j] +=! x[i, j]", DType.FLOAT32, shape, ("y",)).winner.plan.estimate
    stages = {stage.name: stage.seconds for stage in estimate.stages}
    seconds = estimate.seconds - stages["launch"] - stages["combine"]
    assert shape[0] * shape[1] * 4 / 4.8e12 / seconds >= 0.8


def test_dependent_reductions_share_no_loop() -> None:
    x = {"x": TensorType(DType.FLOAT32, (64, 64))}
    joint = parse("s[i] +=! x[i, j]; q[i] +=! x[i, j] * x[i, j]; t[i] +=! x[i, j] * s[i]", x)
    ((first, second),) = joint_reductions(joint.statements)
    assert (first.output, second.output) == ("s", "q")
    assert not joint_reductions(parse("s[i] +=! x[i, j]; t[i] +=! x[i, j] * s[i]", x).statements)
