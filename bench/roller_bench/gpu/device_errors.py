"""Turn device errors into DeviceFault, which ends the worker process: most errors make a CUDA context unusable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from roller_svc.errors import LaunchError

OUT_OF_MEMORY = "out-of-memory"


class DeviceFault(Exception):
    """A device error. Not a RollerError: the worker pool (farm/workers.py) reports it and restarts the process."""


@contextmanager
def fatal_device_errors() -> Iterator[None]:
    """Raise DeviceFault for launch errors; out of memory passes through, for it leaves the context usable."""
    try:
        yield
    except LaunchError as failure:
        if failure.code == OUT_OF_MEMORY:
            raise
        raise DeviceFault(f"{failure.code}: {failure.message}") from failure
