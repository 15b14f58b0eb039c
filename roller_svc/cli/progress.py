"""Progress on stderr: bars if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from roller_svc.cli import options as common

T = TypeVar("T")
Report = Callable[[str, int, int], None]  # stage, done, of how many
PROGRESS_S = 5.0  # between lines of progress


def show_progress(items: Iterable[T], total: int, title: str) -> Iterator[T]:
    """Yield the items and advance the progress bar."""
    if not sys.stderr.isatty():
        yield from items
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        for item in items:
            yield item
            progress.advance(task)


@contextmanager
def report_stages() -> Iterator[Report]:
    """Show a bar for each stage on stderr if that is a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield report_lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield report


def report_lines() -> Report:
    """Return a report that prints a line every PROGRESS_S seconds: short compiles print nothing."""
    printed_s = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= PROGRESS_S:
            printed_s = time.monotonic()
            common.print_line(f"{stage}: {done} of {total}")

    return report
