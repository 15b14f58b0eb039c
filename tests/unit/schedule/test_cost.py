"""Prices of schedules: counts against analytic ones, and the order that the price gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from schedule_support import BLUR, MATMUL, program

import roller_svc
from roller_svc import hardware
from roller_svc.cli import main
from roller_svc.compiler.schedule_cost import price_schedule
from roller_svc.errors import ArgumentError, ScheduleError
from roller_svc.ir.schedule_cost import ScheduleCost
from roller_svc.schedule.by_hand import schedule_by_hand

EXPRESSION = "C[m, n] +=! A[m, k] * B[k, n]"
INPUTS = {"A": ("float32", (512, 512)), "B": ("float32", (512, 512))}
AVX512 = hardware.load("cpu-x86-avx512")
A100 = "nvidia-a100-sxm-80gb"
IN_REGISTERS = """
C: split m 8 as mo mi
C: split n 32 as no ni
C: reorder no mo mi ni
C: accumulate_at mo
C.acc: store_in registers
C.acc: unroll m
C.acc: vectorise n
C.acc.update: reorder k m n
C.acc.update: unroll m
C.acc.update: vectorise n
C: unroll mi
C: vectorise ni
"""


def price(steps: str, of: Any = BLUR) -> ScheduleCost:
    return price_schedule(schedule_by_hand(of, steps), AVX512)


@pytest.mark.parametrize(
    ("steps", "operations", "stored_bytes", "tile_bytes"),
    [
        ("", 768, 64 * 4, 0),
        ("bx: compute_root", 432, (80 + 64) * 4, 0),
        ("bx: compute_root\nbx: compute_at B y", 768, (3 * 8 * 8 + 64) * 4, 3 * 8 * 4),
        ("bx: compute_root\nB: split y 4\nbx: compute_at B y.outer", 480, (2 * 6 * 8 + 64) * 4, 6 * 8 * 4),
    ],
)
def test_row_37_the_price_counts_what_a_blur_recomputes_and_stores(
    steps: str, operations: int, stored_bytes: int, tile_bytes: int
) -> None:
    cost = price(steps)
    assert (cost.operations, cost.stored_bytes, cost.tile_bytes) == (operations, stored_bytes, tile_bytes)


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 5])
def test_guards_and_tails_run_only_where_they_hold(factor: int) -> None:
    for marks in ("", "C.update: vectorise m.inner"):
        cost = price(f"C.update: split m {factor}\nC.update: reorder m.outer k n m.inner\n{marks}", MATMUL)
        assert cost.operations == 2 * 5 * 6 * 7


def test_row_37_the_price_is_that_of_the_performance_model_and_orders_schedules() -> None:
    """Register tiles before rows of vectors before the default schedule; construction's estimate before all of them."""
    constructed = roller_svc.estimate(EXPRESSION, INPUTS, AVX512.id)[AVX512.id][0]
    seconds = [
        roller_svc.Schedule(EXPRESSION, INPUTS, AVX512.id, steps).cost().seconds
        for steps in (IN_REGISTERS + "C: parallel no", IN_REGISTERS, "C.update: reorder m k n\nC.update: vectorise n", "")
    ]
    assert [constructed.seconds, *seconds] == sorted([constructed.seconds, *seconds])
    assert constructed.floor is not None
    assert seconds[0] > constructed.floor.seconds


def test_threads_are_started_once_for_each_run_of_a_parallel_loop() -> None:
    of = program("b[i, j] = a[i, j] * 2.0", a="float32 64 64")
    outer, inner = (price(f"b: parallel {loop}", of).estimate for loop in "ij")
    launches = [{stage.name: stage.seconds for stage in each.stages}["launch"] for each in (outer, inner)]
    assert launches[1] == pytest.approx(64 * launches[0])


def test_each_cache_serves_the_loops_whose_data_it_holds() -> None:
    """Rows of B are read again for each row of C, unless a tile of rows shares them."""
    matrices = program(EXPRESSION, A="float32 1024 4096", B="float32 4096 1024")
    plain = price("C.update: reorder m k n\nC.update: vectorise n", matrices)
    tiled = price("C.update: split m 8\nC.update: reorder m.outer k m.inner n\nC.update: vectorise n", matrices)
    plain_bytes, tiled_bytes = (dict(cost.launches[0].moved_bytes)["l3"] for cost in (plain, tiled))
    assert plain_bytes > 1024 * 4096 * 1024 * 4
    assert tiled_bytes < plain_bytes / 4


def test_a_gpus_price_has_blocks_threads_and_shared_tiles() -> None:
    steps = """
        C: tile m 64 n 64
        C: split m.inner 4 as mt mr
        C: split n.inner 4 as nt nr
        C: reorder m.outer n.outer mt nt mr nr
        C: block m.outer
        C: block n.outer
        C: thread mt
        C: thread nt
        C: accumulate_at nt
    """
    shared = """
        C.acc.update: split k 16 as ko ki
        C.acc.update: reorder ko ki m n
        A: cache C.acc.update ko shared
        A.cache: thread d0
    """
    plain, cached = (roller_svc.Schedule(EXPRESSION, INPUTS, A100, each).cost() for each in (steps, steps + shared))
    assert plain.tile_bytes == 0
    assert cached.tile_bytes == 64 * 16 * 4
    assert cached.launches[0].operations == plain.launches[0].operations == 2 * 512**3
    assert cached.launches[0].threads == 64 * 256
    assert cached.launches[0].estimate.occupancy > 0
    with pytest.raises(ScheduleError, match="two stages"):
        roller_svc.Schedule(EXPRESSION, INPUTS, A100).cost()


def test_estimates_take_a_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (estimate,) = roller_svc.estimate(EXPRESSION, INPUTS, AVX512.id, schedule=IN_REGISTERS)[AVX512.id]
    assert estimate.schedule_cost == roller_svc.Schedule(EXPRESSION, INPUTS, AVX512.id, IN_REGISTERS).cost()
    assert estimate.program is estimate.plan is None
    assert estimate.floor_share is not None
    assert "by hand" in repr(estimate)
    assert "by hand" in estimate._repr_html_()
    with pytest.raises(ArgumentError, match="constants and schedule exclude each other"):
        roller_svc.estimate(EXPRESSION, INPUTS, AVX512.id, schedule=IN_REGISTERS, constants=("B",))
    with pytest.raises(ScheduleError, match="no stage D"):
        roller_svc.estimate(EXPRESSION, INPUTS, AVX512.id, schedule="D: parallel m")

    file = tmp_path / "tiles.schedule"
    file.write_text(IN_REGISTERS)
    common = [EXPRESSION, "--input", "A=float32[512,512]", "--input", "B=float32[512,512]", "--target", AVX512.id]
    assert main(["estimate", *common, "--schedule", str(file), "--json"]) == 0
    (candidate,) = json.loads(capsys.readouterr().out)["estimates"][0]["candidates"]
    assert candidate["seconds"] == estimate.seconds
    assert main(["estimate", *common, "--schedule", str(file)]) == 0
    assert "scheduled by hand" in capsys.readouterr().out
    assert main(["estimate", *common, "--schedule", str(file), "--sensitivity"]) == 2
    capsys.readouterr()
    assert main(["schedule", "check", str(file), *common]) == 0
    assert "legal, estimated" in capsys.readouterr().out
