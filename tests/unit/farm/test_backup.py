"""Backups and restores: of both databases and all kinds of stores, interrupted, beside collections, and refused."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import new_database
from killed_backups import run_killed
from s3_server import S3Server
from sqlalchemy import Table, select, text

from roller_svc.errors import ArgumentError, RollerError, StoreError
from roller_svc.farm import backup
from roller_svc.farm.api_keys import KEYS_MARK, ApiKeys, Scope
from roller_svc.farm.audit import AuditEvent, AuditLog
from roller_svc.farm.backup import MANIFEST, RESTORING, Restored, back_up, check_restored, restore
from roller_svc.farm.blobs import Blobs, blob_name
from roller_svc.farm.collection import collect, verify
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.migrate import upgrade
from roller_svc.farm.database.tables import metadata, probes, workers
from roller_svc.farm.queue import OperationQueue, Submission
from roller_svc.farm.registry import Worker, WorkerRegistry
from roller_svc.farm.store import Artifact, Store

EVERY_STEP = pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
Open = Callable[[str], Database]


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def publish(store: Store, number: int) -> None:
    files = {"source": f"source {number}".encode(), "binary": b"the same"}
    store.publish(digest(number + 1000), Artifact(digest(number), {"number": number, "π": "é"}, files))


def add_rows(database: Database, number: int) -> None:
    """A key, and operations that are queued, building and done."""
    ApiKeys(database).add(f"key {number}", [Scope.COMPILE], quota=number, lifetime_s=1e6)
    queue = OperationQueue(database, "g", max_alive=1000)
    for part in range(3):
        queue.submit(Submission(f"{number}-{part}", {"expression": "é\u2028\0", "number": 1e-300}, "q", "me", deadline_s=1e5))
    claim = queue.claim("w", ["q"])
    assert claim is not None
    queue.finish(claim, {"digest": digest(number)})
    assert queue.claim("w", ["q"]) is not None


def fill(store: Store, database: Database) -> None:
    for number in range(1, 4):
        publish(store, number)
    store.put_upload(b"of a client")
    store.put_derived(digest(1), "ptx", "a tool", b"listing")
    store.pin(digest(2))
    store.objects.write(KEYS_MARK, b"")
    add_rows(database, 1)
    WorkerRegistry(database).add(Worker("w", ("q",), "g", {}))
    database.check()


def contents(store: Store, database: Database) -> tuple[dict[str, bytes | None], dict[str, list[Any]]]:
    """All names with what they refer to, and all rows but those of processes, without numbers of the database's own."""
    assert verify(store).names == verify(store).blobs == []
    folders = ("ac", "kernels", "models", "derived", "uploads", "pins", "keys", "cas")
    names = {info.name: store.objects.read(info.name) for folder in folders for info in store.objects.list(f"{folder}/")}
    with database.read() as connection:
        rows = {
            table.name: sorted(connection.execute(select(*_copied(table))).all(), key=repr)
            for table in metadata.sorted_tables
            if table not in (workers, probes)
        }
    return names, rows


def _copied(table: Table) -> list[Any]:
    return [column for column in table.c if column is not table.autoincrement_column]


@pytest.fixture
def open_database() -> Iterator[Open]:
    opened: list[Database] = []

    def open_one(url: str) -> Database:
        opened.append(Database(url))
        return opened[-1]

    yield open_one
    for database in opened:
        database.close()


@pytest.fixture
def database(database_url: str, open_database: Open) -> Database:
    """A database with the tables and the revision of this version."""
    found = open_database(database_url)
    upgrade(found)
    return found


@pytest.fixture
def sqlite(tmp_path: Path, open_database: Open) -> Database:
    found = open_database(f"sqlite:///{tmp_path}/source.db")
    upgrade(found)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def restore_new(folder: Path, open_database: Open, number: int = 0) -> tuple[Restored, Store, Database]:
    """Restore into a store and a database of SQLite that were not there."""
    parts = Store(folder.parent / f"restored{number}"), open_database(f"sqlite:///{folder.parent}/restored{number}.db")
    return restore(folder, *parts), *parts


@pytest.mark.parametrize("target", ["sqlite", "postgresql"])
def test_a_backup_of_either_database_restores_into_either(
    database: Database, target: str, store: Store, open_database: Open, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fill(store, database)
    saved = back_up(store, database, tmp_path / "backup")
    is_sqlite = target == "sqlite"
    url = f"sqlite:///{tmp_path}/new.db" if is_sqlite else new_database(request.getfixturevalue("postgresql"))
    new_store, restored = Store(tmp_path / "new"), open_database(url)
    done = restore(tmp_path / "backup", new_store, restored)
    assert contents(new_store, restored) == contents(store, database)
    assert (done.names, done.blobs + 2, done.damaged) == (saved.names, saved.blobs, [])
    assert done.is_same_generator
    assert saved.skipped == 0
    with restored.read() as connection:
        assert connection.execute(select(workers)).all() == []
    check_restored(new_store)
    restored.check()
    claim = OperationQueue(restored, "g", max_alive=1000).claim("w2", ["q"])
    assert claim is not None
    assert (claim.action, claim.attempt) == ("1-2", 1)  # the one that was queued


def test_every_kind_of_store_is_backed_up_and_restored(
    any_store: Store, sqlite: Database, open_database: Open, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fill(any_store, sqlite)
    back_up(any_store, sqlite, tmp_path / "backup")
    if any_store.folder is not None:
        new = Store(tmp_path / "new")
    else:
        s3: S3Server = request.getfixturevalue("s3")
        new = Store(s3.location(), s3.options)
    restored = open_database(f"sqlite:///{tmp_path}/new.db")
    restore(tmp_path / "backup", new, restored)
    assert contents(new, restored) == contents(any_store, sqlite)


def test_a_second_backup_adds_what_is_missing_and_removes_what_is_gone(
    store: Store, sqlite: Database, open_database: Open, tmp_path: Path
) -> None:
    fill(store, sqlite)
    folder = tmp_path / "backup"
    back_up(store, sqlite, folder)
    shared = folder / blob_name(Store(folder).put(b"the same"))
    time_ns = shared.stat().st_mtime_ns
    collect(store, 0, grace_s=-1.0)
    publish(store, 9)
    add_rows(sqlite, 9)
    back_up(store, sqlite, folder)
    assert shared.stat().st_mtime_ns == time_ns
    assert len(list(Store(folder).objects.list("cas/"))) == len(list(store.objects.list("cas/"))) + 2
    _, new_store, restored = restore_new(folder, open_database)
    assert contents(new_store, restored) == contents(store, sqlite)
    shared.write_bytes(b"rotten")
    back_up(store, sqlite, folder)
    assert shared.read_bytes() == b"the same"


def test_only_the_owner_reads_a_backup(store: Store, sqlite: Database, tmp_path: Path) -> None:
    publish(store, 1)
    (tmp_path / "backup").mkdir(mode=0o755)
    back_up(store, sqlite, tmp_path / "backup")
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o700
    (tmp_path / "theirs").mkdir(mode=0o755)
    (tmp_path / "theirs" / "file").touch()
    for folder in (tmp_path / "theirs", tmp_path / "store", tmp_path / "theirs" / "file"):
        with pytest.raises(ArgumentError):
            back_up(store, sqlite, folder)
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o755


@pytest.mark.slow
@EVERY_STEP
def test_a_backup_that_is_killed_leaves_the_former_one_or_none(
    store: Store, sqlite: Database, open_database: Open, tmp_path: Path, stride: int
) -> None:
    publish(store, 1)
    add_rows(sqlite, 1)
    back_up(store, sqlite, tmp_path / "former")
    before = contents(store, sqlite)
    publish(store, 2)
    add_rows(sqlite, 2)
    after = contents(store, sqlite)
    outcomes = []
    for step in range(0, 1000, stride):
        new, old = tmp_path / f"new{step}", tmp_path / f"old{step}"
        shutil.copytree(tmp_path / "former", old)
        is_killed = run_killed(step, "backup", old, tmp_path / "store", str(sqlite.url))
        _, *restored = restore_new(old, open_database, step)
        found = contents(*restored)
        assert found in (before, after)
        outcomes.append(found == after)
        if step % 12 == 0 and run_killed(step, "backup", new, tmp_path / "store", str(sqlite.url)) and not has_manifest(new):
            with pytest.raises(ArgumentError, match="incomplete") as caught:
                restore_new(new, open_database, 1000 + step)
            assert caught.value.code == "invalid-backup"
            back_up(store, sqlite, new)
        if not is_killed:
            break
    assert outcomes[0] is False
    assert outcomes[-1] is True
    assert len(outcomes) * stride > 12


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).exists()


@EVERY_STEP
def test_a_restore_that_is_killed_goes_on(
    store: Store, database: Database, open_database: Open, tmp_path: Path, request: pytest.FixtureRequest, stride: int
) -> None:
    publish(store, 1)
    add_rows(database, 1)
    back_up(store, database, tmp_path / "backup")
    expected = contents(store, database)
    for step in range(0, 1000, stride):
        is_sqlite = database.is_sqlite
        url = f"sqlite:///{tmp_path}/{step}.db" if is_sqlite else new_database(request.getfixturevalue("postgresql"))
        is_killed = run_killed(step, "restore", tmp_path / "backup", tmp_path / f"new{step}", url)
        new = Store(tmp_path / f"new{step}"), open_database(url)
        if new[0].objects.info(RESTORING) is not None:
            with pytest.raises(StoreError, match="again") as caught:
                check_restored(new[0])
            assert caught.value.code == "restore-incomplete"
            with pytest.raises(StoreError, match="again"):  # else it removed blobs whose names are not there yet
                collect(new[0], grace_s=-1.0)
            restore(tmp_path / "backup", *new)
        if not is_killed:
            break
        if step:
            assert contents(*new) == expected
    assert contents(*new) == expected
    assert step > 12


def test_a_collection_during_a_backup_takes_nothing_from_it(
    store: Store, sqlite: Database, open_database: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        publish(store, number)
    copy_blob, turns, collected = backup._copy_blob, itertools.count(), threading.Event()

    def collect_meanwhile(source: Blobs, target: Blobs, blob: str) -> bool:
        turn = next(turns)
        if turn == 30:
            collect(store, 0, grace_s=-1.0)
            publish(store, 19)  # again: its name may be read before and its blobs afterwards
            collected.set()
        assert turn < 30 or collected.wait(60)
        return copy_blob(source, target, blob)

    monkeypatch.setattr(backup, "_copy_blob", collect_meanwhile)
    saved = back_up(store, sqlite, tmp_path / "backup")
    done, restored, _ = restore_new(tmp_path / "backup", open_database)
    assert verify(restored).names == verify(restored).blobs == done.damaged == []
    assert saved.skipped == 0
    assert 2 <= saved.names < 40


def test_damage_of_the_store_is_left_out_and_counted(store: Store, sqlite: Database, open_database: Open, tmp_path: Path) -> None:
    for number in (1, 2):
        publish(store, number)
    blob = blob_name(store.put(b"source 1"))
    store.objects.write(blob, b"source 2")
    saved = back_up(store, sqlite, tmp_path / "backup")
    assert (saved.names, saved.skipped) == (2, 2)
    _, restored, _ = restore_new(tmp_path / "backup", open_database)
    assert verify(restored).names == []
    assert restored.action_result(digest(1002)) == {"number": 2, "π": "é"}


def test_damage_of_a_backup_is_reported_and_built_again(
    store: Store, sqlite: Database, open_database: Open, tmp_path: Path
) -> None:
    for number in (1, 2):
        publish(store, number)
    add_rows(sqlite, 1)
    back_up(store, sqlite, tmp_path / "backup")
    lost, changed = store.put(b"source 1"), store.put(b"source 2")
    (tmp_path / "backup" / blob_name(lost)).unlink()
    (tmp_path / "backup" / blob_name(changed)).write_bytes(b"source 3")
    done, restored, database = restore_new(tmp_path / "backup", open_database)
    assert sorted(done.damaged) == sorted([lost, changed])
    assert restored.find_result(digest(1001)) is restored.find_result(digest(1002)) is None
    publish(restored, 1)
    assert restored.action_result(digest(1001)) is not None
    assert len(ApiKeys(database).all()) == 1


def test_restores_into_what_is_filled_are_refused(store: Store, sqlite: Database, open_database: Open, tmp_path: Path) -> None:
    publish(store, 1)
    add_rows(sqlite, 1)
    back_up(store, sqlite, tmp_path / "backup")
    empty = open_database(f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(ArgumentError, match="the store to be empty") as caught:
        restore(tmp_path / "backup", store, empty)
    assert caught.value.code == "restore-not-empty"
    with pytest.raises(ArgumentError, match="the database to be empty, it has rows in api_keys"):
        restore(tmp_path / "backup", Store(tmp_path / "new"), sqlite)
    check_restored(Store(tmp_path / "new"))  # nothing was begun
    restore(tmp_path / "backup", Store(tmp_path / "new"), empty)
    with pytest.raises(ArgumentError, match="the store to be empty"):
        restore(tmp_path / "backup", Store(tmp_path / "new"), empty)
    begun = Store(tmp_path / "begun")
    begun.objects.write(RESTORING, b"another")
    with pytest.raises(ArgumentError, match="a part of another backup"):
        restore(tmp_path / "backup", begun, open_database(f"sqlite:///{tmp_path}/new.db"))


def test_a_store_without_rows_is_restored_twice(store: Store, sqlite: Database, open_database: Open, tmp_path: Path) -> None:
    back_up(store, sqlite, tmp_path / "backup")
    for _ in range(2):
        assert restore_new(tmp_path / "backup", open_database)[0].rows == 0


def change_manifest(folder: Path, **values: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | values))


def test_what_is_no_backup_is_refused(store: Store, sqlite: Database, open_database: Open, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    back_up(store, sqlite, folder)
    listings = [{}, {"names": {"../x": ""}, "blobs": []}, {"names": {"ac/..": ""}, "blobs": []}, {"names": [], "blobs": []}]
    changes: list[dict[str, object]] = [
        {"format": 2},
        {"database": "0" * 64},
        {"database": ["x"]},
        {"listed": None},
        *({"listed": Store(folder).put(json.dumps(listing).encode())} for listing in listings),
    ]
    original = (folder / MANIFEST).read_bytes()
    for change in changes:
        change_manifest(folder, **change)
        with pytest.raises(ArgumentError, match="cannot be restored") as caught:
            restore_new(folder, open_database)
        assert caught.value.code == "invalid-backup"
        (folder / MANIFEST).write_bytes(original)
    for content in (b"", b"[]", b"{}", b"\xff"):
        (folder / MANIFEST).write_bytes(content)
        with pytest.raises(ArgumentError, match="damaged"):
            restore_new(folder, open_database)
    for missing in (tmp_path / "nowhere", tmp_path / "source.db"):
        with pytest.raises(ArgumentError, match=r"cannot open"):
            restore_new(missing, open_database)
    change_manifest_of_newer(folder, original)
    with pytest.raises(StoreError) as newer:
        restore_new(folder, open_database)
    assert newer.value.code == "database-newer"
    check_restored(Store(tmp_path / "restored0"))  # nothing was begun


def change_manifest_of_newer(folder: Path, original: bytes) -> None:
    """Give the backup's database the revision of a newer version."""
    (folder / MANIFEST).write_bytes(original)
    path = folder / "newer.db"
    shutil.copy(folder / blob_name(json.loads(original)["database"]), path)
    database = Database(f"sqlite:///{path}")
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    change_manifest(folder, database=Store(folder).put(path.read_bytes()))


@pytest.mark.parametrize(("revision", "code"), [("9999", "database-newer"), ("0001", "database-older"), (None, "database-older")])
def test_databases_of_other_versions_are_not_backed_up(
    database: Database, store: Store, tmp_path: Path, revision: str | None, code: str
) -> None:
    change = "DELETE FROM alembic_version" if revision is None else f"UPDATE alembic_version SET version_num = '{revision}'"
    with database.write() as connection:
        connection.execute(text(change))
    with pytest.raises(StoreError) as caught:
        back_up(store, database, tmp_path / "backup")
    assert caught.value.code == code
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
def test_a_damaged_database_is_not_backed_up(store: Store, sqlite: Database, tmp_path: Path) -> None:
    for number in range(20):
        add_rows(sqlite, number)
    sqlite.checkpoint()
    sqlite.close()
    with (tmp_path / "source.db").open("r+b") as file:
        file.seek(4096 * 4)
        file.write(os.urandom(4096 * 8))
    with pytest.raises(StoreError) as caught:
        back_up(store, sqlite, tmp_path / "backup")
    assert caught.value.code == "database-error"
    assert not has_manifest(tmp_path / "backup")


def test_two_backups_at_once_into_one_folder_are_refused(store: Store, sqlite: Database, tmp_path: Path) -> None:
    back_up(store, sqlite, tmp_path / "backup")
    handle = os.open(tmp_path / "backup", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    with pytest.raises(StoreError) as caught:
        back_up(store, sqlite, tmp_path / "backup")
    assert caught.value.code == "backup-busy"
    os.close(handle)
    back_up(store, sqlite, tmp_path / "backup")


def test_a_restored_audit_log_goes_on(database: Database, store: Store, open_database: Open, tmp_path: Path) -> None:
    """Rows that the database numbers, by a sequence of PostgreSQL."""
    source = open_database(f"sqlite:///{tmp_path}/audited.db")
    upgrade(source)
    for subject in ("1", "2", "3"):
        AuditLog(source).record(AuditEvent.PINNED, "ann", subject)
    back_up(store, source, tmp_path / "backup")
    restore(tmp_path / "backup", Store(tmp_path / "other"), database)
    AuditLog(database).record(AuditEvent.PINNED, "ann", "4")
    assert [entry.subject for entry in AuditLog(database).entries(limit=9)] == ["4", "3", "2", "1"]


def test_a_store_that_fails_ends_a_backup(store: Store, sqlite: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, 1)

    def fail(*_: object) -> bytes:
        raise StoreError("cannot read the store: I/O error")

    monkeypatch.setattr(store.objects, "read_range", fail)
    with pytest.raises(RollerError, match="I/O"):
        back_up(store, sqlite, tmp_path / "backup")
    assert not has_manifest(tmp_path / "backup")
