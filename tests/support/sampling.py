"""Samples of parametrised tests: the quick suite runs some of the cases, `make test-all` runs all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

QUICK_SHARE = 4
_has_all_examples = True


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test: the first and every `step`-th quick, the others slow.

    A tuple is the values of several arguments.
    """
    return [case if index % step == 0 else slow(case) for index, case in enumerate(cases)]


def examples(count: int) -> int:
    """Return how many random examples a test has: `count`, or a quarter of them with --max-cases, as in `make test`."""
    return count if _has_all_examples else -(-count // QUICK_SHARE)


def have_few_examples() -> None:
    """Make the tests that are imported from now on have few examples."""
    global _has_all_examples
    _has_all_examples = False


def slow(case: Any) -> Any:
    """Return a case as a parameter of a test, marked slow."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
