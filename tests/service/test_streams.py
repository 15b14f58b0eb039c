"""Files are sent in parts: slow readers hold little memory, and a damaged file never arrives whole."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from builders import BODY, Builder, digest_of
from serving import connected, running, served
from waiting import PATIENCE_S, wait_until

from roller_svc.farm.blobs import blob_name
from roller_svc.farm.store import Artifact, Store
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

MODEL_ACTION = "sha256:" + "a" * 64
MIB = 1 << 20


def memory_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def store_model(store: Store, content: bytes) -> str:
    """Have a model with this bundle in the store; return the blob's digest."""
    digest = hashlib.sha256(content).hexdigest()
    facts: dict[str, object] = {
        "digest": "sha256:" + "d" * 64, "target": "cpu-x86-avx2", "inputs": [], "outputs": [], "kernels": [], "plan": {},
        "estimate": {"seconds": 0.1}, "files": {"bundle": digest},
    }  # fmt: skip
    store.publish(MODEL_ACTION, Artifact("sha256:" + "d" * 64, facts, {"bundle": content}, "models"))
    return digest


@pytest.mark.slow
def test_slow_readers_of_a_large_file_take_little_memory(tmp_path: Path) -> None:
    size = 32 * MIB
    digest = store_model(Store(tmp_path), os.urandom(size))
    with running(create_app(Settings(store=tmp_path, workers=0))) as (_, port), contextlib.ExitStack() as stack:
        before = memory_bytes()
        readers = [stack.enter_context(slow_reader(port, f"/v1/blobs/sha256:{digest}")) for _ in range(24)]
        for reader in readers:
            assert reader.recv(10) == b"HTTP/1.1 2"
        deadline = time.monotonic() + 2.0
        highest = before
        while time.monotonic() < deadline:
            highest = max(highest, memory_bytes())
            time.sleep(0.02)
        assert highest - before < 2 * size  # 24 of them whole would be 24 times as much
        response = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=60.0)
        assert response.status_code == 200


@contextlib.contextmanager
def slow_reader(port: int, path: str) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        yield connection


@pytest.mark.parametrize("size", [0, 1, MIB, 3 * MIB + 1])
def test_a_file_arrives_whole(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    digest = store_model(Store(tmp_path), content)
    with served(create_app(Settings(store=tmp_path, workers=0))) as client:
        for _ in range(2):  # on one connection
            response = client.get(f"/v1/blobs/sha256:{digest}")
            assert response.status_code == 200
            assert response.headers["content-length"] == str(size)
            assert response.content == content
        cached = client.get(f"/v1/blobs/sha256:{digest}", headers={"If-None-Match": response.headers["etag"]})
        assert (cached.status_code, cached.content) == (304, b"")


def test_a_damaged_file_is_cut_and_then_missing(tmp_path: Path) -> None:
    content = os.urandom(2 * MIB)
    store = Store(tmp_path)
    digest = store_model(store, content)
    path = tmp_path / blob_name(digest)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    hit = f"/v1/operations/hit-{'a' * 64}"
    with served(create_app(Settings(store=tmp_path, workers=0))) as client:
        assert client.get(hit).status_code == 200  # the size is right
        with pytest.raises(httpx.RemoteProtocolError):
            client.get(f"/v1/blobs/sha256:{digest}")
        response = client.get(f"/v1/blobs/sha256:{digest}")
        assert (response.status_code, response.json()["code"]) == (404, "unknown-blob")
        assert client.get(hit).status_code == 404
        store.publish(MODEL_ACTION, Artifact("sha256:" + "d" * 64, {"files": {}}, {"bundle": content}, "models"))
        assert client.get(f"/v1/blobs/sha256:{digest}").content == content


def test_a_hit_reads_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = os.urandom(2 * MIB)
    digest = store_model(Store(tmp_path), content)
    opened: list[str] = []
    read_range, read = Path.open, Path.read_bytes
    monkeypatch.setattr(Path, "open", lambda path, *rest, **more: opened.append(path.name) or read_range(path, *rest, **more))
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or read(path))
    with served(create_app(Settings(store=tmp_path, workers=0))) as client:
        for _ in range(3):
            assert client.get(f"/v1/operations/hit-{'a' * 64}").status_code == 200
        assert opened
        assert digest not in opened


@pytest.mark.slow
def test_who_leaves_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = store_model(Store(tmp_path), os.urandom(64 * MIB))
    reads = 0
    read_range = os.pread

    def count(*arguments: int) -> bytes:
        nonlocal reads
        reads += 1
        return read_range(*arguments)

    monkeypatch.setattr(os, "pread", count)
    with running(create_app(Settings(store=tmp_path, workers=0))) as (server, port):
        with slow_reader(port, f"/v1/blobs/sha256:{digest}") as reader:
            reader.recv(10)
            wait_until(lambda: reads)
        wait_until(lambda: not server.server_state.connections and not server.server_state.tasks)
        assert reads < 200  # of 256


def test_a_locked_database_stops_no_hit(tmp_path: Path, builder: Builder) -> None:
    """Twelve new builds wait for the lock meanwhile."""
    settings = Settings(store=tmp_path, workers=1)
    with served(create_app(settings, builder, digest_of)) as client:
        hit = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=30"}).json()
        assert hit["done"]
        digest = hit["response"]["digest"]
        lock = sqlite3.connect(tmp_path / "operations.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        statuses: list[int] = []

        def ask(number: int) -> None:
            body = BODY | {"expression": f"D{number}[m, n] +=! A[m, k] * B[k, n]", "outputs": [f"D{number}"]}
            url = str(client.base_url.join("/v1/kernels:compile"))
            statuses.append(httpx.post(url, json=body, timeout=PATIENCE_S).status_code)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        for _ in range(3):
            assert client.post("/v1/kernels:compile", json=BODY).json()["metadata"]["cache"] == "hit"
            assert client.get(f"/v1/operations/hit-{hit['metadata']['action'].removeprefix('sha256:')}").status_code == 200
            assert client.get(f"/v1/kernels/{digest}/source").status_code == 200
        assert statuses == []  # they wait still, so no hit has waited for them
        lock.rollback()
        lock.close()
        for thread in threads:
            thread.join()
    assert statuses == [202] * 12


def test_files_arrive_over_one_connection_beside_short_responses(tmp_path: Path) -> None:
    content = os.urandom(MIB)
    digest = store_model(Store(tmp_path), content)
    with running(create_app(Settings(store=tmp_path, workers=0))) as (_, port), connected(port) as connection:
        for path in ("/healthz", f"/v1/blobs/sha256:{digest}", "/healthz"):
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        received = b""
        while received.count(b"HTTP/1.1 200") < 3:
            part = connection.recv(1 << 16)
            assert part
            received += part
        assert content in received
