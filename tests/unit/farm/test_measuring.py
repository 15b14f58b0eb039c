"""Locks of devices, within a process and between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roller_svc.farm.measuring import DeviceLocks, machine_locks

NAMES = {"cpu": "cpu", "gpu": "gpu-0"}


def test_a_device_is_locked_once(tmp_path: Path) -> None:
    here, there = DeviceLocks(NAMES, tmp_path), DeviceLocks(NAMES | {"gpu": "gpu-1"}, tmp_path)
    assert here.acquire_free() == {"cpu", "gpu"}
    assert here.acquire_free() == frozenset()
    assert there.acquire_free() == {"gpu"}  # another one
    here.release("cpu")
    assert there.acquire_free() == {"cpu"}


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from roller_svc.farm.measuring import DeviceLocks\n"
        "DeviceLocks({'cpu': 'cpu'}, Path(sys.argv[1])).acquire_free(); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    locks = DeviceLocks({"cpu": "cpu"}, tmp_path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        assert locks.acquire_free() == frozenset()
        other.kill()
    assert locks.acquire_free() == {"cpu"}


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    locks = DeviceLocks({"cpu": "cpu"}, tmp_path)
    locks.acquire_free()
    locks.release("cpu")
    path = next(tmp_path.iterdir())
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        locks.acquire_free()
    assert not (tmp_path / "elsewhere").exists()


def test_workers_with_other_visible_gpus_do_not_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    first = machine_locks()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-../1")
    second = machine_locks()
    assert first.acquire_free() == {"cpu", "gpu"}
    assert second.acquire_free() == {"gpu"}
    assert {path.parent for path in tmp_path.rglob("*")} == {tmp_path}
