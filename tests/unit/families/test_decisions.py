"""What the cost of a family assumes of a kernel is what its schedule tree has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from kernel_digests import read_cases

from roller_svc import hardware
from roller_svc.codegen.cuda import function
from roller_svc.compiler.lower_and_emit import emit_plan, lower
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import merge_ranked_plans, rank_partitions
from roller_svc.errors import RollerError
from roller_svc.families import prepare
from roller_svc.families.common.cpu.input_patch import WINDOW
from roller_svc.families.cpu.contraction.blocking import plan_blocking
from roller_svc.families.cpu.contraction.schedule import PACKED_A, PACKED_B
from roller_svc.families.cpu.convolution.schedule import PACKED
from roller_svc.families.cpu.convolution.workload import plan_task as plan_convolution
from roller_svc.families.cpu.winograd.schedule import INPUTS
from roller_svc.families.cpu.winograd.workload import plan_task as plan_winograd
from roller_svc.frontend.parse import parse
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.report import GroupedPlan
from roller_svc.ir.schedule import Compute, Loop, Node, ScheduleTree, Storage, iter_nodes
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload
from roller_svc.verify.corpus import Case, Run, case_request

CASES = [*read_cases().values()][::40]
CPUS = ("cpu-x86-avx2", "cpu-x86-avx512")
GPUS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x")
PLANS = 3
Facts = Mapping[str, object]


def contraction(p: Workload[Any], block: Tile, thread: Tile, tree: ScheduleTree) -> tuple[Facts, Facts]:
    """Return the packed operands and the order of panels: as planned, and as in the tree."""
    plan, nodes = plan_blocking(p, block, thread), [*iter_nodes(tree.body)]
    over_rows = [n for n in nodes if isinstance(n, Loop) and n.var == "m.panel" and "n.panel" in loops(n.body)]
    of_first_use = (m for n in nodes if isinstance(n, Loop) and n.var == "m.panel" for m in iter_nodes(n.body))
    planned = {"A": plan.packs_a, "B in the loop": plan.packs_b_on_first_use, "rows outer": plan.rows_outer}
    built = {
        "A": PACKED_A in storages(tree),
        "B in the loop": any(isinstance(n, Compute) and n.tensor == PACKED_B for n in of_first_use),
        "rows outer": bool(over_rows),
    }
    return planned, built


def convolution(p: Workload[Any], block: Tile, thread: Tile, tree: ScheduleTree) -> tuple[Facts, Facts]:
    plan, image, found = plan_convolution(p, block, thread), p.facts, storages(tree)
    steps = [n.extent for n in iter_nodes(tree.body) if isinstance(n, Loop) and n.var == ".step"]
    planned = {
        "patch": image.patch_elements(plan.pixels, plan.channels),
        "panels": (plan.panels, plan.channels * image.taps, plan.wide),
        "steps": [plan.steps],
    }
    return planned, {"patch": math.prod(found[WINDOW]), "panels": found[PACKED], "steps": steps}


def winograd(p: Workload[Any], block: Tile, thread: Tile, tree: ScheduleTree) -> tuple[Facts, Facts]:
    plan, elements = plan_winograd(p, block, thread), math.prod(storages(tree)[INPUTS])
    return {"inputs": plan.inputs_bytes}, {"inputs": elements * plan.space.image.element_bytes}


def loops(nodes: tuple[Node, ...]) -> set[str]:
    return {n.var for n in iter_nodes(nodes) if isinstance(n, Loop)}


def storages(tree: ScheduleTree) -> dict[str, tuple[int, ...]]:
    return {n.tensor: n.shape for n in iter_nodes(tree.body) if isinstance(n, Storage)}


OF_FAMILY: Mapping[str, Callable[[Workload[Any], Tile, Tile, ScheduleTree], tuple[Facts, Facts]]] = {
    "cpu/contraction": contraction,
    "cpu/convolution": convolution,
    "cpu/winograd": winograd,
}


def plans_of(case: Case, hw: HardwareSpec) -> tuple[TensorProgram, list[GroupedPlan]]:
    request = case_request(case, Run(hw.id))
    try:
        program = parse(request.expression, dict(request.inputs), request.outputs)
        partitions = rank_partitions(PartitionCache(program), hw, PLANS, request.constraints)
    except RollerError:
        return TensorProgram((), (), ()), []
    return program, [*merge_ranked_plans(partitions, PLANS)]


def first_launches(grouped: GroupedPlan, hw: HardwareSpec) -> Iterator[tuple[str, Any, Any, Any, Workload[Any]]]:
    """Yield the main launch of each kernel that has tiles: group's name, launch's group, program, family, workload."""
    for group, choice in zip(grouped.groups, grouped.plan.choices, strict=True):
        family, _ = prepare(group, hw, choice.program.unit, program=choice.program)
        launch = next(iter(family.launches(group, choice.program, hw)))
        if launch.program is not None:
            yield (
                group.name,
                launch.group,
                launch.program,
                *prepare(launch.group, hw, launch.program.unit, program=launch.program),
            )


@pytest.mark.parametrize("target", CPUS)
def test_cpu_trees_pack_and_loop_as_planned(target: str) -> None:
    hw, checked = hardware.load(target), 0
    for case in CASES:
        for grouped in plans_of(case, hw)[1]:
            for _, group, program, family, workload in first_launches(grouped, hw):
                if family.name in OF_FAMILY:
                    (tree,) = lower(group, program, hw)
                    tiles = (workload.footprint.tile(tile) for tile in (program.block, program.thread))
                    planned, built = OF_FAMILY[family.name](workload, *tiles, tree)
                    assert planned == built, (case.id, program.tile_text)
                    checked += 1
    assert checked > 10


@pytest.mark.parametrize("target", GPUS)
def test_gpu_blocks_take_what_the_cost_assumes(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare threads, bytes of shared memory, and blocks."""
    dialect_of = function.dialect_of
    monkeypatch.setattr(function, "dialect_of", lambda arch: replace(dialect_of(arch), static_shared_bytes=0))
    hw, checked = hardware.load(target), 0
    for case in CASES:
        program, plans = plans_of(case, hw)
        for grouped in plans:
            source = emit_plan(grouped.plan, program, grouped.groups, hw)
            for name, _, tiles, family, workload in first_launches(grouped, hw):
                needs, launch = family.model(workload).resources(tiles), source.launches[source.main_launch(name)]
                if needs is None:
                    continue
                assert needs.threads == math.prod(launch.block), (case.id, tiles.tile_text)
                assert needs.shared_bytes == launch.shared_bytes, (case.id, tiles.tile_text)
                cost = family.model(workload).launch(workload, tiles)
                blocks = cost.pipeline.persistent_blocks or cost.pipeline.stream_k_blocks or cost.grid
                assert blocks == math.prod(launch.grid), (case.id, tiles.tile_text)
                checked += 1
    assert checked > 10
