"""Readiness: each part is named, none is waited for beyond the time limit, and results are shared for a while."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import served
from waiting import wait_until

from roller_svc.errors import BuildServiceError, StoreError
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service import readiness
from roller_svc.service.app import create_app
from roller_svc.service.readiness import Part, PartStatus, Readiness
from roller_svc.settings import Settings

FINE: Callable[[], None] = lambda: None  # noqa: E731 - a check


def unused(_: BuildRequest) -> Artifact:
    raise AssertionError


def away() -> None:
    raise StoreError("no route to 10.0.0.3")


@pytest.fixture(autouse=True)
def no_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each request check the parts again."""
    monkeypatch.setattr(readiness, "MAX_AGE_S", 0.0)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """A gate that is open at the end, so that no check hangs for ever."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_service_without_its_database_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(Settings(store=tmp_path), unused)
    with served(app) as client:
        assert client.get("/readyz").json() == {"status": "ready", "parts": {"database": "ok", "store": "ok"}}
        with monkeypatch.context() as patch:
            patch.setattr(app.state.roller.farm.queue.database, "check", away)
            response = client.get("/readyz")
            assert (response.status_code, response.json()["code"]) == (503, "database-error")
            assert response.json()["parts"] == {"database": "failed", "store": "ok"}
            assert "10.0.0.3" not in response.text  # for the log alone: clients need no key
        assert client.get("/readyz").status_code == 200


def test_a_service_without_its_store_is_not_ready(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path), unused)) as client:
        shutil.rmtree(tmp_path / "tmp")
        response = client.get("/readyz")
        assert (response.status_code, response.json()["parts"]["store"]) == (503, "failed")
        (tmp_path / "tmp").mkdir()
        assert client.get("/readyz").status_code == 200


@pytest.mark.slow
def test_a_database_that_cannot_be_written_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(create_app(Settings(store=tmp_path), unused)) as client:
        with contextlib.closing(sqlite3.connect(tmp_path / "operations.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")  # holds the write lock
            with monkeypatch.context() as hurried:
                hurried.setattr(readiness, "TIMEOUT_S", 0.2)
                response = client.get("/readyz")
            assert (response.status_code, response.json()["parts"]["database"]) == (503, "timeout")
            other.execute("ROLLBACK")
        wait_until(lambda: client.get("/readyz").status_code == 200)


def test_a_damaged_database_is_noticed(tmp_path: Path) -> None:
    app = create_app(Settings(store=tmp_path, workers=0), unused)
    with served(app) as client:
        assert client.get("/readyz").status_code == 200
        database = app.state.roller.farm.queue.database
        with database.read() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        database.engine.dispose()  # with what its connections remember
        with (tmp_path / "operations.db").open("r+b") as file:
            file.write(b"\xff" * 65536)
        response = client.get("/readyz")
        assert (response.status_code, response.json()["parts"]["database"]) == (503, "failed")


def test_a_full_disk_is_noticed(tmp_path: Path) -> None:
    with served(create_app(Settings(store=tmp_path, min_free_bytes=1 << 60), unused)) as client:
        response = client.get("/readyz")
        assert (response.status_code, response.json()["parts"]) == (503, {"database": "ok", "store": "failed"})


@pytest.mark.slow
def test_a_service_without_its_broker_is_ready_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("celery")
    settings = Settings(store=tmp_path, broker="amqp://u:p@127.0.0.1:1//", workers=0)
    with served(create_app(settings, unused)) as client:
        response = client.get("/readyz")
    assert (response.status_code, response.json()["parts"]["broker"]) == (200, "failed")


def test_a_part_that_hangs_is_a_timeout_and_is_not_asked_twice(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    monkeypatch.setattr(readiness, "TIMEOUT_S", 0.05)
    calls: list[int] = []

    def hang() -> None:
        calls.append(1)
        gate.wait()

    async def read() -> None:
        parts = Readiness({"database": Part(hang, is_essential=True), "store": Part(FINE, is_essential=True)})
        for _ in range(3):
            statuses = await parts.read()
            while statuses["store"] is PartStatus.TIMEOUT:  # a slow machine may be late
                statuses = await parts.read()
            assert statuses == {"database": PartStatus.TIMEOUT, "store": PartStatus.OK}
            assert parts.missing(statuses) == ["database"]
        assert len(calls) == 1
        gate.set()
        while parts.missing(await parts.read()):
            await asyncio.sleep(0.01)

    asyncio.run(read())


def test_requests_share_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "MAX_AGE_S", 60.0)
    calls: list[int] = []

    async def read() -> None:
        parts = Readiness({"store": Part(lambda: calls.append(1), is_essential=True)})
        await asyncio.gather(*(parts.read() for _ in range(100)))
        assert len(calls) == 1

    asyncio.run(read())


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = [BuildServiceError("refused"), BuildServiceError("refused"), None]

    def check() -> None:
        failure = failures.pop(0)
        if failure is not None:
            raise failure

    async def read() -> None:
        parts = Readiness({"broker": Part(check, is_essential=False)})
        for _ in range(3):
            assert parts.missing(await parts.read()) == []

    with caplog.at_level("INFO"):
        asyncio.run(read())
    said = [record.getMessage() for record in caplog.records if record.name == readiness.__name__]
    assert said == ["the broker cannot be reached: refused", "the broker can be reached again"]


def test_a_bug_in_a_check_is_not_taken_for_an_absent_part() -> None:
    def check() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(Readiness({"store": Part(check, is_essential=True)}).read())


def test_a_service_that_shuts_down_is_not_ready(tmp_path: Path) -> None:
    app = create_app(Settings(store=tmp_path), unused)
    with served(app) as client:
        assert client.get("/readyz").status_code == 200
        app.state.roller.begin_shutdown()  # nothing waits, so that no event is set from this thread
        response = client.get("/readyz")
        assert (response.status_code, response.json()["code"]) == (503, "shutting-down")
        assert client.get("/healthz").status_code == 200
