"""Temporary directory of a service's workers: removed when the service ends or the next one starts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

PREFIX = "roller-service-"


def name_scratch(record: Path) -> Path:
    """Choose a new temporary directory, write its path to the file `record`, and return it.

    The first worker creates the directory. The previously recorded directory is removed: the caller holds the lock of
    the store, so the previous service has ended.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        former = Path(record.read_text(encoding="utf-8"))
        if former.name.startswith(PREFIX) and former.lstat().st_uid == os.geteuid():
            shutil.rmtree(former, ignore_errors=True)  # follows no link
    folder = Path(tempfile.gettempdir(), PREFIX + secrets.token_hex(16))
    record.write_text(str(folder), encoding="utf-8")
    return folder
