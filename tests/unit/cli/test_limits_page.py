"""docs/limits.md: the programs that still lose do, and the compiler says of each what the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from roller_svc.cli import main

PAGE = Path(__file__).resolve().parents[3] / "docs" / "limits.md"
SECTION = PAGE.read_text(encoding="utf-8").split("\n## Ten things that still lose\n")[1].split("\n## ")[0]
LOSSES = re.findall(r"^### (.+?)\n.+?^```\n(.+?)\n```\n\n```\n(.+?)\n```$", SECTION, re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?=[ %;]|$)")
TOLERANCE = 0.1
MIN_RATIO = 3.0


def test_there_are_ten() -> None:
    assert len(LOSSES) == SECTION.count("\n### ") == 10


@pytest.mark.parametrize(("title", "command", "note"), LOSSES, ids=[title for title, *_ in LOSSES])
def test_a_program_that_loses_has_the_note_of_the_page(
    title: str, command: str, note: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "roller"
    assert main(words[1:]) == 0
    said = capsys.readouterr().err.strip()
    assert NUMBER.sub("N", said) == NUMBER.sub("N", note)
    assert list(map(float, NUMBER.findall(said))) == pytest.approx(list(map(float, NUMBER.findall(note))), rel=TOLERANCE)
    ratio = re.search(r"([\d.]+) times the program's floor", said)
    assert ratio is not None
    assert float(ratio[1]) > MIN_RATIO
    assert len(said.removeprefix("note: ").split(": ", 1)[1]) <= 160


def test_numbers_are_compared_and_names_are_not() -> None:
    assert NUMBER.findall("y: 40.6 times `l2` of kernel0 takes 89% of fma_f32; 3.1 times") == ["40.6", "89", "3.1"]
