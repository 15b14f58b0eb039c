"""Every case of the corpora: its printed form parses to the same program, JSON keeps it, and a CPU computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sampling import every

from roller_svc.frontend.lang import parse
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.dtype import dtype_named
from roller_svc.ir.printer import text
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate, reference
from roller_svc.verify.corpus import Run, Task, group_tasks, parse_cases, verify_task

DATA = Path(__file__).parents[2] / "bench" / "data"
# A normal run takes every so many-th case.
STRIDE = 23


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return found


def programs(case: dict[str, Any]) -> list[TensorProgram]:
    """The program on the full shapes, then on the small ones where there are any."""
    result = []
    for form in (case, case.get("small")):
        if form:
            types = {}
            for name, meta in form["inputs"].items():
                dtype = dtype_named(meta["dtype"])
                assert dtype is not None
                types[name] = TensorType(dtype, tuple(meta["shape"]))
            result.append(parse(form["expr"], types, list(case["out_meta"])))
    return result


def check_round_trips(case: dict[str, Any]) -> None:
    for program in programs(case):
        printed = text(program)
        again = parse(printed, dict(program.inputs), [out.name for out in program.outputs])
        assert again == program, printed
        assert from_json(TensorProgram, to_json(program)) == program


@pytest.mark.parametrize("name", ["public", "tensorcore", "cpu_bench"])
def test_some_round_trips(name: str) -> None:
    for case in cases(name)[::STRIDE]:
        check_round_trips(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["public", "tensorcore", "cpu_bench"])
def test_all_round_trips(name: str) -> None:
    for case in cases(name):
        check_round_trips(case)


def test_the_reference_is_within_its_own_bounds() -> None:
    for case in cases("public")[::STRIDE]:
        program = programs(case)[-1]
        arrays = random_inputs(program, 0, case.get("hints"))
        verdict = agrees(program, reference(program, arrays), evaluate(program, arrays))
        assert verdict.ok, (case["id"], verdict)
        assert verdict.unchecked == 0, (case["id"], verdict)


def tasks() -> list[Task]:
    return group_tasks(parse_cases({"cases": cases("public")}, small=True), Run("local"))


@pytest.mark.parametrize("task", every(200, tasks()), ids=lambda task: task.cases[0].id)
def test_programs_are_right_on_a_cpu(task: Task) -> None:
    assert [(row.id, row.status, row.detail) for row in verify_task(task) if row.status != "ok"] == []
