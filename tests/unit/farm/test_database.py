"""Connections and migrations, on both databases."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from databases import new_database
from sqlalchemy import Inspector, event, insert, inspect, select, text

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.database.connect import Database, now_s, parse_url
from roller_svc.farm.database.migrate import _config, upgrade
from roller_svc.farm.database.tables import clients, metadata, probes
from roller_svc.farm.queue import OperationQueue


@pytest.fixture
def empty(database_url: str) -> Database:
    return Database(database_url)


def test_migrations_make_the_tables_of_this_version(empty: Database) -> None:
    upgrade(empty)
    with empty.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert indexes(inspect(connection)) == indexes_of_metadata()
    empty.close()


def test_rows_of_an_earlier_version_keep_their_meaning(empty: Database) -> None:
    config = _config()
    with empty.write() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for number, priority in enumerate([0, 5]):
            connection.execute(
                text(
                    "INSERT INTO operations (id, action, request, queue, generator, client, priority, state, create_time,"
                    " start_after, attempt, failures, is_cancelled) VALUES (:id, :id, '{}', 'q', 'g', 'me', :priority,"
                    " 'queued', 1, 1, 0, 0, false)"
                ),
                {"id": f"000000000000{number}-a", "priority": priority},
            )
            connection.execute(text("INSERT INTO interests VALUES (:id, 'me')"), {"id": f"000000000000{number}-a"})
    upgrade(empty)
    queue = OperationQueue(empty, "g", max_alive=9)
    assert [queue.position(f"000000000000{number}-a") for number in (0, 1)] == [1, 0]
    claim = queue.claim("w", ["q"])
    assert claim is not None
    assert claim.id == "0000000000001-a"
    assert queue.cancel("0000000000000-a", "me") is not None
    empty.close()


def test_a_database_without_an_encoding_has_text(postgresql: str) -> None:
    database = Database(new_database(postgresql, "TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"))
    upgrade(database)
    with database.read() as connection:
        assert connection.execute(text("SELECT 'é'")).scalar_one() == "é"
    database.close()


def indexes(inspector: Inspector) -> set[tuple[str, object]]:
    return {
        (str(index["name"]), bool(index["unique"]))
        for table in metadata.tables
        for index in inspector.get_indexes(table)
        if not index.get("duplicates_constraint")
    }


def indexes_of_metadata() -> set[tuple[str, object]]:
    return {(str(index.name), bool(index.unique)) for table in metadata.tables.values() for index in table.indexes}


def test_several_processes_may_upgrade_at_once(database_url: str) -> None:
    databases = [Database(database_url) for _ in range(4)]
    failures: list[Exception] = []

    def run(database: Database) -> None:
        try:
            upgrade(database)
        except StoreError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    upgrade(databases[0])  # does nothing
    for database in databases:
        database.close()


def test_a_database_of_a_newer_version_is_refused(empty: Database) -> None:
    upgrade(empty)
    with empty.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match="9999") as caught:
        upgrade(empty)
    assert caught.value.code == "database-newer"
    empty.close()


def test_the_clock_goes_on_within_a_transaction(database: Database) -> None:
    with database.write() as connection:
        first = connection.scalar(select(now_s()))
        connection.execute(text("SELECT pg_sleep(0.05)")) if not database.is_sqlite else threading.Event().wait(0.05)
        second = connection.scalar(select(now_s()))
    assert first is not None
    assert second is not None
    assert 0.04 < second - first < 30


def test_a_block_that_raises_changes_nothing(database: Database) -> None:
    def fail() -> None:
        with database.write() as connection:
            connection.execute(insert(clients).values(client="a", last_claim=1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with database.read() as connection:
        assert connection.execute(select(clients)).all() == []


def test_failures_are_store_errors(database: Database) -> None:
    with pytest.raises(StoreError, match="the database failed") as caught, database.write() as connection:
        connection.execute(text("SELECT nothing FROM nowhere"))
    assert caught.value.code == "database-error"


def test_a_database_that_is_read_only_fails_its_check(database: Database) -> None:
    database.check()
    database.check()
    with database.read() as connection:
        assert len(connection.execute(select(probes)).all()) == 1
    if not database.is_sqlite:
        with database.write() as connection:
            connection.execute(text(f"ALTER DATABASE {database.url.database} SET default_transaction_read_only = on"))
    else:
        event.listen(database.engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only = ON"))
    database.engine.dispose()
    with pytest.raises(StoreError, match=r"read.?only"):
        database.check()


def test_a_commit_survives_a_power_cut(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a.db")
    with database.read() as connection:
        assert connection.scalar(text("PRAGMA synchronous")) == 2  # FULL
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
    database.close()


def test_a_copy_of_the_file_alone_has_what_a_checkpoint_wrote(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/a.db")
    upgrade(database)
    with database.read() as other:
        assert other.execute(select(clients)).all() == []
        with database.write() as connection:
            connection.execute(insert(clients).values(client="a", last_claim=1))
        assert clients_of_copy(tmp_path) == []  # which has the tables
        database.checkpoint()
        assert clients_of_copy(tmp_path) == ["a"]
    database.close()


def clients_of_copy(folder: Path) -> list[str]:
    """Clients in a copy of a.db without its log."""
    shutil.copy(folder / "a.db", folder / "copy.db")
    copy = Database(f"sqlite:///{folder}/copy.db")
    with copy.read() as connection:
        found = list(connection.scalars(select(clients.c.client)))
    copy.close()
    return found


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://a:secret@b/c", "sqlite://", "oracle+x://secret", "postgresql+nope://secret@h/d"]
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ArgumentError, match="ROLLER_DATABASE") as caught:
        Database(url)
    assert "secret" not in caught.value.message
    assert caught.value.hint is not None


def test_a_database_that_cannot_be_opened_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for url in (f"sqlite:///{tmp_path}/file", f"sqlite:///{tmp_path}/file/x.db"):
        database = Database(url)
        with pytest.raises(StoreError), database.read() as connection:
            connection.scalar(text("SELECT count(*) FROM sqlite_master"))
        database.close()


def test_a_server_that_is_away_is_a_store_error_without_the_password() -> None:
    database = Database("postgresql://user:secret@127.0.0.1:1/none")
    with pytest.raises(StoreError) as caught, database.read():
        pass
    assert "secret" not in caught.value.message
    assert parse_url("postgres" + "ql://a@b/c").drivername == "postgresql+psycopg"
    database.close()


def test_a_writer_waits_as_long_as_its_database_says(tmp_path: Path) -> None:
    patient, hasty = (Database(f"sqlite:///{tmp_path}/a.db", busy_timeout_s=seconds) for seconds in (20.0, 5.0))
    for database, milliseconds in ((patient, 20_000), (hasty, 5_000)):
        with database.read() as connection:
            assert connection.execute(text("PRAGMA busy_timeout")).scalar() == milliseconds
        database.close()
