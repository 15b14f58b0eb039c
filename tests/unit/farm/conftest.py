"""Databases and stores of all kinds for the farm's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import new_database
from s3_server import S3Server, s3_server

from roller_svc.farm import queue
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.tables import metadata
from roller_svc.farm.store import Store


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: Any, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/operations.db"
    return new_database(request.getfixturevalue("postgresql"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A database with the tables of this version."""
    found = Database(database_url)
    metadata.create_all(found.engine)  # what the migrations make (test_database.py), in less time
    yield found
    found.close()


@pytest.fixture
def long_retry_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses before retries longer than any machine takes between two lines of a test."""
    monkeypatch.setattr(queue, "RETRY_DELAYS_S", (60.0, 120.0, 240.0))


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["folder", "s3", "memory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "folder":
            return Store(tmp_path / "store")
        case "memory":
            return Store("memory:")
        case _:
            s3: S3Server = request.getfixturevalue("s3")
            return Store(s3.location(), s3.options)
