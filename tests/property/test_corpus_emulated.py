"""A fixed part of the corpora as CUDA and HIP in the emulator: what can be shown of GPUs wherever there is a g++."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sampling import every

from roller_svc.verify.corpus import Run, Task, group_tasks, parse_cases, verify_task

DATA = Path(__file__).parents[2] / "bench" / "data"
GPUS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x")
ELSEWHERE = ("nvidia-t4", "nvidia-rtx4090")
STEPS, STEP_ELSEWHERE = {"public": 10, "tensorcore": 20}, 150

pytestmark = pytest.mark.emulator


def tasks(targets: tuple[str, ...], steps: dict[str, int]) -> list[Task]:
    documents = ((json.loads((DATA / f"{name}.json").read_text()), step) for name, step in steps.items())
    part = [case for document, step in documents for case in parse_cases(document, small=True, every=step)]
    return [task for target in targets for task in group_tasks(part, Run(target, emulate=True))]


def id_of(task: Task) -> str:
    return f"{task.run.target}-{task.cases[0].id}"


def check(task: Task) -> None:
    assert [(row.id, row.status, row.detail) for row in verify_task(task) if row.status != "ok"] == []


@pytest.mark.parametrize("task", every(29, tasks(GPUS, STEPS)), ids=id_of)
def test_a_tenth_is_right_on_each_kind_of_gpu(task: Task) -> None:
    check(task)


@pytest.mark.parametrize("task", every(3, tasks(ELSEWHERE, dict.fromkeys(STEPS, STEP_ELSEWHERE))), ids=id_of)
def test_a_few_are_right_on_others(task: Task) -> None:
    check(task)
