"""Let one build of this machine measure on a device at a time: measurements disturb each other."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from roller_svc.farm.routing import CPU, GPU

PREFIX = "roller-measuring-"


class DeviceLocks:
    """Locks of the devices of this machine, shared by its workers: files that a measuring worker keeps locked.

    Args:
        names: a name for each kind of device; workers that give one name to a kind share that device.
        folder: of the files; default: the system's temporary directory.
    """

    def __init__(self, names: Mapping[str, str], folder: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if folder is None else folder
        self._paths = {kind: base / f"{PREFIX}{os.geteuid()}-{name}" for kind, name in names.items()}
        self._handles: dict[str, int] = {}
        self._lock = threading.Lock()

    def acquire_free(self) -> frozenset[str]:
        """Lock all devices on which nobody measures; return their kinds."""
        return frozenset(kind for kind in self._paths if self._acquire(kind))

    def release(self, kind: str) -> None:
        """Unlock a device that this process has locked."""
        with self._lock:
            os.close(self._handles.pop(kind))

    def _acquire(self, kind: str) -> bool:
        with self._lock:
            if kind in self._handles:
                return False
            handle = os.open(self._paths[kind], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            self._handles[kind] = handle
            return True


def machine_locks() -> DeviceLocks:
    """Return the locks of this machine's CPU and of the GPUs that CUDA_VISIBLE_DEVICES shows to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = "".join(letter if letter.isalnum() else "_" for letter in visible)[:80]
    return DeviceLocks({CPU: CPU, GPU: f"{GPU}-{gpus or 'all'}"})
