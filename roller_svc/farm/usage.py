"""Count by the day how many seconds of builds and stored bytes clients use. A day is one of the database's clock, in UTC."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, select

from roller_svc.errors import QuotaExceededError
from roller_svc.farm.database.connect import Database, now_s, today
from roller_svc.farm.database.tables import usage
from roller_svc.settings import Resource

DAY_S = 86_400
ACCOUNT_DAYS = 400  # older usage is deleted
BLOCK_BYTES = 4096  # that a blob takes at least
_WORDS = {Resource.BUILD_SECONDS: "seconds of builds", Resource.STORED_BYTES: "stored bytes"}


@dataclass(frozen=True, slots=True)
class Allowance:
    """The amount that a client may still use, and the seconds until there is more."""

    resource: Resource
    limit: float
    left: float
    seconds: int

    def check(self, amount: float = 0.0) -> None:
        """Raise QuotaExceededError if nothing is left, or less than the amount."""
        if self.left <= 0 or amount > self.left:
            what = _WORDS[self.resource]
            raise QuotaExceededError(f"this client has its part of {what} of a day: {self.limit:g}", retry_after_s=self.seconds)


class DailyUsage:
    """The table of what clients used. All processes share it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def allowance(self, client: str, resource: Resource, limit: float | None) -> Allowance:
        """Return what a client may still use today."""
        with self._database.read() as connection:
            return read_allowance(connection, client, resource, limit)

    def add(self, client: str, resource: Resource, amount: float) -> None:
        """Count an amount for today, and forget what is older than accounts need."""
        insertion = self._database.insert(usage).values(client=client, day=today(), resource=resource.value, amount=amount)
        insertion = insertion.on_conflict_do_update(
            index_elements=[usage.c.client, usage.c.day, usage.c.resource], set_={"amount": usage.c.amount + amount}
        )
        with self._database.write() as connection:
            connection.execute(insertion)
            connection.execute(delete(usage).where(usage.c.day < today() - ACCOUNT_DAYS))

    def totals(self, days: int) -> dict[str, dict[str, float]]:
        """Return what each client used in the last days, today included, by resource; most seconds of builds first."""
        query = (
            select(usage.c.client, usage.c.resource, func.sum(usage.c.amount).label("amount"))
            .where(usage.c.day > today() - days)
            .group_by(usage.c.client, usage.c.resource)
        )
        found: dict[str, dict[str, float]] = {}
        with self._database.read() as connection:
            for row in connection.execute(query):
                found.setdefault(row.client, dict.fromkeys(_WORDS, 0.0))[Resource(row.resource)] = row.amount
        return dict(sorted(found.items(), key=lambda each: (-each[1][Resource.BUILD_SECONDS], each[0])))


def read_allowance(connection: Connection, client: str, resource: Resource, limit: float | None) -> Allowance:
    """Return what a client may still use today; everything if there is no limit."""
    if limit is None:
        return Allowance(resource, math.inf, math.inf, DAY_S)
    used = select(func.coalesce(func.sum(usage.c.amount), 0.0).label("amount"), (now_s() - today() * DAY_S).label("seconds")).where(
        usage.c.client == client, usage.c.day == today(), usage.c.resource == resource.value
    )
    row = connection.execute(used).one()
    return Allowance(resource, limit, limit - row.amount, max(1, math.ceil(DAY_S - row.seconds)))
