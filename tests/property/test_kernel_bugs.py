"""Kernels that broke other compilers, from public reports: right on a CPU, and emulated for three GPUs."""

from __future__ import annotations

from itertools import product

import pytest
from kernel_bugs import CASES, Json, cases_for, check_case
from sampling import every

GPUS = ("nvidia-a100-sxm-80gb", "nvidia-h200-sxm", "amd-mi250x")


def name(value: object) -> str | None:
    return value["id"] if isinstance(value, dict) else None


@pytest.mark.parametrize("case", every(6, cases_for("local")), ids=name)
def test_cases_are_right_on_a_cpu(case: Json) -> None:
    check_case(case, "local")


@pytest.mark.emulator
@pytest.mark.parametrize(("target", "case"), every(60, product(GPUS, cases_for("emulate"))), ids=name)
def test_cases_are_right_in_the_emulator(target: str, case: Json) -> None:
    check_case(case, target, emulate=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case["targets"] == ["gpu"]], ids=name)
@pytest.mark.parametrize("target", GPUS[:2])
def test_cases_for_a_device_only_compile(target: str, case: Json) -> None:
    check_case(case, target, runs=False)
