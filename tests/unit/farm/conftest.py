"""Databases of both kinds for the farm's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from databases import new_database, postgresql_server

from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.tables import metadata


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    with postgresql_server() as url:
        yield url


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
