"""Backups and restores in processes that end by SIGKILL at a given step."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

from roller_svc.farm import backup
from roller_svc.farm.database.connect import Database
from roller_svc.farm.objects import FolderObjects
from roller_svc.farm.store import Store

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["roller_svc.farm.backup"])


def run_killed(step: int, action: str, folder: Path, store: Path, database: str) -> bool:
    """Back up or restore; return whether the process was killed: before or after one of the changes of files or rows."""
    process = _processes.Process(target=_run, args=(step, action, folder, store, database))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _run(step: int, action: str, folder: Path, store: Path, database: str) -> None:
    steps = itertools.count()

    def count() -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            count()
            result = function(*arguments, **options)
            count()
            return result

        return run

    for name in ("write", "move_in", "remove"):
        setattr(FolderObjects, name, counted(getattr(FolderObjects, name)))
    backup._copy_rows = counted(backup._copy_rows)
    opened = Database(database)
    if action == "backup":
        backup.back_up(Store(store), opened, folder)
    else:
        backup.restore(folder, Store(store), opened)
