"""API keys in the database: scopes, quotas, expiry and revocation.

A key is `rk_<id>_<secret>`. The secret has 256 random bits, so its SHA-256 hash needs no salt and no stretching. The
key is shown once, when it is made; the table has the hash.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from roller_svc.errors import ArgumentError, NotFoundError
from roller_svc.farm.audit import AuditEvent, record_event
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import api_keys as keys
from roller_svc.farm.operations import format_time

PREFIX = "rk_"
KEYS_MARK = "keys/made"  # object of the store that says that there are keys
ID_BYTES = 6
SECRET_BYTES = 32
MAX_NAME_CHARACTERS = 80
_KEY = re.compile(r"rk_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_UNKNOWN_HASH = "0" * 64  # of no key


class Scope(Enum):
    """A permission of a client. Each scope includes the ones before it."""

    READ = "read"  # see operations, kernels, devices; estimate
    COMPILE = "compile"  # build, upload, cancel
    MEASURE = "measure"  # run kernels on devices
    ADMIN = "admin"  # see and cancel the operations of every client


def with_included(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return the scopes and those that they include."""
    order = list(Scope)
    highest = max((order.index(scope) for scope in scopes), default=-1)
    return frozenset(order[: highest + 1])


def parse_scopes(names: Iterable[object]) -> frozenset[Scope]:
    """Return the scopes of those names that are scopes, with those that they include."""
    known = {scope.value: scope for scope in Scope}
    return with_included(known[name] for name in names if isinstance(name, str) and name in known)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret."""

    id: str
    name: str
    key_hash: str
    scopes: frozenset[Scope]
    quota: int | None
    create_time: str
    expire_time: str | None
    revoke_time: str | None
    is_valid: bool  # neither expired nor revoked when it was read
    expires_in_s: float | None  # from then


def make_key() -> tuple[str, str]:
    """Return a new key and its id."""
    key_id = secrets.token_hex(ID_BYTES)
    return f"{PREFIX}{key_id}_{secrets.token_urlsafe(SECRET_BYTES)}", key_id


def id_of_key(text: str) -> str | None:
    """Return the id in a key, or None for a text that is not a key of this form."""
    match = _KEY.fullmatch(text)
    return None if match is None else match[1]


def hash_key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def has_key(known: ApiKey | None, text: str) -> bool:
    """Whether a text is the key. The time depends on neither the text nor the key."""
    stored = _UNKNOWN_HASH if known is None else known.key_hash
    return hmac.compare_digest(hash_key(text), stored) and known is not None


class ApiKeys:
    """The table of API keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        name: str,
        scopes: Collection[Scope],
        *,
        quota: int | None = None,
        lifetime_s: float | None = None,
        by: str = "",
    ) -> tuple[str, ApiKey]:
        """Make a key; return its text, which cannot be read again, and its row. The audit log has who made it."""
        if not scopes:
            raise ArgumentError("a key needs at least one scope", code="invalid-option")
        if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
            raise ArgumentError(
                f"the name of a key must have 1 to {MAX_NAME_CHARACTERS} printable characters", code="invalid-option"
            )
        text, key_id = make_key()
        values = {
            "id": key_id, "name": name, "key_hash": hash_key(text), "quota": quota, "create_time": now_s(),
            "scopes": [scope.value for scope in Scope if scope in scopes],
            "expire_time": None if lifetime_s is None else now_s() + lifetime_s,
        }  # fmt: skip
        with self._database.write() as connection:
            connection.execute(insert(keys).values(values))
            record_event(connection, AuditEvent.KEY_MADE, by, key_id, name=name, scopes=values["scopes"], quota=quota)
        return text, next(key for key in self.all() if key.id == key_id)

    def all(self) -> list[ApiKey]:
        """Return every key, the oldest first, also those that expired or were revoked."""
        query = select(keys, (keys.c.expire_time - now_s()).label("expires_in_s"))
        with self._database.read() as connection:
            return [_to_key(row) for row in connection.execute(query.order_by(keys.c.create_time, keys.c.id))]

    def limit(self, key_id: str, quota: int | None, by: str = "") -> None:
        """Change the quota of a key; None: the service's. Raises NotFoundError. The audit log has who changed it."""
        with self._database.write() as connection:
            _check_known(connection, key_id)
            connection.execute(update(keys).where(keys.c.id == key_id).values(quota=quota))
            record_event(connection, AuditEvent.KEY_LIMITED, by, key_id, quota=quota)

    def revoke(self, key_id: str, by: str = "") -> None:
        """Revoke a key; do nothing if it was revoked. Raises NotFoundError. The audit log has who revoked it."""
        with self._database.write() as connection:
            _check_known(connection, key_id)
            revoked = update(keys).where(keys.c.id == key_id, keys.c.revoke_time.is_(None))
            if connection.execute(revoked.values(revoke_time=now_s())).rowcount:
                record_event(connection, AuditEvent.KEY_REVOKED, by, key_id)


def _check_known(connection: Connection, key_id: str) -> None:
    if connection.execute(select(keys.c.id).where(keys.c.id == key_id)).first() is None:
        raise NotFoundError(f"unknown key {key_id[:40]!r}", code="unknown-key", hint="roller keys list")


def _to_key(row: Row[Any]) -> ApiKey:
    is_expired = row.expires_in_s is not None and row.expires_in_s <= 0
    return ApiKey(
        id=row.id,
        name=row.name,
        key_hash=row.key_hash,
        scopes=parse_scopes(row.scopes),
        quota=row.quota,
        create_time=format_time(row.create_time),
        expire_time=_format(row.expire_time),
        revoke_time=_format(row.revoke_time),
        is_valid=row.revoke_time is None and not is_expired,
        expires_in_s=row.expires_in_s,
    )


def _format(seconds: float | None) -> str | None:
    return None if seconds is None else format_time(seconds)
