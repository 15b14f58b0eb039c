"""The folder of a service's temporary files."""

from __future__ import annotations

from pathlib import Path

import pytest

from roller_svc.farm.scratch import name_scratch


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_what_a_killed_service_left_goes_when_the_next_starts(tmp_path: Path) -> None:
    record = tmp_path / "scratch"
    left = name_scratch(record)
    (left / "worker-1").mkdir(parents=True)
    (left / "worker-1" / "kernel.c").write_text("text")
    found = name_scratch(record)
    assert found != left
    assert not left.exists()
    assert record.read_text() == str(found)


@pytest.mark.parametrize("content", [b"", b"\xff", b"/nowhere/roller-service-x", b"a\0b"])
def test_a_record_that_names_nothing_is_no_fault(tmp_path: Path, content: bytes) -> None:
    record = tmp_path / "scratch"
    record.write_bytes(content)
    assert name_scratch(record).parent == tmp_path
    assert record.read_text().startswith(str(tmp_path))


def test_no_other_folder_is_removed(tmp_path: Path) -> None:
    record, other = tmp_path / "scratch", tmp_path / "home"
    other.mkdir()
    link = tmp_path / "roller-service-link"
    link.symlink_to(other)
    for named in (other, link):
        record.write_text(str(named))
        name_scratch(record)
        assert other.is_dir()
