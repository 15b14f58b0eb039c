"""The folder of built kernels: what cannot be read is built again, what cannot be written is not kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import roller_svc
from roller_svc.compiler.kernel_cache import KernelCache, PlanChoice
from roller_svc.runtime.saved.serialization import write_folder
from roller_svc.settings import read_settings, use


@pytest.mark.parametrize("damage", [b"", b"truncated", b"0" * 64 + b"\nother"])
def test_a_damaged_object_counts_as_missing(tmp_path: Path, damage: bytes) -> None:
    cache = KernelCache(tmp_path)
    cache.save_object("key", b"content\nof two lines")
    assert cache.load_object("key") == b"content\nof two lines"
    (path,) = (tmp_path / "objects").iterdir()
    path.write_bytes(damage)
    assert cache.load_object("key") is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = KernelCache(tmp_path / "file" / "cache")
    cache.save_object("key", b"content")
    cache.save_choice("key", PlanChoice("serial"))
    assert cache.load_object("key") is None
    assert cache.load_choice("key") is None
    use(read_settings(cache=cache.folder, cache_kernels=True))
    try:
        kernel = roller_svc.compile("y[i] = x[i] - 7", x=np.ones(3, np.float32), select="model", top_k=1)
        assert kernel(x=np.ones(3, np.float32))["y"].tolist() == [-6, -6, -6]
    finally:
        use(read_settings())


def test_two_processes_may_write_one_folder_at_once(tmp_path: Path) -> None:
    def write(staged: Path) -> None:
        (staged / "new").touch()
        (tmp_path / "kernel").mkdir()
        (tmp_path / "kernel" / "other").touch()  # by the other process, in the meantime

    write_folder(tmp_path / "kernel", write)
    assert sorted(path.name for path in (tmp_path / "kernel").iterdir()) == ["new", "other"]
