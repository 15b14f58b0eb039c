"""Keys of actions, in parts: which part of a request's key differs from the nearest result in the store.

A part is its hash; what it contains is in a table of its own, once for all actions that share it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, select, union

from roller_svc.compiler.action import PARTS, ActionKey
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import action_parts, actions, operations
from roller_svc.farm.operations import format_time
from roller_svc.farm.store import Json, Store

MAX_CANDIDATES = 200  # entries that are compared
MAX_FIELDS = 50  # that are listed for a part
ABSENT = None  # value of a field that one of two parts lacks
_COLUMNS = [actions.c[name] for name in PARTS]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of a part, by its path, with both values."""

    field: str
    this: object
    nearest: object


@dataclass(frozen=True, slots=True)
class PartDifference:
    """A part of the key that differs, and its first fields that do."""

    part: str
    fields: list[FieldDifference]


@dataclass(frozen=True, slots=True)
class NearestAction:
    """The stored action whose key is the most alike."""

    action: str
    result: str  # digest of its kernel or model
    create_time: str
    differences: list[PartDifference]


@dataclass(frozen=True, slots=True)
class RememberedError:
    """An error of a request's own, and until when it stands."""

    code: str
    message: str
    until: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an action is a hit or a miss. `parts` is empty for an action without a record."""

    action: str
    result: str | None
    parts: Mapping[str, str]
    nearest: NearestAction | None
    remembered_error: RememberedError | None = None  # that a request gets without a build


class ActionLog:
    """The keys of actions that were submitted."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database = database
        self._store = store

    def record(self, key: ActionKey, contents: Mapping[str, object]) -> None:
        """Record the key of an action that is to be built; do nothing if it is known."""
        known = select(actions.c.action).where(actions.c.action == key.digest)
        with self._database.read() as connection:
            if connection.execute(known).first() is not None:
                return
        with self._database.write() as connection:
            # Others may record the same parts meanwhile; in one order, so that they wait for each other and no more.
            parts = sorted((digest, part) for part, digest in key.parts.items())
            for digest, part in parts:
                values = {"digest": digest, "content": contents[part]}
                connection.execute(self._database.insert(action_parts).values(values).on_conflict_do_nothing())
            row = {"action": key.digest, "kind": key.kind, "create_time": now_s(), **key.parts}
            connection.execute(self._database.insert(actions).values(row).on_conflict_do_nothing())

    def forget(self, removed: Collection[str]) -> None:
        """Delete the keys of actions whose results were removed from the store."""
        if not removed:
            return
        with self._database.write() as connection:
            connection.execute(delete(actions).where(actions.c.action.in_(sorted(removed))))
            _delete_unused_parts(connection)

    def forget_unbuilt(self, older_than_s: float) -> None:
        """Delete the keys of actions that were submitted that long ago and not built."""
        with self._database.read() as connection:
            query = select(actions.c.action).where(actions.c.create_time < now_s() - older_than_s)
            old = connection.scalars(query.where(actions.c.build_time.is_(None))).all()
        self.forget(old)

    def explain(self, key: ActionKey, contents: Mapping[str, object]) -> Explanation:
        """Compare a key with those of the stored actions."""
        result = self._result(key.digest)
        if result is not None:
            return Explanation(key.digest, result, key.parts, None)
        return Explanation(key.digest, None, key.parts, self._nearest(key, contents), self._remembered_error(key.digest))

    def explain_known(self, action: str) -> Explanation | None:
        """Explain an action by its digest; None if it is neither recorded nor stored."""
        with self._database.read() as connection:
            row = connection.execute(select(actions).where(actions.c.action == action)).one_or_none()
        if row is not None:
            key = ActionKey(action, row.kind, {part: getattr(row, part) for part in PARTS})
            return self.explain(key, {part: self._content(digest) for part, digest in key.parts.items()})
        result = self._result(action)
        return None if result is None else Explanation(action, result, {}, None)

    def _nearest(self, key: ActionKey, contents: Mapping[str, object]) -> NearestAction | None:
        for row in self._candidates(key):
            result = self._result(row.action)
            if result is not None:
                differences = [
                    PartDifference(part, list(_differences(contents[part], self._content(getattr(row, part)))))
                    for part in PARTS
                    if getattr(row, part) != key.parts[part]
                ]
                return NearestAction(row.action, result, format_time(row.create_time), differences)
        return None

    def _remembered_error(self, action: str) -> RememberedError | None:
        query = (
            select(operations.c.error, operations.c.remember_until)
            .where(operations.c.action == action, operations.c.remember_until > now_s())
            .order_by(operations.c.end_time.desc())
            .limit(1)
        )
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
        return row and RememberedError(row.error["code"], row.error["message"], format_time(row.remember_until))

    def _candidates(self, key: ActionKey) -> list[Row[Any]]:
        """Return built actions, the nearest first: the same expression before all else, then the most equal parts."""
        built = select(actions).where(actions.c.kind == key.kind, actions.c.build_time.is_not(None), actions.c.action != key.digest)
        latest = actions.c.build_time.desc()
        alike = built.where(actions.c.expression == key.parts["expression"]).order_by(latest).limit(MAX_CANDIDATES)
        others = built.where(actions.c.spec == key.parts["spec"]).order_by(latest).limit(MAX_CANDIDATES)
        with self._database.read() as connection:
            rows = connection.execute(alike).all()
            rows = rows or connection.execute(others).all()
            rows = rows or connection.execute(built.order_by(latest).limit(MAX_CANDIDATES)).all()

        def count_equal(row: Row[Any]) -> int:
            return sum(getattr(row, part) == key.parts[part] for part in PARTS)

        return sorted(rows, key=count_equal, reverse=True)  # stable: the latest of equal ones is first

    def _result(self, action: str) -> str | None:
        facts = self._store.find_result(action)
        return None if facts is None else str(facts["digest"])

    def _content(self, digest: str) -> object:
        with self._database.read() as connection:
            return connection.scalar(select(action_parts.c.content).where(action_parts.c.digest == digest))


def explanation_json(explanation: Explanation) -> Json:
    """Encode an explanation."""
    nearest, remembered = explanation.nearest, explanation.remembered_error
    return {
        "action": explanation.action,
        "result": explanation.result,
        "remembered_error": None
        if remembered is None
        else {
            "code": remembered.code,
            "message": remembered.message,
            "until": remembered.until,
        },
        "parts": dict(explanation.parts),
        "nearest": None
        if nearest is None
        else {
            "action": nearest.action,
            "result": nearest.result,
            "create_time": nearest.create_time,
            "differences": [
                {
                    "part": part.part,
                    "fields": [{"field": each.field, "this": each.this, "nearest": each.nearest} for each in part.fields],
                }
                for part in nearest.differences
            ],
        },
    }


def _delete_unused_parts(connection: Connection) -> None:
    used = union(*(select(column) for column in _COLUMNS))
    connection.execute(delete(action_parts).where(action_parts.c.digest.not_in(used)))


def _differences(this: object, nearest: object) -> Iterator[FieldDifference]:
    left, right = dict(_flatten("", this)), dict(_flatten("", nearest))
    names = [name for name in (left | right) if left.get(name, ABSENT) != right.get(name, ABSENT)]
    for name in names[:MAX_FIELDS]:
        yield FieldDifference(name, left.get(name, ABSENT), right.get(name, ABSENT))


def _flatten(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the leaves of a JSON value with their paths."""
    if isinstance(value, list) and any(isinstance(member, dict) for member in value):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, member in value.items():
            yield from _flatten(f"{path}.{name}" if path else str(name), member)
    else:
        yield path, value
