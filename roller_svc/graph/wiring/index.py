"""Keep seconds of trials in a SQLite file that processes share, by what they depend on."""

from __future__ import annotations

import json
import math
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_svc.errors import ArgumentError, RollerWarning
from roller_svc.graph.wiring.tree import Variable

FILE = "wiring.sqlite"  # in the folder of the cache
FORMAT = "roller-profiles/1"
MAX_PROFILES = 1_000_000  # of a document that is imported
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
_LOOK_UP = f"SELECT least_s, samples FROM profile WHERE {' AND '.join(f'{name} = ?' for name in _KEY)}"
_FORGET = f"DELETE FROM profile WHERE {' AND '.join(f'{name} = ?' for name in _KEY)}"
_RECORD = f"""
    INSERT INTO profile VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1, ?)
    ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
    SET least_s = min(least_s, excluded.least_s), samples = samples + 1, updated = excluded.updated
"""
_MERGE = f"""
    INSERT INTO profile VALUES ({", ".join("?" * len(_COLUMNS))})
    ON CONFLICT ({", ".join(_KEY)}) DO UPDATE
    SET least_s = min(least_s, excluded.least_s), samples = max(samples, excluded.samples), updated = max(updated, excluded.updated)
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
        row = self._execute(_LOOK_UP, self._key(variable, choice, context))
        if row is None:
            return None
        least_s, samples = row
        if _is_duration(least_s) and _is_count(samples):
            return float(least_s) if samples >= self._min_samples else None
        self._execute(_FORGET, self._key(variable, choice, context))  # SQLite takes any value, and damage wins nothing
        return None

    def record(self, variable: Variable, choice: int, context: Mapping[str, str], seconds: float) -> None:
        """Add a sample. Seconds that cannot be a time, such as NaN, are left out."""
        if _is_duration(seconds):
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

    def _execute(self, statement: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
        if self._connection is None:
            return None
        try:
            with self._connection, closing(self._connection.execute(statement, values)) as cursor:
                row: tuple[Any, ...] | None = cursor.fetchone()
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
            return _connect(self._path)
        except sqlite3.OperationalError as error:
            self._give_up(str(error))
        except sqlite3.DatabaseError as error:
            self._set_aside(str(error))
            try:
                return _connect(self._path)
            except sqlite3.Error as second:
                self._give_up(str(second))
        except OSError as error:
            self._give_up(str(error))
        return None

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


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)
    connection.text_factory = _decode
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


def _decode(text: bytes) -> str | bytes:
    """Return a text of a column; its bytes if they are not UTF-8: sqlite3 would refuse the row."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return text


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an index for one transaction. Raises ArgumentError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(_connect(path)) as connection, connection:
            yield connection
    except (OSError, sqlite3.Error) as error:
        raise ArgumentError(
            f"{path}: expected an index of trials that can be read and written, got: {error}", code="unreadable-file"
        ) from error


def export_profiles(path: Path) -> dict[str, Any]:
    """Return the seconds of an index as a document; without a file there are none. Raises ArgumentError.

    A damaged row is left out.
    """
    rows: list[tuple[Any, ...]] = []
    if path.exists():
        with _opened(path) as connection:
            rows = connection.execute(f"SELECT * FROM profile ORDER BY {', '.join(_KEY)}").fetchall()
    profiles = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
    return {"format": FORMAT, "profiles": [profile for profile in profiles if _is_profile(profile)]}


def import_profiles(path: Path, document: object) -> int:
    """Add the seconds of a document to an index, and return their number. Of equal keys the least seconds are kept.

    Raises ArgumentError: the document is not one of `export_profiles`, or the file cannot be written.
    """
    listed = document.get("profiles") if isinstance(document, Mapping) and document.get("format") == FORMAT else None
    if not isinstance(listed, list) or len(listed) > MAX_PROFILES:
        raise ArgumentError(
            f"expected a document of the format {FORMAT} with at most {MAX_PROFILES} profiles", code="invalid-option"
        )
    for number, row in enumerate(listed):
        if not _is_profile(row):
            raise ArgumentError(
                f"profiles[{number}]: expected {', '.join(_KEY)} as texts, and positive numbers {', '.join(_COLUMNS[len(_KEY) :])}",
                code="invalid-option",
            )
    with _opened(path) as connection:
        connection.executemany(_MERGE, [tuple(row[name] for name in _COLUMNS) for row in listed])
    return len(listed)


def clear_profiles(path: Path, device: str | None = None) -> int:
    """Remove the seconds of an index, or those of a device, and return their number. Raises ArgumentError."""
    if not path.exists():
        return 0
    with _opened(path) as connection:
        if device is None:
            return connection.execute("DELETE FROM profile").rowcount
        return connection.execute("DELETE FROM profile WHERE device = ?", (device,)).rowcount


def _is_duration(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 62


def _is_profile(row: object) -> bool:
    if not isinstance(row, Mapping) or row.keys() != set(_COLUMNS):
        return False
    least_s, samples, updated = (row[name] for name in _COLUMNS[len(_KEY) :])
    numbers = all(map(_is_duration, (least_s, updated)))
    return all(isinstance(row[name], str) for name in _KEY) and numbers and _is_count(samples)
