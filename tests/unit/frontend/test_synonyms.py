"""Hints for names and signs of other languages, and errors that show their place."""

from __future__ import annotations

import pickle
import re

import pytest

import roller_svc
from roller_svc.errors import InputError
from roller_svc.frontend.lang import names
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.frontend.lang.synonyms import SYNONYMS, explain_character, plain
from roller_svc.frontend.ops import OPS
from roller_svc.frontend.parse import parse

PARAMETERS = {parameter.name for operator in OPS.values() for parameter in operator.parameters}
KNOWN = {*names.FUNCTIONS, *names.FORMS, *names.METHODS, *names.TYPE_NAMES, *OPS, *PARAMETERS}
TYPES = dict(tensor_types({"x": ("float32", (4, 6)), "A": ("float32", (4, 6)), "B": ("float32", (6, 5))}))


def refusal(expression: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse(expression, TYPES)
    return caught.value


def test_every_synonym_has_a_right_form_that_exists() -> None:
    assert len(SYNONYMS) >= 40
    for word, meant in SYNONYMS.items():
        assert word == plain(word)
        assert meant
        assert [each for each in meant if " " not in each and each not in KNOWN] == []


@pytest.mark.parametrize("word", [word for word, meant in SYNONYMS.items() if any("; y[i]" in each for each in meant)])
def test_programs_in_hints_are_programs(word: str) -> None:
    (program,) = re.findall(r"`([^`]*; y\[i\][^`]*)`", SYNONYMS[word][-1])
    parse(program, TYPES)


@pytest.mark.parametrize(
    ("expression", "hint"),
    [
        ("y[i] = swish(x[i, 0])", "did you mean `silu`?"),
        ("y[i] = mean(x[i, j])", "reduce_mean"),
        ("y[i] = max(x[i, j])", "`y[i] >=! x[i, j]`"),
        ("y[i] = gelu_tanh(x[i, 0])", 'gelu(X, approximate="tanh")'),
        ("y[i] = softmax(x[i, 0])", "an operator is a statement of its own: `Y = softmax(X)`"),
        ("Y = LayerNorm(x)", "did you mean `layer_norm`?"),
        ("Y = MaxPool(x)", "did you mean `max_pool2d`?"),
        ("Y = softmax(x, dim=1)", "did you mean `axis`?"),
        ("Y = softmax(matmul(A, B))", "`T = matmul(...); Y = softmax(T)`"),
        ("Y[m, n] = softmax(A)[m, n]", "name the result of a call"),
        ("C = A @ B", "matmul(A, B)"),
        ("C[:, :] = A[:, :]", "name an axis for each dimension"),
        ("C[m] = A[...]", "name an axis for each dimension"),
        ("y[i] = x[i, 0] ^ 2", "`x ** 2`"),
        ("y[i] = x[i, 0] && x[i, 1]", "write `a & b`"),
        ("y[i] = x[i, 0] \N{MIDDLE DOT} x[i, 1]", "write `*`"),
        ("y[i] = \N{GREEK SMALL LETTER ALPHA} * x[i, 0]", "`alpha`"),
        ("y[i] = x[i, 0]\N{SUPERSCRIPT THREE}", "write `3`"),
        ("y[i, j] = A.T[i, j]", "other order"),
        ("mk,kn->mn", 'einsum("mk,kn->mn")'),
        ("y[i] = T[i]", 'inputs={"T":'),
        ("y[i] = x[i]", "`x[i, j]`"),
        ("y[i: half] = x[i, 0]", "name an axis"),
        ("y[i]: fp8 = x[i, 0]", "float8_e4m3fn"),
    ],
)
def test_a_mistake_is_answered_with_the_right_form(expression: str, hint: str) -> None:
    assert hint in (refusal(expression).hint or "")


@pytest.mark.parametrize(("dtype", "hint"), [("int4", "shifts"), ("tf32", "allow_tf32=True"), ("e5m2", "`float8_e5m2`")])
def test_types_of_other_libraries(dtype: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        tensor_types({"x": (dtype, (4,))})
    assert hint in (caught.value.hint or "")


def test_a_character_without_a_meaning_has_no_hint() -> None:
    assert explain_character("$") is None


def test_an_error_shows_line_caret_and_hint() -> None:
    with pytest.raises(InputError) as caught:
        roller_svc.compile("z[i] = x[i, 0]\ny[i] = swish(z[i])", {"x": ("float32", (4, 6))})
    shown = "`swish` is not a function\n2 | y[i] = swish(z[i])\n  |        ^^^^^\nhint: did you mean `silu`?"
    assert str(caught.value) == shown
    assert caught.value.message == "`swish` is not a function"
    assert str(pickle.loads(pickle.dumps(caught.value))) == shown
    assert str(InputError("no place", hint="none")) == "no place\nhint: none"
    error = refusal("S = softmax(x)\ny[i] = S[i, k]")  # a place after an expanded call
    assert str(error).splitlines()[1] == "2 | y[i] = S[i, k]"
