"""The output of estimates, explanations and targets fits the terminal, and notes go to stderr."""

from __future__ import annotations

import pytest

from roller_svc.cli import format as show
from roller_svc.cli import main

HALF = ("C[m, n]: float32 +=! A[m, k] * B[k, n]", "--input", "A=float16[512,256]", "--input", "B=float16[256,512]")
WIDE = ("y[b, c, d, e] = x[b, c, d, e] * 2.0", "--input", "x=float32[16,128,56,56]", "--input", "unread_input=float32[3]")
H200 = ("--target", "nvidia-h200-sxm")


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize(
    "words",
    [
        ("estimate", *HALF, *H200, "--target", "amd-mi250x", "--top-k", "3", "--sensitivity"),
        ("estimate", *WIDE, *H200, "--target", "nvidia-a100-sxm-80gb", "--target", "cpu-x86-avx512"),
        ("explain", *HALF, "--target", "nvidia-a100-sxm-80gb", "--steps", "8"),
        ("explain", *WIDE, "--target", "cpu-x86-avx2"),
        ("targets",),
    ],
    ids=lambda words: " ".join(words[:2])[:30],
)
def test_every_line_fits(
    words: tuple[str, ...], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(words) == 0
    shown = capsys.readouterr()
    lines = [*shown.out.splitlines(), *shown.err.splitlines()]
    assert [line for line in lines if len(line) > columns and " " in line.strip()] == []
    assert len(lines) > 5


def test_a_narrow_last_column_is_below_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [("a" * 20, "some words that do not fit in a line of forty"), ("b", "")]
    assert show.format_table(("name", "text"), rows).splitlines() == [
        "name",
        "    text",
        "a" * 20,
        "    some words that do not fit in a line",
        "    of forty",
        "b",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    assert show.format_table(("name", "text"), rows).splitlines()[1:3] == [
        "a" * 20 + "  some words that do not fit in a line",
        " " * 22 + "of forty",
    ]
    monkeypatch.setenv("COLUMNS", "80")
    assert len(show.format_table(("name", "text"), rows).splitlines()) == 3


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
def test_a_terminal_of_few_columns_shows_a_word_in_each_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert show.format_table(("name", "text"), [("a", "two words")]).splitlines()[2:] == ["a", "    two", "    words"]
    assert show.wrap("two words").split() == ["two", "words"]


def test_estimates_show_rate_floor_kernels_and_notes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["estimate", *HALF, *H200]) == 0
    header, tiles, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["target", "estimated", "rate", "floor", "kernels", "bound"]
    assert tiles.strip() == "unit and tiles"
    assert "TFLOP/s" in row or "GB/s" in row
    assert main(["estimate", *WIDE, *H200]) == 0
    shown = capsys.readouterr()
    assert "GB/s" in shown.out
    assert shown.err == "note: nvidia-h200-sxm: input unread_input is not read\n"
    assert main(["estimate", *WIDE, *H200, "--strict"]) == 2
    assert "has-notes: input unread_input is not read" in capsys.readouterr().err


def test_compile_prints_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", *WIDE, "--target", "cpu-x86-avx2", "--select", "model"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "note" not in shown.out
    assert shown.err == "note: input unread_input is not read\n"
    assert main([*words, "--strict"]) == 2
