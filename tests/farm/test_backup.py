"""A farm under load is backed up, and restored as another one: keys, operations, hits and the build in progress."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from databases import new_database
from farm_stack import PostgreSql, Requests, Stack, base_url, body
from service_process import ServiceProcess
from waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.farm, pytest.mark.slow]

HELD = 999  # number of the program whose build does not end


@pytest.fixture(params=["sqlite", "postgresql"])
def new_stack(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[str], Stack]]:
    """Farms of which each has a folder and a database of its own."""
    made: list[Stack] = []

    def create(name: str) -> Stack:
        (folder / name).mkdir()
        database = "" if request.param == "sqlite" else new_database(request.getfixturevalue("postgresql").url)
        made.append(Stack(folder / name, database=database))
        return made[-1]

    yield create
    for stack in made:
        stack.close()


def finished(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """The exit code and the output of a command."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output.decode()


def killed_when(process: subprocess.Popen[bytes], condition: Callable[[], object]) -> None:
    """End a command by SIGKILL once something can be seen, if it has not ended."""
    wait_until(lambda: condition() or process.poll() is not None)
    process.kill()
    process.communicate()


@contextmanager
def load(service: ServiceProcess, requests: Requests, names: dict[str, int]) -> Iterator[None]:
    """Post new programs, one after the other, until the block ends; note the names of their operations."""
    stop = threading.Event()

    def post() -> None:
        for number in itertools.count(100):
            if stop.wait(0.02):
                return
            names[requests.compile(service, number)["name"]] = number

    thread = threading.Thread(target=post)
    thread.start()
    yield
    stop.set()
    thread.join()


def test_a_farm_under_load_is_restored_elsewhere(new_stack: Callable[[str], Stack], requests: Requests, folder: Path) -> None:
    old, backup = new_stack("old"), folder / "backup"
    code, key = finished(old.run("keys", "add", "me"))
    assert code == 0, key
    requests.use_key(key.split()[0])
    old.lease_s = 8.0  # the new farm waits so long for the holder, which may not lose the build before
    service = old.serve()
    holder = old.work(build_s=600.0)
    held = requests.compile(service, HELD)["name"]
    wait_until(lambda: old.lines("build"))
    names: dict[str, int] = {held: HELD}
    old.work(build_s=0.1)
    with load(service, requests, names):
        wait_until(lambda: len(old.lines("published")) > 10)
        killed_when(old.run("store", "backup", str(backup)), (backup / "cas").exists)
        if not (backup / "manifest.json").exists():
            code, output = finished(new_stack("none").run("store", "restore", str(backup)))
            assert code == 2
            assert "incomplete" in output
        known = dict(names)
        code, output = finished(old.run("store", "backup", str(backup)))
        assert code == 0, output
    before = {name: requests.get(service, f"/v1/{name}").json() for name in known}
    for process in (service, holder, *old.workers):
        process.kill()
    shutil.rmtree(old.folder / "store")

    new = new_stack("new")
    killed_when(new.run("store", "restore", str(backup)), (new.folder / "store" / "restoring").exists)
    is_begun = (new.folder / "store" / "restoring").exists()
    code, output = finished(new.run("store", "restore", str(backup)))
    assert code == 0 if is_begun else "to be empty" in output, output
    assert not (new.folder / "store" / "restoring").exists()
    code, output = finished(new.run("store", "verify"))
    assert code == 0, output

    service = new.serve()
    url = f"{base_url(service)}/v1/kernels:compile"
    assert httpx.post(url, json=body(1), timeout=60.0).status_code == 401
    listed = {name: requests.get(service, f"/v1/{name}").json() for name in known}
    assert all("metadata" in document for document in listed.values()), listed
    done = [name for name, document in listed.items() if document["done"]]
    assert len(done) > 10
    for name in done:
        assert listed[name]["response"] == before[name]["response"]
        hit = requests.compile(service, known[name])
        assert (hit["done"], hit["metadata"]["cache"]) == (True, "hit")
        assert requests.get(service, hit["response"]["links"]["source"]).status_code == 200
    assert new.lines("build") == []
    new.work()
    for name in known:
        assert "error" not in requests.ended(service, name)
    document: dict[str, Any] = requests.ended(service, held)
    assert document["metadata"]["attempt"] == 2
    assert set(new.ends().values()) == {1}
    assert any(f"* {HELD}.5" in line for line in new.lines("build"))


@pytest.mark.parametrize("part", ["service", "worker", "database"])
def test_parts_that_are_killed_during_backup_and_restore(
    folder: Path, postgresql: PostgreSql, requests: Requests, part: str
) -> None:
    """What a killed part interrupts is done by running the command again."""
    stacks = [Stack(folder / name, database=new_database(postgresql.url)) for name in ("old", "new")]
    for stack in stacks:
        stack.folder.mkdir()
    old, new = stacks
    backup = folder / "backup"

    def kill() -> None:
        if part == "service":
            service.kill()
        elif part == "worker":
            worker.kill()
        else:
            postgresql.kill()
            postgresql.start()

    def run_while_killed(stack: Stack, action: str, began: Path) -> None:
        process = stack.run("store", action, str(backup))
        wait_until(lambda: began.exists() or process.poll() is not None)
        kill()
        code, output = finished(process)
        assert part == "database" or code == 0, output
        if code:
            assert output.startswith("error: database-"), output
            code, output = finished(stack.run("store", action, str(backup)))
            assert code == 0, output

    try:
        service, worker = old.serve(), old.work(build_s=0.05)
        names = {requests.compile(service, number)["name"]: number for number in range(16)}
        wait_until(lambda: len(old.lines("published")) > 4)
        run_while_killed(old, "backup", backup / "tmp")
        old.close()
        service, worker = old.serve(), old.work()  # of the farm that is left
        run_while_killed(new, "restore", new.folder / "store" / "restoring")
        restored = new.serve()
        new.work()
        for name, number in names.items():
            assert "error" not in requests.ended(restored, name)
            assert requests.compile(restored, number)["done"]
        assert set(new.ends().values()) == {1}
    finally:
        for stack in stacks:
            stack.close()


def test_a_copy_of_the_database_file_has_the_keys_and_operations(polling_farm: Stack, requests: Requests, folder: Path) -> None:
    """Finding 10 of the second audit: the file had 4,096 bytes until the service ended."""
    service = polling_farm.serve()
    names = {requests.compile(service, number)["name"].partition("/")[2] for number in range(5)}

    def copied() -> set[str]:
        shutil.copy(polling_farm.folder / "store" / "operations.db", folder / "copy.db")
        with closing(sqlite3.connect(folder / "copy.db")) as copy:
            return {row[0] for row in copy.execute("SELECT id FROM operations")}

    wait_until(lambda: copied() == names)
