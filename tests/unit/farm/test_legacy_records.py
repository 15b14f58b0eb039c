"""Operations that earlier versions recorded as files are built after the upgrade."""

from __future__ import annotations

import json
from pathlib import Path

from roller_svc.farm.database.connect import Database
from roller_svc.farm.legacy_records import import_records
from roller_svc.farm.queue import OperationQueue

REQUEST = {"expression": "y[i] = x[i]"}


def test_unfinished_operations_are_queued_once(database: Database, tmp_path: Path) -> None:
    folder = tmp_path / "operations"
    folder.mkdir()
    records: dict[str, object] = {
        "1-queued": {"id": "1-queued", "stage": "queued", "request": REQUEST},
        "2-building": {"id": "2-building", "stage": "building", "request": REQUEST},
        "3-done": {"id": "3-done", "stage": "done", "request": REQUEST},
        "4-list": [],
        "5-none": {"stage": "queued"},
        "6_bad_id": {"stage": "queued", "request": REQUEST},
    }
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    (folder / "7-torn.json").write_text('{"id": "7')
    (folder / "8-deep.json").write_text("[" * 100_000)
    queue = OperationQueue(database, "a" * 64, max_alive=1)
    assert import_records(tmp_path, queue) == 2
    assert import_records(tmp_path, queue) == 0
    assert not folder.exists()
    assert [(each.id, each.request) for each in queue.foreign((), 9)] == [
        ("1-queued", REQUEST),
        ("2-building", REQUEST),
    ]


def test_a_store_without_records_is_left_alone(database: Database, tmp_path: Path) -> None:
    assert import_records(tmp_path, OperationQueue(database, "a" * 64, max_alive=1)) == 0
    assert list(tmp_path.glob("*-imported")) == []
