"""The micro performance model: what it must never say, and known cases."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import replace

import pytest
from tile_spaces import column_sum, conv, depthwise, matmul, relu, row_sum, scatter

from roller_svc import hardware
from roller_svc.compiler.rank import construct, rank
from roller_svc.families import model_of, prepare_model
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Estimate
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, MemoryLevel, Source, TargetKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.common import dram_bytes_with_reuse, simt_waves, streaming_bandwidth, wave_rectangle
from roller_svc.perf.machine import prepare_machine
from roller_svc.perf.occupancy import BlockResources, blocks_per_core

V100 = hardware.load("nvidia-v100-sxm2")
AVX512 = hardware.load("cpu-x86-avx512")
GROUPS = {
    "square": matmul(1024, 1024, 1024),
    "odd": matmul(257, 131, 1009),
    "row": matmul(1, 4096, 4096),
    "deep": matmul(64, 64, 4096),
    "batched": matmul(128, 128, 64, batch=96),
    "double": matmul(512, 512, 512, dtype=DType.FLOAT64),
    "conv": conv(16, 64, 30, 64, 3),
    "stem": conv(1, 3, 224, 64, 7, 2),
    "relu": relu(4096, 1024),
    "scalar": relu(),
    "rows": row_sum(4096, 1024),
    "one row": row_sum(1, 1 << 22),
    "columns": column_sum(4096, 1024),
    "depthwise": depthwise(32, 84, 42, 5),
    "scatter": scatter(4096, 4096),
}


def unit_of(hw: HardwareSpec, group: KernelGroup) -> ComputeUnit:
    return hw.unit_for(group.space.compute_dtype)


def best(group: KernelGroup, hw: HardwareSpec) -> Estimate:
    return rank(group, hw, unit_of(hw, group), 1)[0][0].estimate


def floor_s(group: KernelGroup, hw: HardwareSpec) -> float:
    """Work over peak, compulsory bytes over bandwidth; a CPU may find its data in a cache."""
    space = group.space
    points = math.prod(a.extent for a in space.axes)
    flops = 2 * points if space.role(AxisRole.K) else space.flops
    levels = hw.levels[:-1] if hw.family is TargetKind.CPU else hw.levels[:1]
    bandwidth = max(level.bandwidth_bytes_per_s for level in levels)
    return max(flops / unit_of(hw, group).flops_per_s, space.compulsory_bytes / bandwidth)


@pytest.mark.parametrize("name", GROUPS)
def test_estimates_are_finite_positive_and_above_the_floor_on_every_device(name: str) -> None:
    group = GROUPS[name]
    for hw in hardware.all_specs():
        e = best(group, hw)
        assert math.isfinite(e.seconds)
        assert e.seconds >= floor_s(group, hw) > 0
        assert all(math.isfinite(s.seconds) and s.seconds >= 0 for s in e.stages)
        assert e.bound in {s.name for s in e.stages}
        assert 0 < e.occupancy <= 1
        assert e.waves >= 1
        assert e.uncertainty > 1


def estimated(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Estimate:
    return model_of(group, program, hw).estimate(program)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("hw", [V100, AVX512], ids=lambda hw: hw.id)
def test_faster_devices_are_never_slower(hw: HardwareSpec, name: str) -> None:
    group = GROUPS[name]
    unit = unit_of(hw, group)
    # docs/model.md, known gaps: of non-temporal stores, what the caches deliver meanwhile counts as hidden
    programs = [p for p in construct(group, hw, unit).programs if not p.pipeline.nontemporal][::4]
    for faster in _faster(hw):
        for program in programs:
            quick = replace(program, unit=unit_of(faster, group))
            assert estimated(group, quick, faster).seconds <= estimated(group, program, hw).seconds * (1 + 1e-9)


def _faster(hw: HardwareSpec) -> list[HardwareSpec]:
    """The device with one level's bandwidth doubled, or all units twice as fast."""

    def doubled(level: MemoryLevel) -> HardwareSpec:
        quick = replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s)
        return replace(hw, levels=tuple(quick if lv is level else lv for lv in hw.levels))

    units = tuple(replace(u, flops_per_s=2 * u.flops_per_s) for u in hw.units)
    return [*(doubled(level) for level in hw.levels), replace(hw, units=units)]


def test_model_prepared_once_says_the_same() -> None:
    group = GROUPS["conv"]
    prepared = prepare_model(group, V100, unit_of(V100, group))
    for program in construct(group, V100, unit_of(V100, group)).programs:
        assert prepared.estimate(program) == estimated(group, program, V100)


def test_candidates_come_best_first() -> None:
    group = GROUPS["square"]
    ranked, construction = rank(group, V100, unit_of(V100, group), 10)
    seconds = [c.estimate.seconds for c in ranked]
    assert seconds == sorted(seconds)
    assert len(ranked) == 10
    assert {c.program for c in ranked} <= set(construction.programs)


def test_large_matmul_is_compute_bound_and_a_map_memory_bound() -> None:
    assert best(matmul(8192, 8192, 8192), V100).bound == "compute"
    assert best(relu(1 << 26), V100).bound == "dram"
    assert best(matmul(16, 1, 1), V100).bound == "launch"


def test_of_stages_that_overlap_less_shows_where_blocks_keep_loading() -> None:
    """A map's blocks load once, and 5 % of the other stages shows; those of a deep product show their queues."""

    def shown(estimated: Estimate) -> float:
        """In shares of the stages beside the longest."""
        *stages, launch = [s.seconds for s in estimated.stages]
        return (estimated.seconds - launch - max(stages)) / (sum(stages) - max(stages))

    assert shown(best(relu(1 << 26), V100)) == pytest.approx(0.05)
    product = best(matmul(8192, 8192, 8192), V100)
    *parts, compute, _ = [s.seconds for s in product.stages]
    utilised = sum(s * s for s in parts) / (compute * sum(parts))
    assert 0.05 * utilised < shown(product) < 0.05 * (utilised + 0.01)


def test_split_reduction_pays_for_its_second_launch() -> None:
    group = GROUPS["deep"]
    programs = construct(group, V100, unit_of(V100, group)).programs
    split = next(p for p in programs if p.split_k > 1)
    stages = {s.name: s.seconds for s in estimated(group, split, V100).stages}
    assert stages["combine"] >= V100.limits.launch_overhead_s
    assert "combine" not in {s.name for s in estimated(group, replace(split, split_k=1), V100).stages}


@pytest.mark.parametrize(
    ("needs", "blocks"),
    [
        (BlockResources(256, 32, 0), 8),  # 2048 threads
        (BlockResources(256, 128, 0), 2),  # 65536 registers
        (BlockResources(128, 255, 0), 2),
        (BlockResources(64, 32, 48 * 1024), 2),  # 96 KiB of shared memory
        (BlockResources(32, 16, 0), 32),  # blocks
        (BlockResources(72, 16, 0), 21),  # 64 warps, of which a block has three
        (BlockResources(160, 128, 0), 3),  # four warps of 16384 registers a scheduler: 16 warps, five a block
        (BlockResources(1024, 255, 0), 1),  # at least one
    ],
)
def test_blocks_per_core_of_a_v100(needs: BlockResources, blocks: int) -> None:
    assert blocks_per_core(needs, V100) == blocks


def test_waves_count_the_fillings_of_the_device() -> None:
    assert simt_waves(80, 1, 80, lambda c: 100 * c) == (1, 100)
    assert simt_waves(81, 1, 80, lambda c: 100 * c) == (2, 200)
    assert simt_waves(160, 2, 80, lambda c: 100 * c) == (1, 200)
    assert simt_waves(161, 2, 80, lambda c: 100 * c) == (2, 300)  # one more block alone on its core


@pytest.mark.parametrize("grid", [16_000, 16_001, 16_079])
def test_many_waves_end_half_a_block_late_wherever_the_last_one_ends(grid: int) -> None:
    waves, cycles = simt_waves(grid, 1, 80, lambda c: 100 * c)
    assert waves == -(-grid // 80)
    assert cycles == pytest.approx(100 * grid / 80 + 50)


@pytest.mark.parametrize("waves", [1.25, 1.75, 2.5, 4.25, 8.0, 16.75, 32.5, 64.0, 100.25])
def test_ends_of_blocks_are_those_of_blocks_whose_times_differ_by_a_twentieth(waves: float) -> None:
    """Each of 80 cores begins the next block when it has ended one; within a sixth of a block."""
    draw, cores, blocks = random.Random(0), 80, round(80 * waves)
    ends = [0.0] * cores
    for _ in range(blocks):
        heapq.heapreplace(ends, ends[0] + draw.gauss(1.0, 0.05))
    assert simt_waves(blocks, 1, cores, lambda _: 1.0)[1] == pytest.approx(max(ends), abs=1 / 6)


@pytest.mark.parametrize(
    ("grid", "at_once", "raster", "rectangle"),
    [
        ((32, 32), 108, 1, (3.375, 32)),  # rows one after another: three and a bit of them
        ((32, 32), 108, 8, (8, 13.5)),
        ((4, 200), 108, 1, (1, 108)),
        ((2, 2), 108, 1, (2, 2)),
    ],
)
def test_wave_rectangle(grid: tuple[int, int], at_once: int, raster: int, rectangle: tuple[float, float]) -> None:
    assert wave_rectangle(*grid, at_once, raster) == rectangle


def test_last_cache_saves_what_it_can_hold() -> None:
    mach = prepare_machine(V100, unit_of(V100, GROUPS["square"]))
    small, large = 1 << 20, 1 << 30
    assert dram_bytes_with_reuse(mach, small, 10.0) == small
    assert 9 * large < dram_bytes_with_reuse(mach, large, 10.0) <= 10 * large
    assert dram_bytes_with_reuse(mach, large, 1.0) == large


def test_few_bytes_in_flight_do_not_fill_the_memory() -> None:
    mach = prepare_machine(V100, unit_of(V100, GROUPS["relu"]))
    assert streaming_bandwidth(mach, 1e9) == V100.dram.bandwidth_bytes_per_s
    assert streaming_bandwidth(mach, 1024) == pytest.approx(1024 / V100.dram.latency_s)


def test_uncertainty_is_larger_where_figures_are_assumed() -> None:
    measured = replace(V100, sources=(Source(("levels",), "measured"),))
    guessed = replace(V100, sources=(Source(("levels",), "a guess", assumed=True),))
    group = GROUPS["relu"]
    assert best(group, measured).uncertainty < best(group, guessed).uncertainty
