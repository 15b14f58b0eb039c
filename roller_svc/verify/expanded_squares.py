"""Bounds of the reference for a kernel that may compute squares of differences as products.

The error of Σ a² + Σ b² - 2 Σ ab is relative to these sums. It follows from a program that has them as statements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from roller_svc.fusion.inline import inline_elementwise
from roller_svc.fusion.linear_sums import split_linear_sums
from roller_svc.ir.program import TensorProgram
from roller_svc.semantics.interpreter import Value


def expand_squares(program: TensorProgram) -> TensorProgram:
    """Return the program with sums of squares of differences as sums of products."""
    statements = split_linear_sums(inline_elementwise(program), program.types, allow_expanded_squares=True)
    return replace(program, statements=statements)


def widen_bounds(values: Mapping[str, Value], expanded: Mapping[str, Value]) -> dict[str, Value]:
    """Return values of a program with bounds that include those of the expanded one; none where this is NaN or infinite."""
    return {name: _widen(value, expanded[name]) for name, value in values.items()}


def _widen(value: Value, expanded: Value) -> Value:
    if value.error is None or expanded.error is None:
        return value
    with np.errstate(invalid="ignore"):
        distance = np.abs(np.asarray(expanded.wide, np.float64) - np.asarray(value.wide, np.float64))
        error = np.maximum(value.error, expanded.error + distance)
    return replace(value, error=np.where(np.isfinite(distance), error, np.inf))
