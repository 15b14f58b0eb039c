"""API keys in the database: made once, hashed, limited in time and scope, revoked. On both databases."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import update

from roller_svc.errors import ArgumentError, NotFoundError
from roller_svc.farm.api_keys import ApiKeys, Scope, has_key, id_of_key, make_key, parse_scopes, with_included
from roller_svc.farm.audit import AuditEvent, AuditLog
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import api_keys


@pytest.fixture
def keys(database: Database) -> ApiKeys:
    return ApiKeys(database)


def test_a_key_is_stored_as_a_hash(keys: ApiKeys, database: Database) -> None:
    text, key = keys.add("alice", [Scope.COMPILE], quota=3)
    assert re.fullmatch(r"rk_[0-9a-f]{12}_[A-Za-z0-9_-]{43}", text)
    assert id_of_key(text) == key.id
    assert (key.name, key.quota, key.is_valid) == ("alice", 3, True)
    assert (key.expire_time, key.revoke_time) == (None, None)
    secret = text.split("_", 2)[2]
    with database.read() as connection:
        row = connection.execute(api_keys.select()).one()
    assert secret not in repr(tuple(row))
    assert secret not in repr(key)
    assert has_key(key, text)


def test_only_the_whole_key_is_the_key(keys: ApiKeys) -> None:
    text, key = keys.add("alice", [Scope.READ])
    other, _ = keys.add("bob", [Scope.READ])
    wrong = f"rk_{key.id}_{other.split('_', 2)[2]}"
    assert id_of_key(wrong) == key.id
    assert not has_key(key, wrong)
    assert not has_key(None, text)
    for damaged in (text[:-1], text + "x", text.upper(), f" {text}", text.replace("rk_", "rk-"), "rk__", ""):
        assert id_of_key(damaged) is None


def test_keys_are_random() -> None:
    texts = {make_key()[0] for _ in range(100)}
    assert len({text.split("_", 2)[2][:6] for text in texts}) == 100


def test_an_expired_or_revoked_key_is_invalid(keys: ApiKeys, database: Database) -> None:
    _, lasting = keys.add("lasting", [Scope.READ], lifetime_s=3600)
    _, short = keys.add("short", [Scope.READ], lifetime_s=3600)
    _, revoked = keys.add("revoked", [Scope.READ])
    with database.write() as connection:
        connection.execute(update(api_keys).where(api_keys.c.id == short.id).values(expire_time=now_s() - 1))
    keys.revoke(revoked.id)
    keys.revoke(revoked.id)  # again does nothing
    assert {key.name: key.is_valid for key in keys.all()} == {"lasting": True, "short": False, "revoked": False}
    assert [key.name for key in keys.all()] == ["lasting", "short", "revoked"]
    assert 3500 < (lasting.expires_in_s or 0) <= 3600


def test_errors_name_the_fault(keys: ApiKeys) -> None:
    with pytest.raises(NotFoundError, match="'0'"):
        keys.revoke("0")
    with pytest.raises(ArgumentError, match="scope"):
        keys.add("alice", [])
    for name in ("", "x" * 81, "two\nlines", "\x00"):
        with pytest.raises(ArgumentError, match="name"):
            keys.add(name, [Scope.READ])


def test_scopes_include_the_ones_before() -> None:
    assert with_included([]) == frozenset()
    assert with_included([Scope.COMPILE]) == {Scope.READ, Scope.COMPILE}
    assert with_included([Scope.ADMIN]) == set(Scope)
    assert parse_scopes(["measure", "other", 7, None]) == {Scope.READ, Scope.COMPILE, Scope.MEASURE}


def test_a_quota_is_changed_and_taken_away(keys: ApiKeys, database: Database) -> None:
    _, key = keys.add("alice", [Scope.COMPILE], quota=3)
    for quota in (7, None):
        keys.limit(key.id, quota, "local:root")
        assert keys.all()[0].quota == quota
    entries = AuditLog(database).entries(event=AuditEvent.KEY_LIMITED, limit=9)
    assert [(entry.client, entry.subject, entry.details) for entry in entries] == [
        ("local:root", key.id, {}),
        ("local:root", key.id, {"quota": 7}),
    ]
    with pytest.raises(NotFoundError):
        keys.limit("0" * 12, 7)
