"""The model of CPUs: what more cores, and caches that hold a part, must never do to an estimate."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from tile_spaces import COSTS, with_costs

from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import construct
from roller_svc.families import prepare, prepare_model
from roller_svc.families.common.cpu.memory import dram_fraction
from roller_svc.families.matching import group_views
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, Scope
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram, RTile
from roller_svc.perf.model import Model
from roller_svc.perf.roofline import roofline

AVX512 = hardware.load("cpu-x86-avx512")
# One of each family of kernels, small enough that few tasks are natural.
FAMILIES = {
    "transpose": ("y[j, i] = x[i, j]", {"x": (48, 48)}),
    "window": ("y[c, i, j] >=! x[c, i + p, j + q] where p in 3, q in 3, i in 30, j in 30", {"x": (2, 32, 32)}),
    "loops": ("y[i] +=! x[i, k]", {"x": (16, 500)}),
    "contraction": ("y[i, j] +=! a[i, k] * b[k, j]", {"a": (48, 64), "b": (64, 48)}),
    "convolution": (
        "y[n, f, i, j] +=! x[n, c, i + p, j + q] * w[f, c, p, q] where i in 28, j in 28",
        {"x": (1, 32, 30, 30), "w": (32, 32, 3, 3)},
    ),
}


def with_cores(hw: HardwareSpec, cores: int) -> HardwareSpec:
    """The same rates and capacities for each core."""
    factor = cores / hw.num_cores
    levels = tuple(
        replace(
            lv,
            bandwidth_bytes_per_s=lv.bandwidth_bytes_per_s * factor,
            capacity_bytes=round(lv.capacity_bytes * (factor if lv.scope is Scope.DEVICE else 1)),
        )
        for lv in hw.levels
    )
    units = tuple(replace(unit, flops_per_s=unit.flops_per_s * factor) for unit in hw.units)
    return replace(hw, num_cores=cores, levels=levels, units=units)


def model_of(group: KernelGroup, hw: HardwareSpec) -> Model:
    return prepare_model(group, hw, hw.unit_for(DType.FLOAT32))


def group_of(family: str) -> KernelGroup:
    text, shapes = FAMILIES[family]
    types = {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()}
    (group,) = partition(parse(text, types), AVX512)
    unit = AVX512.unit_for(DType.FLOAT32)
    return next(v for v in group_views(group, AVX512) if prepare(v, AVX512, unit)[0].name == f"cpu/{family}")


def map_of(walked_bytes: float) -> KernelGroup:
    """Reads half of the bytes and writes the other half."""
    types = {"x": TensorType(DType.FLOAT32, (round(walked_bytes / 8),))}
    (group,) = partition(parse("y[i] = x[i] + 1.0", types), AVX512)
    return group


@pytest.mark.parametrize("family", FAMILIES)
def test_cores_without_a_task_cost_nothing(family: str) -> None:
    group = group_of(family)
    models = {cores: model_of(group, with_cores(AVX512, cores)) for cores in (1, 2, 4, 8, 28)}
    made_for = [models[cores].workload.machine for cores in (1, 4)]
    programs = [program for m in made_for for program in construct(group, m.hw, m.unit).programs]
    assert min(models[1].estimate(program).waves for program in programs) == 1
    for program in programs:
        tasks = models[1].estimate(program).waves  # one core does one after the other
        priced = [m.estimate(program).seconds for cores, m in models.items() if cores >= tasks]
        assert all(more <= less * (1 + 1e-9) for less, more in pairwise(priced)), (program, priced)


def test_the_floor_counts_on_a_cache_only_where_it_keeps_something() -> None:
    last = AVX512.level("l3").capacity_bytes
    kept = COSTS.memory.llc_zero_hit_ratio * last  # nothing of more
    for walked, level in ((0.99 * kept, "l3"), (1.01 * kept, "dram")):
        problem = model_of(map_of(walked), AVX512).workload
        share = dram_fraction(problem.machine, problem.compulsory_bytes)
        assert (share < 1) == (level == "l3")
        assert problem.data_level == level
        assert problem.lower_bound_s == problem.compulsory_bytes / AVX512.level(level).bandwidth_bytes_per_s
        moved = {roof.level: roof.amount for roof in roofline(problem)}
        assert moved["dram"] == (problem.compulsory_bytes if level == "dram" else 0)


def test_the_floor_follows_the_costs() -> None:
    walked = 1.1 * COSTS.memory.llc_zero_hit_ratio * AVX512.level("l3").capacity_bytes
    larger_llc = replace(COSTS, memory=replace(COSTS.memory, llc_zero_hit_ratio=1.2 * COSTS.memory.llc_zero_hit_ratio))
    model = model_of(map_of(walked), AVX512)
    assert model.workload.data_level == "dram"
    assert with_costs(model, larger_llc).workload.data_level == "l3"


def product_of(m: int, n: int, k: int) -> KernelGroup:
    types = {"a": TensorType(DType.FLOAT32, (m, k)), "b": TensorType(DType.FLOAT32, (k, n))}
    (group,) = partition(parse("y[i, j] +=! a[i, k] * b[k, j]", types), AVX512)
    return group


def tiled(group: KernelGroup, hw: HardwareSpec, block: tuple[int, ...], thread: tuple[int, ...]) -> RProgram:
    names = [axis.name for axis in group.space.axes]
    block_tile, thread_tile = (RTile(tuple(zip(names, tile, strict=True))) for tile in (block, thread))
    return RProgram(group.space, hw.unit_for(DType.FLOAT32), block_tile, thread_tile)


@pytest.mark.parametrize(("rows", "hides"), [(513, True), (18, False)])
def test_hints_hide_panels_that_take_little_of_the_time(rows: int, hides: bool) -> None:
    hw, group = with_cores(AVX512, 1), product_of(rows, 1536, 1024)
    program = tiled(group, hw, (rows, 1536, 512), (9, 48, 1))
    model = model_of(group, hw)
    nothing_hidden = replace(COSTS, contraction=replace(COSTS.contraction, prefetch_hidden_fraction=1e-9))
    all_waited = with_costs(model, nothing_hidden).estimate(program).seconds
    assert (model.estimate(program).seconds < all_waited) == hides


def test_sums_come_back_from_where_a_step_has_left_room_for_them() -> None:
    """A tile of C of half of L2 is there between steps where blocks of A and B are small, not where they fill it."""
    hw = with_cores(AVX512, 1)
    update_s = {}
    for depth in (64, 512):
        group = product_of(258, 256, 1024)
        estimate = model_of(group, hw).estimate(tiled(group, hw, (258, 256, depth), (6, 64, 1)))
        update_s[depth] = {stage.name: stage.seconds for stage in estimate.stages}["update"] / (1024 / depth)
    assert update_s[64] < update_s[512]


def test_large_products_fill_the_registers_and_keep_a_block_of_b_near() -> None:
    hw = with_cores(AVX512, 1)
    group = product_of(512, 4096, 1024)
    programs = construct(group, hw, hw.unit_for(DType.FLOAT32)).programs
    tile, lanes = programs[0].thread, hw.unit_for(DType.FLOAT32).shape[-1]
    assert 24 <= tile["i"] * tile["j"] // lanes <= 28  # of 32, the others for a row of B and what is broadcast
    blocks = {program.block["j"] * program.block["k"] * 4 for program in programs}
    assert any(0.6 * hw.level("l2").capacity_bytes < size <= 0.1 * hw.level("l3").capacity_bytes for size in blocks)
