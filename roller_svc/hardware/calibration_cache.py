"""Calibrated specs of the host CPU in the cache folder, by machine, cores and the code that measured them.

A stored spec never changes, so that the caches of kernels see one device.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from roller_svc.errors import SpecError
from roller_svc.hardware.detect import AVX2_BASE, AVX512_BASE, NEON_BASE
from roller_svc.hardware.shipped_files import shipped_files
from roller_svc.hardware.yaml_text import load_yaml, to_yaml
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.settings import settings
from roller_svc.version import __version__

FOLDER = "calibrations"
RETRY_AFTER_S = 3600.0  # a busy machine stays busy: measuring delays a command by seconds
LOCK_TIMEOUT_S = 30.0  # a calibration takes a few seconds
_LOCK_POLL_S = 0.1
_CACHES = ("l1", "l2", "l3")
_CORES = re.compile(r"-(\d{1,5})-cores\.yaml")


def find_calibrated(detected: HardwareSpec) -> Path | None:
    """Return the spec stored for this CPU, for its number of cores or the next larger one; None without one."""
    by_cores = {
        int(match[1]): path
        for path in _folder().glob(f"{_machine_digest(detected)}-*")
        if (match := _CORES.search(path.name)) is not None and int(match[1]) >= detected.num_cores
    }
    return by_cores[min(by_cores)] if by_cores else None


def load_calibrated(detected: HardwareSpec) -> HardwareSpec | None:
    """Return the spec stored for this CPU. One that cannot be read counts as missing."""
    path = find_calibrated(detected)
    try:
        return None if path is None else load_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, SpecError):
        return None


def calibrated_path(detected: HardwareSpec) -> Path:
    """Return the path of the spec stored for this CPU and its number of cores."""
    return _folder() / f"{_machine_digest(detected)}-{detected.num_cores}-cores.yaml"


def note_failure(detected: HardwareSpec) -> None:
    """Remember that this CPU could not be measured now."""
    with contextlib.suppress(OSError):  # a read-only folder remembers nothing
        _failure_path(detected).touch()


def has_failed_lately(detected: HardwareSpec) -> bool:
    """Return whether a measurement of this CPU has failed in the last hour."""
    try:
        return time.time() - _failure_path(detected).stat().st_mtime < RETRY_AFTER_S
    except OSError:
        return False


def _failure_path(detected: HardwareSpec) -> Path:
    return calibrated_path(detected).with_suffix(".failed")


def save_calibrated(spec: HardwareSpec) -> None:
    """Store a spec at once, so that other processes read all of it or none. Raises OSError."""
    path = calibrated_path(spec)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{FOLDER}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(to_yaml(spec))
    Path(temporary).replace(path)


@contextmanager
def lock_calibration(detected: HardwareSpec) -> Iterator[None]:
    """Let one process at a time measure this CPU. Raises OSError: the folder is read-only, or a TimeoutError."""
    path = calibrated_path(detected).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not _has_locked(file.fileno()):
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"another process has measured for {LOCK_TIMEOUT_S:g} s")
            time.sleep(_LOCK_POLL_S)
        yield  # closing the file unlocks it


def _has_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    return settings().cache_folder / FOLDER


def _machine_digest(spec: HardwareSpec) -> str:
    """Hash what identifies a CPU, and the code that measures it. Clocks and memory vary on one machine."""
    caches = [(level.name, level.capacity_bytes) for level in spec.levels if level.name in _CACHES]
    cpu = [spec.name, spec.vendor, str(spec.arch), spec.isa, spec.vector_bytes, caches]
    return hashlib.sha256(json.dumps([cpu, _code_digest()]).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """Hash the version, the sources that measure and detect a CPU, and the specs with the assumed values."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256(__version__.encode())
    for folder in (package / "calibration", package / "hardware"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(package)}\n".encode())
            digest.update(path.read_bytes())
    for base in (AVX2_BASE, AVX512_BASE, NEON_BASE):
        digest.update(shipped_files()[base].read_bytes())
    return digest.hexdigest()
