"""The folder for temporary files of a service's workers: removed with the service, or when the next one starts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path

PREFIX = "roller-service-"


def name_scratch(record: Path) -> Path:
    """The path of a folder that the first worker makes; the file `record` names it from now on.

    The folder that it named before is removed.

    The caller holds the lock of the store that the record lies in: the former service has ended.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        former = Path(record.read_text(encoding="utf-8"))
        if former.name.startswith(PREFIX) and former.lstat().st_uid == os.geteuid():
            shutil.rmtree(former, ignore_errors=True)  # follows no link
    folder = Path(tempfile.gettempdir(), PREFIX + secrets.token_hex(16))
    record.write_text(str(folder), encoding="utf-8")
    return folder
