"""Cost model of tensor-core contractions: known points, invariants, dependence on stages and bandwidths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from contractions import A100, batched, conv, matmul, unit

from roller_svc import hardware
from roller_svc.compiler.rank import construct, rank
from roller_svc.families import model_of
from roller_svc.ir.estimate import Candidate, Estimate
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.rprogram import RProgram

F16 = unit(A100, "mma_f16")
GROUPS = {
    "square": matmul(4096, 4096, 4096),
    "medium": matmul(1024, 1024, 1024),
    "skinny": matmul(16, 4096, 4096),
    "deep": matmul(64, 64, 8192),
    "odd": matmul(257, 131, 1009, layout="tn"),
    "batched": batched(96, 128, 128, 64),
    "conv": conv(16, 64, 30, 64, 3),
}


def ranked(group: KernelGroup, hw: HardwareSpec = A100, name: str = "mma_f16", top: int = 10) -> tuple[Candidate, ...]:
    return rank(group, hw, unit(hw, name), top)[0]


def flops(group: KernelGroup) -> int:
    return 2 * math.prod(axis.extent for axis in group.space.axes)


def test_large_matmul_takes_the_usual_tiles_near_the_unit_s_rate() -> None:
    best = ranked(GROUPS["square"])
    for candidate in best[:2]:
        block = candidate.program.block
        assert {block["m"], block["n"]} <= {128, 256}
        assert block["k"] in (32, 64)
        assert candidate.program.pipeline.stages >= 3
        assert candidate.program.threads in (128, 256)
        assert candidate.program.pipeline.raster > 1
        assert 0.70 <= flops(GROUPS["square"]) / candidate.estimate.seconds / F16.flops_per_s <= 0.95
    assert best[0].estimate.bound == "mma"


def test_few_rows_are_bound_by_dram_and_fill_the_device() -> None:
    best = ranked(GROUPS["skinny"])[0]
    assert best.estimate.bound == "dram"
    assert best.program.block["m"] in (16, 32)
    assert best.program.grid >= A100.num_cores // 2
    assert best.estimate.seconds < 1.5 * (GROUPS["skinny"].space.compulsory_bytes / A100.dram.bandwidth_bytes_per_s)


def test_a_deep_reduction_is_shared_by_many_blocks() -> None:
    best = ranked(GROUPS["deep"])[0].program
    assert best.split_k > 1 or best.pipeline.stream_k_blocks > 1
    assert best.split_k == 1 or best.grid >= A100.num_cores // 2


def test_batches_become_blocks() -> None:
    best = ranked(GROUPS["batched"])[0].program
    assert best.grid >= 96
    assert best.split_k == 1


def test_an_uneven_last_wave_is_streamed() -> None:
    """256 tiles of 128 x 128 on 108 cores: 2.4 waves."""
    programs = construct(matmul(2048, 2048, 2048), A100, F16).programs
    streamed = [p for p in programs if p.pipeline.stream_k_blocks]
    assert streamed
    assert all(p.pipeline.stream_k_blocks % A100.num_cores == 0 for p in streamed if p.block["m"] == p.block["n"] == 128)
    assert not any(p.pipeline.stream_k_blocks for p in construct(matmul(8192, 8192, 8192), A100, F16).programs)


@pytest.mark.parametrize("name", GROUPS)
def test_estimates_stay_above_the_floor(name: str) -> None:
    group = GROUPS[name]
    for hw in (A100, hardware.load("nvidia-t4"), hardware.load("nvidia-rtx4090"), hardware.load("nvidia-h200-sxm")):
        one = unit(hw, "mma_f16")
        floor = max(flops(group) / one.flops_per_s, group.space.compulsory_bytes / hw.dram.bandwidth_bytes_per_s)
        for candidate in ranked(group, hw):
            e = candidate.estimate
            assert math.isfinite(e.seconds)
            assert e.seconds >= floor
            assert all(math.isfinite(s.seconds) and s.seconds >= 0 for s in e.stages)
            assert e.bound in {s.name for s in e.stages}
            assert 0 < e.occupancy <= 1


def estimated(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> Estimate:
    return model_of(group, program, hw).estimate(program)


@pytest.mark.parametrize("name", GROUPS)
def test_faster_devices_are_never_slower(name: str) -> None:
    group = GROUPS[name]
    for program in construct(group, A100, F16).programs[::4]:
        before = estimated(group, program, A100).seconds
        for level in A100.levels:
            quick = replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s)
            faster = replace(A100, levels=tuple(quick if lv is level else lv for lv in A100.levels))
            assert estimated(group, program, faster).seconds <= before * (1 + 1e-9)
        quicker = replace(program, unit=replace(F16, flops_per_s=2 * F16.flops_per_s))
        assert estimated(group, quicker, A100).seconds <= before * (1 + 1e-9)


@pytest.mark.parametrize("name", GROUPS)
def test_more_stages_are_never_slower_where_as_many_blocks_fit(name: str) -> None:
    group = GROUPS[name]
    for program in construct(group, A100, F16).programs:
        one = estimated(group, program, A100)
        more = estimated(group, program.with_pipeline(stages=program.pipeline.stages + 1), A100)
        if more.occupancy == one.occupancy:
            assert more.seconds <= one.seconds * (1 + 1e-9)


def test_a_raster_saves_dram_traffic() -> None:
    group = GROUPS["square"]
    program = ranked(group)[0].program.with_pipeline(raster=1)
    plain, walked = ({s.name: s.seconds for s in estimated(group, program.with_pipeline(raster=r), A100).stages} for r in (1, 8))
    assert walked["dram"] < plain["dram"]
    assert walked["mma"] == plain["mma"]


def test_loads_that_take_more_instructions_cost_more() -> None:
    """The same product on the same tile: copied, loaded and converted, gathered."""
    h200 = hardware.load("nvidia-rtx4090")
    copied, turned = matmul(2048, 2048, 2048, "float8_e4m3fn", layout="nt"), matmul(2048, 2048, 2048, "float8_e4m3fn")
    program = ranked(copied, h200, "mma_e4m3")[0].program.with_pipeline(stages=2, stream_k_blocks=0)
    gathered = replace(program, space=turned.space)
    assert estimated(turned, gathered, h200).seconds > estimated(copied, program, h200).seconds


def test_split_reduction_pays_for_its_second_launch() -> None:
    group = GROUPS["deep"]
    split = next(p for p in construct(group, A100, F16).programs if p.split_k > 1)
    stages = {s.name: s.seconds for s in estimated(group, split, A100).stages}
    assert stages["combine"] >= A100.limits.launch_overhead_s
    whole = estimated(group, replace(split, split_k=1), A100)
    assert "combine" not in {s.name for s in whole.stages}
