"""What the artifact's kernels cost: the box they stage, its traffic, its banks, what a thread waits for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from roller_bench.model.artifact_kernel import artifact_seconds
from roller_bench.model.published import published_program
from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.families import prepare
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType

K80, MI50 = hardware.load("nvidia-k80"), hardware.load("amd-mi50")
PLANES, SIDE = 4096, 40


def seconds(hw: HardwareSpec, taps: int, stride: int, tile: str = "[1, 20, 20]", thread: str = "[1, 1, 2]") -> float:
    """Of a pooling of 4096 planes of 40 x 40."""
    out = (SIDE - taps) // stride + 1
    window = f"X[N, {stride} * H + R, {stride} * W + S]" if taps > 1 else f"X[N, {stride} * H, {stride} * W]"
    sizes = f", R in {taps}, S in {taps}" if taps > 1 else ""
    join = "+=!" if taps > 1 else "="
    program = parse(
        f"Y[N, H, W] {join} {window} where H in {out}, W in {out}{sizes}",
        {"X": TensorType(DType.FLOAT32, (PLANES, SIDE, SIDE))},
    )
    (group,) = partition(program, hw)
    unit = hw.unit_for(DType.FLOAT32)
    step = f"[{taps}, {taps}]"
    tiles = f"[level 0: [tile: {tile}; step: {step}]][level 1: [tile: {thread}; step: [1, 1]]]"
    found, stages = artifact_seconds(prepare(group, hw, unit)[1], published_program(tiles, group.space, unit))
    assert math.isfinite(found)
    assert found > max(stage.seconds for stage in stages)
    return found


@pytest.mark.parametrize("hw", [K80, MI50], ids=lambda hw: hw.id)
def test_a_box_is_staged_whole_even_where_rows_are_skipped(hw: HardwareSpec) -> None:
    """One tap of four neighbours: the bytes of the whole planes, not the quarter that is used."""
    whole_s = PLANES * SIDE * SIDE * 4 / hw.dram.bandwidth_bytes_per_s
    assert seconds(hw, taps=1, stride=2) > whole_s


def test_more_taps_of_the_same_planes_take_longer() -> None:
    assert seconds(K80, 3, 2) < seconds(K80, 5, 2) < seconds(K80, 7, 2)


def test_strided_reads_meet_in_banks_of_four_bytes_and_not_of_eight() -> None:
    narrow = replace(K80, levels=tuple(replace(lv, bank_bytes=4) if lv.name == "shared" else lv for lv in K80.levels))
    row = ("[1, 8, 32]", "[1, 1, 1]")  # a warp stands along one row
    assert seconds(narrow, 7, 2, *row) > 1.2 * seconds(K80, 7, 2, *row)
    assert seconds(narrow, 7, 1, *row) == pytest.approx(seconds(K80, 7, 1, *row), rel=0.05)


def test_narrow_tiles_read_more_of_their_neighbours() -> None:
    assert seconds(MI50, 7, 1, "[1, 4, 4]") > seconds(MI50, 7, 1, "[1, 16, 16]")


def rows_summed(hw: HardwareSpec, columns: int, step: int) -> dict[str, float]:
    """Seconds of 65536 rows of so many columns, 128 a block of 64 threads: of each stage, and of all."""
    program = parse("Y[M] +=! X[M, K]", {"X": TensorType(DType.FLOAT32, (65536, columns))})
    (group,) = partition(program, hw)
    unit = hw.unit_for(DType.FLOAT32)
    tiles = f"[level 0: [tile: [128]; step: [{step}]]][level 1: [tile: [2]; step: [1]]]"
    found, stages = artifact_seconds(prepare(group, hw, unit)[1], published_program(tiles, group.space, unit))
    return {stage.name: stage.seconds for stage in stages} | {"all": found}


def test_loads_in_a_loop_wait_in_pairs_and_those_of_one_step_in_eights() -> None:
    once, loop = rows_summed(MI50, 64, 64), rows_summed(MI50, 128, 64)
    assert loop["latency"] == pytest.approx(2 * 4 * once["latency"])  # twice the steps, four times the waits of each
    assert all(seconds["all"] > seconds["latency"] + seconds["compute"] for seconds in (once, loop))


def test_threads_whose_rows_begin_in_one_bank_read_them_in_turn() -> None:
    assert rows_summed(MI50, 64, 64)["compute"] > 2 * rows_summed(MI50, 65, 65)["compute"]


def test_loads_of_other_devices_go_together() -> None:
    assert rows_summed(K80, 1024, 64)["latency"] == 0.0
