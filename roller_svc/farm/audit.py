"""The audit log: who made, used and revoked keys; who asked for, cancelled and pinned what. All processes share it.

Entries are written in the transaction of what they tell. A hit in the store needs no database: only the request log of
the service has it.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, delete, insert, select

from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import audit, client_uses
from roller_svc.farm.operations import format_time

MAX_SUBJECT_CHARACTERS = 120


class AuditEvent(StrEnum):
    """The kind of an entry."""

    KEY_MADE = "key-made"
    KEY_LIMITED = "key-limited"
    KEY_REVOKED = "key-revoked"
    REQUESTED = "requested"  # a build that was not in the store
    CANCELLED = "cancelled"
    CANCELLED_FOR_ALL = "cancelled-for-all"
    PINNED = "pinned"
    UNPINNED = "unpinned"


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An event. `client` is the id of a key, of a token's subject, or `local:USER` of the command line."""

    time: str
    client: str
    event: str
    subject: str  # id of the operation or of the key, or the digest
    details: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ClientUse:
    """When a client was seen, by its name; exact to a minute."""

    client: str
    name: str
    first_time: str
    last_time: str


def record_event(connection: Connection, event: AuditEvent, client: str, subject: str, **details: object) -> None:
    """Add an entry in a transaction. A detail that is None is left out."""
    known = {name: value for name, value in details.items() if value is not None}
    connection.execute(
        insert(audit).values(
            time=now_s(), client=client, event=event.value, subject=subject[:MAX_SUBJECT_CHARACTERS], details=known
        )
    )


def local_client() -> str:
    """Return who uses the command line on this machine."""
    try:
        return f"local:{pwd.getpwuid(os.getuid()).pw_name}"
    except KeyError:  # a user without a name
        return f"local:{os.getuid()}"


def _printable(name: str) -> str:
    """Return a name with escapes for what a terminal or a database cannot show. An identity provider may let users choose it."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)


class AuditLog:
    """The tables of the audit log."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, event: AuditEvent, client: str, subject: str) -> None:
        """Add an entry."""
        with self._database.write() as connection:
            record_event(connection, event, client, subject)

    def note_uses(self, names: Mapping[str, str]) -> None:
        """Note that clients, given by their ids and names, are used now."""
        with self._database.write() as connection:
            for client, name in names.items():
                known = {"name": _printable(name)[:MAX_SUBJECT_CHARACTERS], "last_time": now_s()}
                insertion = self._database.insert(client_uses).values(client=client, first_time=now_s(), **known)
                connection.execute(insertion.on_conflict_do_update(index_elements=[client_uses.c.client], set_=known))

    def entries(
        self, *, client: str | None = None, event: AuditEvent | None = None, newer_than_s: float | None = None, limit: int
    ) -> list[AuditEntry]:
        """Return entries, the latest first; None: of all clients, of all events, of all times."""
        query = select(audit).order_by(audit.c.number.desc()).limit(limit)
        if client is not None:
            query = query.where(audit.c.client == client)
        if event is not None:
            query = query.where(audit.c.event == event.value)
        if newer_than_s is not None:
            query = query.where(audit.c.time > now_s() - newer_than_s)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [AuditEntry(format_time(row.time), row.client, row.event, row.subject, row.details) for row in rows]

    def uses(self) -> list[ClientUse]:
        """Return when each client was seen, the latest first."""
        query = select(client_uses).order_by(client_uses.c.last_time.desc(), client_uses.c.client)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return [ClientUse(row.client, row.name, format_time(row.first_time), format_time(row.last_time)) for row in rows]

    def forget(self, older_than_s: float) -> None:
        """Delete what is older."""
        with self._database.write() as connection:
            connection.execute(delete(audit).where(audit.c.time < now_s() - older_than_s))
            connection.execute(delete(client_uses).where(client_uses.c.last_time < now_s() - older_than_s))
