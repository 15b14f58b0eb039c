"""Integers that know their formulas, and the marks that they leave in a text."""

from __future__ import annotations

import math

import pytest

from roller_svc.ir.origin import (
    MAX_FORMULA,
    Derived,
    Number,
    TextPart,
    begin_part,
    end_part,
    marking,
    named,
    read_marks,
    shown,
)


def formula(value: int) -> str:
    assert isinstance(value, Derived)
    return value.formula


def test_a_number_is_plain_unless_something_is_marked() -> None:
    assert type(named(128, "shared.m")) is int
    with marking():
        known = named(128, "shared.m")
    assert shown(known) == "128"
    assert begin_part("main loop") == end_part() == []


def test_formulas_follow_arithmetic() -> None:
    with marking():
        m, k, extent = named(128, "shared.m"), named(64, "shared.k"), named(4000, "m")
        assert named(m, "another") is m
        cases = {
            m * k * 2: "shared.m * shared.k * 2",
            (m + k) * 2: "(shared.m + shared.k) * 2",
            3 * math.prod((m, k)): "3 * shared.m * shared.k",
            sum((m, k)): "shared.m + shared.k",
            -(-extent // m): "⌈m / shared.m⌉",
            (extent - (k - 1)) % m: "(m - (shared.k - 1)) % shared.m",
            m // (k * 2): "shared.m / (shared.k * 2)",
            m << 1: "shared.m << 1",
            2 + -m: "2 + (-shared.m)",
        }
    assert [formula(value) for value in cases] == list(cases.values())
    assert list(cases) == [16384, 384, 24576, 192, 32, 97, 1, 256, -126]
    assert {128: "m", 64: "k"}[m] == "m"


def test_operands_that_change_nothing_are_not_in_formulas() -> None:
    with marking():
        m = named(128, "shared.m")
        assert [formula(value) for value in (m + 0, 0 + m, m * 1, 1 * m, m // 1, m - 0)] == ["shared.m"] * 6
        assert [type(value) for value in (m * 0, 0 * m, m / 2, m + 0.5)] == [int, int, float, float]


def test_a_long_formula_is_only_its_names() -> None:
    with marking() as marks:
        long = named(2, "a" * 60) + named(3, "b" * 60)
        assert isinstance(long, Derived)
        assert long.formula == ""
        (number,) = read_marks(shown(long * 2), marks).numbers
    assert number.formula == ""
    assert number.sources == ("a" * 60, "b" * 60)
    assert len("a" * 60 + " + " + "b" * 60) > MAX_FORMULA


def test_marks_are_read_and_leave_the_text_as_it_was() -> None:
    with marking() as marks:
        size, one = named(128, "shared.m"), named(1, "stages")
        body = [
            *begin_part("main loop"),
            f"for (k = 0; k < {shown(size)}; k += {shown(one)})",
            f"  a[{shown(size * 2)}] = {size};",
            *end_part(),
        ]
        lines = [*begin_part("consumer"), f"int a[{shown(size)}];", *body, *begin_part("empty"), *end_part(), *end_part(), "}"]
    found = read_marks("\n".join(lines), marks)
    assert found.text == "int a[128];\nfor (k = 0; k < 128; k += 1)\n  a[256] = 128;\n}"
    assert found.parts == (TextPart("consumer", 1, 3), TextPart("main loop", 2, 3))
    assert found.numbers == (
        Number(1, 6, 3, "shared.m", ("shared.m",)),
        Number(2, 16, 3, "shared.m", ("shared.m",)),
        Number(3, 4, 3, "shared.m * 2", ("shared.m",)),
    )


@pytest.mark.parametrize("value", [0, 1])
def test_small_numbers_have_no_marks(value: int) -> None:
    with marking():
        assert shown(named(value, "stages")) == str(value)
