"""Keys in memory: how old they may be, and how they are read while the database is slow or away."""

from __future__ import annotations

import asyncio
import threading

import pytest
from waiting import PATIENCE_S

from roller_svc.errors import StoreError
from roller_svc.farm.api_keys import ApiKey, Scope
from roller_svc.service import key_cache
from roller_svc.service.key_cache import MAX_AGE_S, MAX_STALE_S, MIN_AGE_S, KeyCache


class Table:
    """A table of keys that counts its reads and can be away or slow."""

    def __init__(self) -> None:
        self.rows: list[ApiKey] = []
        self.reads = 0
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()
        self.now_s = 1000.0

    def read(self) -> list[ApiKey]:
        assert self.gate.wait(PATIENCE_S)
        self.reads += 1
        if self.is_away:
            raise StoreError("away")
        return list(self.rows)

    def clock(self) -> float:
        return self.now_s


def key(key_id: str, *, is_valid: bool = True, expires_in_s: float | None = None) -> ApiKey:
    return ApiKey(key_id, "name", "0" * 64, frozenset({Scope.READ}), None, "", None, None, is_valid, expires_in_s)


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def cache(table: Table) -> KeyCache:
    cache = KeyCache(table.read, table.clock)
    cache.load()
    return cache


def found(cache: KeyCache, key_id: str) -> ApiKey | None:
    async def find() -> ApiKey | None:
        await cache.refresh()
        return await cache.find(key_id)

    return asyncio.run(find())


def test_a_known_key_costs_no_read(cache: KeyCache, table: Table) -> None:
    table.rows = [key("a")]
    table.now_s += MAX_AGE_S + 1
    for _ in range(100):
        assert found(cache, "a") == key("a")
    assert table.reads == 2


def test_a_new_key_is_found_soon_and_unknown_ones_cost_little(cache: KeyCache, table: Table) -> None:
    table.rows = [key("a")]
    assert found(cache, "a") is None
    table.now_s += MIN_AGE_S + 0.01
    assert found(cache, "a") is not None
    reads = table.reads
    for number in range(100):
        assert found(cache, f"guess{number}") is None
    assert table.reads == reads


def test_a_revocation_is_seen_after_the_greatest_age(cache: KeyCache, table: Table) -> None:
    table.rows = [key("a")]
    cache.load()
    table.rows = [key("a", is_valid=False)]
    table.now_s += MAX_AGE_S
    assert found(cache, "a") is not None
    table.now_s += 0.01
    assert found(cache, "a") is None


def test_a_key_expires_between_reads(cache: KeyCache, table: Table) -> None:
    table.rows = [key("a", expires_in_s=1.0)]
    cache.load()
    table.now_s += 0.9
    assert found(cache, "a") is not None
    table.now_s += 0.2
    assert found(cache, "a") is None
    assert table.reads == 2


def test_keys_are_accepted_for_a_while_without_the_database(cache: KeyCache, table: Table) -> None:
    table.rows = [key("a")]
    cache.load()
    table.is_away = True
    table.now_s += MAX_STALE_S
    assert found(cache, "a") is not None
    table.now_s += 1
    with pytest.raises(StoreError) as away:
        found(cache, "a")
    assert away.value.code == "keys-unreadable"
    table.is_away = False
    assert found(cache, "a") is not None


def test_the_service_does_not_become_open_with_the_last_key(cache: KeyCache, table: Table) -> None:
    assert cache.is_empty
    table.rows = [key("a", is_valid=False)]
    cache.load()
    assert not cache.is_empty
    table.rows = []  # somebody emptied the table
    cache.load()
    assert not cache.is_empty
    assert found(cache, "a") is None


def test_requests_wait_little_for_a_slow_database(cache: KeyCache, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_cache, "LOAD_WAIT_S", 0.05)
    table.rows = [key("a")]
    cache.load()

    async def find_many() -> list[ApiKey | None]:
        table.gate.clear()
        table.now_s += MAX_AGE_S + 1
        await cache.refresh()  # begins to read, and gives up
        table.now_s += 0.1
        results = [await cache.find("a") for _ in range(50)]  # none waits again
        table.gate.set()
        while table.reads < 3:
            await asyncio.sleep(0.001)
        return results

    assert all(asyncio.run(asyncio.wait_for(find_many(), PATIENCE_S)))
    assert table.reads == 3
