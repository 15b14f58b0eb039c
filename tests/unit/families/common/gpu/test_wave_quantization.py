"""Wave quantization on tensor cores: stream-K blocks, balanced tile extents, and the prefilter's estimate."""

from __future__ import annotations

import math

import pytest
from contractions import A100, matmul, unit

from roller_svc.construct.rules import Shape, ThreadTile, spatial_grid
from roller_svc.families import prepare
from roller_svc.families.common.gpu.matrix.tile import MMA_SYNC
from roller_svc.families.common.gpu.matrix.wave_quantization import (
    MIN_WAVES,
    has_wave_quantization,
    stream_k_choices,
    wave_balanced_tiles,
)
from roller_svc.families.gpu.mma_contraction.rules import MmaContractionRules, approx_cycles
from roller_svc.ir.group import KernelGroup
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

CORES = A100.num_cores  # 108


def problem_of(group: KernelGroup) -> Workload:
    return prepare(group, A100, unit(A100, "mma_f16"))[1]


@pytest.mark.parametrize(
    ("tiles", "steps", "blocks"),
    [
        (64, 32, CORES),  # the last wave, the only one, is 59 % full
        (CORES, 32, None),  # full
        (2 * CORES - 5, 32, None),  # nearly
        (20, 512, None),  # more than four blocks would share each tile
        (30, 4, None),  # not four steps a block
    ],
)
def test_steps_are_streamed_where_the_last_wave_would_be_empty(tiles: int, steps: int, blocks: int | None) -> None:
    found = stream_k_choices(tiles, steps, CORES)
    assert found == (() if blocks is None else (blocks,))


@pytest.mark.parametrize("tiles", [37, 64, 90, 130, 150])
@pytest.mark.parametrize("steps", [16, 33, 250])
def test_streamed_steps_are_shared_evenly(tiles: int, steps: int) -> None:
    found = stream_k_choices(tiles, steps, CORES)
    assert len(found) == 1
    for blocks in found:
        share = math.ceil(tiles * steps / blocks)
        assert blocks <= CORES
        assert (blocks - 1) * share < tiles * steps <= blocks * share


def test_sides_change_so_that_the_grid_comes_to_whole_waves() -> None:
    p = problem_of(matmul(1024, 1024, 1024))
    block, base = (128, 128, 64), ThreadTile((64, 64, 16))
    assert spatial_grid(p, block) == 64
    found = dict(wave_balanced_tiles(p, block, base, (MMA_SYNC.rows, MMA_SYNC.columns)))
    assert (128, 80, 64) in found  # 8 x 13 = 104 tiles for 108 cores
    for tile, of in found.items():
        assert spatial_grid(p, tile) % CORES == 0 or spatial_grid(p, tile) % CORES > 0.75 * CORES
        assert (of.tile[0] % MMA_SYNC.rows, of.tile[1] % MMA_SYNC.columns) == (0, 0)
        assert all(b % t == 0 for b, t in zip(tile, of.tile, strict=True))


def test_few_waves_are_those_below_the_limit() -> None:
    p = problem_of(matmul(4096, 4096, 64))
    small, large = (64, 64, 64), (256, 256, 64)
    assert spatial_grid(p, small) >= MIN_WAVES * CORES
    assert not has_wave_quantization(p, small)
    assert has_wave_quantization(p, large)


def test_a_tile_that_loads_less_and_fills_the_device_promises_more() -> None:
    p = problem_of(matmul(4096, 4096, 4096))
    base = ThreadTile((64, 64, 16))

    def cycles(m: int, n: int) -> float:
        return approx_cycles(p, (m, n, 32), base, 1)

    assert cycles(128, 128) < cycles(64, 64)
    assert cycles(128, 128) <= cycles(64, 256)
    assert cycles(128, 128) >= 4096**3 / CORES / p.machine.fma_per_cycle


def test_prefilter_prices_each_shape_once() -> None:
    priced = []

    class Counted(MmaContractionRules):
        def approx_cycles(self, block: Tile, base: ThreadTile, split_k: int) -> float:
            priced.append((block, base, split_k))
            return MmaContractionRules.approx_cycles(self, block, base, split_k)

    rules, base = Counted(problem_of(matmul(1024, 1024, 1024))), ThreadTile((64, 64, 16), 32)
    shapes = [Shape((m, n, 64), base, split_k) for m in (64, 128) for n in (64, 128, 256) for split_k in (1, 2)]
    found = rules.prefilter(shapes, 8)
    assert len(found) == 8
    assert set(found) - set(shapes)  # tiles that fill whole waves
    assert len(priced) == len(set(priced)) > len(shapes)
