"""roller ops."""

from __future__ import annotations

import json

import pytest

from roller_svc.cli.command import main
from roller_svc.frontend.ops import OPS, expression


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["ops", *words]) == 0
    return capsys.readouterr().out


def test_all_operators_are_listed_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ran(capsys).splitlines()
    assert [line.split()[0] for line in lines[: len(OPS)]] == list(OPS)
    assert max(map(len, lines)) <= 80
    assert [each["name"] for each in json.loads(ran(capsys, "--json"))["operators"]] == list(OPS)


@pytest.mark.parametrize("name", OPS)
def test_an_operator_is_explained_in_80_columns(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = ran(capsys, name)
    assert text.startswith(f"{name}(")
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n  {parameter.name} (" in text for parameter in OPS[name].parameters)


def test_an_example_is_a_call_and_its_statements(capsys: pytest.CaptureFixture[str]) -> None:
    text = ran(capsys, "grouped_matmul")
    assert "# ids: int32[6]\n  Y = grouped_matmul(X, W, ids)" in text
    assert "Y[m, n] +=! X[m, k] * W[ids[m], k, n]" in text
    example = json.loads(ran(capsys, "grouped_matmul", "--json"))["example"]
    types = {name: (kind["dtype"], kind["shape"]) for name, kind in example["inputs"].items()}
    assert expression("grouped_matmul", types, output="Y") == example["statements"]


def test_a_word_finds_operators_by_their_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in ran(capsys, "MoE").splitlines()[:1]] == ["grouped_matmul"]
    assert "paged_attention" in ran(capsys, "cache")


def test_an_unknown_word_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops", "cov2d"]) == 2
    assert "did you mean `conv2d`?" in capsys.readouterr().err
