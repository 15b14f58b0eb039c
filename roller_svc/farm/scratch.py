"""Temporary directory of a process's workers: removed when the process ends, or by the next one if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "roller-farm-"
_OWNER = "owner"  # a file that the owner keeps locked while it lives


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create a directory for this process, and remove those of processes that ended without doing so."""
    base = Path(tempfile.gettempdir())
    _remove_orphans(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    handle = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _remove_orphans(base: Path) -> None:
    for folder in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or removed meanwhile
            if folder.lstat().st_uid == os.geteuid() and not _has_owner(folder):
                shutil.rmtree(folder, ignore_errors=True)  # follows no link


def _has_owner(folder: Path) -> bool:
    """Whether a living process owns the directory. One without the file is just being made."""
    try:
        handle = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
