"""Choosing among built plans by measuring: no plan loses for what only its first call pays for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from roller_bench.model.candidate_plans import trial_plans
from roller_svc.compiler.autotune import measure_candidates, sort_best_first
from roller_svc.errors import LaunchError
from roller_svc.frontend.lang import parse
from roller_svc.hardware import load
from roller_svc.ir.dtype import DType
from roller_svc.ir.kernel import CompiledKernel
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import CandidateResult

HW = load("cpu-x86-avx512")
PROGRAM = parse("y[i, j] +=! a[i, k] * b[k, j]", dict.fromkeys("ab", TensorType(DType.FLOAT32, (256, 256))))


@dataclass(slots=True)
class MadeUpCall:
    """A kernel that takes `cold_s` the first time and `warm_s` from then on, by a clock of its own."""

    cold_s: float
    warm_s: float
    fails: bool = False  # where results are asked for
    min_sample_s: float = 20e-6
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1

    def stopwatch(self, call: Callable[[], object], times: int) -> float:
        cold = self.cold_s - self.warm_s if self.calls == 0 else 0.0
        for _ in range(times):
            call()
        return cold + times * self.warm_s

    def device_name(self) -> str:
        return "made up"

    def results(self) -> dict[str, object]:
        if self.fails:
            raise LaunchError("results are lost")
        return {}


@dataclass(slots=True)
class MadeUpBackend:
    """Kernels that take those seconds, cold and warm, in the order in which they are loaded."""

    seconds: tuple[tuple[float, float], ...]
    failing: int | None
    loaded: list[MadeUpCall] = field(default_factory=list)

    def to_device(self, arrays: Mapping[str, object]) -> Mapping[str, object]:
        return arrays

    def load(self, _: CompiledKernel) -> MadeUpBackend:
        return self

    def bind(self, arrays: object, results: object) -> MadeUpCall:
        number = len(self.loaded)
        self.loaded.append(MadeUpCall(*self.seconds[number], fails=number == self.failing))
        return self.loaded[-1]


def chosen(*seconds: tuple[float, float], failing: int | None = None, one_text: bool = False) -> tuple[int, MadeUpBackend]:
    """Which of kernels that take those seconds, cold and warm, is chosen; `failing`: whose results do not come."""
    plans = trial_plans(PROGRAM, HW, len(seconds), 0, "").plans
    assert len(plans) == len(seconds)
    binaries: list[Any] = [SimpleNamespace(resources=(), binary=bytes([0 if one_text else i])) for i, _ in enumerate(plans)]
    attempts = tuple(CandidateResult(plan, (), None, compiled, None, None) for plan, compiled in zip(plans, binaries, strict=True))
    backend: Any = MadeUpBackend(seconds, failing)
    best = sort_best_first(measure_candidates(attempts, PROGRAM, backend))[0]
    return [id(plan) for plan in plans].index(id(best.plan)), backend


@pytest.mark.parametrize("cold_s", [0.02, 0.09])
def test_a_slow_first_call_does_not_lose(cold_s: float) -> None:
    """Neither where it is one of several samples, nor where it takes all the time that a look may take."""
    assert chosen((cold_s, 0.010), (cold_s, 0.009))[0] == 1
    assert chosen((cold_s, 0.040), (cold_s, 0.036))[0] == 1


def test_short_kernel_does_not_lose_by_one_cold_call() -> None:
    """The binary is loaded: threads that wake and cold code made the call long."""
    assert chosen((0.5e-3, 0.10e-3), (0.4e-3, 0.08e-3), one_text=True)[0] == 1


def test_what_is_far_off_is_called_once() -> None:
    number, backend = chosen((0.012, 0.010), (0.5, 0.4))
    assert number == 0
    assert [call.calls for call in backend.loaded][1] == 1


@pytest.mark.parametrize(("one_text", "calls"), [(True, 1), (False, 2)])
def test_first_long_call_ignores_page_fault_time(one_text: bool, calls: int) -> None:
    number, backend = chosen((0.09, 0.040), (0.06, 0.059), one_text=one_text)
    assert number == 0
    assert backend.loaded[1].calls == calls


def test_one_whose_results_fail_when_it_has_been_timed_is_no_finalist() -> None:
    number, backend = chosen((0.010, 0.010), (0.011, 0.011), (0.0105, 0.0105), failing=0)
    assert number == 2
    assert [call.calls > 0 for call in backend.loaded] == [True] * 3
