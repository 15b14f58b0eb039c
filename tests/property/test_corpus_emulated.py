"""A fixed part of the corpora as CUDA kernels in the emulator: what can be shown of GPUs wherever there is a g++."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from sampling import every

from roller_svc.verify.corpus import Case, Run, Task, parse_cases, verify_task

DATA = Path(__file__).parents[2] / "bench" / "data"
A100, T4, RTX4090 = "nvidia-a100-sxm-80gb", "nvidia-t4", "nvidia-rtx4090"
STEP, STEP_ELSEWHERE = 20, 150

pytestmark = pytest.mark.emulator


def part(step: int) -> list[Case]:
    documents = (json.loads((DATA / f"{name}.json").read_text()) for name in ("public", "tensorcore"))
    return [case for document in documents for case in parse_cases(document, small=True, every=step)]


def check(case: Case, target: str) -> None:
    (row,) = verify_task(Task((case,), Run(target, emulate=True)))
    assert row.status == "ok", (row.id, row.status, row.detail)


@pytest.mark.parametrize("case", every(3, part(STEP)), ids=lambda case: case.id)
def test_a_twentieth_is_right_on_an_a100(case: Case) -> None:
    check(case, A100)


ELSEWHERE = list(product([T4, RTX4090], part(STEP_ELSEWHERE)))


@pytest.mark.parametrize(("target", "case"), every(3, ELSEWHERE), ids=lambda value: getattr(value, "id", value))
def test_a_few_are_right_on_others(case: Case, target: str) -> None:
    check(case, target)
