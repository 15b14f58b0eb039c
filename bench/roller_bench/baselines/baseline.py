"""A baseline of a program, and the choice of the fastest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from roller_svc.errors import BuildError, WrongAnswerError
from roller_svc.ir.program import TensorProgram
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.interpreter import Value

# Raised by no_baseline, and by numpy, torch and TVM for unsupported arguments.
EXPECTED_ERRORS = (BuildError, RuntimeError, ValueError, TypeError, IndexError)

_TRIALS = 3
_REASON = 200  # characters of an error message
_TRIAL_S = 0.5  # slower translations are timed once


@dataclass(frozen=True, slots=True)
class Baseline:
    """A translation that agrees with the reference."""

    run: Callable[[], object]
    calls: tuple[str, ...]  # names of the called functions
    state: object


def check(calls: Sequence[str], program: TensorProgram, results: Mapping[str, NDArray[Any]], expected: Mapping[str, Value]) -> None:
    """Raise WrongAnswerError if the results differ from the reference."""
    verdict = agrees(program, results, expected)
    if not verdict.ok:
        raise WrongAnswerError(f"{', '.join(calls)}: {verdict.detail}")


def fastest(baselines: Sequence[Baseline]) -> Baseline:
    """Return the baseline with the smallest time over a few calls."""
    timed = [(_min_trial_s(baseline), number, baseline) for number, baseline in enumerate(baselines)]
    return min(timed)[2]


def error_summary(error: Exception) -> str:
    """Return the type and the beginning of the message of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:_REASON]


def _min_trial_s(baseline: Baseline) -> float:
    """Return the smallest time of a few calls."""
    min_s = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        baseline.run()
        min_s = min(min_s, time.perf_counter() - start)
        if min_s > _TRIAL_S:
            break
    return min_s
