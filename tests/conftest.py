"""What all tests share: those that need a device or a compiler that is not here are skipped, and so not counted.

No test measures this machine by accident, neither here nor in a child process: `local` has assumed rates.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from roller_svc.runtime.cuda.module import device_present

RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # Debian's

os.environ["ROLLER_CALIBRATE"] = "0"
os.environ.pop("ROLLER_LOCAL_SPEC", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if device_present() else "there is no NVIDIA device here",
        "farm": None if RABBITMQ.exists() else "there is no rabbitmq-server here (apt install rabbitmq-server)",
        "emulator": None if shutil.which("g++") else "there is no g++ here (apt install g++)",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
