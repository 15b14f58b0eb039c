"""Kernel families: the two tables and the folders agree, only they name a family, and a new one needs nothing else."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import roller_svc
from roller_svc import families
from roller_svc.construct.rules import Enumerated, Shape, ThreadTile
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.families.family import Family
from roller_svc.families.schedules import SCHEDULES
from roller_svc.ir.expr import AxisRef, substitute
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.program import StatementKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, ScheduleTree
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "roller_svc"
NAMES = [family.name for family in families.FAMILIES]


def test_the_tables_and_the_folders_name_the_same_families() -> None:
    folders = {
        f"{machine}/{path.name}"
        for machine in ("gpu", "cpu")
        for path in (PACKAGE / "families" / machine).iterdir()
        if (path / "__init__.py").exists()
    }
    assert len(NAMES) == len(set(NAMES))
    assert folders == set(NAMES) == set(SCHEDULES)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_a_schedule_and_says_what_it_prepares(name: str) -> None:
    folder = PACKAGE / "families" / name
    assert (folder / "schedule.py").exists()
    assert (folder / "workload.py").exists()


def test_the_map_has_a_row_for_each_family() -> None:
    page = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in page] == []


# Questions that only a family, or what describes units and devices, may ask of a unit.
ALLOWED = {"ir", "hardware", "calibration", "families", "analysis"}
# Files that describe a device or its instructions, and branch on no family.
DESCRIPTIONS = {"compiler/partition_cache.py", "verify/lint.py"}


def test_no_branch_on_a_kind_of_unit_outside_the_families() -> None:
    asked = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        if name.parts[0] in ALLOWED or str(name) in DESCRIPTIONS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("WGMMA", "MFMA", "takes_fragments"):
                asked.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert asked == []


class OneTask(Enumerated):
    """Rules with one shape: everything in one task, point by point."""

    def __init__(self, workload: Workload[str]) -> None:
        self.workload = workload

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> Sequence[Shape]:
        log.tiles_visited += 1
        extents = self.workload.extents
        return (Shape(extents, ThreadTile(tuple(1 for _ in extents))),)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[str] | None:
    is_map = group.kind is GroupKind.NEST and [s.kind for s in group.statements] == [StatementKind.MAP]
    return None if base.machine.is_gpu or not is_map else base.with_facts("toy")


def price(workload: Workload[str], launch: Launch) -> Costs:
    assert workload.facts == "toy"
    return Costs(core_s=1e-6, core_stage=None, stage_seconds=(("compute", 1e-6),), occupancy=1.0, waves=1)


def lower(group: KernelGroup, program: RProgram, workload: Workload[str]) -> tuple[ScheduleTree, ...]:
    assert workload.facts == "toy"
    (statement,) = group.statements
    toy = {axis.name: AxisRef(f"toy_{axis.name}") for axis in statement.axes}
    index = tuple(substitute(i, toy) for i in statement.index)
    nodes: tuple[Node, ...] = (Compute(statement.output, index, substitute(statement.body, toy)),)
    for axis in reversed(statement.axes):
        nodes = (Loop(toy[axis.name].name, axis.extent, LoopKind.SERIAL, nodes),)
    return (ScheduleTree(group.name, nodes),)


TOY = Family(name="cpu/toy", prepare=prepare, rules=OneTask, cost=price)


def test_a_toy_family_compiles_once_it_stands_in_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", (TOY, *families.FAMILIES))
    monkeypatch.setitem(SCHEDULES, "cpu/toy", lower)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    kernel = roller_svc.compile("y[i, j] = x[i, j] * 2.0", {"x": ("float32", (2, 3))}, target="local", select="model")
    assert "toy_i" in kernel.source
    assert kernel.estimate.bound != ""
    np.testing.assert_array_equal(kernel(x=x)["y"], x * 2)


def test_other_groups_keep_their_families_beside_a_toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", (TOY, *families.FAMILIES))
    monkeypatch.setitem(SCHEDULES, "cpu/toy", lower)
    kernel = roller_svc.compile("y[i] +=! x[i, j]", {"x": ("float32", (2, 300))}, target="local", select="model")
    assert "toy_" not in kernel.source
