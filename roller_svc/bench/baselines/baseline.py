"""A peer of a program, and the fastest of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from roller_svc.errors import BuildError, WrongAnswerError
from roller_svc.ir.program import TensorProgram
from roller_svc.reference.compare import agrees
from roller_svc.reference.interpreter import Value

# What no_peer makes, and what numpy, torch and TVM raise for what they do not take.
EXPECTED_ERRORS = (BuildError, RuntimeError, ValueError, TypeError, IndexError)

_TRIALS = 3
_REASON = 200  # characters of a refusal that are worth keeping
_TRIAL_S = 0.5  # a way so slow is tried once


@dataclass(frozen=True, slots=True)
class Baseline:
    """A way that gives the reference's values. `calls` names what is called, `kept` is what the call needs to stay."""

    run: Callable[[], object]
    calls: tuple[str, ...]
    state: object


def check(
    calls: Sequence[str], program: TensorProgram, results: Mapping[str, NDArray[Any]], expected: Mapping[str, Value]
) -> None:
    """WrongAnswerError where the results are not the reference's."""
    verdict = agrees(program, results, expected)
    if not verdict.ok:
        raise WrongAnswerError(f"{', '.join(calls)}: {verdict.detail}")


def fastest(baselines: Sequence[Baseline]) -> Baseline:
    """The one whose few calls took the least time."""
    timed = [(_min_trial_s(baseline), number, baseline) for number, baseline in enumerate(baselines)]
    return min(timed)[2]


def error_summary(refusal: Exception) -> str:
    """The kind and the beginning of its message."""
    return f"{type(refusal).__name__}: {refusal}".splitlines()[0][:_REASON]


def _min_trial_s(baseline: Baseline) -> float:
    """The least time of a few calls."""
    min_s = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        baseline.run()
        min_s = min(min_s, time.perf_counter() - start)
        if min_s > _TRIAL_S:
            break
    return min_s
