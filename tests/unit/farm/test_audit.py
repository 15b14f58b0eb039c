"""The audit log: who did what, and when clients were used. On both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from roller_svc.farm.api_keys import ApiKeys, Scope
from roller_svc.farm.audit import MAX_SUBJECT_CHARACTERS, AuditEntry, AuditEvent, AuditLog, local_client
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import audit, client_uses
from roller_svc.farm.operations import CacheStatus
from roller_svc.farm.queue import MAX_PROGRAM_CHARACTERS, OperationQueue, Submission

ACTION = "sha256:" + "a" * 64


@pytest.fixture
def log(database: Database) -> AuditLog:
    return AuditLog(database)


@pytest.fixture
def queue(database: Database) -> OperationQueue:
    return OperationQueue(database, "g", max_alive=9)


def told(entries: list[AuditEntry]) -> list[tuple[str, str, str]]:
    return [(entry.client, entry.event, entry.subject) for entry in entries]


def test_keys_are_made_and_revoked_by_someone(log: AuditLog, database: Database) -> None:
    keys = ApiKeys(database)
    text, key = keys.add("alice", [Scope.COMPILE], quota=3, by="local:root")
    for by in ("local:eve", "local:late"):
        keys.revoke(key.id, by)  # the second time nothing happens
    entries = log.entries(limit=9)
    assert told(entries) == [("local:eve", "key-revoked", key.id), ("local:root", "key-made", key.id)]
    assert entries[1].details == {"name": "alice", "scopes": ["read", "compile"][1:], "quota": 3}
    assert text.split("_", 2)[2] not in repr(entries)


def test_requests_are_told_by_client_and_what_they_are_of(log: AuditLog, queue: OperationQueue) -> None:
    request = {"expression": "y[i] = x[i]" + " " * MAX_PROGRAM_CHARACTERS}
    first = queue.submit(Submission(ACTION, request, "build.cuda", "ann", request_id="r1"))
    again = queue.submit(Submission(ACTION, request, "build.cuda", "ann"))
    other = queue.submit(Submission(ACTION, request, "build.cuda", "bob"))
    assert (again.id, other.id, other.cache) == (first.id, first.id, CacheStatus.JOINED)
    entries = log.entries(limit=9)
    assert told(entries) == [("bob", "requested", first.id), ("ann", "requested", first.id)]  # asking again tells nothing new
    details = entries[1].details
    assert (details["cache"], details["action"], details["queue"], details["request_id"]) == ("miss", ACTION, "build.cuda", "r1")
    assert str(details["program"]).startswith("y[i] = x[i]")
    assert len(str(details["program"])) == MAX_PROGRAM_CHARACTERS
    assert "request_id" not in entries[0].details


def test_a_request_for_a_model_names_its_blob(log: AuditLog, queue: OperationQueue) -> None:
    queue.submit(Submission(ACTION, {"model": {"blob": "f" * 64, "format": "onnx"}}, "q", "ann"))
    assert "f" * 64 in str(log.entries(limit=1)[0].details["program"])


def test_cancellations_are_told_while_there_is_something_to_cancel(log: AuditLog, queue: OperationQueue) -> None:
    operation = queue.submit(Submission(ACTION, {}, "q", "ann"))
    queue.submit(Submission(ACTION, {}, "q", "bob"))
    queue.cancel(operation.id, "ann")
    queue.cancel(operation.id, "root", for_all=True)
    queue.cancel(operation.id, "ann")  # it is done
    queue.cancel("unknown", "ann")
    waiting = queue.submit(Submission("0" * 64, {}, "q", "ann"))
    queue.cancel(waiting.id, "bob")  # who does not wait for it
    cancelled = [entry for entry in log.entries(limit=9) if entry.event != "requested"]
    assert told(cancelled) == [("root", "cancelled-for-all", operation.id), ("ann", "cancelled", operation.id)]


def test_entries_outlive_the_operation_they_tell_of(log: AuditLog, queue: OperationQueue) -> None:
    operation = queue.submit(Submission(ACTION, {}, "q", "ann"))
    queue.cancel(operation.id, "ann")
    assert queue.forget(-1.0) == 1
    assert {entry.subject for entry in log.entries(limit=9)} == {operation.id}


def test_entries_are_selected_and_forgotten_by_age(log: AuditLog, database: Database) -> None:
    log.record(AuditEvent.PINNED, local_client(), "x" * 200)
    log.record(AuditEvent.UNPINNED, "b", "2")
    with database.write() as connection:
        connection.execute(update(audit).where(audit.c.client == "b").values(time=now_s() - 100.0))
    assert told(log.entries(limit=1)) == [("b", "unpinned", "2")]
    assert [entry.subject for entry in log.entries(client=local_client(), limit=9)] == ["x" * MAX_SUBJECT_CHARACTERS]
    assert told(log.entries(event=AuditEvent.UNPINNED, limit=9)) == [("b", "unpinned", "2")]
    assert [entry.client for entry in log.entries(newer_than_s=50.0, limit=9)] == [local_client()]
    log.forget(50.0)
    assert [entry.client for entry in log.entries(limit=9)] == [local_client()]


def test_the_first_and_the_last_use_of_a_client(log: AuditLog, database: Database) -> None:
    log.note_uses({"a": "alice", "b": "bob"})
    with database.write() as connection:
        connection.execute(update(client_uses).values(first_time=now_s() - 100.0, last_time=now_s() - 100.0))
    log.note_uses({"a": "alice again"})
    first, second = log.uses()
    assert (first.client, first.name, second.client) == ("a", "alice again", "b")
    assert first.first_time == second.first_time == second.last_time < first.last_time
    log.forget(50.0)
    assert [use.client for use in log.uses()] == ["a"]


def test_names_of_clients_can_be_stored_and_shown(log: AuditLog) -> None:
    log.note_uses({"a": "\ud800\x1b[2Jbob\nfake\0"})
    assert [use.name for use in log.uses()] == [r"\ud800\x1b[2Jbob\nfake\x00"]
