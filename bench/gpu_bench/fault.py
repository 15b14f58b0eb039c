"""A device's refusal → the end of the process it happened in: after many of them a context answers nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from roller_svc.errors import LaunchError


class DeviceFault(Exception):
    """No error of ours, so that a lane (farm/lanes.py) reports it and gives the next task a fresh process."""


@contextmanager
def ending_the_process() -> Iterator[None]:
    try:
        yield
    except LaunchError as failure:
        raise DeviceFault(f"{failure.code}: {failure.message}") from failure
