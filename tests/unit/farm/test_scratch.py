"""Temporary directories: one a process, removed at its end or by the next process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roller_svc.farm.scratch import PREFIX, scratch_folder

HOLD = "from roller_svc.farm.scratch import scratch_folder as s\nwith s() as f: print(f, flush=True); input()"


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_folder_is_removed_at_the_end(tmp_path: Path) -> None:
    with scratch_folder() as folder:
        (folder / "worker-1").mkdir()
        (folder / "worker-1" / "kernel.c").write_text("text")
        with scratch_folder() as other:
            assert other != folder
            assert (folder / "worker-1").exists()  # its owner lives
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_when_the_next_starts(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    left = Path(process.stdout.readline().strip())
    with scratch_folder():
        assert left.is_dir()
    process.kill()
    process.communicate()
    with scratch_folder():
        assert not left.exists()


def test_no_other_folder_is_removed(tmp_path: Path) -> None:
    other = tmp_path / "home"
    other.mkdir()
    (other / "owner").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(other)
    (tmp_path / f"{PREFIX}young").mkdir()  # its owner has not locked it yet
    with scratch_folder():
        assert (other / "owner").exists()
        assert (tmp_path / f"{PREFIX}young").is_dir()
