"""Uses of clients in the audit log: of keys and tokens, seldom, and beside requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from clocks import ManualClock
from serving import served
from waiting import PATIENCE_S, wait_until

from roller_svc.errors import StoreError
from roller_svc.farm.api_keys import ApiKeys, Scope
from roller_svc.farm.audit import AuditLog
from roller_svc.farm.database.migrate import open_upgraded
from roller_svc.service.app import create_app
from roller_svc.service.authentication import ENVIRONMENT_KEY, client_id_of
from roller_svc.service.client_uses import MAX_CLIENTS, PAUSE_S, UseRecorder
from roller_svc.settings import Settings


async def settle(recorder: UseRecorder) -> None:
    while recorder._writing is not None:
        await asyncio.sleep(0.001)


def test_a_client_is_noted_once_a_minute() -> None:
    async def use() -> None:
        for seconds, client in [(0.0, "a"), (1.0, "a"), (1.0, "b"), (PAUSE_S, "a")]:
            clock.now_s = seconds
            recorder.note(client, client.upper())
            await settle(recorder)

    clock, written = ManualClock(), list[dict[str, str]]()
    recorder = UseRecorder(lambda uses: written.append(dict(uses)), clock)
    asyncio.run(use())
    assert written == [{"a": "A"}, {"b": "B"}, {"a": "A"}]


def test_a_locked_database_takes_one_thread(caplog: pytest.LogCaptureFixture) -> None:
    free, threads = threading.Event(), list[int]()

    def write(uses: Mapping[str, str]) -> None:
        threads.append(len(uses))
        assert free.wait(PATIENCE_S)
        raise StoreError("locked")

    async def use() -> None:
        recorder = UseRecorder(write)
        recorder.note("a", "a")
        while not threads:
            await asyncio.sleep(0.001)
        for number in range(50):
            recorder.note(str(number), "")
        await asyncio.sleep(0.01)
        assert threads == [1]
        free.set()
        await settle(recorder)

    with caplog.at_level(logging.WARNING):
        asyncio.run(use())
    assert threads == [1, 50]
    assert "locked" in caplog.text


def test_a_failure_of_one_write_does_not_end_the_next() -> None:
    written: list[str] = []

    def write(uses: Mapping[str, str]) -> None:
        written.extend(uses)
        if "a" in uses:
            raise ValueError

    async def use() -> None:
        recorder = UseRecorder(write)
        for client in "ab":
            recorder.note(client, "")
            with contextlib.suppress(ValueError):
                assert recorder._writing is not None
                await recorder._writing
            await settle(recorder)

    asyncio.run(use())
    assert written == ["a", "b"]


def test_memory_is_bounded() -> None:
    async def use() -> None:
        for number in range(MAX_CLIENTS + 5):
            recorder.note(str(number), "")
        await settle(recorder)

    recorder = UseRecorder(lambda _: None, ManualClock())
    asyncio.run(use())
    assert len(recorder._noted_s) == 5


def test_keys_that_are_used_are_in_the_log_and_wrong_ones_are_not(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path, api_keys="of the environment")
    with open_upgraded(settings.database_url) as database:
        text, key = ApiKeys(database).add("alice", [Scope.READ])
        expected = {key.id: "alice", client_id_of("of the environment"): ENVIRONMENT_KEY}
        with served(create_app(settings)) as client:
            for offered in ("wrong", text[:-4] + "AAAA", text, text, "of the environment"):
                client.get("/v1/version", headers={"X-API-Key": offered})
            wait_until(lambda: {use.client for use in AuditLog(database).uses()} == expected.keys())
        assert {use.client: use.name for use in AuditLog(database).uses()} == expected
