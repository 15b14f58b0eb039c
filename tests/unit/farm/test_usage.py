"""What clients use by the day, on both databases."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, update

from roller_svc.errors import QuotaExceededError
from roller_svc.farm.database.connect import Database, today
from roller_svc.farm.database.tables import usage
from roller_svc.farm.usage import ACCOUNT_DAYS, DAY_S, DailyUsage
from roller_svc.settings import Resource


@pytest.fixture
def daily(database: Database) -> DailyUsage:
    return DailyUsage(database)


def shift(database: Database, days: int) -> None:
    with database.write() as connection:
        connection.execute(update(usage).values(day=usage.c.day - days))


def test_amounts_of_all_processes_add_up(daily: DailyUsage, database: Database) -> None:
    others = [DailyUsage(database) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for each in others * 5:
            threads.submit(each.add, "a", Resource.STORED_BYTES, 2.5)
    daily.add("b", Resource.STORED_BYTES, 7)
    daily.add("a", Resource.BUILD_SECONDS, 7)
    allowance = daily.allowance("a", Resource.STORED_BYTES, 60)
    assert (allowance.limit, allowance.left) == (60, 10)
    assert 0 < allowance.seconds <= DAY_S
    allowance.check(10)
    with pytest.raises(QuotaExceededError) as refused:
        allowance.check(11)
    assert refused.value.retry_after_s == allowance.seconds
    with pytest.raises(QuotaExceededError):
        daily.allowance("a", Resource.STORED_BYTES, 50).check()
    assert daily.allowance("a", Resource.STORED_BYTES, None).left == math.inf


def test_each_day_begins_with_nothing(daily: DailyUsage, database: Database) -> None:
    daily.add("a", Resource.STORED_BYTES, 5)
    shift(database, 1)
    assert daily.allowance("a", Resource.STORED_BYTES, 5).left == 5
    daily.add("a", Resource.STORED_BYTES, 1)
    with database.read() as connection:
        rows = connection.execute(select(today() - usage.c.day, usage.c.amount).order_by(usage.c.day)).all()
    assert [tuple(row) for row in rows] == [(1, 5.0), (0, 1.0)]
    shift(database, ACCOUNT_DAYS)
    daily.add("a", Resource.STORED_BYTES, 1)
    with database.read() as connection:
        assert len(connection.execute(select(usage)).all()) == 2  # the oldest one is deleted


def test_totals_of_clients_outlive_their_operations(daily: DailyUsage, database: Database) -> None:
    daily.add("a", Resource.BUILD_SECONDS, 5)
    shift(database, 7)  # operations of that day are forgotten
    daily.add("a", Resource.BUILD_SECONDS, 1)
    daily.add("b", Resource.BUILD_SECONDS, 2)
    daily.add("b", Resource.STORED_BYTES, 3)
    assert daily.totals(30) == {
        "a": {Resource.BUILD_SECONDS: 6, Resource.STORED_BYTES: 0},
        "b": {Resource.BUILD_SECONDS: 2, Resource.STORED_BYTES: 3},
    }
    assert list(daily.totals(7)) == ["b", "a"]  # the most first
    assert daily.totals(7)["a"][Resource.BUILD_SECONDS] == 1
