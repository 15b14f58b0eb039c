"""Parsing: statements, operators, precedence, and errors with their positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roller_svc.errors import ExprSyntaxError, InputError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType, dtype_named
from roller_svc.ir.expr import Cast, Const, Load, Op, Select
from roller_svc.ir.program import Combine, StatementKind, TensorProgram, TensorType

F32, F16, I32, I8 = DType.FLOAT32, DType.FLOAT16, DType.INT32, DType.INT8
INPUTS = {
    "A": TensorType(F32, (4, 5)),
    "B": TensorType(F32, (5, 6)),
    "x": TensorType(F32, (4,)),
    "h": TensorType(F16, (4,)),
    "i": TensorType(I32, (4,)),
    "b": TensorType(I8, (4,)),
    "s": TensorType(F32, ()),
    "one": TensorType(F32, (1,)),
}


def program(text: str) -> TensorProgram:
    return parse(text, INPUTS)


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse(text, INPUTS)
    return caught.value


def test_a_matmul() -> None:
    found = program("C[m, n] +=! A[m, k] * B[k, n];   # matmul")
    (statement,) = found.statements
    assert statement.kind is StatementKind.REDUCE
    assert statement.combine is Combine.SUM
    assert [(a.name, a.extent, a.kind.value) for a in statement.axes] == [
        ("m", 4, "spatial"),
        ("n", 6, "spatial"),
        ("k", 5, "reduce"),
    ]
    assert statement.type == TensorType(F32, (4, 6))
    assert [o.name for o in found.outputs] == ["C"]


@pytest.mark.parametrize(
    "text",
    [
        "t[n] = x[n]; y[n] = t[n]",
        "t[n] = x[n];\n\ny[n] = t[n];",
        "t[n] = x[n]\ny[n] = t[n]",
        "t[n] = x[n] # one; not two\n  y[n] = t[n] # end",
        "t[n]\n= x[n]\n+ 0.0\ny[n] = t[n] *\nt[n]",
        "t[n] = x[n] where n in 4\ny[n]: float32 = t[n]",
        ";; t[n] = x[n];; y[n] = t[n];;",
    ],
)
def test_statements_end_at_semicolons_and_before_an_assignment_on_a_new_line(text: str) -> None:
    assert [s.name for s in program(text).statements] == ["t", "y"]


def test_a_line_break_inside_a_value_ends_nothing() -> None:
    assert len(program("y[n] = x[n]\n * x[n]\n + (x[n]\n + i[n])").statements) == 1


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("1 + 2 * 3", "1 + (2 * 3)"),
        ("6 - 2 - 1", "(6 - 2) - 1"),
        ("2 ** 3 ** 2", "2 ** (3 ** 2)"),
        ("-n ** 2", "-(n ** 2)"),
        ("n << 1 + 1", "n << (1 + 1)"),
        ("n & n | n", "(n & n) | n"),
        ("n | n == n", "(n | n) == n"),
        ("n & n + 1", "n & (n + 1)"),
        ("7 / 2 * 2", "(7 / 2) * 2"),
        ("~n + 1", "(~n) + 1"),
        ("+n", "n"),
        ("-n.cast(`float32`)", "-(n.cast(`float32`))"),
        ("n.call(`max`, 2)", "max(n, 2)"),
        ("n.call(strs.max, [2])", "max(n, 2)"),
        ("float16(n)", "n.to('float16')"),
        ('n.cast("half")', "n.cast(float16)"),
        ("where(n > 1, n, 0)", "n.when([n > 1], 0)"),
        ("n.when(n > 1, 0)", "n.when([n > 1], 0)"),
        ("n.when([n > 1, n < 3], 0, merge_op=`any`)", "n.when([(n > 1) | (n < 3)], 0)"),
        ("extent(n)", "n.val()"),
        ("x.val(0)", "x.size(0)"),
        ("1_000", "1000"),
        ("1e2", "100."),
        (".5", "0.5"),
    ],
)
def test_these_are_two_ways_to_write_one_thing(text: str, same: str) -> None:
    left, right = program(f"y[n] = {text} where n in 4"), program(f"y[n] = {same} where n in 4")
    assert left.statements[0].body == right.statements[0].body


@pytest.mark.parametrize(("sign", "combine"), [("+=!", "+"), ("+=", "+"), ("*=!", "*"), (">=!", ">"), ("|=!", "|")])
def test_reductions(sign: str, combine: str) -> None:
    (statement,) = program(f"y[] {sign} x[n]").statements
    assert (statement.kind, statement.combine, statement.type.shape) == (StatementKind.REDUCE, Combine(combine), ())


def test_a_point_after_an_equals_sign_may_start_a_number() -> None:
    body = program("y[n] =.5 + x[n]").statements[0].body
    assert isinstance(body, Op)
    assert body.args[0] == Const(0.5, F32)


def test_scalars_and_tensors_of_one_element() -> None:
    body = program("y[] = s[] + s[0] + one[]").statements[0].body
    assert isinstance(body, Op)
    assert body.args[1] == Load("one", (Const(0, I32),), F32, (False,))
    assert program("y[n, 0] = x[n]").statements[0].type.shape == (4, 1)


def test_a_when_is_a_select_and_a_cast_is_explicit() -> None:
    body = program("y[n] = x[n].when([n > 1], 0).cast(`float16`)").statements[0].body
    assert isinstance(body, Cast)
    assert not body.implicit
    assert isinstance(body.arg, Select)
    assert body.arg.otherwise == Const(0.0, F32)


def test_long_chains_are_rejected_without_recursion() -> None:
    for text in ("+".join(["x[n]"] * 9000), "-" * 5000 + "x[n]", "x[n]" + ".call(`exp`)" * 4000, "2**" * 9000 + "2"):
        assert refused(f"y[n] = {text}").code == "too-deep"


def test_64_brackets_are_fine_and_65_are_not() -> None:
    program(f"y[n] = {'(' * 63}x[n]{')' * 63}")
    assert refused(f"y[n] = {'(' * 65}x[n]{')' * 65}").code == "too-deep"
    assert refused(f"y[n] = {'(' * 30000}x[n]{')' * 30000}").code == "too-deep"


def test_limits_of_text_and_statements() -> None:
    assert refused("y[n] = x[n] #" + "é" * 40_000).code == "text-too-long"
    assert len(program(";".join(f"y{i}[n] = x[n]" for i in range(64))).statements) == 64
    assert refused(";".join(f"y{i}[n] = x[n]" for i in range(65))).code == "too-many-statements"
    assert refused(f"{'y' * 500}[n] = x[n]").code == "name-too-long"


def test_comments_may_hold_anything() -> None:
    program("y[n] = x[n] # naïve “quotes” \x07 ; z[")


@pytest.mark.parametrize(
    ("text", "code", "line", "column", "end_column"),
    [
        ("", "empty-program", 1, 1, 2),
        ("  ;\n # nothing\n", "empty-program", 1, 1, 2),
        ("y[n] = x[n", "unbalanced-bracket", 1, 9, 10),
        ("y[n] = x[n])", "unbalanced-bracket", 1, 12, 13),
        ("y[n] = (x[n]]", "unbalanced-bracket", 1, 13, 14),
        ("y[n] = x[n] +", "syntax-error", 1, 13, 14),
        ("y[n] x[n]", "unknown-reduction", 1, 6, 7),
        ("y[n] argmax(0, n)=! A[n, k]", "unknown-reduction", 1, 6, 12),
        ("y[n] -= x[n]", "unknown-reduction", 1, 6, 8),
        ("y[n] = 0 <= n < 3", "chained-comparison", 1, 15, 16),
        ("y[n] = x[n] ^ 1", "xor-operator", 1, 13, 14),
        ("y[n] =\n  x[n] +\n  01", "bad-number", 3, 3, 5),
        ("y[n] = 0x1F", "bad-number", 1, 8, 12),
        ("y[n] = 1e999", "literal-out-of-range", 1, 8, 13),
        ("y[n] = x[é]", "bad-character", 1, 10, 11),
        ("y[n] = x[n] \x00", "bad-character", 1, 13, 14),
        ("y[n] = x[n] @ x[n]", "bad-character", 1, 13, 14),
        ("y[n] = x[n].call(`exp)", "unterminated-string", 1, 18, 19),
        ("y[n] = x.shape", "unknown-attribute", 1, 10, 15),
        ("y[n] = x[n].wen([n > 1], 0)", "unknown-method", 1, 13, 16),
        ("y[n] = exq(x[n])", "unknown-function", 1, 8, 11),
        ("y[n] = x[n].call(`frobnicate`)", "unknown-function", 1, 18, 30),
        ("y[n] = exp(x[n], 1)", "wrong-arguments", 1, 8, 11),
        ("y[n] = exp(x[n], foo=1)", "wrong-arguments", 1, 22, 23),
        ("y[n] = x[n].cast(`float33`)", "unknown-type", 1, 18, 27),
        ("y[n]: float33 = x[n]", "unknown-type", 1, 7, 14),
        ("y = x[n]", "syntax-error", 1, 3, 4),
        ('y[n] = f"{x}"', "syntax-error", 1, 9, 14),
        ("y[n] = lambda: x[n]", "syntax-error", 1, 14, 15),
        ("y[n] = x[n] if n else 0", "syntax-error", 1, 13, 15),
        ("import os; y[n] = x[n]", "syntax-error", 1, 8, 10),
        ("y[n] = x[n] where n 4", "syntax-error", 1, 21, 22),
        ("y[n] = x[n] = x[n]", "syntax-error", 1, 13, 14),
    ],
)
def test_errors_have_their_position(text: str, code: str, line: int, column: int, end_column: int) -> None:
    error = refused(text)
    assert isinstance(error, ExprSyntaxError)
    assert (error.code, error.line, error.column, error.end_column) == (code, line, column, end_column)


def test_hints_offer_the_nearest_name() -> None:
    assert "`exp`" in (refused("y[n] = exq(x[n])").hint or "")
    assert "`when`" in (refused("y[n] = x[n].wen([n > 1], 0)").hint or "")
    assert "`float32`" in (refused("y[n] = x[n].cast(`float33`)").hint or "")
    assert "a & b" in (refused("y[n] = x[n] and x[n]").hint or "")


def test_render_draws_a_caret_under_the_place() -> None:
    text = "t[n] = x[n]\ny[n] = t[n] + qq[n]"
    error = refused(text)
    shown = error.render(text).splitlines()
    assert shown[0].startswith("line 2, column 15: unknown-name:")
    assert shown[1] == "2 | y[n] = t[n] + qq[n]"
    assert shown[2].index("^") == shown[1].index("qq")
    assert shown[2].count("^") == 2


def test_render_cuts_long_lines_and_takes_errors_without_a_place() -> None:
    text = "y[n] = " + "1.0 + " * 60 + "qq[n]"
    shown = refused(text).render(text).splitlines()
    assert len(shown[1]) < 200
    assert shown[1][shown[2].index("^") :].startswith("qq")
    assert InputError("no text", code="invalid-argument").render("") == "invalid-argument: no text"


NEGATIVES = json.loads((Path(__file__).parents[2] / "data" / "negatives.json").read_text())["cases"]


@pytest.mark.parametrize("case", NEGATIVES, ids=lambda case: case["id"])
def test_negatives(case: dict[str, Any]) -> None:
    inputs = {name: TensorType(dtype_named(t["dtype"]), tuple(t["shape"])) for name, t in case["inputs"].items()}
    if case["refused_at"] == "call":
        assert parse(str(case["expr"]), inputs).has_runtime_checks
        return
    with pytest.raises(InputError) as caught:
        parse(str(case["expr"]), inputs)
    assert caught.value.line == 1
    assert caught.value.column is not None
    assert caught.value.code != "invalid-input"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("y[i] = sum(x[i, j])", "reduction: `y[i] +=!"),
        ("y[i] = swish(x[i, 0])", "`silu`"),
        ("y[i] max=! x[i, j]", ">=! (maximum)"),
    ],
)
def test_names_of_other_languages_have_hints(text: str, hint: str) -> None:
    with pytest.raises(ExprSyntaxError) as refusal:
        parse(text, {"x": TensorType(DType.FLOAT32, (4, 8))})
    assert hint in (refusal.value.hint or "")
