"""`roller store` on a folder: what its actions print and do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import text_kernel

from roller_svc.cli import main
from roller_svc.compiler.request import build_request
from roller_svc.farm.backup import RESTORING
from roller_svc.farm.store import Store

ACTION = "sha256:" + "a" * 64
BUILT = text_kernel(build_request("y[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model"), "text")
KERNEL = BUILT.digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path / "store")
    found.publish(ACTION, BUILT)
    return found


def run(capsys: pytest.CaptureFixture[str], store: Store, *words: str, code: int = 0) -> Any:
    assert main(["store", *words, "--store", str(store.folder), "--json"]) == code
    text = capsys.readouterr().out
    return json.loads(text) if text else None


def test_gc_reports_what_it_removed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    size_bytes = sum(info.size_bytes for info in store.objects.list("cas"))
    report = {"removed_results": 0, "removed_blobs": 0, "removed_bytes": 0, "bytes": size_bytes}
    assert run(capsys, store, "gc", "--quota", "0") == report  # everything is younger than the grace period
    assert main(["store", "gc", "--store", str(store.folder)]) == 0
    assert f"{size_bytes} bytes are left" in capsys.readouterr().out
    run(capsys, store, "gc", "--quota", "-1", code=2)


def test_verify_fails_for_damage_until_it_is_removed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, store, "verify")["damaged_blobs"] == []
    blob = next(store.objects.list("cas")).name
    store.objects.write(blob, b"?")
    assert run(capsys, store, "verify", code=1)["damaged_blobs"] == [blob]
    assert run(capsys, store, "verify", "--remove")["damaged_blobs"] == [blob]
    assert run(capsys, store, "verify")["checked_names"] == 0


def test_pins_are_added_listed_and_removed(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, store, "pin", KERNEL)
    assert run(capsys, store, "pin") == {"pins": [KERNEL]}
    run(capsys, store, "pin", KERNEL, "--remove")
    assert run(capsys, store, "pin") == {"pins": []}
    run(capsys, store, "pin", "sha256:" + "d" * 64, code=2)
    run(capsys, store, "pin", "--remove", code=2)


def test_results_are_exported_and_imported(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "results.tar", Store(tmp_path / "other")
    assert run(capsys, store, "export", str(file))["names"] == 2
    assert run(capsys, other, "import", str(file))["names"] == 2
    assert other.action_result(ACTION) == BUILT.facts
    file.write_bytes(b"no archive" * 100)
    assert run(capsys, other, "import", str(file), code=2)["error"]["code"] == "invalid-archive"


def test_a_farm_is_backed_up_and_restored(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = str(tmp_path / "backup"), Store(tmp_path / "other")
    assert run(capsys, store, "backup", folder, code=1)["error"]["code"] == "database-older"
    assert main(["keys", "add", "me", "--store", str(store.folder)]) == 0
    capsys.readouterr()
    saved = run(capsys, store, "backup", folder)
    assert (saved["names"], saved["blobs"], saved["skipped"]) == (2, 6, 0)
    restored = {"names": 2, "blobs": 4, "rows": 2, "damaged_blobs": [], "is_same_generator": True}
    assert run(capsys, other, "restore", folder) == restored
    assert other.action_result(ACTION) == BUILT.facts
    assert main(["keys", "list", "--store", str(other.folder)]) == 0
    assert "me" in capsys.readouterr().out
    assert run(capsys, other, "restore", folder, code=2)["error"]["code"] == "restore-not-empty"
    assert run(capsys, store, "restore", str(tmp_path), code=2)["error"]["code"] == "invalid-backup"


def test_a_backup_that_lost_blobs_is_restored_with_an_exit_code(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["keys", "add", "me", "--store", str(store.folder)]) == 0
    store.objects.write("cas/sha256/00/" + "0" * 64, b"damaged")
    assert main(["store", "backup", str(tmp_path / "backup"), "--store", str(store.folder)]) == 0
    assert "2 names and 6 blobs" in capsys.readouterr().out
    binary = next(path for path in (tmp_path / "backup").rglob("*") if path.is_file() and path.read_bytes() == b"\x7fELF")
    binary.unlink()
    monkeypatch.setattr("roller_svc.farm.backup.generator_digest", lambda: "another")
    assert main(["store", "restore", str(tmp_path / "backup"), "--store", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().out
    assert f"damaged     {binary.name}" in printed
    assert "another version" in printed


@pytest.mark.parametrize("location", ["memory:", "no/such/folder", "gs://bucket"])
def test_a_store_that_cannot_be_opened_is_named(location: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", "--store", location]) == 2
    assert location.removesuffix(":") in capsys.readouterr().err


@pytest.mark.parametrize("action", [["gc"], ["gc", "--quota", "0"], ["verify", "--remove"], ["pin"], ["export", "x.tar"]])
def test_a_store_that_is_being_restored_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: list[str]
) -> None:
    store = Store(tmp_path / "store")
    store.objects.write(RESTORING, b"a backup")
    blob = store.put(b"its name is not there yet")
    assert main(["store", *action, "--store", str(tmp_path / "store")]) == 1
    assert "restore-incomplete" in capsys.readouterr().err
    assert store.has(blob)
