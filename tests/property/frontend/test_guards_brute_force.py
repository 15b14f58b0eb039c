"""An index is refused exactly when some point that its guards let through is outside, counted point by point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from roller_svc.errors import IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import TensorType

AXES = ("a", "b")

small = st.integers(0, 6)
leaf = st.one_of(st.sampled_from(AXES), small.map(str))


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from("+-"), inner),
        st.builds("({} * {})".format, inner, st.integers(-3, 3)),
        st.builds("({} {} {})".format, inner, st.sampled_from(["//", "%"]), st.integers(1, 5)),
        st.builds("abs({})".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["max", "min"]), inner, inner),
        st.builds("where({} < {}, {}, {})".format, inner, inner, inner, inner),
    )


index = st.recursive(leaf, _combined, max_leaves=5)
comparison = st.builds("({} {} {})".format, index, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), index)
condition = st.recursive(
    comparison, lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("&|"), inner), max_leaves=3
)
conditions = st.lists(condition, min_size=1, max_size=3)
extent = st.integers(1, 7)


def where(cond: bool, x: int, y: int) -> int:
    return x if cond else y


def value_of(text: str, a: int, b: int) -> int:
    """The text has Python's own meaning here: the strategies above write nothing else."""
    return int(eval(text, {"a": a, "b": b, "abs": abs, "max": max, "min": min, "where": where}))


def is_refused(program: str, size: int) -> bool:
    try:
        parse(program, {"x": TensorType(DType.FLOAT32, (size,))})
    except IndexRangeError as error:
        return error.code == "index-out-of-range" and error.line == 1
    return False


@pytest.mark.slow
@settings(max_examples=200)
@given(index, conditions, extent, extent, extent, st.sampled_from(["all", "any", "else"]))
def test_refused_exactly_when_a_point_is_outside(text: str, guards: list[str], ea: int, eb: int, size: int, branch: str) -> None:
    joined = ", ".join(guards)
    if branch == "else":
        value = f"const(0.0).when([{joined}], x[{text}])"
    else:
        value = f"x[{text}].when([{joined}], 0.0, merge_op=`{branch}`)"
    outside = False
    for a in range(ea):
        for b in range(eb):
            held = [value_of(guard, a, b) != 0 for guard in guards]
            reached = any(held) if branch == "any" else all(held) is (branch == "all")
            outside |= reached and not 0 <= value_of(text, a, b) < size
    assert is_refused(f"y[a, b] = {value} where a in {ea}, b in {eb}", size) is outside


@settings(max_examples=examples(60))
@given(st.floats(0.05, 4.0), st.floats(-3.0, 3.0), extent, st.integers(1, 12), st.sampled_from(["floor", "ceil"]))
def test_floating_indices_are_decided_by_enumeration(scale: float, shift: float, n: int, size: int, function: str) -> None:
    axis = np.arange(n, dtype=np.float32)
    reached = getattr(np, function)(axis * np.float32(scale) + np.float32(shift))
    outside = bool(((reached < 0) | (reached >= size)).any())
    text = f"y[a] = x[(a.cast(`float32`) * {scale!r} + {shift!r}).call(`{function}`)] where a in {n}"
    assert is_refused(text, size) is outside


@settings(max_examples=examples(60))
@given(index, extent, extent, extent)
def test_proven_indices_are_not_checked_at_the_call(text: str, ea: int, eb: int, size: int) -> None:
    clipped = f"y[a, b] = x[max(min({text}, {size - 1}), 0)] where a in {ea}, b in {eb}"
    program = parse(clipped, {"x": TensorType(DType.FLOAT32, (size,))})
    assert all(load.bounds_checked == (False,) for s in program.statements for load in loads_of(s.body))
