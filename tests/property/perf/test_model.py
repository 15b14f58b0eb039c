"""The performance model on the public corpus and every device: finite, above the floor, no slower on a faster one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from roller_bench.cases import BenchCase, performance_cases
from roller_svc import hardware
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import estimate_program, rank_best_partition
from roller_svc.errors import NoCandidateError
from roller_svc.families import prepare, prepare_model
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec, TargetKind

PUBLIC = Path(__file__).parents[3] / "bench" / "data" / "public.json"
SPECS = tuple(name for name in hardware.ids() if name != hardware.LOCAL)
# A run takes every so many-th case on each device, another one on the next: a quick run, and one with slow tests.
QUICK_STRIDE = 97
STRIDE = 4


@lru_cache(maxsize=1)
def cases() -> tuple[BenchCase, ...]:
    return tuple(performance_cases(PUBLIC))


def faster(hw: HardwareSpec) -> Iterator[HardwareSpec]:
    """The device with one level's bandwidth doubled, and with all units twice as fast."""
    for i, level in enumerate(hw.levels):
        quick = replace(level, bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s)
        yield replace(hw, levels=(*hw.levels[:i], quick, *hw.levels[i + 1 :]))
    yield replace(hw, units=tuple(replace(unit, flops_per_s=2 * unit.flops_per_s) for unit in hw.units))


def floor_s(group: KernelGroup, candidate: Candidate, hw: HardwareSpec) -> float:
    """Operations over the unit's rate, bytes touched over the bandwidth of memory; a CPU may find them in a cache."""
    space, unit = group.space, candidate.program.unit
    flops = space.flops
    if group.kind is GroupKind.CONTRACTION:
        flops = 2 * math.prod(axis.extent for axis in space.axes)
    elif group.kind is GroupKind.ATTENTION:  # products of the keys that its mask leaves
        flops = prepare(group, hw, unit)[1].operations
    elif hw.family is not TargetKind.CPU:  # unpacking is integer arithmetic
        flops -= space.operand_flops
    levels = hw.levels[:-1] if hw.family is TargetKind.CPU else hw.levels[:1]
    return max(flops / unit.flops_per_s, space.compulsory_bytes / max(lv.bandwidth_bytes_per_s for lv in levels))


def check(group: KernelGroup, candidate: Candidate, hw: HardwareSpec) -> None:
    estimate = candidate.estimate
    assert math.isfinite(estimate.seconds)
    assert all(math.isfinite(stage.seconds) and stage.seconds >= 0 for stage in estimate.stages)
    assert 0 < estimate.occupancy <= 1
    assert 1 < estimate.uncertainty <= 2
    if group.kind is not GroupKind.SCATTER:  # what it touches depends on its indices
        assert estimate.seconds >= floor_s(group, candidate, hw) * (1 - 1e-9)
    view = replace(group, space=candidate.program.space)
    for quick in faster(hw):
        unit = next(u for u in quick.units if u.name == candidate.program.unit.name)
        again = prepare_model(view, quick, unit).estimate(replace(candidate.program, unit=unit))
        assert again.seconds <= estimate.seconds * (1 + 1e-9)


def check_case(case: BenchCase, hw: HardwareSpec) -> None:
    try:
        groups, ranked, constructions = rank_best_partition(case.program(), hw, 1)
    except NoCandidateError:
        return  # no tile fits the device: tests of construction judge that
    for group, (candidate,), construction in zip(groups, ranked, constructions, strict=True):
        check(group, candidate, hw)
        assert candidate.estimate.seconds > max(roof.seconds for roof in construction.roofline)
    found = estimate_program(PartitionCache(case.program()), hw)
    assert found.plans[0].estimate.seconds >= found.floor.seconds * (1 - 1e-3)


@pytest.mark.parametrize("target", SPECS)
def test_some_estimates(target: str) -> None:
    hw = hardware.load(target)
    some = cases()[SPECS.index(target) :: QUICK_STRIDE]
    assert len(some) > 10
    for case in some:
        check_case(case, hw)


@pytest.mark.slow
@pytest.mark.parametrize("target", SPECS)
def test_many_estimates(target: str) -> None:
    hw = hardware.load(target)
    for case in cases()[SPECS.index(target) % STRIDE :: STRIDE]:
        check_case(case, hw)
