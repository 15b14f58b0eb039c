"""Sums scaled in blocks on a CPU: which groups and units compute them, tiles and tails of runs, and values."""

from __future__ import annotations

import numpy as np
import pytest
from cases_cpu import AVX2
from dot_specs import DOTS, runs, spec_with

import roller_svc
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program
from roller_svc.families import model_of
from roller_svc.families.common.cpu.dot import dot_operands
from roller_svc.families.cpu.contraction.rules import MAX_K_STEP
from roller_svc.families.cpu.contraction.workload import OperandLayout, cpu_operands
from roller_svc.families.matching import unit_views, units_for
from roller_svc.frontend.lang import parse
from roller_svc.ir.constraints import NO_CONSTRAINTS
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import MAX_BYTE_PRODUCTS, AxisRole, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.runtime.cpu import CpuModule
from roller_svc.toolchain import compile_source

SPEC = spec_with(DOTS)
UNITS = {unit.name: unit for unit in SPEC.units}
Tiles = tuple[int, int, int, int, int]  # mr, nr, mc, nc, kc
NESTED = (
    "p[m, n, g] +=! a[m, g * {r} + i].cast({sum}) * b[n, g * {r} + i].cast({sum}) where g in {g}, i in {r};"
    " y[m, n] +=! p[m, n, g].cast(float32) * sa[m, g] * sc[n, g]"
)
OPERANDS = "y[m, n]: float32 +=! (a[m, k].cast(float32) * sa[m, k // {r}]) * (b[n, k].cast(float32) * sc[n, k // {r}])"
ROWS = "y[m, n]: float32 +=! a[m, k].cast(float32) * b[n, k].cast(float32) * sa[m, k // {r}]"
COLUMNS = "y[m, n]: float32 +=! a[m, k].cast(float32) * b[n, k].cast(float32) * sc[n, k // {r}]"
BLOCKS_ALONE = "y[m, n]: float32 +=! a[m, k].cast(float32) * b[n, k].cast(float32) * s[k // {r}]"
RELU = OPERANDS + "; z[m, n] = max(y[m, n], 0.0)"


def program_of(text: str, size: tuple[int, int, int], run: int, dtype: DType) -> TensorProgram:
    (m, n, k), blocks = size, -(-size[2] // run)
    shapes = {"a": (m, k), "b": (n, k), "sa": (m, blocks), "sc": (n, blocks), "s": (blocks,)}
    types = {
        name: TensorType(dtype if name in "ab" else DType.FLOAT32, shape) for name, shape in shapes.items() if f"{name}[" in text
    }
    sums = "float32" if dtype.is_float else "int32"
    return parse(text.format(r=run, g=blocks, sum=sums), types)


def scaled_group(program: TensorProgram, hw: HardwareSpec) -> KernelGroup:
    """Return the group of the only partition with one kernel that scales sums."""
    found = [groups for groups in PartitionCache(program).partitions(hw) if groups[0].space.scale_runs is not None]
    ((group,),) = found
    return group


def tiled(group: KernelGroup, unit: ComputeUnit, tiles: Tiles) -> RProgram:
    mr, nr, mc, nc, kc = tiles
    sizes = {AxisRole.M: (mr, mc), AxisRole.N: (nr, nc), AxisRole.K: (1, kc), AxisRole.BATCH: (1, 1)}
    axes = group.space.axes
    block = tuple((axis.name, sizes[axis.role][1]) for axis in axes)
    thread = tuple((axis.name, sizes[axis.role][0]) for axis in axes)
    return RProgram(group.space, unit, RTile(block), RTile(thread))


def check(
    text: str, size: tuple[int, int, int], run: int, dtype: DType, tiles: Tiles, hw: HardwareSpec = AVX2, unit: str = ""
) -> None:
    """Compare a kernel in those tiles with sums in float64, within roundings of float32."""
    program = program_of(text, size, run, dtype)
    group = scaled_group(program, hw)
    chosen = tiled(group, UNITS[unit] if unit else hw.unit_for(group.product_sum_dtype), tiles)
    plan = Plan((Candidate(chosen, model_of(group, chosen, hw).estimate(chosen)),))
    rng = np.random.default_rng(7)
    arrays = {}
    for name, type_ in program.inputs:
        low, high = type_.dtype.integer_range if not type_.dtype.is_float else (-8, 8)
        values = rng.integers(low, high + 1, type_.shape) if name in "ab" else rng.standard_normal(type_.shape)
        arrays[name] = values.astype(np.dtype(type_.dtype.value))
    (found,) = CpuModule(compile_source(emit_plan(plan, program, (group,), hw))).run(arrays).values()
    m, n, k = size
    along_k = np.arange(k) // run
    rows, columns, of_k = (
        arrays[name].astype(np.float64)[..., along_k] if name in arrays else np.ones((1, k)) for name in ("sa", "sc", "s")
    )
    a, b = arrays["a"].astype(np.float64) * rows * of_k, arrays["b"].astype(np.float64) * columns
    right, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    right = np.maximum(right, 0.0) if text is RELU else right
    assert found.shape == (m, n)
    assert (np.abs(found.astype(np.float64) - right) <= 2.0**-20 * magnitude).all()


HALF = DType.FLOAT16
CASES = [
    (NESTED, (37, 45, 96), 32, HALF, (6, 16, 18, 48, 96)),  # three runs of one block of k
    (OPERANDS, (37, 45, 200), 48, HALF, (6, 16, 18, 48, 96)),  # blocks of two runs; the last run is short
    (OPERANDS, (12, 33, 200), 96, HALF, (6, 16, 12, 48, 48)),  # two blocks of k in each run
    (OPERANDS, (12, 33, 150), 50, HALF, (6, 16, 12, 48, 40)),  # blocks of k that runs do not divide
    (RELU, (37, 45, 96), 32, HALF, (6, 16, 18, 48, 64)),  # an epilogue after several blocks
    (ROWS, (13, 30, 70), 17, HALF, (5, 16, 15, 32, 70)),
    (COLUMNS, (13, 30, 70), 17, HALF, (5, 16, 15, 32, 34)),
    (BLOCKS_ALONE, (13, 32, 64), 16, HALF, (5, 16, 15, 32, 64)),
    (NESTED, (13, 30, 128), 32, DType.INT8, (5, 16, 15, 32, 64)),  # integers without instructions for them
]


@pytest.mark.parametrize(("text", "size", "run", "dtype", "tiles"), CASES)
def test_sums_of_runs_are_right(text: str, size: tuple[int, int, int], run: int, dtype: DType, tiles: Tiles) -> None:
    check(text, size, run, dtype, tiles)


@runs
@pytest.mark.parametrize(
    ("dtype", "unit", "size", "run", "tiles"),
    [
        (DType.INT8, "dot_i8", (13, 45, 256), 64, (5, 16, 15, 48, 128)),  # signs are flipped: each run has its compensation
        (DType.UINT8, "dot_i8", (13, 45, 200), 40, (5, 16, 15, 48, 200)),
        (DType.FLOAT8_E5M2, "dot_bf16", (13, 45, 100), 32, (5, 16, 15, 48, 100)),
    ],
)
def test_dot_products_of_runs_are_right(dtype: DType, unit: str, size: tuple[int, int, int], run: int, tiles: Tiles) -> None:
    check(NESTED if not dtype.is_float else OPERANDS, size, run, dtype, tiles, SPEC, unit)


def test_units_of_words_take_runs_of_whole_words() -> None:
    for run, is_taken in ((64, True), (18, False)):
        group = scaled_group(program_of(NESTED, (64, 64, 8 * run), run, DType.INT8), SPEC)
        assert (dot_operands(UNITS["dot_i8"], group) is not None) is is_taken
        assert [unit.name for unit in units_for(group, SPEC, NO_CONSTRAINTS).units][-1] == "vector_i32"


def test_a_scaled_sum_is_no_convolution() -> None:
    group = scaled_group(program_of(OPERANDS, (49, 64, 256), 64, HALF), AVX2)
    units = units_for(group, AVX2, NO_CONSTRAINTS)
    assert [view for _, view in unit_views(group, AVX2, units)] == [group]


def test_no_sum_of_bytes_of_a_block_wraps() -> None:
    assert MAX_K_STEP * max(unit.k_group for unit in UNITS.values()) <= MAX_BYTE_PRODUCTS


def test_blocks_of_k_are_whole_runs_or_parts_of_one() -> None:
    for run in (128, 768):
        program = program_of(OPERANDS, (256, 256, 6 * 768), run, HALF)
        (choice,) = estimate_program(PartitionCache(program), AVX2, 1).plans[0].choices
        assert choice.program.space.scale_runs is not None
        depth = choice.program.block[choice.program.space.axes[-1].name]
        assert depth % run == 0 or run % depth == 0


@pytest.mark.parametrize("dtype", [DType.FLOAT8_E4M3FN, HALF])
def test_scaled_products_take_the_time_of_plain_ones(dtype: DType) -> None:
    hw = hardware.load("cpu-x86-avx512")
    plain = program_of("y[m, n]: float32 +=! a[m, k] * b[n, k]", (768, 768, 768), 128, dtype)
    seconds = estimate_program(PartitionCache(plain), hw, 1).plans[0].estimate.seconds
    for text in (NESTED, OPERANDS):
        program = program_of(text, (768, 768, 768), 128, dtype)
        plan = estimate_program(PartitionCache(program), hw, 1).plans[0]
        assert len(plan.choices) == 1
        assert plan.estimate.seconds < 1.15 * seconds


def test_operands_with_one_stride_along_fused_axes_are_transposed() -> None:
    types = {name: TensorType(HALF, (64, 6, 32)) for name in "ab"}
    cut = {"a": types["a"], "b": TensorType(HALF, (64, 6, 40))}
    for inputs, layout in ((types, OperandLayout.K_MAJOR), (cut, OperandLayout.STRIDED)):
        (group,) = PartitionCache(parse("y[m, n]: float32 +=! a[m, g, i] * b[n, g, i] where g in 6, i in 32", inputs)).groups(AVX2)
        assert cpu_operands(group)[1].layout is layout


def test_batches_are_right() -> None:
    text = "y[e, m, n] +=! a[e, m, g, i] * b[e, n, g, i] * sa[e, m, g] * sc[e, n, g]"
    rng = np.random.default_rng(3)
    shapes = {"a": (3, 20, 4, 64), "b": (3, 72, 4, 64), "sa": (3, 20, 4), "sc": (3, 72, 4)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16 if name in "ab" else np.float32) for name, shape in shapes.items()}
    inputs = {name: (str(each.dtype), each.shape) for name, each in arrays.items()}
    kernel = roller_svc.compile(text, inputs, select="model", top_k=1)
    assert "column_scales" in kernel.source
    right = np.einsum("emgi,engi,emg,eng->emn", *(each.astype(np.float64) for each in arrays.values()))
    np.testing.assert_allclose(kernel.run(arrays)["y"], right, rtol=1e-4, atol=1e-3)
