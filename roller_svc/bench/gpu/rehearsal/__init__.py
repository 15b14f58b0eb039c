"""The whole program without a device: a driver that is not there, whose clock goes by the model's estimates.

What is small is run by the emulator, so that verdicts are real. Nothing that comes of it was measured.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

FAULTS = ("slow", "memory", "fault", "gone")
_SANITIZER = """#!/bin/sh
# In place of compute-sanitizer: what it prints. Racecheck finds what the other tools do not.
case "$2" in
racecheck) echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 86 ;;
*) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""
_NVIDIA_SMI = """#!/bin/sh
# In place of nvidia-smi: as many figures as it is asked for.
case "$*" in
*clocks.sm*) echo "1980 MHz, 1980 MHz, 2619 MHz, 500.00 W, 700.00 W, 40, Enabled" ;;
*) echo rehearsed ;;
esac
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """`fault`: what befalls the device, if anything. `folder`: where its processes count what was done on it."""

    fault: str | None
    folder: Path


class RehearsedWork(Generic[T, R]):
    """Work on a device, in a process that is given one that is not there."""

    def __init__(self, work: Callable[[T], R], plan: Plan) -> None:
        self._work, self._plan = work, plan
        self.__module__, self.__name__ = work.__module__, work.__name__  # which lanes import and show

    def __call__(self, task: T) -> R:
        from roller_svc.bench.gpu.rehearsal.install import install_device  # noqa: PLC0415 - only where a device is to be there

        device = install_device(self._plan)
        device.begin(task)
        result: R = device.amend(self._work(task))
        return result


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """`on_device` wraps what is done on the device; `folder` is for what is left of it."""

    folder: Path
    on_device: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]


def no_rehearsal() -> Rehearsal:
    return Rehearsal(Path(), lambda work: work)


@contextmanager
def rehearsal_of(fault: str | None) -> Iterator[Rehearsal]:
    """With programs of the same names in place of the vendor's, in front of the PATH."""
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory(prefix="gpu-bench-rehearsal-") as name:
        folder = Path(name)
        for program, text in (("compute-sanitizer", _SANITIZER), ("nvidia-smi", _NVIDIA_SMI)):
            (folder / program).write_text(text, encoding="utf-8")
            (folder / program).chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
        try:
            yield Rehearsal(folder, lambda work: RehearsedWork(work, Plan(fault, folder)))
        finally:
            os.environ["PATH"] = before
