"""Construction for warpgroups against its rules, and the model's estimates of what it finds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from contractions import LAYOUTS, batched, conv, matmul, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from roller_svc import hardware
from roller_svc.analysis.operand import operands
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import construct, rank_units
from roller_svc.construct.align import EPSILONS
from roller_svc.errors import NoCandidateError
from roller_svc.families import prepare, prepare_model
from roller_svc.families.common.gpu.matrix.stream_k import stream_k_partition
from roller_svc.families.common.gpu.warpgroups.tile import wgmma_tile
from roller_svc.frontend.parse import parse
from roller_svc.fusion.split.reduction import may_split, split_group
from roller_svc.ir.constraints import OpClass, ScheduleConstraints
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram

DEVICES = ("nvidia-h100-sxm", "nvidia-h200-sxm")
HOPPER = hardware.load(DEVICES[1])
TENSORCORE = Path(__file__).parents[3] / "bench" / "data" / "tensorcore.json"
STRIDE = 41
QUIET = settings(max_examples=30)
extents = st.one_of(st.integers(8, 40), st.sampled_from([63, 64, 96, 127, 128, 255, 512, 1000, 1024, 4096]))
groups: st.SearchStrategy[KernelGroup] = st.one_of(
    st.builds(matmul, extents, extents, extents, layout=st.sampled_from(sorted(LAYOUTS)), hw=st.just(HOPPER)),
    st.builds(batched, st.integers(1, 40), extents, extents, extents),
    st.builds(conv, st.integers(1, 4), st.integers(4, 70), st.integers(7, 40), st.integers(8, 130), st.integers(1, 4)),
)


@QUIET
@given(group=groups)
def test_every_candidate_keeps_the_contract(group: KernelGroup) -> None:
    found = construct(group, HOPPER, unit(HOPPER, "wgmma_f16"))
    assert found.programs
    assert len(set(found.programs)) == len(found.programs) <= 64
    for program in found.programs:
        check_program(group, program)


@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("wgmma_tf32", "float32", "nn"),
        ("wgmma_tf32", "float32", "nt"),
        ("wgmma_bf16", "bfloat16", "tn"),
        ("wgmma_f16", "float8_e4m3fn", "nn"),
        ("wgmma_e4m3", "float8_e4m3fn", "nt"),
        ("wgmma_e4m3", "float8_e5m2", "tt"),
        ("wgmma_s8", "int8", "tn"),
        ("wgmma_u8", "uint8", "nt"),
    ],
)
@settings(QUIET, max_examples=8)
@given(m=extents, n=extents, k=extents)
def test_every_type_keeps_the_contract(name: str, dtype: str, layout: str, m: int, n: int, k: int) -> None:
    group = matmul(m, n, k, dtype, layout=layout, hw=HOPPER)
    for program in construct(group, HOPPER, unit(HOPPER, name)).programs:
        check_program(group, program)


def check_program(group: KernelGroup, program: RProgram) -> None:
    m, n, k = (group.space.role(role)[0].name for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    check_shape(group, program, (m, n, k))
    check_capacity(group, program)
    check_blocks(group, program, (m, n))


def check_shape(group: KernelGroup, program: RProgram, axes: tuple[str, str, str]) -> None:
    """Whole instructions, rows of the ring in whole swizzled atoms, padding within bounds."""
    m, n, k = axes
    block, warpgroup = program.block, program.thread
    tile = wgmma_tile(program, operands(group), HOPPER.arch)
    assert all(block[b.name] == warpgroup[b.name] == 1 for b in group.space.role(AxisRole.BATCH))
    assert warpgroup[m] in (64, 128)
    assert warpgroup[n] % program.unit.shape[1] == 0
    assert warpgroup[n] <= program.unit.max_shape[1]
    assert tile.b.k_major or warpgroup[n] % 16 == 0
    assert 1 <= tile.consumers <= 3
    assert program.reduce_threads == 128
    assert program.threads == tile.threads == 128 * (tile.consumers + 1)
    for staged, extent in ((tile.a, block[m]), (tile.b, block[n])):
        assert staged.atom_bytes in (32, 64, 128)
        assert block[k] * staged.dtype.bytes in (32, 64, 128)
        assert staged.rows * staged.panels * staged.atom_bytes == staged.bytes == extent * block[k] * staged.dtype.bytes
        assert staged.load.is_tma == (staged.copies > 0)
    for axis, least in ((m, 64), (n, 16)):
        extent = group.space.axis(axis).extent
        padded = math.ceil(extent / block[axis]) * block[axis]
        assert padded <= max(extent * (1 + EPSILONS[-1]), least, warpgroup[axis])


def check_capacity(group: KernelGroup, program: RProgram) -> None:
    """Sums in a consumer's registers, roles in a core's, rings in its shared memory."""
    limits = HOPPER.limits
    tile = wgmma_tile(program, operands(group), HOPPER.arch)
    assert tile.accumulator_registers < tile.consumer_registers <= limits.max_registers_per_thread
    assert tile.producer_registers % 8 == 0
    if tile.consumers > 1:
        handed = 128 * (tile.producer_registers + tile.consumers * tile.consumer_registers)
        assert handed <= limits.registers_per_core
    assert tile.shared_bytes <= limits.shared_bytes_per_block
    assert program.pipeline.stages >= 2


def check_blocks(group: KernelGroup, program: RProgram, axes: tuple[str, str]) -> None:
    """Clusters of whole grids that share what comes in boxes; no idle blocks, no empty parts of a reduction."""
    p = prepare(group, HOPPER, program.unit)[1]
    tile = wgmma_tile(program, operands(group), HOPPER.arch)
    sides = zip(axes, program.pipeline.cluster, (tile.b, tile.a), (1, 0), strict=True)
    for axis, blocks, shared, side in sides:
        tiles = -(-group.space.axis(axis).extent // program.block[axis])
        assert tiles % blocks == 0
        assert blocks == 1 or p.facts.loads.can_multicast(side, shared, blocks)
    assert program.pipeline.persistent_blocks % program.pipeline.cluster_size == 0
    assert program.pipeline.persistent_blocks <= program.grid
    assert program.pipeline.raster == 1 or program.pipeline.raster % program.pipeline.cluster_m == 0
    if program.split_k > 1:
        assert may_split(group)
        assert split_group(group, program).workspaces[0][1].shape[0] == program.split_k
    if program.pipeline.stream_k_blocks:
        assert program.steps == tile.k_order.steps
        work = stream_k_partition(program)
        assert (work.blocks - 1) * work.k_tiles_per_block < work.tiles * work.k_tiles


@lru_cache(maxsize=1)
def cases() -> tuple[dict[str, object], ...]:
    return tuple(json.loads(TENSORCORE.read_text())["cases"])


def contractions(case: dict[str, object]) -> Iterator[tuple[KernelGroup, bool]]:
    """Those of one case, and whether float32 may be rounded to tf32."""
    inputs = case["inputs"]
    assert isinstance(inputs, dict)
    types = {name: TensorType(DType(t["dtype"]), tuple(t["shape"])) for name, t in inputs.items()}
    options = case.get("options", {})
    assert isinstance(options, dict)
    for group in partition(parse(str(case["expr"]), types, None), HOPPER):
        if group.kind is GroupKind.CONTRACTION:
            yield group, bool(options.get("allow_tf32"))


def faster(hw: HardwareSpec) -> Iterator[HardwareSpec]:
    for i, level in enumerate(hw.levels):
        quick = replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s)
        yield replace(hw, levels=(*hw.levels[:i], quick, *hw.levels[i + 1 :]))
    yield replace(hw, units=tuple(replace(unit, flops_per_s=2 * unit.flops_per_s) for unit in hw.units))


def check_estimate(group: KernelGroup, hw: HardwareSpec, *, allow_tf32: bool) -> None:
    try:
        best, _ = rank_units(group, hw, 4, ScheduleConstraints(allow_tf32, OpClass.WGMMA))
    except NoCandidateError:
        return  # rows are reduced
    for candidate in best:
        estimate, program = candidate.estimate, candidate.program
        assert math.isfinite(estimate.seconds)
        assert all(math.isfinite(stage.seconds) and stage.seconds >= 0 for stage in estimate.stages)
        assert estimate.seconds >= prepare(group, hw, program.unit)[1].lower_bound_s
        for quick in faster(hw):
            twin = unit(quick, program.unit.name)
            again = prepare_model(group, quick, twin).estimate(replace(program, unit=twin))
            assert again.seconds <= estimate.seconds * (1 + 1e-9)


@pytest.mark.parametrize("target", DEVICES)
def test_some_estimates(target: str) -> None:
    hw = hardware.load(target)
    for case in cases()[DEVICES.index(target) :: STRIDE]:
        for group, allow_tf32 in contractions(case):
            check_estimate(group, hw, allow_tf32=allow_tf32)


@pytest.mark.slow
@pytest.mark.parametrize("target", DEVICES)
def test_all_estimates(target: str) -> None:
    hw = hardware.load(target)
    for case in cases():
        for group, allow_tf32 in contractions(case):
            check_estimate(group, hw, allow_tf32=allow_tf32)
