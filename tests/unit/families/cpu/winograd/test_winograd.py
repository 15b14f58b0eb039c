"""Winograd convolutions on a CPU: results match the interpreter for all shapes; a wrong transform does not."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.analysis import winograd
from roller_svc.analysis.winograd import Transforms, transforms
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import (
    MAX_WINOGRAD_PLANS,
    RankedPartition,
    merge_ranked_plans,
    rank_partitions,
    select_for_measurement,
)
from roller_svc.compiler.serialize import interpret_space
from roller_svc.families import prepare
from roller_svc.families.cpu.winograd import rules
from roller_svc.families.cpu.winograd import workload as winograd_workload
from roller_svc.families.cpu.winograd.workload import plan_task
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import ScheduleConstraints, WinogradMode
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.ir.report import Plan
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import Agreement
from roller_svc.semantics.inputs import random_inputs
from roller_svc.toolchain import compile_source
from roller_svc.verify.run_and_verify import verify_results

F32 = DType.FLOAT32
AVX2, AVX512 = hardware.load("cpu-x86-avx2"), hardware.load("cpu-x86-avx512")
Shapes = dict[str, tuple[int, ...]]


def convolution(n: int, c: int, f: int, h: int, w: int, pad: int = 1, epilogue: str = "S[n, f, y, x]") -> tuple[str, Shapes]:
    """Return a convolution of 3 x 3 taps with an epilogue, and the shapes of its inputs."""
    tall, wide = h + 2 * pad - 2, w + 2 * pad - 2
    rows, columns = f"y + i - {pad}", f"x + j - {pad}"
    guard = f".when([{rows} >= 0, {rows} < {h}, {columns} >= 0, {columns} < {w}], 0.0)" if pad else ""
    text = f"S[n, f, y, x] +=! W[f, c, i, j] * X[n, c, {rows}, {columns}]{guard} where y in {tall}, x in {wide}"
    shapes: Shapes = {"X": (n, c, h, w), "W": (f, c, 3, 3)}
    if "B[f]" in epilogue:
        shapes["B"] = (f,)
    if "R[" in epilogue:
        shapes["R"] = (n, f, tall, wide)
    return f"{text}; Y[n, f, y, x] = {epilogue}", shapes


CHANNELS_LAST = (
    "Y[n, y, x, f] +=! X[n, y + i - 1, x + j - 1, c].when([y + i - 1 >= 0, y + i - 1 < 9, x + j - 1 >= 0, "
    "x + j - 1 < 11], 0.0) * W[i, j, c, f] where y in 9, x in 11"
)
PROLOGUE = (
    "S[f, y, x] +=! W[f, c, i, j] * max(X[c, y + i - 1, x + j - 1] * A[c], 0.0).when([y + i - 1 >= 0, "
    "y + i - 1 < 9, x + j - 1 >= 0, x + j - 1 < 10], 0.0) where y in 9, x in 10; Y[f, y, x] = S[f, y, x]"
)
REFLECTED = "Y[f, y, x] +=! W[f, c, i, j] * X[c, 7 - abs(7 - abs({y})), 7 - abs(7 - abs({x}))] where y in 4, x in 4, i in 3, j in 3"
PLANES = (
    "S[n, f, z, y, x] +=! W[f, c, k, i, j] * X[n, c, z + k - 1, y + i - 1, x + j - 1].when([z + k - 1 >= 0, "
    "z + k - 1 < 5, y + i - 1 >= 0, y + i - 1 < 9, x + j - 1 >= 0, x + j - 1 < 10], 0.0) "
    "where z in 5, y in 9, x in 10; Y[n, f, z, y, x] = max(S[n, f, z, y, x] + B[f], 0.0)"
)
DILATED_PLANES = "Y[n, z, y, x, f] +=! W[k, i, j, c, f] * X[n, z + k * 2, y + i, x + j, c] where z in 3, y in 6, x in 7"
GROUPED = (
    "S[n, f, y, x] +=! X[n, f // 12 * 5 + c, y + i - 1, x + j - 1].when([y + i - 1 >= 0, y + i - 1 < 9, "
    "x + j - 1 >= 0, x + j - 1 < 7], 0.0) * W[f, c, i, j] where n in 2, f in 36, y in 9, x in 7, c in 5; "
    "Y[n, f, y, x] = max(S[n, f, y, x] + B[f], 0.0)"
)
GROUPS_LAST = "Y[y, x, g, f] +=! W[g, f, c, i, j] * X[y + i, x + j, g, c] where y in 8, x in 7"
LINE = (
    "S[n, f, t] +=! W[f, c, i] * X[n, c, t + i * {d} - {d}].when([t + i * {d} - {d} >= 0, t + i * {d} - {d} < 61], 0.0) "
    "where t in 61; Y[n, f, t] = max(S[n, f, t] + B[f], 0.0)"
)
LINE_LAST = "Y[t, f] +=! X[t + i * 2, c] * W[i, c, f] where t in 37"
DILATED = "Y[f, y, x] +=! W[f, c, i, j] * X[c, y + i * 3, x + j * 2] where y in 9, x in 11"
ACROSS = "Y[f, y, x] +=! W[f, c, i, j] * X[c, y + i, x + j] where y in 9, x in 14"
FULL = "max(S[n, f, y, x] + B[f] + R[n, f, y, x], 0.0)"
GROUPED_ALONE: tuple[str, Shapes] = (
    "Y[f, y, x] +=! X[f // 16 * 16 + c, y + i, x + j] * W[f, c, i, j] where f in 48, y in 12, x in 12, c in 16",
    {"X": (48, 14, 14), "W": (48, 16, 3, 3)},
)
CASES: dict[str, tuple[str, Shapes]] = {
    "even": convolution(1, 16, 16, 8, 8),
    "odd": convolution(1, 12, 20, 9, 7),
    "one row of tiles": convolution(1, 8, 8, 2, 30),
    "valid": convolution(1, 10, 24, 11, 14, pad=0),
    "padded by two": convolution(1, 8, 17, 6, 9, pad=2),
    "batch": convolution(3, 9, 16, 7, 7),
    "epilogue": convolution(2, 12, 20, 10, 13, epilogue=FULL),
    "few filters": convolution(1, 16, 5, 10, 10, epilogue="max(S[n, f, y, x] + B[f], 0.0)"),
    "many channels": convolution(1, 70, 40, 6, 6),
    "channels last": (CHANNELS_LAST, {"X": (2, 9, 11, 10), "W": (3, 3, 10, 24)}),
    "planes": (PLANES, {"X": (2, 10, 5, 9, 10), "W": (20, 10, 3, 3, 3), "B": (20,)}),
    "dilated planes, channels last": (DILATED_PLANES, {"X": (2, 5, 8, 9, 6), "W": (2, 3, 3, 6, 17)}),
    "grouped": (GROUPED, {"X": (2, 15, 9, 7), "W": (36, 5, 3, 3), "B": (36,)}),
    "groups, channels last": (GROUPS_LAST, {"X": (10, 9, 3, 10), "W": (3, 20, 10, 3, 3)}),
    "prologue": (PROLOGUE, {"X": (12, 9, 10), "A": (12,), "W": (16, 12, 3, 3)}),
    "line": (LINE.format(d=1), {"X": (2, 20, 61), "W": (24, 20, 3), "B": (24,)}),
    "dilated line": (LINE.format(d=8), {"X": (1, 20, 61), "W": (24, 20, 3), "B": (24,)}),
    "dilated line, channels last": (LINE_LAST, {"X": (41, 12), "W": (3, 12, 20)}),
    "rows": (ACROSS, {"X": (12, 11, 14), "W": (16, 12, 3, 1)}),
    "columns": (ACROSS, {"X": (12, 9, 16), "W": (16, 12, 1, 3)}),
    "columns of planes": (ACROSS, {"X": (12, 13, 16), "W": (16, 12, 5, 3)}),
    "dilated": (DILATED, {"X": (12, 15, 15), "W": (16, 12, 3, 3)}),
    "dilated, reflected": (REFLECTED.format(y="y + i * 2 - 1", x="x + j * 2 - 1"), {"X": (12, 8, 8), "W": (16, 12, 3, 3)}),
    "reflected": (REFLECTED.format(y="y + i - 1", x="x + j - 1"), {"X": (12, 8, 8), "W": (16, 12, 3, 3)}),
}


def program_of(text: str, shapes: Shapes, constants: tuple[str, ...] = ("W", "B")) -> TensorProgram:
    program = parse(text, {name: TensorType(F32, shape) for name, shape in shapes.items()})
    return replace(program, constants=tuple(name for name in constants if name in shapes))


def ranked(program: TensorProgram, hw: HardwareSpec, mode: WinogradMode, count: int = 40) -> RankedPartition:
    return rank_partitions(PartitionCache(program), hw, count, ScheduleConstraints(winograd=mode))[0]


def tiles_of(partition: RankedPartition) -> set[int]:
    return {candidate.program.space.winograd_tile for candidate in partition.candidates[0]}


def varied(partition: RankedPartition, m: int, count: int = 3) -> list[Candidate]:
    """Return candidates of one tile size, as different as the list has them."""
    found = [c for c in partition.candidates[0] if c.program.space.winograd_tile == m]
    return found[:: max(1, len(found) // count)][:count]


def run(program: TensorProgram, partition: RankedPartition, candidate: Candidate, hw: HardwareSpec) -> Agreement:
    """Build a candidate, run it on random inputs, and compare it with the reference.

    Wide vectors run on a CPU with narrower ones too, once nothing pins them to registers.
    """
    source = emit_plan(Plan((candidate,)), program, partition.groups, hw)
    if hw.arch != AVX2.arch:
        text = re.sub(r'__asm__ ?(volatile)?\("" : "\+v"\([^)]*\)\);', "", source.text)
        source = replace(source, text=text, arch=AVX2.arch)
    arrays = random_inputs(program, seed=1)
    call = CpuModule(compile_source(source)).bind(arrays)
    call()
    return verify_results(program, arrays, call.results(), allow_tf32=False, main=candidate.program)


@pytest.mark.parametrize("m", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_results_match_the_reference(case: str, m: int) -> None:
    program = program_of(*CASES[case])
    partition = ranked(program, AVX2, WinogradMode.ALWAYS)
    assert len(partition.groups) == 1
    for candidate in varied(partition, m):
        verdict = run(program, partition, candidate, AVX2)
        assert verdict.ok, (candidate.program.tile_text, verdict.detail)


@pytest.mark.parametrize("m", [2, 4])
def test_rows_of_tiles_are_cut_where_one_is_too_large(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(*convolution(1, 16, 8, 6, 61))
    monkeypatch.setattr(rules, "MAX_INPUTS_FRACTION", 0.02)
    partition = ranked(program, AVX2, WinogradMode.ALWAYS)
    for candidate in varied(partition, m, 2):
        assert candidate.program.block["x"] < 61
        verdict = run(program, partition, candidate, AVX2)
        assert verdict.ok, (candidate.program.tile_text, verdict.detail)


@pytest.mark.slow
@pytest.mark.parametrize("hw", [AVX2, AVX512], ids=lambda hw: hw.id)
def test_blocks_of_planes_are_of_one_image(hw: HardwareSpec) -> None:
    """Each number of planes of a block is tried, with rows that are whole and cut; all of them are right."""
    program = program_of(*CASES["planes"])
    partition = ranked(program, hw, WinogradMode.ALWAYS, 200)
    found: dict[tuple[int, bool], Candidate] = {}
    for candidate in partition.candidates[0]:
        block = candidate.program.block
        assert block["n"] == 1
        if candidate.program.space.winograd_tile == 2:
            found.setdefault((block["z"], block["y"] < 9), candidate)
    assert {planes for planes, _ in found} == {1, 2, 3, 5}
    assert {cut for _, cut in found} == {False, True}
    for candidate in found.values():
        assert run(program, partition, candidate, hw).ok, candidate.program.tile_text


@pytest.mark.slow
@pytest.mark.parametrize("case", ["odd", "epilogue", "channels last"])
def test_results_of_wide_vectors_match_the_reference(case: str) -> None:
    program = program_of(*CASES[case])
    partition = ranked(program, AVX512, WinogradMode.ALWAYS)
    for m in (2, 4):
        for candidate in varied(partition, m, 2):
            verdict = run(program, partition, candidate, AVX512)
            assert verdict.ok, (candidate.program.tile_text, verdict.detail)


def test_large_inputs_beside_an_output_keep_it_within_its_bound() -> None:
    """Errors follow the largest inputs of a tile, which direct convolution's bound does not."""
    program = program_of(*convolution(1, 8, 16, 8, 8))
    partition = ranked(program, AVX2, WinogradMode.ALWAYS)
    (candidate, *_) = varied(partition, 4, 1)
    arrays = random_inputs(program, seed=1)
    arrays["X"][..., 2, 2] = 1e4
    call = CpuModule(compile_source(emit_plan(Plan((candidate,)), program, partition.groups, AVX2))).bind(arrays)
    call()
    results = call.results()
    assert verify_results(program, arrays, results, allow_tf32=False, main=candidate.program).ok
    assert not verify_results(program, arrays, results, allow_tf32=False).ok


@pytest.mark.parametrize("matrix", ["inputs", "filters", "outputs"])
@pytest.mark.parametrize("m", [2, 4])
def test_wrong_transform_is_caught(m: int, matrix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One coefficient that is off by 1 % makes the kernel disagree with the reference."""
    rows = [list(row) for row in getattr(transforms(m), matrix)]
    r, k = next((r, k) for r, row in enumerate(rows) for k, c in enumerate(row) if r == 1 and c)
    rows[r][k] *= Fraction(101, 100)
    wrong = replace(transforms(m), **{matrix: tuple(map(tuple, rows))})
    program = program_of(*CASES["odd"])
    partition = ranked(program, AVX2, WinogradMode.ALWAYS)
    (candidate, *_) = varied(partition, m, 1)
    monkeypatch.setattr(winograd_workload, "transforms", lambda _: wrong)
    assert not run(program, partition, candidate, AVX2).ok


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("case", [convolution(1, 20, 40, 13, 13), GROUPED_ALONE], ids=["plain", "grouped"])
def test_prepared_weights_give_the_same_bits(case: tuple[str, Shapes], mode: str) -> None:
    text, shapes = case
    inputs = {name: ("float32", shape) for name, shape in shapes.items()}
    kernel = roller_svc.compile(text, inputs, select="model", constants=["W"], winograd=mode)
    assert ("finish" in kernel.source) is (mode == "always")
    arrays = random_inputs(program_of(text, shapes), seed=3)
    prepared = kernel.prepare(W=arrays["W"])(X=arrays["X"])
    np.testing.assert_array_equal(prepared["Y"], kernel.run(arrays)["Y"])


@pytest.mark.parametrize("shape", [convolution(1, 16, 32, 24, 24), CASES["grouped"]], ids=["plain", "grouped"])
def test_threads_compute_the_same(shape: tuple[str, Shapes]) -> None:
    program = program_of(*shape)
    partition = ranked(program, replace_cores(AVX2, 2), WinogradMode.ALWAYS)
    for candidate in varied(partition, 4):
        assert candidate.program.grid > 1
        assert run(program, partition, candidate, AVX2).ok


@pytest.mark.parametrize(("cores", "filters"), [(2, 256), (3, 264)])
def test_blocks_of_filters_have_legal_trees(cores: int, filters: int) -> None:
    """One candidate of F(2 x 2) for each block and panel of filters."""
    hw = replace_cores(AVX2, cores)
    partition = ranked(program_of(*convolution(1, 16, filters, 14, 14)), hw, WinogradMode.ALWAYS, 200)
    blocks = {
        (c.program.block["f"], c.program.thread["f"]): c.program
        for c in partition.candidates[0]
        if c.program.space.winograd_tile == 2
    }
    assert len(blocks) > 4
    for program in blocks.values():
        assert lower(partition.groups[0], program, hw)


def replace_cores(hw: HardwareSpec, cores: int) -> HardwareSpec:
    return replace(hw, num_cores=cores)


# where the algorithm applies ------------------------------------------------------------------------------------------
STRIDED = "Y[f, y, x] +=! W[f, c, i, j] * X[c, y * 2 + i, x * 2 + j] where y in 8, x in 8"
PLAIN = "Y[f, y, x] +=! W[f, c, i, j] * X[c, y + i, x + j] where y in 8, x in 8"
STRIDED_PLANES = "Y[f, z, y, x] +=! W[f, c, k, i, j] * X[c, z * 2 + k, y + i, x + j] where z in 4, y in 8, x in 8"


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        (STRIDED, {"X": (16, 17, 17), "W": (16, 16, 3, 3)}),
        (PLAIN, {"X": (16, 12, 12), "W": (16, 16, 5, 5)}),
        (PLAIN, {"X": (16, 10, 12), "W": (16, 16, 3, 5)}),
        (GROUPS_LAST, {"X": (10, 9, 3, 16), "W": (3, 7, 16, 3, 3)}),
        (STRIDED_PLANES, {"X": (16, 9, 10, 10), "W": (16, 16, 3, 3, 3)}),
        (REFLECTED.format(y="y * 2 + i - 1", x="x * 2 + j - 1"), {"X": (16, 8, 8), "W": (16, 16, 3, 3)}),
        ("Y[f, t] +=! W[f, c, i] * X[c, t * 2 + i] where t in 20", {"X": (16, 41), "W": (16, 16, 3)}),
    ],
)
def test_other_convolutions_are_direct(text: str, shapes: Shapes) -> None:
    program = program_of(text, shapes)
    for mode in WinogradMode:
        assert tiles_of(ranked(program, AVX2, mode)) == {0}


def test_weights_that_change_and_other_types_are_direct() -> None:
    text, shapes = convolution(1, 16, 16, 8, 8)
    assert tiles_of(ranked(program_of(text, shapes, ()), AVX2, WinogradMode.ALWAYS)) == {0}
    doubles = parse(text, {name: TensorType(DType.FLOAT64, shape) for name, shape in shapes.items()})
    assert tiles_of(ranked(replace(doubles, constants=("W",)), AVX2, WinogradMode.ALWAYS)) == {0}


def test_modes_choose_the_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(*CASES["epilogue"])
    assert tiles_of(ranked(program, AVX2, WinogradMode.NEVER)) == {0}
    assert tiles_of(ranked(program, AVX2, WinogradMode.ALWAYS)) == {2, 4}
    assert tiles_of(ranked(program, AVX2, WinogradMode.AUTO)) == {0, 2, 4}
    monkeypatch.setattr(winograd, "MAX_RELATIVE_ERROR", 1e-9)
    assert tiles_of(ranked(program, AVX2, WinogradMode.AUTO)) == {0, 2}
    assert tiles_of(ranked(program, AVX2, WinogradMode.ALWAYS)) == {2, 4}


# ranking --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("hw", [AVX2, AVX512], ids=lambda hw: hw.id)
def test_model_ranks_large_tiles_first_for_large_planes_and_direct_first_for_few_filters(hw: HardwareSpec) -> None:
    large = ranked(program_of(*convolution(1, 64, 64, 56, 56)), hw, WinogradMode.AUTO)
    assert large.candidates[0][0].program.space.winograd_tile == 4
    few = ranked(program_of(*convolution(1, 3, 4, 224, 224)), hw, WinogradMode.AUTO)
    assert few.candidates[0][0].program.space.winograd_tile == 0


def test_every_algorithm_is_measured() -> None:
    program = program_of(*convolution(1, 128, 128, 28, 28))
    partitions = rank_partitions(PartitionCache(program), AVX2, 13)
    plans = merge_ranked_plans(partitions, 13)
    shortlist = select_for_measurement(plans, partitions, 10)
    tiles = [grouped.plan.choices[0].program.space.winograd_tile for grouped in shortlist]
    assert MAX_WINOGRAD_PLANS <= sum(tile > 0 for tile in tiles) <= MAX_WINOGRAD_PLANS + 1  # one is explored
    assert {0, 4} <= set(tiles)
    labels = {interpret_space(partitions[0].groups[0], grouped.plan.choices[0].program.space) for grouped in shortlist}
    assert {"Winograd F(4 x 4, 3 x 3)", "convolution along filters"} <= labels


def test_lower_bound_counts_the_products_that_are_computed() -> None:
    program = program_of(*convolution(1, 64, 64, 56, 56))
    estimates: dict[int, Any] = {}
    for candidate in ranked(program, AVX2, WinogradMode.AUTO).candidates[0]:
        estimates.setdefault(candidate.program.space.winograd_tile, candidate.estimate.seconds)
    peak = 2 * 9 * 64 * 64 * 56 * 56 / AVX2.unit_for(F32).flops_per_s
    assert estimates[0] > peak > estimates[4] > 36 / 144 * peak


def test_sizes_of_a_task_cover_its_tiles_and_fit() -> None:
    partition = ranked(program_of(*convolution(1, 48, 80, 30, 23)), AVX2, WinogradMode.ALWAYS)
    level = AVX2.block_level
    for candidate in partition.candidates[0]:
        group, program = partition.groups[0], candidate.program
        _, workload = prepare(group, AVX2, program.unit, program=program)
        tile = workload.footprint.tile
        task = plan_task(workload, tile(program.block), tile(program.thread))
        assert task.rows <= task.tiles <= task.calls * task.rows
        assert task.rows * task.vectors + task.vectors + 1 <= AVX2.limits.max_registers_per_thread
        assert task.inputs_bytes <= 2 * level.capacity_bytes


def test_operands_of_transforms_are_never_multiplied_by_zero_or_one() -> None:
    program = program_of(*CASES["odd"])
    partition = ranked(program, AVX2, WinogradMode.ALWAYS)
    for m in (2, 4):
        (candidate, *_) = varied(partition, m, 1)
        text = emit_plan(Plan((candidate,)), program, partition.groups, AVX2).text
        body = text[text.index("transform") : text.index("multiply")]
        assert "half__1_0_0" in body
        assert not re.search(r"\b[01]\.0f \*", body)


def test_matrices_of_a_transform_are_values() -> None:
    assert transforms(4) is transforms(4)
    assert isinstance(transforms(2), Transforms)
