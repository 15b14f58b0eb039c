"""Keep seconds of trials in a SQLite file that processes share, by what they depend on."""

from __future__ import annotations

import json
import sqlite3
import time
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from roller_svc.errors import RollerWarning
from roller_svc.graph.wiring.tree import Variable

BUSY_TIMEOUT_S = 5.0  # how long a writer waits for another one
_KEY = ("device", "driver", "generator", "class", "choice", "context", "bucket")
_COLUMNS = (*_KEY, "least_s", "samples", "updated")
_SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS profile (
        device TEXT NOT NULL, driver TEXT NOT NULL, generator TEXT NOT NULL, class TEXT NOT NULL, choice TEXT NOT NULL,
        context TEXT NOT NULL, bucket TEXT NOT NULL, least_s REAL NOT NULL, samples INTEGER NOT NULL,
        updated REAL NOT NULL, PRIMARY KEY ({", ".join(_KEY)})
    ) WITHOUT ROWID
"""
_LOOK_UP = f"SELECT least_s FROM profile WHERE {' AND '.join(f'{name} = ?' for name in _KEY)} AND samples >= ?"
_RECORD = f"""
    INSERT INTO profile VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?)
    ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
    SET least_s = min(least_s, excluded.least_s), samples = samples + 1, updated = excluded.updated
"""


@dataclass(frozen=True, slots=True)
class Origin:
    """The properties that all seconds of a search have in common."""

    device: str  # digest of the spec, name of the CPU or GPU, clock policy
    driver: str  # and versions of compilers
    generator: str  # digest of the sources that make kernels
    bucket: str = ""  # extents of symbolic dimensions


class ProfileIndex:
    """Seconds of trials of one origin in a SQLite file.

    A file that is not a database of this kind is renamed to `.broken`, with a warning. Where the file cannot be read or
    written, the index knows nothing and keeps nothing, with one warning: trials go on.

    Args:
        path: the file; made with its folder if it is not there.
        origin: of the seconds.
        min_samples: how many samples a value needs before a look-up returns it.
    """

    def __init__(self, path: Path, origin: Origin, *, min_samples: int = 1) -> None:
        self._path = path
        self._origin = origin
        self._min_samples = min_samples
        self._connection: sqlite3.Connection | None = None
        self._connection = self._open()

    def look_up(self, variable: Variable, choice: int, context: Mapping[str, str]) -> float | None:
        """Return the least seconds of a choice in a context; None if they are not known."""
        row = self._execute(_LOOK_UP, (*self._key(variable, choice, context), self._min_samples))
        return None if row is None else float(row[0])

    def record(self, variable: Variable, choice: int, context: Mapping[str, str], seconds: float) -> None:
        """Add a sample."""
        self._execute(_RECORD, (*self._key(variable, choice, context), seconds, time.time()))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _key(self, variable: Variable, choice: int, context: Mapping[str, str]) -> tuple[str, ...]:
        origin = self._origin
        return (
            origin.device, origin.driver, origin.generator, variable.key or variable.name, variable.choices[choice],
            json.dumps(context, sort_keys=True), origin.bucket,
        )  # fmt: skip

    def _execute(self, statement: str, values: tuple[object, ...]) -> tuple[float] | None:
        if self._connection is None:
            return None
        try:
            with self._connection, closing(self._connection.execute(statement, values)) as cursor:
                row: tuple[float] | None = cursor.fetchone()
                return row
        except sqlite3.OperationalError as error:  # a full disk, a lock that another process does not release
            self._give_up(str(error))
        except sqlite3.DatabaseError as error:
            self.close()
            self._set_aside(str(error))
            self._connection = self._open()
        return None

    def _open(self) -> sqlite3.Connection | None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._connect()
        except sqlite3.OperationalError as error:
            self._give_up(str(error))
        except sqlite3.DatabaseError as error:
            self._set_aside(str(error))
            try:
                return self._connect()
            except sqlite3.Error as second:
                self._give_up(str(second))
        except OSError as error:
            self._give_up(str(error))
        return None

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(_SCHEMA)
            columns = tuple(row[1] for row in connection.execute("PRAGMA table_info(profile)"))
            if columns != _COLUMNS:
                raise sqlite3.DatabaseError(f"expected columns {', '.join(_COLUMNS)}, got {', '.join(columns)}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _set_aside(self, reason: str) -> None:
        aside = self._path.with_name(f"{self._path.name}.broken")
        warnings.warn(f"{self._path} cannot be read ({reason}): renamed to {aside.name}", RollerWarning, stacklevel=2)
        for suffix in ("", "-wal", "-shm"):
            file = self._path.with_name(self._path.name + suffix)
            if suffix:
                file.unlink(missing_ok=True)
            elif file.exists():
                file.replace(aside)

    def _give_up(self, reason: str) -> None:
        self.close()
        warnings.warn(f"seconds of trials are not kept in {self._path}: {reason}", RollerWarning, stacklevel=2)
