"""Blobs are read in parts; their hashes are checked as the bytes pass, and what was found is remembered."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from roller_svc.errors import StoreError
from roller_svc.farm import blobs
from roller_svc.farm.blobs import BlobReader, Blobs, blob_name
from roller_svc.farm.objects import FolderObjects, ObjectInfo, Objects, open_objects
from roller_svc.farm.store import Artifact, Store

PART_BYTES = 1000


@pytest.fixture(params=["folder", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    found = open_objects(str(tmp_path / "store") if request.param == "folder" else "memory:", {})
    monkeypatch.setattr(type(found), "part_bytes", PART_BYTES)
    return found


def put(objects: Objects, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    objects.write(blob_name(digest), content)
    return digest


def read_all(reader: BlobReader | None) -> list[bytes]:
    assert reader is not None
    parts = []
    while part := reader.read():
        parts.append(part)
    return parts


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 2500])
def test_a_blob_is_given_in_parts(objects: Objects, size: int) -> None:
    content = os.urandom(size)
    reader = Blobs(objects).open(put(objects, content))
    parts = read_all(reader)
    assert reader is not None
    assert reader.size_bytes == size
    assert b"".join(parts) == content
    assert all(len(part) <= PART_BYTES for part in parts)
    assert reader.read() == b""


def test_no_blob_is_read_whole(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = put(objects, os.urandom(5000))
    monkeypatch.setattr(type(objects), "read", lambda *_: pytest.fail("it reads the whole object"))
    found = Blobs(objects)
    assert len(read_all(found.open(digest))) == 5
    assert found.is_intact(digest)
    assert found.is_there(digest, 5000)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer"])
def test_the_last_part_of_a_damaged_blob_is_not_given(objects: Objects, damage: str) -> None:
    content = os.urandom(2500)
    digest, found = put(objects, content), Blobs(objects)
    changed = {"flipped": flip(content), "shorter": content[:-1], "longer": content + b"x"}[damage]
    objects.write(blob_name(digest), changed)
    reader = found.open(digest)
    assert reader is not None
    given = [reader.read(), reader.read()]
    with pytest.raises(StoreError, match="does not match its hash"):
        reader.read()
    assert sum(map(len, given)) < len(content)
    assert found.open(digest) is None  # it is marked
    assert not found.is_there(digest, None)
    assert not found.is_intact(digest)
    objects.write(blob_name(digest), content)  # a build has repaired it
    assert b"".join(read_all(found.open(digest))) == content
    assert found.is_there(digest, len(content))


def test_a_damaged_blob_of_one_part_is_missing(objects: Objects) -> None:
    digest = put(objects, b"a" * 100)
    objects.write(blob_name(digest), b"b" * 100)
    assert Blobs(objects).open(digest) is None


def test_a_blob_that_is_removed_while_it_is_read_is_an_error(objects: Objects) -> None:
    digest = put(objects, bytes(2500))
    reader = Blobs(objects).open(digest)
    objects.remove([blob_name(digest)])
    assert reader is not None
    assert len(reader.read()) == PART_BYTES
    with pytest.raises(StoreError, match="removed"):
        reader.read()


def test_a_blob_that_was_checked_is_not_read_again_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FolderObjects(tmp_path)
    content = os.urandom(100)
    digest, found = put(objects, content), Blobs(objects)
    path = tmp_path / blob_name(digest)
    os.utime(path, (1e9, 1e9))
    assert found.is_intact(digest)
    with monkeypatch.context() as patched:
        patched.setattr(FolderObjects, "read_range", lambda *_: pytest.fail("it is read again"))
        assert found.is_intact(digest)
        assert found.is_there(digest, len(content))
    path.write_bytes(flip(content))
    assert not found.is_intact(digest)
    assert not found.is_there(digest, len(content))


def test_what_was_written_just_now_is_checked_again(tmp_path: Path) -> None:
    """A file system's clock may give two writes one time."""
    objects = FolderObjects(tmp_path)
    content = os.urandom(100)
    digest, found = put(objects, content), Blobs(objects)
    path = tmp_path / blob_name(digest)
    before = path.stat()
    assert found.is_intact(digest)
    path.write_bytes(flip(content))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not found.is_intact(digest)


def test_an_intact_blob_is_checked_again_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FolderObjects(tmp_path)
    digest, found = put(objects, bytes(100)), Blobs(objects)
    path = tmp_path / blob_name(digest)
    os.utime(path, (1e9, 1e9))
    assert found.is_intact(digest)
    path.write_bytes(flip(bytes(100)))
    os.utime(path, (1e9, 1e9))  # the version says that nothing has changed
    assert found.is_intact(digest)
    monkeypatch.setattr(blobs, "REMEMBER_S", 0.0)
    assert not found.is_intact(digest)


def test_a_hit_reads_no_large_file_and_a_build_mends_a_damaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "SMALL_BYTES", 1000)
    store, action, content = Store(tmp_path), "sha256:" + "a" * 64, os.urandom(5000)
    artifact = Artifact("sha256:" + "c" * 64, {"note": "first"}, {"bundle": content})
    assert store.publish(action, artifact) == {"note": "first"}
    path = store.folder / blob_name(hashlib.sha256(content).hexdigest())
    path.write_bytes(flip(content))
    assert store.find_result(action) == {"note": "first"}  # its size is right
    assert store.action_result(action) is None  # a worker reads it before it builds
    assert store.find_result(action) is None  # and now the damage is known
    store.publish(action, artifact)
    assert store.find_result(action) == {"note": "first"}
    path.write_bytes(content[:-1])
    assert store.find_result(action) is None  # its size is wrong


def test_the_memory_of_checks_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "MAX_BYTES", 1 << 18)
    found = Blobs(FolderObjects(tmp_path))

    def remember(number: int) -> None:
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        info = ObjectInfo(blob_name(digest), 10, 1e9, f"{2_000_000 + number} 1795970610715{number:06}")
        assert found.remember(info, is_intact=True)

    remember(0)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(2000):
        remember(number)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 17 < after - before < 1 << 18
