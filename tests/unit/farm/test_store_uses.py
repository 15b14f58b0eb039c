"""Uses are written once in a while, and what was written long ago is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from roller_svc.farm import store_uses
from roller_svc.farm.objects import FolderObjects
from roller_svc.farm.store_uses import UseLog


def test_a_use_is_written_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(FolderObjects, "note", lambda _, name: written.append(name))
    uses = UseLog(FolderObjects(tmp_path))
    for _ in range(2):
        uses.note("kernels/a")
        uses.flush()
    assert written == ["used/kernels/a"]
    assert uses.is_recent("kernels/a")


def test_a_write_is_forgotten_when_the_next_one_may_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = UseLog(FolderObjects(tmp_path))
    uses.write("kernels/a")
    uses.flush()
    assert len(uses._written_s) == 1
    monkeypatch.setattr(store_uses, "RENEW_S", 0.0)
    uses.flush()
    assert not uses._written_s


def test_the_memory_of_uses_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_uses, "MAX_NAMES", 8)
    monkeypatch.setattr(FolderObjects, "note", lambda *_: None)
    uses = UseLog(FolderObjects(tmp_path))
    for number in range(100):
        uses.write(f"kernels/{number}")
        assert len(uses._written_s) <= 8
