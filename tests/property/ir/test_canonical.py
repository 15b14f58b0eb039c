"""Nouns survive JSON: from_json(to_json(x)) == x, equal nouns give equal text, wrong data is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples

from roller_svc.errors import ArgumentError
from roller_svc.ir.canonical import (
    FLAT,
    OMIT_DEFAULT,
    UNTAGGED,
    Key,
    Limit,
    Pattern,
    as_array,
    canonical_text,
    digest,
    from_json,
    to_json,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Estimate, StageCost
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.hardware import Arch, ComputeUnit, MemoryLevel, Scope, UnitKind
from roller_svc.ir.kernel import (
    Buffer,
    KernelSource,
    Language,
    LaunchSpec,
    Measurement,
    Role,
    RuntimeCheck,
)
from roller_svc.ir.program import Axis, AxisKind, Combine, Output, StatementKind, TensorExpr, TensorProgram, TensorType
from roller_svc.ir.rprogram import RTile

names = st.from_regex(r"[a-z][a-z0-9]{0,3}", fullmatch=True)
dtypes = st.sampled_from(DType)
counts = st.integers(1, 2**40)
seconds = st.floats(0, 1e3)


@st.composite
def constants(draw: st.DrawFn) -> Const:
    dtype = draw(dtypes)
    return Const(draw(st.floats(allow_nan=False) if dtype.is_float else st.integers(-(2**31), 2**64 - 1)), dtype)


def _grown(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    several = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Op, st.sampled_from(OpKind), several, dtypes),
        st.builds(Load, names, several, dtypes, st.lists(st.booleans(), max_size=3).map(tuple)),
        st.builds(Cast, inner, dtypes, st.booleans()),
        st.builds(Select, inner, inner, inner, dtypes),
    )


leaves: st.SearchStrategy[Expr] = st.one_of(constants(), st.builds(AxisRef, names))
expressions = st.recursive(leaves, _grown, max_leaves=8)
types = st.builds(TensorType, dtypes, st.lists(counts, max_size=4).map(tuple))
axes = st.builds(Axis, names, counts, st.sampled_from(AxisKind))
statements = st.builds(
    TensorExpr,
    names,
    names,
    st.sampled_from(StatementKind),
    types,
    st.lists(axes, max_size=3).map(tuple),
    st.lists(expressions, max_size=2).map(tuple),
    expressions,
    st.none() | st.sampled_from(Combine),
    st.none() | names,
    st.none() | expressions,
    st.lists(st.booleans(), max_size=2).map(tuple),
)
programs = st.builds(
    TensorProgram,
    st.lists(st.tuples(names, types), max_size=3).map(tuple),
    st.lists(statements, max_size=2).map(tuple),
    st.lists(st.builds(Output, names, names), max_size=2).map(tuple),
)
levels = st.builds(MemoryLevel, names, st.sampled_from(Scope), counts, seconds, seconds, counts, counts, counts)
units = st.builds(ComputeUnit, names, st.sampled_from(UnitKind), st.lists(counts, max_size=3).map(tuple), dtypes, dtypes, seconds)
estimates = st.builds(
    Estimate, seconds, st.lists(st.builds(StageCost, names, seconds), max_size=3).map(tuple), seconds, counts, seconds
)
tiles = st.lists(st.tuples(names, counts), max_size=3).map(tuple)
sources = st.builds(
    KernelSource,
    names,
    st.sampled_from(Language),
    st.builds(Arch, names, counts, names),
    st.text(),
    st.lists(
        st.builds(Buffer, names, names, st.sampled_from(Role), dtypes, st.lists(counts, max_size=3).map(tuple)), max_size=2
    ).map(tuple),
    st.lists(st.builds(LaunchSpec, names, st.lists(names, max_size=2).map(tuple)), max_size=2).map(tuple),
    st.lists(st.builds(RuntimeCheck, names, st.integers(0, 16), counts, names), max_size=2).map(tuple),
    st.lists(names, max_size=2).map(tuple),
)
nouns = st.one_of(
    programs,
    levels,
    units,
    estimates,
    sources,
    st.builds(RTile, tiles),
    st.builds(Measurement, seconds, seconds, counts, names, st.none() | seconds),
)


@settings(max_examples=examples(150))
@given(nouns)
def test_round_trip(noun: Any) -> None:
    data = json.loads(json.dumps(to_json(noun), allow_nan=False))
    again = from_json(type(noun), data)
    assert again == noun
    assert canonical_text(again) == canonical_text(noun)
    assert digest(again) == digest(noun)


@settings(max_examples=examples(50))
@given(programs)
def test_numbers_keep_their_kind(program: TensorProgram) -> None:
    again = from_json(TensorProgram, json.loads(canonical_text(program)))
    assert repr(again) == repr(program)


def test_infinities_and_nan() -> None:
    cost = StageCost("dram", math.inf)
    assert to_json(cost) == {"name": "dram", "seconds": "inf"}
    assert from_json(StageCost, to_json(cost)) == cost
    assert math.isnan(from_json(StageCost, {"name": "x", "seconds": "nan"}).seconds)


def test_an_integer_in_a_floating_field_makes_no_other_digest() -> None:
    assert digest(StageCost("dram", 1)) == digest(StageCost("dram", 1.0))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dtype": "float32"}, r"TensorType\.shape: missing"),
        ({"dtype": "float32", "shape": [1], "rank": 1}, r"TensorType\.rank: unknown field"),
        ({"dtype": "float33", "shape": [1]}, r"TensorType\.dtype: expected one of float64"),
        ({"dtype": "float32", "shape": [1.5]}, r"TensorType\.shape\[0\]: expected int"),
        ({"dtype": "float32", "shape": [True]}, r"TensorType\.shape\[0\]: expected int"),
        ({"dtype": "float32", "shape": 3}, r"TensorType\.shape: expected an array"),
        ([], "TensorType: expected an object"),
    ],
)
def test_wrong_data_is_refused_with_its_place(data: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        from_json(TensorType, data)


def test_an_unknown_node_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"Cast\.arg\.node"):
        from_json(Cast, {"arg": {"node": "Lambda"}, "dtype": "int8", "implicit": False})


@as_array
@dataclass(frozen=True)
class _Place:
    slot: Annotated[int, Limit(0, 9)]
    offset: int = 0


@dataclass(frozen=True)
class _Options:
    stages: int = 1
    swap: bool = False


@dataclass(frozen=True)
class _Copy:
    target: Annotated[_Place, Key("copy")]
    source: Annotated[_Place, Key("copy")]


@dataclass(frozen=True)
class _Fill:
    at: tuple[tuple[Annotated[_Place, FLAT], int], ...]
    value: Annotated[int, OMIT_DEFAULT] = 0


@dataclass(frozen=True)
class _Steps:
    name: Annotated[str, Pattern("[a-z]+", "a word")]
    kernels: tuple[str, ...]
    options: Annotated[_Options, FLAT]
    steps: Annotated[tuple[Annotated[_Copy | _Fill, UNTAGGED], ...], Limit(1, 3)]


MARKED = _Steps(
    "net",
    ("gemm",),
    _Options(3),
    (_Copy(_Place(1), _Place(2, 64)), _Fill(((_Place(3, 4), 16),)), _Fill((), 7)),
)
MARKED_JSON: dict[str, Any] = {
    "name": "net",
    "stages": 3,
    "swap": False,
    "steps": [{"copy": [[1, 0], [2, 64]]}, {"at": [[3, 4, 16]]}, {"at": [], "value": 7}],
}


def test_marks_change_the_form() -> None:
    assert to_json(MARKED, without=("kernels",)) == MARKED_JSON
    assert from_json(_Steps, MARKED_JSON, kernels=("gemm",)) == MARKED
    assert to_json(MARKED) == MARKED_JSON | {"kernels": ["gemm"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "Net"}, r'_Steps\.name: expected a word, got "Net"'),
        ({"name": 7}, r"_Steps\.name: expected str"),
        ({"stages": "3"}, r"_Steps\.stages: expected int"),
        ({"options": {}}, r"_Steps\.options: unknown field"),
        ({"kernels": []}, r"_Steps\.kernels: unknown field"),
        ({"steps": []}, r"_Steps\.steps: expected a length from 1 to 3, got 0"),
        ({"steps": [{"copy": [[1, 0]]}]}, r"_Steps\.steps\[0\]\.copy: expected 2 items"),
        (
            {"steps": [{"copy": [[1, 0], [10, 0]]}]},
            r"steps\[0\]\.copy\[1\]\[0\]: expected a number from 0 to 9, got 10",
        ),
        ({"steps": [{"at": [[1, 0]]}]}, r"steps\[0\]\.at\[0\]: expected 3 items"),
        ({"steps": [{"at": [[10, 0, 1]]}]}, r"steps\[0\]\.at\[0\]\[0\]: expected a number from 0"),
        ({"steps": [{"value": 7}]}, r"steps\[0\]: expected an object with the fields copy or at"),
        ({"steps": [7]}, r"steps\[0\]: expected an object with the fields copy or at"),
    ],
)
def test_marked_fields_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        from_json(_Steps, MARKED_JSON | change, kernels=("gemm",))


def test_a_flat_field_may_be_missing_nowhere() -> None:
    with pytest.raises(ArgumentError, match=r"_Steps\.swap: missing"):
        from_json(_Steps, {key: value for key, value in MARKED_JSON.items() if key != "swap"}, kernels=())
