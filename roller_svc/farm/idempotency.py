"""Idempotency keys: a client repeats a request with its key and gets the operation of the first one.

A key is remembered for a day. See draft-ietf-httpapi-idempotency-key-header.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sqlalchemy import Connection, delete, select

from roller_svc.errors import ConflictError
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import idempotency_keys as keys

REMEMBER_S = 86_400.0


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with an idempotency key. Only hashes of the key and of the content are stored."""

    client: str
    key: str
    content: bytes  # whatever decides the result

    @property
    def key_hash(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()

    @property
    def request_hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


class IdempotencyKeys:
    """The table of idempotency keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, request: KeyedRequest) -> str | None:
        """Return the id of the operation of the same request. Raises ConflictError for another request's key."""
        query = select(keys.c.request_hash, keys.c.operation).where(
            keys.c.client == request.client,
            keys.c.key_hash == request.key_hash,
            keys.c.create_time > now_s() - REMEMBER_S,
        )
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            return None
        if row.request_hash != request.request_hash:
            raise _conflict()
        return str(row.operation)


def record_key(connection: Connection, database: Database, request: KeyedRequest, operation_id: str) -> None:
    """Give a request's key its operation, within the transaction that queues it; forget the keys of the day before.

    Raises ConflictError if another request has the key, and whoever has the operation then must not queue it.
    """
    values = {
        "client": request.client, "key_hash": request.key_hash, "request_hash": request.request_hash,
        "operation": operation_id, "create_time": now_s(),
    }  # fmt: skip
    insertion = (
        database.insert(keys)
        .values(values)
        .on_conflict_do_update(
            index_elements=[keys.c.client, keys.c.key_hash],
            set_={"operation": operation_id, "create_time": now_s()},
            where=keys.c.request_hash == request.request_hash,
        )
    )
    connection.execute(delete(keys).where(keys.c.create_time <= now_s() - REMEMBER_S))
    if connection.execute(insertion.returning(keys.c.operation)).first() is None:
        raise _conflict()


def _conflict() -> ConflictError:
    return ConflictError(
        "the Idempotency-Key belongs to another request",
        code="idempotency-key-reused",
        hint="send a new key with each request that is not a repetition",
    )
