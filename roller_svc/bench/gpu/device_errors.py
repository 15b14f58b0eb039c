"""A device's refusal → the end of the process it happened in: after many of them a context answers nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from roller_svc.errors import LaunchError

OUT_OF_MEMORY = "out-of-memory"


class DeviceFault(Exception):
    """No error of ours, so that a lane (farm/workers.py) reports it and gives the next task a fresh process."""


@contextmanager
def fatal_device_errors() -> Iterator[None]:
    """Where the device has no room a context is as good as before."""
    try:
        yield
    except LaunchError as failure:
        if failure.code == OUT_OF_MEMORY:
            raise
        raise DeviceFault(f"{failure.code}: {failure.message}") from failure
