"""Idempotency keys, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from roller_svc.errors import ConflictError
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import idempotency_keys
from roller_svc.farm.idempotency import REMEMBER_S, IdempotencyKeys, KeyedRequest, record_key


def record(database: Database, request: KeyedRequest, operation_id: str) -> None:
    with database.write() as connection:
        record_key(connection, database, request, operation_id)


@pytest.fixture
def keys(database: Database) -> IdempotencyKeys:
    return IdempotencyKeys(database)


def test_a_key_finds_its_operation(keys: IdempotencyKeys, database: Database) -> None:
    request = KeyedRequest("client", "key", b"body")
    assert keys.find(request) is None
    record(database, request, "1")
    assert keys.find(request) == "1"
    record(database, request, "2")  # the first one is gone
    assert keys.find(request) == "2"
    assert keys.find(KeyedRequest("other", "key", b"body")) is None


def test_a_key_of_another_request_is_a_conflict(keys: IdempotencyKeys, database: Database) -> None:
    record(database, KeyedRequest("client", "key", b"body"), "1")
    other = KeyedRequest("client", "key", b"another")
    with pytest.raises(ConflictError):
        keys.find(other)
    with pytest.raises(ConflictError):  # it was taken between the look and the record
        record(database, other, "2")
    assert keys.find(KeyedRequest("client", "key", b"body")) == "1"


def test_keys_are_forgotten(keys: IdempotencyKeys, database: Database) -> None:
    old, new = KeyedRequest("client", "old", b"body"), KeyedRequest("client", "new", b"body")
    record(database, old, "1")
    with database.write() as connection:
        connection.execute(update(idempotency_keys).values(create_time=now_s() - REMEMBER_S - 1))
    assert keys.find(KeyedRequest("client", "old", b"another")) is None
    record(database, new, "2")
    with database.read() as connection:
        assert [row.operation for row in connection.execute(idempotency_keys.select())] == ["2"]
