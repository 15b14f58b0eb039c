"""What more of each resource saves, and how sure an estimate is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tile_spaces import matmul, relu

from roller_svc import hardware
from roller_svc.compiler.partition_cache import partition
from roller_svc.compiler.rank import rank
from roller_svc.compiler.sensitivity import analyze_sensitivity
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import StageCost
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec, Source
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import Plan
from roller_svc.perf.uncertainty import find_assumed_stages, uncertainty

QUOTIENT = {name: TensorType(DType.FLOAT32, (65536,)) for name in "xy"}
V100 = hardware.load("nvidia-v100-sxm2")


def best(group: KernelGroup, hw: HardwareSpec) -> Plan:
    return Plan((rank(group, hw, hw.unit_for(group.space.compute_dtype), 1)[0][0],))


@pytest.mark.parametrize(
    ("target", "group", "resource", "least"),
    [
        ("nvidia-v100-sxm2", relu(4096, 4096), "dram bandwidth", 0.08),
        ("nvidia-v100-sxm2", matmul(4096, 4096, 4096), "arithmetic rate", 0.05),
        # Kepler's four schedulers do not feed its 192 lanes
        ("nvidia-k80", matmul(4096, 4096, 4096), "issue rate", 0.05),
        ("nvidia-v100-sxm2", relu(8, 8), "launch overhead", 0.05),
        ("cpu-x86-avx512", relu(8192, 8192), "dram bandwidth", 0.05),
    ],
)
def test_the_resource_that_bounds_saves_most(target: str, group: KernelGroup, resource: str, least: float) -> None:
    hw = hardware.load(target)
    first = analyze_sensitivity(best(group, hw), (group,), hw)[0]
    assert first.resource == resource
    assert least < first.time_saved_fraction <= 0.1


def test_what_divides_gains_by_a_higher_rate_of_divisions() -> None:
    hw = hardware.load("cpu-x86-avx512")
    units = (replace(unit, quotients_per_s=1e9) if unit.name == "vector_f32" else unit for unit in hw.units)
    hw, group = replace(hw, units=tuple(units)), partition(parse("z[i] = x[i] / y[i]", QUOTIENT), hw)[0]
    found = {s.resource: s.time_saved_fraction for s in analyze_sensitivity(best(group, hw), (group,), hw)}
    assert found["division rate"] > 0.05


def test_more_of_everything_saves_no_more_than_a_tenth() -> None:
    """All rates a tenth up and all latencies a tenth down make a time that is between 1/1.1 and 0.9 of the old one."""
    for group in (matmul(1024, 1024, 1024), relu(4096, 1024)):
        saved = analyze_sensitivity(best(group, V100), (group,), V100)
        assert 0.08 < sum(s.time_saved_fraction for s in saved) < 0.12


def test_plans_of_several_kernels_weigh_them_by_their_time() -> None:
    long, short = relu(4096, 4096), relu(8, 8)
    both = Plan((*best(long, V100).choices, *best(short, V100).choices))
    found = {s.resource: s.time_saved_fraction for s in analyze_sensitivity(both, (long, short), V100)}
    alone = {s.resource: s.time_saved_fraction for s in analyze_sensitivity(best(long, V100), (long,), V100)}
    assert 0 < found["dram bandwidth"] < alone["dram bandwidth"]


def test_kernels_weigh_by_their_time_in_how_sure_a_plan_is() -> None:
    (long,), (short,) = (best(group, V100).choices for group in (relu(4096, 4096), relu(8, 8)))
    sure, unsure = (replace(long.estimate, uncertainty=factor) for factor in (1.3, 2.0))
    brief = replace(short.estimate, seconds=long.estimate.seconds / 99)
    plan = Plan((replace(long, estimate=sure), replace(short, estimate=replace(brief, uncertainty=2.0))))
    assert plan.estimate.uncertainty == pytest.approx(1.3**0.99 * 2.0**0.01)
    plan = Plan((replace(long, estimate=unsure), replace(short, estimate=replace(brief, uncertainty=2.0))))
    assert plan.estimate.uncertainty == pytest.approx(2.0)


def with_sources(*sources: Source) -> HardwareSpec:
    return replace(V100, sources=sources)


def test_the_first_source_of_a_figure_says_whether_it_is_assumed() -> None:
    hw = with_sources(Source(("levels.dram",), "measured"), Source(("levels.*",), "a guess", assumed=True))
    assert not hw.is_assumed("levels.dram.bandwidth_bytes_per_s")
    assert hw.is_assumed("levels.l2.bandwidth_bytes_per_s")
    assert hw.is_assumed("limits.launch_overhead_s")  # nobody says where it is from


@pytest.mark.parametrize(
    ("assumed", "factor"),
    [
        ((), 1.3),
        (("levels", "units", "limits"), 2.0),
        (("levels.dram",), 1.3 * (2.0 / 1.3) ** 0.8),
        (("limits.launch_overhead_s",), 1.3 * (2.0 / 1.3) ** 0.2),
        (("levels.l2",), 1.3 * (2.0 / 1.3) ** 0.8),  # nearly as long as the longest
        (("units",), 1.3),  # far from the longest
    ],
)
def test_uncertainty_grows_with_time_that_depends_on_assumed_fields(assumed: tuple[str, ...], factor: float) -> None:
    known = Source(("levels", "units", "limits"), "measured")
    hw = with_sources(Source(assumed, "a guess", assumed=True), known) if assumed else with_sources(known)
    stages = (StageCost("compute", 1.0), StageCost("l2", 7.0), StageCost("dram", 8.0), StageCost("launch", 2.0))
    unit = hw.units[0]
    assert uncertainty(stages, 10.0, find_assumed_stages(hw, unit)) == pytest.approx(factor)
