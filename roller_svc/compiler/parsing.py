"""Parse the program of a request once: for its digest, for its build, and where a kernel is lowered again."""

from __future__ import annotations

from functools import lru_cache

from roller_svc.frontend.parse import parse_forms
from roller_svc.ir.program import Forms, TensorType

MAX_PROGRAMS = 256  # more than the classes of most models


@lru_cache(maxsize=MAX_PROGRAMS)
def parse_once(expression: str, inputs: tuple[tuple[str, TensorType], ...], outputs: tuple[str, ...] | None) -> Forms:
    """Return the forms of the program of an expression. Raises InputError as `parse_forms` does."""
    return parse_forms(expression, dict(inputs), outputs)
