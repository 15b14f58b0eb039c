"""A RabbitMQ and a PostgreSQL for the tests of the farm on several machines; each test has stacks of its own."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from databases import new_database
from farm_stack import Broker, PostgreSql, Requests, Stack


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    folder = Path(tempfile.mkdtemp(prefix="roller-mq-"))
    server = Broker(folder / "broker")
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSql]:
    folder = Path(tempfile.mkdtemp(prefix="roller-pg-"))
    server = PostgreSql(folder)
    yield server
    server.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short: addresses of Unix sockets have at most 108 characters."""
    path = Path(tempfile.mkdtemp(prefix="roller-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def farm(folder: Path, broker: Broker, postgresql: PostgreSql) -> Iterator[Stack]:
    """Nothing yet but a database and a broker that services and workers will share."""
    made = Stack(folder, database=new_database(postgresql.url), broker=broker.url)
    yield made
    made.close()


@pytest.fixture
def polling_farm(folder: Path) -> Iterator[Stack]:
    """One of this machine alone: SQLite, without a broker."""
    made = Stack(folder)
    yield made
    made.close()


@pytest.fixture
def requests() -> Iterator[Requests]:
    made = Requests()
    yield made
    made.close()
