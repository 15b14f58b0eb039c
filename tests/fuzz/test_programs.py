"""Random programs of several statements: kernels that are right, and no internal error.

tests/fuzz/fuzz_programs.py runs the long form, and one program again by its seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_programs import Row, Task, judge, program_of, run
from programs import LARGE_POINTS, draw

from roller_svc.errors import InvariantError
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.semantics.compare import Agreement

CPU = Task(0, "local", emulate=False, emit=False, plans=2)
EMULATED = ("nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x")
EMITTED = ("local", "cpu-arm-neon", "nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "nvidia-b200", "amd-mi250x")
MAX_INVALID_SHARE = 0.1  # programs that the language refuses show nothing


def failures(task: Task, first: int, count: int) -> list[Row]:
    rows = list(run([replace(task, seed=seed) for seed in range(first, first + count)], jobs=2))
    assert sum(row.status == "ok" for row in rows) >= (1 - MAX_INVALID_SHARE) * count
    return [row for row in rows if row.status in ("wrong", "error")]


@pytest.mark.slow
def test_kernels_of_a_cpu_are_right() -> None:
    assert failures(CPU, 0, 60) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", EMULATED)
def test_emulated_kernels_are_right(target: str) -> None:
    assert failures(replace(CPU, target=target, emulate=True), 0, 15) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", EMITTED)
def test_large_programs_have_sources(target: str) -> None:
    assert failures(replace(CPU, target=target, emit=True, plans=6), 0, 25) == []


# -- the fuzzer itself: what it is to find, it finds -------------------------------------------------------------------


def test_a_seed_makes_the_same_program() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert len({draw(seed).expression for seed in range(50)}) == 50


def test_every_pattern_is_drawn_with_few_and_many_points() -> None:
    for limit in (1000, LARGE_POINTS):
        drawn = [draw(seed, is_gpu=seed % 2 == 0, limit=limit) for seed in range(300)]
        assert len({pattern for program in drawn for pattern in program.patterns}) == 15
        assert {";" in program.expression or "\n" in program.expression for program in drawn} == {True, False}
        assert any(program.outputs for program in drawn)


def test_a_wrong_value_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = Agreement(ok=False, max_abs_error=1.0, max_rel_error=1.0, output="t0", detail="1 element is wrong")
    monkeypatch.setattr("fuzz_programs.verify_results", lambda *args, **kwargs: verdict)
    row = judge(replace(CPU, plans=1))
    assert (row.seed, row.status, row.patterns) == (0, "wrong", program_of(CPU).patterns)
    assert "1 element is wrong" in row.detail


def test_an_internal_error_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> CompiledKernel:
        raise InvariantError("a tree is not legal")

    monkeypatch.setattr("fuzz_programs.compiled_plan", refuse)
    row = judge(CPU)
    assert (row.status, "a tree is not legal" in row.detail) == ("error", True)
