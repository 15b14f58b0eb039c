"""Width and colours: of a terminal, and of files and pipes."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
from waiting import PATIENCE_S

from roller_svc.cli import format as show
from roller_svc.cli import main
from roller_svc.terminal import DEFAULT, UNLIMITED, color_labels, has_colors, width_of

VARIABLES = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal() -> Iterator[io.TextIOWrapper]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as stream:
        yield stream
    os.close(ours)


def test_the_width_is_that_of_the_terminal(terminal: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    assert width_of(terminal) == DEFAULT  # it does not say
    termios.tcsetwinsize(terminal.fileno(), (24, 132))
    assert width_of(terminal) == 132
    monkeypatch.setenv("COLUMNS", "100")
    assert width_of(terminal) == width_of(io.StringIO()) == 100


@pytest.mark.parametrize("columns", ["", "0", "-5", "wide", "²"])
def test_a_file_has_no_width_unless_columns_has_one(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert width_of(io.StringIO()) == UNLIMITED


@pytest.mark.parametrize(
    ("environment", "on_terminal", "in_file"),
    [
        ({}, True, False),
        ({"TERM": "xterm"}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"NO_COLOR": "0"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
    ],
)
def test_colors_follow_terminal_and_environment(
    environment: dict[str, str],
    on_terminal: bool,
    in_file: bool,
    terminal: io.TextIOWrapper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert has_colors(terminal) is on_terminal
    assert has_colors(io.StringIO()) is in_file


def test_the_words_that_begin_lines_are_colored(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "error: a: b\n1 | note: c\nhint: d: error: e"
    assert color_labels(text, io.StringIO()) == text
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert color_labels(text, io.StringIO()) == ("\x1b[1;31merror\x1b[0m: a: b\n1 | note: c\n\x1b[1;32mhint\x1b[0m: d: error: e")


def test_errors_and_notes_are_colored_and_results_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["estimate", "y[i] = x[i]", "--input", "x=float32[64]", "--input", "z=float32[3]", "--target", "h200"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("\x1b[1;36mnote\x1b[0m: ")
    assert "\x1b" not in shown.out
    assert main(["estimate", "y[i] = x[j]", "--input", "x=float32[64]", "--target", "h200"]) == 2
    assert capsys.readouterr().err.startswith("\x1b[1;31merror\x1b[0m: ")


@pytest.mark.parametrize(
    ("words", "closed", "expected"),
    [
        ("targets", ">&-", 0),
        ("targets --json", ">&-", 0),
        ("estimate 'y[i] = x[j]' --input 'x=float32[4]' --target h200", "2>&-", 2),
        ("estimate 'y[i] = x[j]' --input 'x=float32[4]' --target h200 --json", ">&- 2>&-", 2),
        ("estimate - --input 'x=float32[4]' --target h200", "<&-", 2),
        ("estimate 'y[i] = x[i]' --input 'x=float32[4]' --target nowhere", ">&- 2>&-", 2),
    ],
)
def test_closed_streams_change_no_exit_code(words: str, closed: str, expected: int) -> None:
    command = f"{sys.executable} -m roller_svc {words} {closed}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, "Traceback" in ended.stderr) == (expected, False)
    if "2>&-" in closed:
        assert ended.stdout + ended.stderr == ""  # messages go nowhere else


def test_a_closed_stream_has_no_width_and_no_colors() -> None:
    assert (width_of(None), has_colors(None), color_labels("error: a", None)) == (UNLIMITED, False, "error: a")


def test_a_table_in_a_pipe_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    rows = [("name", "word " * 60)]
    assert len(show.format_table(("a", "b"), rows).splitlines()) == 2
    monkeypatch.setenv("COLUMNS", "80")
    assert len(show.format_table(("a", "b"), rows).splitlines()) > 2
