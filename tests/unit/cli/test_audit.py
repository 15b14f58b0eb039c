"""`roller audit`, and what `roller keys` and `roller store pin` leave in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import text_kernel

from roller_svc.cli import main
from roller_svc.compiler.request import build_request
from roller_svc.farm.audit import AuditLog, local_client
from roller_svc.farm.database.connect import Database
from roller_svc.farm.store import Store
from roller_svc.farm.usage import DailyUsage
from roller_svc.settings import Resource, Settings

BUILT = text_kernel(build_request("y[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model"), "text")


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    text = capsys.readouterr().out
    return json.loads(text) if text else None


def test_keys_and_pins_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "store")
    Store(folder).publish("sha256:" + "a" * 64, BUILT)
    main(["store", "pin", BUILT.digest, "--store", folder])
    assert "not in the audit log" in capsys.readouterr().err  # there is no database yet
    key = run(capsys, "keys", "add", "alice", "--store", folder)
    main(["store", "pin", BUILT.digest, "--store", folder])
    main(["store", "pin", "--remove", BUILT.digest, "--store", folder])
    main(["keys", "revoke", key["id"], "--store", folder])
    events = run(capsys, "audit", "events", "--store", folder)["events"]
    assert [(each["event"], each["subject"]) for each in events] == [
        ("key-revoked", key["id"]),
        ("unpinned", BUILT.digest),
        ("pinned", BUILT.digest),
        ("key-made", key["id"]),
    ]
    assert {each["client"] for each in events} == {local_client()}
    some = run(capsys, "audit", "events", "--store", folder, "--event", "pinned", "--days", "1", "--count", "9")["events"]
    assert [each["event"] for each in some] == ["pinned"]
    assert run(capsys, "audit", "events", "--store", folder, "--client", "nobody")["events"] == []
    run(capsys, "audit", "events", "--store", folder, "--count", "0", code=2)


def test_tables_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    main(["keys", "add", "alice", "--store", folder])
    database = Database(Settings(store=folder).database_url)
    AuditLog(database).note_uses({"0123456789ab": "alice"})
    database.close()
    capsys.readouterr()
    assert main(["audit", "events", "--store", folder]) == 0
    assert "key-made" in capsys.readouterr().out
    assert main(["audit", "clients", "--store", folder]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "client"
    assert row.startswith("0123456789ab  alice  ")


def test_keys_have_limits_and_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path)
    key = run(capsys, "keys", "add", "alice", "--quota", "3", "--store", folder)
    database = Database(Settings(store=folder).database_url)
    AuditLog(database).note_uses({key["id"]: "alice"})
    daily = DailyUsage(database)
    daily.add(key["id"], Resource.BUILD_SECONDS, 12.5)
    daily.add("", Resource.STORED_BYTES, 4096)
    database.close()
    run(capsys, "keys", "limit", key["id"], "--quota", "9", "--store", folder)
    run(capsys, "keys", "limit", key["id"], "--quota", "0", "--store", folder, code=2)
    (listed,) = run(capsys, "keys", "list", "--store", folder)["keys"]
    assert (listed["quota"], listed["first_use_time"]) == (9, listed["last_use_time"])
    assert listed["last_use_time"] is not None
    usage = run(capsys, "audit", "usage", "--store", folder)["clients"]
    assert [(each["name"], each["build_seconds"], each["stored_bytes"]) for each in usage] == [("alice", 12.5, 0), (None, 0, 4096)]
    assert main(["audit", "usage", "--days", "1", "--store", folder]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [key["id"], "alice", "12.5", "0"]
    assert main(["keys", "list", "--store", folder]) == 0
    assert "last used" in capsys.readouterr().out
