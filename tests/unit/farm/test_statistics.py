"""Figures for operators, on both databases."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from roller_svc.errors import CompileError
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import operations
from roller_svc.farm.queue import OperationQueue, Submission
from roller_svc.farm.registry import Worker, WorkerRegistry
from roller_svc.farm.statistics import read_figures


def test_figures_of_an_idle_farm(database: Database) -> None:
    figures = read_figures(database, WorkerRegistry(database))
    assert (figures.queues, figures.ended, figures.wait_s, figures.build_s, figures.workers) == ((), {}, {}, {}, {})


def test_figures_count_queues_ends_times_and_workers(database: Database) -> None:
    queue, registry = OperationQueue(database, "a" * 64, max_alive=100), WorkerRegistry(database)
    for number in range(6):
        queue.submit(Submission(str(number), {}, "build.cuda"))
    queue.submit(Submission("hip", {}, "build.hip"))
    with database.write() as connection:
        connection.execute(update(operations).values(create_time=now_s() - 100))
    for number in range(4):
        claim = queue.claim("w", ("build.cuda",))
        assert claim is not None
        if number < 2:
            assert queue.finish(claim, {"digest": "d"})
        elif number == 2:
            assert queue.fail(claim, CompileError("no"))
    with database.write() as connection:
        ended = update(operations).where(operations.c.state == "done")
        connection.execute(ended.values(claim_time=operations.c.create_time + 30, end_time=operations.c.create_time + 70))
    for name, is_draining in (("1", False), ("2", False), ("3", True)):
        registry.add(Worker(name, ("*",), "a" * 64, {}, is_draining=is_draining))
    figures = read_figures(database, registry)
    counts = {(each.queue, each.state): each.count for each in figures.queues}
    assert counts == {("build.cuda", "queued"): 2, ("build.cuda", "building"): 1, ("build.hip", "queued"): 1}
    assert all(99 < each.oldest_s < 160 for each in figures.queues)
    assert figures.ended == {"ok": 2, "compile-failed": 1}
    assert figures.wait_s == pytest.approx({0.5: 30.0, 0.95: 30.0})
    assert figures.build_s == pytest.approx({0.5: 40.0, 0.95: 40.0})
    assert figures.workers == {"active": 2, "draining": 1}
    with database.write() as connection:
        connection.execute(update(operations).where(operations.c.state == "done").values(end_time=now_s() - 400))
    assert read_figures(database, registry).ended == {}


def test_queues_of_devices_that_nobody_has_are_counted_together(database: Database) -> None:
    queue, registry = OperationQueue(database, "a" * 64, max_alive=100), WorkerRegistry(database)
    names = [*(f"measure.sm_{number}x" for number in range(41)), "measure.sm_90a", "measure.served", "build.cpu.x86-64-v4"]
    for name in names:
        queue.submit(Submission(name, {}, name))
    registry.add(Worker("1", ("measure.served",), "a" * 64, {}))
    counts = {each.queue: each.count for each in read_figures(database, registry).queues}
    assert counts == {"other": 41, "measure.sm_90a": 1, "measure.served": 1, "build.cpu.x86-64-v4": 1}
