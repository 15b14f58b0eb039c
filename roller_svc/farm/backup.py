"""Back up a database and a store to a folder, beside running services and workers, and restore both from it.

    manifest.json          says what belongs to the backup; written last
    cas/sha256/ab/<hex>    a blob of the store; also a copy of the database, in SQLite, and the list of names and blobs

The database is copied first, at one moment. Each name of the store is then read before its blobs are copied. What the
database refers to was in the store before, so it is in the backup. No lock holds collections off: where a blob of a name
is missing, the name is read again. It is left out if a collection has removed it.

A restore writes blobs, then names, and the rows of the database last, in one transaction. Until it is complete, an object
of the store says so, and services and workers do not start.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from sqlalchemy import Connection, insert, inspect, literal, select
from sqlalchemy.engine import URL

from roller_svc.compiler.action import generator_digest
from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.api_keys import KEYS_MARK
from roller_svc.farm.blobs import BLOBS, DAMAGED, Blobs, blob_name
from roller_svc.farm.database.connect import Database, as_store_error, now_s
from roller_svc.farm.database.migrate import check_revision, upgrade
from roller_svc.farm.database.tables import metadata, probes, workers
from roller_svc.farm.store import ACTIONS, DERIVED, KERNELS, MODELS, PINS, UPLOADS, Json, Store, parse_json
from roller_svc.version import __version__

MANIFEST = "manifest.json"
FORMAT = 1  # of a backup; raise it when an earlier version could not restore it
RESTORING = "restoring"  # object of a store that is not restored completely
READS = 3  # of a name whose blobs are missing
THREADS = 8  # that copy: requests to S3, and flushes to a disk, wait for each other
BATCH_ROWS = 1000
# An action is listed before the kernel or model that it refers to, which was written before it.
_NAMES = (ACTIONS, KERNELS, MODELS, DERIVED, UPLOADS, PINS, KEYS_MARK.partition("/")[0])
_NAME = re.compile(rf"({'|'.join(_NAMES)})/\w[\w.-]*", re.ASCII)
_ENTRIES = {MANIFEST, BLOBS.partition("/")[0], "tmp", "set-aside"}  # of a backup's folder
_OF_PROCESSES = (workers, probes)  # tables whose rows mean nothing when their processes have ended

T = TypeVar("T")
U = TypeVar("U")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BackedUp:
    """The content of a backup. `skipped` counts names that were damaged in the store."""

    names: int
    blobs: int
    size_bytes: int
    skipped: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of a restore. `damaged` are blobs that the backup has lost: their results are built again when needed."""

    names: int
    blobs: int
    rows: int
    damaged: list[str]
    is_same_generator: bool  # whether the results are hits for this version


def back_up(store: Store, database: Database, folder: Path) -> BackedUp:
    """Write a backup to a folder. Of an earlier one there, blobs are kept, and all of it until the new one is complete.

    Raises StoreError if the database has tables of another version, or if something cannot be read or written.
    """
    revision = check_revision(database)
    _make_folder(folder)
    with _locked(folder, fcntl.LOCK_EX):
        copy = Store(folder)
        copy.objects.remove_leftovers()
        rows = _copy_database(database, copy)
        names, blobs, skipped = _copy_names(store, copy)
        listing = _to_bytes({"names": names, "blobs": sorted(blobs)})
        listed = hashlib.sha256(listing).hexdigest()
        _write(copy, blob_name(listed), listing)
        manifest = {
            "format": FORMAT,
            "version": __version__,
            "generator": generator_digest(),
            "revision": revision,
            "database": rows,
            "listed": listed,
        }
        _write(copy, MANIFEST, _to_bytes(manifest))
        blobs |= {rows, listed}
        found = list(copy.objects.list(f"{BLOBS}/"))
        copy.objects.remove(info.name for info in found if info.name.rpartition("/")[2] not in blobs)
        size_bytes = sum(info.size_bytes for info in found if info.name.rpartition("/")[2] in blobs)
        return BackedUp(len(names), len(blobs), size_bytes, skipped)


def restore(folder: Path, store: Store, database: Database) -> Restored:
    """Restore a backup into an empty store and an empty database, or go on with a restore of it that was interrupted.

    Raises ArgumentError if the backup is not complete, or if the store or the database has other content.
    """
    with _locked(folder, fcntl.LOCK_SH), store.objects.spool() as (file, rows):
        manifest, token = _read_manifest(folder)
        copy = Store(folder)
        names, blobs = _parse_listing(folder, copy.get(str(manifest["listed"])))
        if not _write_blob(copy.blobs, str(manifest["database"]), file):
            raise _invalid(folder, "its copy of the database is damaged")
        with contextlib.closing(Database(URL.create("sqlite", database=str(rows)))) as source:
            upgrade(source)
            _begin(store, database, token)
            copied = _in_threads(partial(_copy_blob, copy.blobs, store.blobs), blobs)
            damaged = [digest for digest, is_there in copied if not is_there]
            list(_in_threads(lambda name: store.objects.write(name, names[name]), names))
            count = _restore_rows(source, database, token)
        store.objects.remove([RESTORING])
    return Restored(len(names), len(blobs), count, damaged, manifest["generator"] == generator_digest())


def check_restored(store: Store) -> None:
    """Raise StoreError while a store is not restored completely."""
    if store.objects.info(RESTORING) is not None:
        raise StoreError(
            "the store is not restored completely: run `roller store restore` again, with the same folder",
            code="restore-incomplete",
        )


# ------------------------------------------------------------------------- the folder


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        entries = {path.name for path in folder.iterdir()}
        if not entries <= _ENTRIES:
            raise ArgumentError(
                f"{folder} is not a folder of backups: it has {sorted(entries - _ENTRIES)[0]!r}",
                code="invalid-backup",
                hint="name a new or empty folder, or that of an earlier backup",
            )
        folder.chmod(0o700)  # the database has hashes of keys
    except OSError as failure:
        raise ArgumentError(f"cannot write to {folder}: {failure.strerror}", code="unwritable-folder") from failure


@contextlib.contextmanager
def _locked(folder: Path, kind: int) -> Iterator[None]:
    """Exclude others from the folder, or other writers. The lock ends with the process."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as failure:
        raise ArgumentError(f"cannot open {folder}: {failure.strerror}", code="invalid-backup") from failure
    try:
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError as failure:
            raise StoreError(f"another backup or restore uses {folder}", code="backup-busy") from failure
        except OSError as failure:  # such as a file system without locks
            raise ArgumentError(f"cannot lock {folder}: {failure.strerror}", code="invalid-backup") from failure
        yield
    finally:
        os.close(handle)


def _write(copy: Store, name: str, content: bytes) -> None:
    """Write an object of a backup at once. A process that is killed leaves a file in `tmp` only."""
    with copy.objects.spool() as (file, path):
        file.write(content)
        file.flush()
        copy.objects.move_in(path, name)


def _read_manifest(folder: Path) -> tuple[Json, bytes]:
    """Return the manifest of a backup, and what identifies it."""
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as failure:
        raise _invalid(folder, f"it has no {MANIFEST}, which is written last: it is incomplete, or is none") from failure
    except OSError as failure:
        raise ArgumentError(f"cannot read {folder / MANIFEST}: {failure.strerror}", code="unreadable-file") from failure
    manifest = parse_json(content)
    if manifest is None or not {"format", "generator", "database", "listed"} <= manifest.keys():
        raise _invalid(folder, f"its {MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        version = str(manifest.get("version"))[:40]
        raise _invalid(folder, f"expected format {FORMAT}, got {manifest['format']!r}, of version {version}")
    return manifest, hashlib.sha256(content).hexdigest().encode()


def _parse_listing(folder: Path, content: bytes | None) -> tuple[dict[str, bytes], list[str]]:
    """Return the names with their contents, and the digests of their blobs."""
    listing = parse_json(content) or {}
    names, blobs = listing.get("names"), listing.get("blobs")
    if not isinstance(names, dict) or not isinstance(blobs, list):
        raise _invalid(folder, "its list of names is damaged")
    for name in names:
        if not _NAME.fullmatch(name):
            raise _invalid(folder, f"unexpected name {name[:80]!r}")
    return {name: str(text).encode("latin-1", "replace") for name, text in names.items()}, list(map(str, blobs))


def _invalid(folder: Path, why: str) -> ArgumentError:
    return ArgumentError(
        f"{folder} cannot be restored: {why}", code="invalid-backup", hint="name a folder of `roller store backup`"
    )


# ----------------------------------------------------------------------- the database


def _copy_database(database: Database, copy: Store) -> str:
    """Copy the rows of one moment into a file of SQLite, which becomes a blob; return its digest."""
    with copy.objects.spool() as (_, path):
        if database.is_sqlite:
            _copy_sqlite(database, path)
        else:
            with contextlib.closing(Database(URL.create("sqlite", database=str(path)))) as target:
                upgrade(target)
                with _snapshot(database) as source, target.write() as connection:
                    _copy_rows(source, connection)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=DELETE")  # all of it is in one file
        digest = _hash(path)
        copy.objects.move_in(path, blob_name(digest))
    return digest


def _copy_sqlite(database: Database, path: Path) -> None:
    """Copy the pages of one moment; others write meanwhile."""
    try:
        with database.read() as connection, contextlib.closing(sqlite3.connect(path)) as target:
            source: Any = connection.connection.driver_connection
            source.backup(target)
            (found,) = target.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as failure:
        raise StoreError(f"the database cannot be copied: {failure}", code="database-error") from failure
    if found != "ok":
        raise StoreError(f"the database is damaged: {found}", code="database-error")


@contextlib.contextmanager
def _snapshot(database: Database) -> Iterator[Connection]:
    """Read PostgreSQL as of one moment."""
    with as_store_error(), database.engine.connect() as connection:
        yield connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)


def _copy_rows(source: Connection, target: Connection) -> int:
    """Copy all rows but those of processes, a table after those that it refers to; return their number.

    Rows that the database numbers are numbered again, in their order: its sequence goes on after them.
    """
    count = 0
    for table in metadata.sorted_tables:
        if table not in _OF_PROCESSES:
            number = table.autoincrement_column
            query = select(*(column for column in table.c if column is not number))
            result = source.execute(query.order_by(number), execution_options={"yield_per": BATCH_ROWS})
            for rows in result.mappings().partitions():
                target.execute(insert(table), [dict(row) for row in rows])
                count += len(rows)
    return count


def _restore_rows(source: Database, database: Database, token: bytes) -> int:
    """Fill the database by one transaction, unless this restore has done it; return the number of rows."""
    upgrade(database)
    with source.read() as connection, database.write() as target:
        if _is_filled(target, token):
            return 0
        count = _copy_rows(connection, target)
        target.execute(insert(probes).values(process=_row_of(token), time=now_s()))
    return count


def _is_filled(connection: Connection, token: bytes) -> bool:
    """Whether this restore has filled the database. Raises ArgumentError if something else has."""
    present = set(inspect(connection).get_table_names())
    has_row_of_restore = select(probes.c.process).where(probes.c.process == _row_of(token))
    if probes.name in present and connection.execute(has_row_of_restore).first() is not None:
        return True
    for table in metadata.sorted_tables:
        has_row = select(literal(1)).select_from(table).limit(1)
        if table.name in present and table is not probes and connection.execute(has_row).first() is not None:
            raise _not_empty("the database", f"rows in {table.name}")
    return False


def _row_of(token: bytes) -> str:
    return f"restore {token.decode()}"


# -------------------------------------------------------------------------- the store


def _copy_names(store: Store, copy: Store) -> tuple[dict[str, str], set[str], int]:
    """Copy the blobs of all names; return the names with their contents, their blobs, and the number of damaged names."""
    listed = (info.name for folder in _NAMES for info in store.objects.list(f"{folder}/") if _NAME.fullmatch(info.name))
    found: dict[str, tuple[bytes, list[str]]] = {}
    skipped = 0
    for name, copied in _in_threads(partial(_copy_name, store, copy), listed):
        if copied is not None:
            found[name] = copied
        elif store.objects.info(name) is not None:
            log.warning("%s is damaged in the store: it is not in the backup", name)
            skipped += 1
    complete = {
        name: copied
        for name, copied in found.items()
        if not name.startswith(f"{ACTIONS}/") or copy.result_name(copied[0]) in found  # a collection may be between both
    }
    blobs = set(itertools.chain.from_iterable(digests for _, digests in complete.values()))
    return {name: content.decode("latin-1") for name, (content, _) in complete.items()}, blobs, skipped


def _copy_name(store: Store, copy: Store, name: str) -> tuple[bytes, list[str]] | None:
    """Copy the blobs of a name; return its content and their digests, or None if it is damaged or was removed.

    A collection may remove blobs after the name was read, and a build may write it again.
    """
    for _ in range(READS):
        content = store.objects.read(name)
        if content is None:
            return None
        digests = store.blobs_of(name, content)
        if digests is not None and all(_copy_blob(store.blobs, copy.blobs, digest) for digest in digests):
            return content, digests
    return None


def _copy_blob(source: Blobs, target: Blobs, digest: str) -> bool:
    """Copy a blob unless it is there; return whether it is there now."""
    if target.is_intact(digest):
        return True
    with target.objects.spool() as (file, path):
        if not _write_blob(source, digest, file):
            return False
        target.objects.move_in(path, blob_name(digest))
    return True


def _write_blob(blobs: Blobs, digest: str, file: IO[bytes]) -> bool:
    """Write a blob to a file; return False if it is missing or damaged."""
    reader = blobs.open(digest)
    try:
        for part in iter(reader.read, b"") if reader is not None else ():
            file.write(part)
    except StoreError as error:
        if error.code != DAMAGED:
            raise
        return False
    file.flush()
    return reader is not None


def _begin(store: Store, database: Database, token: bytes) -> None:
    """Note in an empty store that it is being restored. Raises ArgumentError if it or the database has other content."""
    mark = store.objects.read(RESTORING)
    if mark is None:
        for folder in (*_NAMES, BLOBS):
            for info in store.objects.list(f"{folder}/"):
                raise _not_empty("the store", info.name)
    elif mark != token:
        raise _not_empty("the store", "a part of another backup")
    with database.read() as connection:
        _is_filled(connection, token)
    store.objects.write(RESTORING, token)


def _not_empty(what: str, found: str) -> ArgumentError:
    return ArgumentError(
        f"expected {what} to be empty, it has {found}",
        code="restore-not-empty",
        hint="restore into a new store and a new database: see ROLLER_STORE and ROLLER_DATABASE",
    )


def _in_threads(function: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Yield items with their results. Nothing more begins after a failure."""
    known = list(items)
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="backup")
    try:
        yield from zip(known, pool.map(function, known), strict=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_bytes(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
