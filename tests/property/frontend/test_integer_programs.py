"""Random programs of integers of eight types over their full range, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest
from integer_programs import IntegerProgram, draw

import roller_svc


def check(seed: int, target: str | None) -> None:
    program = draw(seed)
    found = run(program, target)
    for name, expected in program.expected.items():
        assert found[name].dtype == expected.dtype, (seed, name, program.expression)
        assert np.array_equal(found[name], expected), (seed, name, program.expression)


def run(program: IntegerProgram, target: str | None) -> dict[str, np.ndarray]:
    types = {name: (str(array.dtype), array.shape) for name, array in program.arrays.items()}
    if target is None:
        return roller_svc.reference(program.expression, types, program.arrays)
    runtime = "auto" if target == "local" else "emulator"
    kernel = roller_svc.compile(program.expression, types, target=target, top_k=1, select="model", runtime=runtime)
    return kernel(**program.arrays)


@pytest.mark.parametrize("seed", range(40))
def test_the_interpreter_follows_the_rules(seed: int) -> None:
    check(seed, None)


@pytest.mark.parametrize("seed", range(4))
def test_kernels_follow_the_rules(seed: int) -> None:
    check(seed, "local")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_kernels_of_many_programs_follow_the_rules(seed: int) -> None:
    check(seed, "local")


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "amd-mi250x"])
@pytest.mark.parametrize("seed", range(2000, 2015))
def test_emulated_kernels_follow_the_rules(seed: int, target: str) -> None:
    check(seed, target)
