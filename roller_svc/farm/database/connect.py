"""Connect to the farm's database: SQLite in a file, or PostgreSQL."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Double, Engine, Integer, Table, create_engine, delete, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError as UrlError
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.database.tables import api_keys, interests, operations, probes

BUSY_TIMEOUT_S = 20.0  # how long a writer of SQLite waits for another
REQUEST_BUSY_TIMEOUT_S = 5.0  # the same for a request of a client, which waits for the answer
CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 20  # of PostgreSQL
POOL_SIZE, MAX_OVERFLOW = 8, 24
POOL_TIMEOUT_S = 10
PROBE_S = 3600.0  # after which the row of a process that has ended is removed
SQLITE_CACHE_KIB = 512  # of pages in memory, for each connection: the kernel has the file in its own cache
_DRIVERS = {
    "sqlite": "sqlite", "sqlite+pysqlite": "sqlite", "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}  # fmt: skip


class now_s(FunctionElement[float]):  # noqa: N801 - reads as an SQL function
    """The database's clock in seconds since 1970, so that the clocks of machines need not agree."""

    type = Double()
    inherit_cache = True


@compiles(now_s, "sqlite")
def _now_in_sqlite(element: now_s, compiler: SQLCompiler, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now_s, "postgresql")
def _now_in_postgresql(element: now_s, compiler: SQLCompiler, **_: Any) -> str:
    return "(extract(epoch from clock_timestamp())::double precision)"


class today(FunctionElement[int]):  # noqa: N801 - reads as an SQL function
    """The day of the database's clock since 1970, in UTC."""

    type = Integer()
    inherit_cache = True


@compiles(today, "sqlite")
def _today_in_sqlite(element: today, compiler: SQLCompiler, **_: Any) -> str:
    return "CAST(julianday('now') - 2440587.5 AS INTEGER)"


@compiles(today, "postgresql")
def _today_in_postgresql(element: today, compiler: SQLCompiler, **_: Any) -> str:
    return "(floor(extract(epoch from clock_timestamp()) / 86400)::integer)"


class Database:
    """A database whose failures are StoreErrors.

    Args:
        url: `sqlite:///FILE` or `postgresql://USER:PASSWORD@HOST/NAME`.
        busy_timeout_s: how long a writer of SQLite waits for another.
    """

    def __init__(self, url: str | URL, *, busy_timeout_s: float = BUSY_TIMEOUT_S) -> None:
        self.url = parse_url(url)
        self._process = uuid.uuid4().hex  # of the row that `check` writes
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url, busy_timeout_s) if self.is_sqlite else _postgresql_engine(self.url)

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Run queries that change nothing, each seeing the latest commits."""
        with as_store_error(), self.engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """Run one transaction: committed at the end of the block, rolled back if it raises."""
        with as_store_error(), self.engine.begin() as connection:
            yield connection

    def insert(self, table: Table) -> Any:
        """Return the dialect's INSERT, which has ON CONFLICT; both databases spell it alike."""
        return (sqlite if self.is_sqlite else postgresql).insert(table)

    def check(self) -> None:
        """Write a row, and read it and one of each table that requests need. Raises StoreError."""
        values = {"process": self._process, "time": now_s()}
        row = self.insert(probes).values(values)
        with self.write() as connection:
            connection.execute(delete(probes).where(func.abs(now_s() - probes.c.time) > PROBE_S))
            connection.execute(row.on_conflict_do_update(index_elements=[probes.c.process], set_=values))
        with self.read() as connection:
            if connection.execute(select(probes).where(probes.c.process == self._process)).first() is None:
                raise StoreError("the database has lost what was written to it", code="database-error")
            for table in (operations, interests, api_keys):
                latest = [column.desc() for column in table.primary_key]
                connection.execute(select(table).order_by(*latest).limit(1)).all()

    def checkpoint(self) -> None:
        """Write what SQLite's log has to the database's file, as far as readers allow. A copy of the file then has it."""
        if self.is_sqlite:
            with self.read() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")

    def close(self) -> None:
        self.engine.dispose()


def parse_url(url: str | URL) -> URL:
    """Parse a database's URL. Raises ArgumentError, which never quotes the password."""
    try:
        parsed = make_url(url)
    except UrlError as failure:
        raise _invalid_url("it is not a URL") from failure
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise _invalid_url(f"expected sqlite or postgresql, got {parsed.drivername[:40]!r}")
    if driver == "sqlite" and not parsed.database:
        raise _invalid_url("SQLite needs a file")
    return parsed.set(drivername=driver)


def _invalid_url(why: str) -> ArgumentError:
    hint = "sqlite:///FILE, or postgresql://USER:PASSWORD@HOST:PORT/NAME"
    return ArgumentError(f"ROLLER_DATABASE: {why}", code="invalid-setting", hint=hint)


@contextlib.contextmanager
def as_store_error() -> Iterator[None]:
    """Turn a failure of the database into a StoreError, which is transient."""
    try:
        yield
    except SQLAlchemyError as failure:
        why = failure.orig if isinstance(failure, DBAPIError) else failure
        words = " ".join(str(why).split())[:200]
        raise StoreError(f"the database failed: {words}", code="database-error") from failure


def _sqlite_engine(url: URL, busy_timeout_s: float) -> Engine:
    assert url.database is not None
    with contextlib.suppress(OSError):  # connecting reports what is wrong
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(
        url,
        connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
        pool_size=POOL_SIZE,
        max_overflow=MAX_OVERFLOW,
        pool_timeout=POOL_TIMEOUT_S,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # transactions are begun below, not by the driver
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"cache_size=-{SQLITE_CACHE_KIB}"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            # A transaction that reads before it writes cannot wait for another writer: lock at its begin.
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgresql_engine(url: URL) -> Engine:
    try:
        return create_engine(
            url,
            pool_size=POOL_SIZE,
            max_overflow=MAX_OVERFLOW,
            pool_timeout=POOL_TIMEOUT_S,
            pool_pre_ping=True,  # replaces connections of a server that restarted
            connect_args={
                "client_encoding": "utf8",  # of a database in SQL_ASCII too
                "connect_timeout": CONNECT_TIMEOUT_S,
                "options": f"-c statement_timeout={STATEMENT_TIMEOUT_S}s -c timezone=UTC",
            },
        )
    except ImportError as failure:
        raise ArgumentError(
            "ROLLER_DATABASE: the driver of PostgreSQL is not installed",
            code="invalid-setting",
            hint="pip install 'roller-svc[farm]'",
        ) from failure
