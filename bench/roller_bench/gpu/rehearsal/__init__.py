"""Run the whole program without a device, on a simulated driver whose clock advances by the model's estimates.

The emulator runs small kernels, so their verdicts are real. No time in a rehearsal is measured.
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
# Replaces compute-sanitizer. racecheck reports hazards that the other tools do not.
case "$2" in
racecheck) echo "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"; exit 86 ;;
*) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""
_NVIDIA_SMI = """#!/bin/sh
# Replaces nvidia-smi: prints the queried number of values.
case "$*" in
*clocks.sm*) echo "1980 MHz, 1980 MHz, 2619 MHz, 500.00 W, 700.00 W, 40, Enabled" ;;
*) echo rehearsed ;;
esac
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The configuration of a simulated device."""

    fault: str | None  # to inject
    folder: Path  # where its processes count their tasks


class RehearsedWork(Generic[T, R]):
    """Wraps a function so that its process gets a simulated device."""

    def __init__(self, work: Callable[[T], R], plan: Plan) -> None:
        self._work, self._plan = work, plan
        self.__module__, self.__name__ = work.__module__, work.__name__  # which worker processes import and show

    def __call__(self, task: T) -> R:
        from roller_bench.gpu.rehearsal.install import install_device

        device = install_device(self._plan)
        device.begin(task)
        result: R = device.amend(self._work(task))
        return result


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A rehearsal; `on_device` wraps functions that run on the device."""

    folder: Path  # for its files
    on_device: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]


def no_rehearsal() -> Rehearsal:
    return Rehearsal(Path(), lambda work: work)


@contextmanager
def rehearsal_of(fault: str | None) -> Iterator[Rehearsal]:
    """Put replacements of the vendor's programs in front of the PATH."""
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
