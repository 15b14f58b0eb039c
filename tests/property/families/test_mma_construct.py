"""Construction for matrix units against its rules: every candidate is one that the lowering can make a kernel of."""

from __future__ import annotations

import itertools
import math

import pytest
from contractions import LAYOUTS, batched, conv, matmul, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from roller_svc import hardware
from roller_svc.analysis.operand import operands, staged_dtype
from roller_svc.compiler.rank import construct
from roller_svc.construct.align import EPSILONS
from roller_svc.construct.rules import ThreadTile
from roller_svc.construct.scale_up import SearchTrace, scale_up
from roller_svc.families import model_of, prepare
from roller_svc.families.common.gpu.matrix.stream_k import stream_k_partition
from roller_svc.families.common.gpu.matrix.tile import LoadKind, mma_tile, plan_operand_loads, thread_registers
from roller_svc.families.gpu.mma_contraction.rules import SPILL_SLACK, MmaContractionRules
from roller_svc.fusion.split.reduction import may_split, split_group
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import Arch, ComputeUnit, HardwareSpec
from roller_svc.ir.rprogram import RProgram

DEVICES = {
    "nvidia-a100-sxm-80gb": "mma_f16",
    "nvidia-t4": "mma_f16",
    "nvidia-rtx4090": "mma_f16",
    "nvidia-h200-sxm": "mma_f16",
}
QUIET = settings(max_examples=40)
extents = st.one_of(st.integers(8, 40), st.sampled_from([63, 64, 96, 127, 128, 255, 512, 1000, 1024, 4096]))
groups: st.SearchStrategy[KernelGroup] = st.one_of(
    st.builds(matmul, extents, extents, extents, layout=st.sampled_from(sorted(LAYOUTS))),
    st.builds(batched, st.integers(1, 40), extents, extents, extents),
    st.builds(conv, st.integers(1, 4), st.integers(4, 70), st.integers(7, 40), st.integers(8, 130), st.integers(1, 4)),
)


@pytest.mark.parametrize("target", DEVICES)
@QUIET
@given(group=groups)
def test_every_candidate_keeps_the_contract(target: str, group: KernelGroup) -> None:
    hw = hardware.load(target)
    found = construct(group, hw, unit(hw, DEVICES[target]))
    assert found.programs
    assert len(set(found.programs)) == len(found.programs) <= 64
    for program in found.programs:
        check_shape(group, program, hw)
        check_capacity(group, program, hw)
        check_reduction(group, program)


@pytest.mark.parametrize(
    ("target", "name", "dtype", "layout"),
    [
        ("nvidia-a100-sxm-80gb", "mma_tf32", "float32", "nn"),
        ("nvidia-a100-sxm-80gb", "mma_bf16", "bfloat16", "tn"),
        ("nvidia-a100-sxm-80gb", "mma_f16", "float8_e4m3fn", "nn"),
        ("nvidia-rtx4090", "mma_e4m3", "float8_e4m3fn", "nt"),
        ("nvidia-rtx4090", "mma_e4m3", "float8_e5m2", "nn"),
        ("nvidia-a100-sxm-80gb", "mma_s8", "int8", "tn"),
        ("nvidia-t4", "mma_u8", "uint8", "nt"),
    ],
)
@settings(QUIET, max_examples=12)
@given(m=extents, n=extents, k=extents)
def test_every_type_keeps_the_contract(target: str, name: str, dtype: str, layout: str, m: int, n: int, k: int) -> None:
    hw = hardware.load(target)
    group = matmul(m, n, k, dtype, layout=layout, hw=hw)
    for program in construct(group, hw, unit(hw, name)).programs:
        check_shape(group, program, hw)
        check_capacity(group, program, hw)
        check_reduction(group, program)


def axes_of(group: KernelGroup) -> tuple[str, str, str]:
    m, n, k = (group.space.role(role)[0].name for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    return m, n, k


def check_shape(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    """Whole instructions, whole chunks, whole pairs; padding within bounds."""
    m, n, k = axes_of(group)
    block, warp = program.block, program.thread
    assert all(block[b.name] == warp[b.name] == 1 for b in group.space.role(AxisRole.BATCH))
    assert warp[m] % 16 == 0
    assert warp[n] % 8 == 0
    assert warp[k] == 1
    assert block[m] % warp[m] == block[n] % warp[n] == 0
    assert block[n] % 16 == 0 or (block[n] == 8 and group.space.axis(n).extent <= 8)
    a, b = operands(group)
    for operand in (a, b):
        assert block[k] * staged_dtype(program.unit, operand).bytes in (32, 64, 128)
    assert program.reduce_threads == hw.limits.warp_size == 32
    assert program.threads == 32 * (block[m] // warp[m]) * (block[n] // warp[n])
    for axis in (m, n):
        extent = group.space.axis(axis).extent
        padded = math.ceil(extent / block[axis]) * block[axis]
        assert padded <= max(extent * (1 + EPSILONS[-1]), 16 if axis == m else 8, warp[axis])
        assert warp[axis] < 2 * max(extent, 16)


def check_capacity(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> None:
    """Registers without spills, shared memory of all stages, stages only where copies are asynchronous."""
    limits = hw.limits
    a, b = operands(group)
    tile = mma_tile(program, a, b)
    fed = plan_operand_loads(program.unit, (a, b), hw.arch)
    registers = thread_registers(tile, *fed)
    assert registers <= limits.max_registers_per_thread - SPILL_SLACK
    assert program.threads <= 256
    assert registers * program.threads <= limits.registers_per_core
    assert tile.shared_bytes <= limits.shared_bytes_per_block
    assert program.pipeline.stages >= 2
    if any(feed.load.kind is not LoadKind.ASYNC for feed in fed):
        assert program.pipeline.stages == 2
    if hw.arch < Arch("sm_", 80):
        assert program.pipeline.stages == 2
    needs = model_of(group, program, hw).resources(program)
    assert needs is not None
    assert (needs.registers_per_thread, needs.shared_bytes) == (registers, tile.shared_bytes)


def check_reduction(group: KernelGroup, program: RProgram) -> None:
    """No piece of a split reduction is empty, and neighbours along k stay neighbours; no streaming block is idle."""
    if program.split_k > 1:
        assert may_split(group)
        halves = split_group(group, program)
        assert halves.workspaces[0][1].shape[0] == program.split_k
        whole, piece = operands(group), operands(halves.partial)
        for before, after in zip(whole, piece, strict=True):
            assert after.k_major == before.k_major
            widest = 16 // before.memory_dtype.bytes  # elements of the widest access, cp.async of 16 bytes
            assert min(after.vector_width, widest) == min(before.vector_width, widest)
    if program.pipeline.stream_k_blocks:
        work = stream_k_partition(program)
        assert program.split_k == 1
        assert (work.blocks - 1) * work.k_tiles_per_block < work.tiles * work.k_tiles
        assert work.max_tiles_per_block <= work.tiles


@QUIET
@given(m=extents, n=extents, k=extents, warp=st.sampled_from([(16, 8), (32, 16), (32, 32), (64, 32), (64, 64)]))
def test_scale_up_finds_what_brute_force_finds(m: int, n: int, k: int, warp: tuple[int, int]) -> None:
    hw = hardware.load("nvidia-a100-sxm-80gb")
    group = matmul(m, n, k)
    rules = rules_of(group, hw, unit(hw, "mma_f16"))
    stage = rules.block_level(ThreadTile((*warp, 1), 32), EPSILONS[-1])
    grown = scale_up(stage, SearchTrace(10_000, rules.workload, "family"), 10_000)
    every = [tile for tile in itertools.product(*stage.steps) if not any(stage.evaluate(tile)[2:])]
    # growth stops at what is too large; alignments that growth mends do not stop it
    reached = {tile for tile in every if any(step == tile for step in (*grown.saturated, *grown.border))}
    assert set(grown.saturated) | set(grown.border) == reached
    assert {tile for tile in every if stage.is_saturated(tile)} >= set(grown.saturated)
    if not any(stage.evaluate(tile).too_large for tile in itertools.product(*stage.steps)):
        assert reached == set(every)


def rules_of(group: KernelGroup, hw: HardwareSpec, one: ComputeUnit) -> MmaContractionRules:
    return MmaContractionRules(prepare(group, hw, one)[1])


@QUIET
@given(m=extents, n=extents)
def test_warp_tiles_are_the_best_of_their_size(m: int, n: int) -> None:
    """Of all tiles of as many instructions none reads fewer fragments for a multiply-add."""
    hw = hardware.load("nvidia-a100-sxm-80gb")
    rules = rules_of(matmul(m, n, 512), hw, unit(hw, "mma_f16"))
    stage = rules.thread_level(32)
    chosen = rules.rank_thread_tiles(scale_up(stage, SearchTrace(10_000, rules.workload, "family"), 10_000), 32)
    fitting = [tile for tile in itertools.product(*stage.steps) if not stage.evaluate(tile).too_large]
    for tile in chosen:
        alike = [t for t in fitting if (t[0] * t[1]).bit_length() == (tile[0] * tile[1]).bit_length()]
        assert stage.evaluate(tile).traffic == min(stage.evaluate(t).traffic for t in alike)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (9, 4096), (4096, 8), (16, 8)])
def test_tiny_sides_are_padded_to_one_instruction(m: int, n: int) -> None:
    hw = hardware.load("nvidia-a100-sxm-80gb")
    programs = construct(matmul(m, n, 64), hw, unit(hw, "mma_f16")).programs
    if m <= 16:
        assert {p.block["m"] for p in programs} == {16}
    if n <= 8:
        assert {p.block["n"] for p in programs} == {8}
