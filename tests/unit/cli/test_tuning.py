"""roller tuning: the index of trials on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roller_svc.cli.command import main
from roller_svc.graph.wiring.index import FILE
from roller_svc.settings import read_settings, use
from roller_svc.tuning import Origin, ProfileIndex, Variable

KERNEL = Variable("k", "kernel", ("a", "b"))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Path]:
    use(read_settings(cache=tmp_path))
    yield tmp_path / FILE
    use(read_settings())


def record(file: Path, device: str, **seconds: float) -> None:
    profiles = ProfileIndex(file, Origin(device, "gcc", "g", "m"))
    for choice, value in seconds.items():
        profiles.record(KERNEL, KERNEL.choices.index(choice), {"buffers": "apart"}, value)
    profiles.close()


def look_up(file: Path, device: str, choice: int) -> float | None:
    profiles = ProfileIndex(file, Origin(device, "gcc", "g", "m"))
    value = profiles.look_up(KERNEL, choice, {"buffers": "apart"})
    profiles.close()
    return value


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["tuning", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_an_index_moves_to_another_machine(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "list") == "no profiles\n"
    assert not index.exists()
    record(index, "one", a=2.0, b=1.0)
    record(index, "two", a=3.0)
    assert [line.split() for line in run(capsys, "list").splitlines()[-2:]] == [["one", "gcc", "1", "2"], ["two", "gcc", "1", "1"]]
    file = tmp_path / "profiles.json"
    run(capsys, "export", str(file))
    assert json.loads(run(capsys, "export", "-")) == json.loads(file.read_text())
    assert json.loads(run(capsys, "clear", "--device", "two", "--json")) == {"removed": 1}
    assert run(capsys, "clear") == "2 profiles removed\n"
    record(index, "one", a=1.5, b=4.0)
    assert run(capsys, "import", str(file)) == "3 profiles imported\n"
    assert (look_up(index, "one", 0), look_up(index, "one", 1), look_up(index, "two", 0)) == (1.5, 1.0, 3.0)
    assert json.loads(run(capsys, "list", "--json"))["file"] == str(index)


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.update(format="roller-profiles/0"),
        lambda document: document.update(profiles={}),
        lambda document: document["profiles"][0].update(least_s=0.0),
        lambda document: document["profiles"][0].update(least_s=True),
        lambda document: document["profiles"][0].update(samples=1.5),
        lambda document: document["profiles"][0].update(device=None),
        lambda document: document["profiles"][0].pop("bucket"),
        lambda document: document["profiles"].append(0),
    ],
)
def test_other_documents_are_refused_and_change_nothing(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Any
) -> None:
    record(index, "one", a=2.0)
    document = json.loads(run(capsys, "export", "-"))
    edit(document)
    file = tmp_path / "profiles.json"
    file.write_text(json.dumps(document))
    run(capsys, "clear")
    assert "invalid-option" in run(capsys, "import", str(file), code=2)
    assert run(capsys, "list") == "no profiles\n"


def test_files_that_cannot_be_read_or_written_are_named(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing" / "file")
    assert missing in run(capsys, "import", missing, code=2)
    assert missing in run(capsys, "export", missing, code=2)
    index.write_text("no database")
    assert str(index) in run(capsys, "list", code=2)
