"""Constants of the CPU model, fitted to times that a model with other constants made up."""

from __future__ import annotations

import math
from dataclasses import asdict, fields, replace
from functools import lru_cache
from pathlib import Path

import pytest
from tile_spaces import matmul, relu, row_sum

from roller_svc import hardware
from roller_svc.bench.model import fit_costs
from roller_svc.bench.model.fit import MAX_FACTOR, estimate_plans, fit_constants, fit_machines
from roller_svc.bench.model.measured_plans import FitCase, MeasuredPlan
from roller_svc.compiler.rank import rank
from roller_svc.families import prepare_model
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.report import Plan
from roller_svc.perf.cpu_costs import CpuCosts
from roller_svc.perf.cpu_costs_fitted import FITTED

HW = hardware.load("cpu-x86-avx512")
START = CpuCosts()
# what made-up times were made with
TRUE = replace(
    START,
    contraction=replace(START.contraction, copy_cycles=4.0, call_cycles=90.0),
    loops=replace(START.loops, imperfect_overlap=3 * START.loops.imperfect_overlap),
    memory=replace(START.memory, write_cost_factor=1.6),
)
GROUPS = (matmul(64, 512, 512), matmul(512, 256, 64), matmul(300, 300, 300), relu(4096, 1024), row_sum(4096, 1024))


def case(group: KernelGroup, costs: CpuCosts, slower: float = 1.0) -> FitCase:
    candidates, _ = rank(group, HW, HW.unit_for(group.space.compute_dtype), 8)
    plans = [MeasuredPlan(Plan((candidate,)), (group,), 1.0) for candidate in candidates]
    made = FitCase(group.name, "made up", tuple(plans))
    (seconds,) = estimate_plans((made,), HW, costs)
    timed = tuple(replace(plan, seconds=slower * s) for plan, s in zip(plans, seconds, strict=True))
    return replace(made, plans=timed)


@lru_cache(maxsize=1)
def cases() -> tuple[FitCase, ...]:
    return tuple(case(group, TRUE) for group in GROUPS)


def worst(costs: CpuCosts, of: tuple[FitCase, ...] | None = None, hw: HardwareSpec = HW) -> float:
    """The largest |ln(predicted / measured)|."""
    of = of or cases()
    pairs = zip(estimate_plans(of, hw, costs), of, strict=True)
    return max(
        abs(math.log(found / plan.seconds))
        for estimates, one in pairs
        for found, plan in zip(estimates, one.plans, strict=True)
    )


def test_times_are_explained_where_constants_can_explain_them() -> None:
    assert worst(START) > 0.1
    assert worst(fit_constants(cases(), HW, START)) < 0.5 * worst(START)


def test_the_same_measurements_give_the_same_constants() -> None:
    assert fit_constants(cases(), HW, START) == fit_constants(cases(), HW, START)


def test_true_constants_stay() -> None:
    assert fit_constants(cases(), HW, TRUE) == TRUE


def test_constants_stay_within_their_bounds_and_those_that_nothing_rests_on_stay_put() -> None:
    slow = tuple(case(group, TRUE, slower=30.0) for group in GROUPS)
    found = fit_constants(slow, HW, START)
    assert found.convolution == START.convolution
    for part in (found.contraction, found.loops):
        started = START.contraction if part is found.contraction else START.loops
        for constant in fields(part):
            ratio = getattr(part, constant.name) / getattr(started, constant.name)
            assert 1 / MAX_FACTOR - 1e-9 <= ratio <= MAX_FACTOR + 1e-9
    assert found.contraction.copy_cycles > START.contraction.copy_cycles


def test_without_measurements_nothing_changes() -> None:
    assert fit_constants((), HW, START) == START


def test_measurements_on_two_machines_are_fitted_together() -> None:
    """One case on a machine whose clock is half as fast: with the same constants it takes another time there."""
    slow = replace(HW, clock_hz=HW.clock_hz / 2)
    first, *others = cases()
    (seconds,) = estimate_plans((first,), slow, TRUE)
    plans = tuple(replace(plan, seconds=s) for plan, s in zip(first.plans, seconds, strict=True))
    there = (replace(first, plans=plans),)
    together = fit_machines(((there, slow), (others, HW)), START)
    assert worst(together, there, slow) < 0.5 * worst(START, there, slow)
    assert worst(together, there, slow) < worst(fit_constants(others, HW, START), there, slow)


@pytest.mark.parametrize("number", range(len(GROUPS)))
def test_estimates_of_all_plans_are_those_of_each(number: int) -> None:
    one = cases()[number]
    alone = (
        prepare_model(GROUPS[number], HW, choice.program.unit).with_costs(TRUE).estimate(choice.program).seconds
        for plan in one.plans
        for choice in plan.plan.choices
    )
    assert estimate_plans((one,), HW, TRUE) == (tuple(alone),)


@pytest.mark.parametrize("writes", [True, False])
def test_a_fitted_module_replaces_the_old_one_whole(tmp_path: Path, writes: bool) -> None:
    module = tmp_path / "costs.py"
    module.write_text("OLD = 1\n", encoding="utf-8")
    if writes:
        fit_costs.replace_file(module, "NEW = 2\n")
    else:
        with pytest.raises(UnicodeEncodeError):
            fit_costs.replace_file(module, "NEW = 2\n\ud800")
    assert module.read_text(encoding="utf-8") == ("NEW = 2\n" if writes else "OLD = 1\n")
    assert list(tmp_path.iterdir()) == [module]


def test_classes_whose_kernels_have_changed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"cases": [{"id": "a", "cls": "gemm"}, {"id": "b", "cls": "maxpool"}, {"id": "c", "cls": "relu"}]}
    monkeypatch.setattr(fit_costs, "read_measurements", lambda _: document)
    assert fit_costs.read_document("old.json") == document
    assert [case["id"] for case in fit_costs.read_document("old.json:-maxpool,relu")["cases"]] == ["a"]
    with pytest.raises(SystemExit, match=r"old.json has no class gem"):
        fit_costs.read_document("old.json:-gem")


def test_fitted_costs_become_a_module() -> None:
    loops = replace(CpuCosts().loops, load_cycles=0.31415)
    costs = replace(CpuCosts(), loops=loops, single_task_launch_fraction=0.2718)
    found: dict[str, CpuCosts] = {}
    exec(fit_costs.module_source(costs, "two plans of one program"), found)
    assert found["FITTED"].contraction == costs.contraction
    assert (found["FITTED"].loops.load_cycles, found["FITTED"].single_task_launch_fraction) == (0.31, 0.27)


def test_no_cost_is_fitted_far_from_where_it_was_written_down() -> None:
    start, fitted_to = asdict(CpuCosts()), asdict(FITTED)
    for family, costs in start.items():
        before_and_after = (costs, fitted_to[family])
        if isinstance(costs, float):  # no family
            pairs = [before_and_after]
        else:
            pairs = list(zip(*(one.values() for one in before_and_after), strict=True))
        assert pairs
        assert all(1 / MAX_FACTOR * 0.95 <= after / before <= MAX_FACTOR * 1.05 for before, after in pairs), family
