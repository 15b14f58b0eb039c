"""Bring a database to this version's tables. Safe to call from several processes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from roller_svc.errors import StoreError
from roller_svc.farm.database.connect import Database

SCRIPTS = Path(__file__).with_name("migrations")
_LOCK = 0x726F6C6C  # of PostgreSQL's advisory locks


def upgrade(database: Database) -> None:
    """Apply the missing migrations. Raises StoreError for a database of a newer version."""
    with database.read() as connection:
        if _revision(connection) == _script().get_current_head():
            return
    with database.write() as connection:
        if not database.is_sqlite:  # SQLite's writers exclude each other
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        _refuse_newer(_revision(connection))
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    database.checkpoint()


def check_revision(database: Database) -> str:
    """Return the revision of a database. Raises StoreError unless it has the tables of this version."""
    with database.read() as connection:
        revision = _revision(connection)
    _refuse_newer(revision)
    head = _script().get_current_head()
    if revision is None or revision != head:
        raise StoreError(
            f"expected a database with tables of revision {head}, got {revision or 'one without tables'}: "
            "use the version that runs, or start a service of this version first",
            code="database-older",
        )
    return revision


def _refuse_newer(revision: str | None) -> None:
    known = {script.revision for script in _script().walk_revisions()}
    if revision is not None and revision not in known:
        raise StoreError(
            f"the database has the tables of a newer version ({revision}): run that version, or restore a backup",
            code="database-newer",
        )


@contextmanager
def open_upgraded(url: str) -> Iterator[Database]:
    """Open a database, with the tables of this version."""
    database = Database(url)
    try:
        upgrade(database)
        yield database
    finally:
        database.close()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return config


def _script() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())
