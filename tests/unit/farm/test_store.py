"""The store: what is published is whole or not there, whatever happens to the files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_server import S3Server

from roller_svc.compiler.action import SCHEMA
from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.blobs import BLOBS
from roller_svc.farm.store import Artifact, Store

ACTION = "sha256:" + "a" * 64
OTHER_ACTION = "sha256:" + "b" * 64


def artifact(text: bytes = b"void f() {}", note: str = "first") -> Artifact:
    return Artifact("sha256:" + "c" * 64, {"note": note}, {"source": text, "binary": b"\x7fELF"})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def blob_names(store: Store) -> list[str]:
    return sorted(info.name for info in store.objects.list(BLOBS))


def blob_paths(store: Store) -> list[Path]:
    return sorted(path for path in (store.folder / "cas").rglob("*") if path.is_file())


def test_blobs_are_named_by_their_content(any_store: Store) -> None:
    store = any_store
    digest = store.put(b"hello")
    assert digest == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    assert store.get(digest) == b"hello"
    assert store.put(b"hello") == digest
    assert [info.size_bytes for info in store.objects.list(BLOBS)] == [5]


def test_names_that_are_no_digest_find_nothing(any_store: Store) -> None:
    store = any_store
    for name in ("", "../../etc/passwd", "A" * 64, "a" * 63):
        assert store.get(name) is None
        assert store.kernel(name) is None


def test_an_artifact_is_found_by_action_and_by_digest(any_store: Store) -> None:
    store = any_store
    made = artifact()
    assert store.action_result(ACTION) is None
    store.publish(ACTION, made)
    assert store.action_result(ACTION) == {"note": "first"}
    assert store.kernel(made.digest) == {"note": "first"}
    assert store.file(made.digest, "binary") == b"\x7fELF"
    assert store.file(made.digest, "ptx") is None
    assert set(store.kinds(made.digest)) == {"source", "binary"}


def test_what_a_digest_names_never_changes(any_store: Store) -> None:
    store = any_store
    store.publish(ACTION, artifact())
    store.publish(OTHER_ACTION, artifact(note="second"))
    assert store.kernel(artifact().digest) == {"note": "first"}
    assert store.action_result(OTHER_ACTION) == {"note": "second"}


@pytest.mark.parametrize("damage", ["truncate", "flip", "swap", "remove"])
def test_damage_to_any_blob_makes_a_miss_and_publishing_again_mends_it(any_store: Store, damage: str) -> None:
    store = any_store
    store.publish(ACTION, artifact())
    names = blob_names(store)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        content = store.objects.read(name)
        if damage == "remove":
            store.objects.remove([name])
        else:
            changed = {
                "truncate": content[:-1],
                "flip": bytes([content[0] ^ 1]) + content[1:],
                "swap": store.objects.read(other),
            }
            store.objects.write(name, changed[damage])
        assert store.action_result(ACTION) is None
        assert store.kernel(artifact().digest) is None
        store.publish(ACTION, artifact())
        assert store.action_result(ACTION) == {"note": "first"}
        assert store.file(artifact().digest, "source") == b"void f() {}"


@pytest.mark.parametrize("content", [b"", b"no digest", b"\xff\xfe", b"0" * 64])
def test_a_damaged_name_is_a_miss_and_is_mended(any_store: Store, content: bytes) -> None:
    store = any_store
    store.publish(ACTION, artifact())
    store.objects.write("ac/" + "a" * 64, content)
    assert store.action_result(ACTION) is None
    store.publish(ACTION, artifact())
    assert store.action_result(ACTION) == {"note": "first"}


def test_an_action_whose_kernel_is_gone_gets_another_one(any_store: Store) -> None:
    store = any_store
    store.publish(ACTION, artifact())
    store.objects.remove(["kernels/" + "c" * 64])
    other = Artifact("sha256:" + "d" * 64, {"note": "second"}, {"source": b"other"})
    assert store.publish(ACTION, other) == {"note": "second"}
    assert store.action_result(ACTION) == {"note": "second"}


def test_a_client_sends_a_blob_in_parts(any_store: Store) -> None:
    store, digest = any_store, "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    with store.receive(digest) as blob:
        blob.write(b"hellO")
        with pytest.raises(ArgumentError, match="digest"):
            blob.finish()
    assert not store.has(digest)
    for is_stored in (False, True):
        with store.receive(digest) as blob:
            blob.write(b"hel")
            blob.write(b"lo")
            assert store.has(digest) is is_stored
            blob.finish()
    assert store.get(digest) == b"hello"
    assert [info.name for info in store.objects.list("uploads/")] == [f"uploads/{digest}"]
    assert store.put_upload(b"more") in {info.name.removeprefix("uploads/") for info in store.objects.list("uploads/")}


def test_a_store_is_readable_where_it_can_be_written(any_store: Store) -> None:
    any_store.objects.check_writable()


def test_a_bucket_that_does_not_exist_cannot_be_written(s3: S3Server) -> None:
    store = Store("s3://no-such-bucket", s3.options)
    for call in (store.objects.check_writable, lambda: store.publish(ACTION, artifact())):
        with pytest.raises(StoreError, match="cannot write"):
            call()


def test_a_server_that_is_away_is_a_store_error() -> None:
    options = {"endpoint": "http://127.0.0.1:9", "aws_region": "x", "aws_access_key_id": "i",
               "aws_secret_access_key": "k", "allow_http": "true"}  # fmt: skip
    store = Store("s3://roller", options)
    with pytest.raises(StoreError, match="cannot read the store: the object store did not answer"):
        store.action_result(ACTION)


@pytest.mark.parametrize("location", ["s3://", "s3://B", "s3://bucket/a?b", "gs://bucket", "file:///x", "http://x"])
def test_other_locations_are_refused(location: str) -> None:
    with pytest.raises(ArgumentError, match="expected"):
        Store(location)


def test_a_store_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its files as that version wrote them."""
    source, kernel = b"void f() {}", "c" * 64
    document = {
        "digest": f"sha256:{kernel}", "facts": {"note": "old"}, "files": {"source": sha256(source)}, "schema": SCHEMA,
    }  # fmt: skip
    manifest = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    for content in (source, manifest):
        path = tmp_path / "cas" / "sha256" / sha256(content)[:2] / sha256(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for folder, name in (("ac", "a" * 64), ("kernels", kernel)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(sha256(manifest))
    store = Store(tmp_path)
    assert store.action_result(ACTION) == {"note": "old"}
    assert store.files(f"sha256:{kernel}") == {"source": source}
    assert store.publish(ACTION, artifact()) == {"note": "old"}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_nothing_half_written_is_left_behind(store: Store) -> None:
    store.publish(ACTION, artifact())
    assert list((store.folder / "tmp").iterdir()) == []
    assert [path for path in store.folder.rglob("*") if "#" in path.name] == []


def test_a_store_that_cannot_be_written_says_so(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as refused:
        Store(tmp_path / "file" / "store")
    assert refused.value.code == "store-error"
    assert refused.value.message == f"cannot make a store in {tmp_path / 'file' / 'store'}: Not a directory"
    store.objects.check_writable()
    for path in (store.folder / "tmp").iterdir():
        path.unlink()
    (store.folder / "tmp").rmdir()
    with pytest.raises(StoreError):
        store.objects.check_writable()
    with pytest.raises(StoreError), store.receive("a" * 64):
        pass
    (store.folder / "cas").write_text("")
    with pytest.raises(StoreError, match="Not a directory"):
        store.put(b"lost")


def test_what_cannot_be_read_is_not_taken_for_missing(store: Store) -> None:
    store.publish(ACTION, artifact())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        for read in (lambda: store.action_result(ACTION), lambda: store.kernel(artifact().digest)):
            with pytest.raises(StoreError, match="cannot read the store: Too many open files"):
                read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.action_result(ACTION) == {"note": "first"}


def test_a_full_disk_is_a_store_error_and_nothing_is_half_published(store: Store) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # files that grow beyond the limit fail to be written
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(StoreError, match="cannot write to the store: File too large"):
            store.publish(ACTION, artifact(bytes(10_000)))
        with pytest.raises(StoreError), store.receive("a" * 64) as blob:
            blob.write(bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert store.action_result(ACTION) is None
    assert list((store.folder / "tmp").iterdir()) == []
    assert store.publish(ACTION, artifact(bytes(10_000))) == {"note": "first"}
    assert store.file(artifact().digest, "source") == bytes(10_000)


@pytest.mark.parametrize("damage", ["empty", "garbage", "folder", "gone"])
def test_a_hit_is_whole_from_every_name_or_a_miss(store: Store, damage: str) -> None:
    store.publish(ACTION, artifact())
    name = store.folder / "kernels" / ("c" * 64)
    name.unlink()
    if damage == "folder":
        name.mkdir()
    elif damage != "gone":
        name.write_bytes({"empty": b"", "garbage": b"\xff"}[damage])
    assert store.action_result(ACTION) is None
    if damage == "folder":
        name.rmdir()
    store.publish(ACTION, artifact())
    assert store.action_result(ACTION) == {"note": "first"}
    assert store.file(artifact().digest, "source") is not None


@pytest.mark.parametrize(
    "changes", [{"schema": 99}, {"schema": None}, {"files": None}, {"facts": [1]}, {"digest": 7}, {"files": "x"}]
)
def test_a_manifest_of_another_version_is_a_miss(store: Store, changes: dict[str, object]) -> None:
    store.publish(ACTION, artifact())
    manifest = json.loads(store.get((store.folder / "ac" / ("a" * 64)).read_text()) or b"")
    other = store.put(json.dumps(manifest | changes).encode())
    for name in ("ac/" + "a" * 64, "kernels/" + "c" * 64):
        (store.folder / name).write_text(other)
    assert store.action_result(ACTION) is None
    assert store.kernel(artifact().digest) is None


def publish_many(root: str) -> None:
    store = Store(Path(root))
    for _ in range(20):
        store.publish(ACTION, artifact())
        assert store.action_result(ACTION) is not None


@pytest.mark.slow
def test_writers_in_several_processes_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=publish_many, args=(str(tmp_path / "store"),)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert Store(tmp_path / "store").action_result(ACTION) == {"note": "first"}


def test_old_leftovers_of_killed_writers_are_removed(store: Store) -> None:
    store.publish(ACTION, artifact())
    for name in ("old", "being-written"):
        (store.folder / "tmp" / name).write_bytes(b"half a blo")
    (store.folder / "tmp" / "folder").mkdir()
    os.utime(store.folder / "tmp" / "old", (0, 0))
    for name in ("old#1", "being-written#2", "being-written"):
        (store.folder / "ac" / name).write_bytes(b"half a name")
        os.utime(store.folder / "ac" / name, (0, 0) if name != "being-written#2" else None)
    store.objects.remove_leftovers()
    store.objects.remove_staged()
    assert {path.name for path in (store.folder / "ac").iterdir()} == {"a" * 64, "being-written#2", "being-written"}
    assert sorted(path.name for path in (store.folder / "tmp").iterdir()) == ["being-written", "folder"]
    assert store.action_result(ACTION) == {"note": "first"}


def test_the_first_complete_publication_stays(any_store: Store) -> None:
    store = any_store
    assert store.publish(ACTION, artifact()) == {"note": "first"}
    other = Artifact("sha256:" + "d" * 64, {"note": "second"}, {"source": b"other"})
    assert store.publish(ACTION, other) == {"note": "first"}
    assert store.action_result(ACTION) == {"note": "first"}


def test_a_derived_text_is_of_its_kernel_kind_and_tool(any_store: Store) -> None:
    store = any_store
    kernel, other = "sha256:" + "c" * 64, "sha256:" + "d" * 64
    assert store.derived(kernel, "ptx", "nvrtc 13") is None
    store.put_derived(kernel, "ptx", "nvrtc 13", b".target sm_80")
    assert store.derived(kernel, "ptx", "nvrtc 13") == b".target sm_80"
    assert store.derived(kernel, "ptx", "nvrtc 14") is None
    assert store.derived(kernel, "sass", "nvrtc 13") is None
    assert store.derived(other, "ptx", "nvrtc 13") is None
    assert store.derived("../../operations/1-a", "json", "nvrtc 13") is None
    store.put_derived(kernel, "ptx", "nvrtc 14", b".target sm_90")
    assert store.derived(kernel, "ptx", "nvrtc 13") is None
    assert store.derived(kernel, "ptx", "nvrtc 14") == b".target sm_90"


def fill(store: Store) -> None:
    """Have one of everything in the store."""
    store.publish(ACTION, artifact())
    store.put_derived(artifact().digest, "ptx", "nvrtc 13", b".target sm_80")


READS: dict[str, Callable[[Store], object]] = {
    "action_result": lambda store: store.action_result(ACTION),
    "find_result": lambda store: store.find_result(ACTION),
    "kernel": lambda store: store.kernel(artifact().digest),
    "kinds": lambda store: store.kinds(artifact().digest),
    "file": lambda store: store.file(artifact().digest, "source"),
    "files": lambda store: store.files(artifact().digest),
    "derived": lambda store: store.derived(artifact().digest, "ptx", "nvrtc 13"),
    "get": lambda store: [store.get(path.name) for path in sorted((store.folder / "cas").glob("*/*/*"))],
}


def turn_into_folder(path: Path) -> None:
    path.unlink()
    (path / "inside").mkdir(parents=True)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "bytes of no text": lambda path: path.write_bytes(b"\xff\xfe\x00" * 50),
    "zeros": lambda path: path.write_bytes(bytes(64)),
    "no document": lambda path: path.write_bytes(b'{"schema": 2, "digest'),
    "nested without an end": lambda path: path.write_bytes(b"[" * 100_000),
    "a list": lambda path: path.write_bytes(b"[]"),
    "another schema": lambda path: path.write_bytes(b'{"schema": 99, "tool": 1, "blob": [], "files": 3}'),
    "a long number": lambda path: path.write_bytes(b'{"schema": ' + b"9" * 5000 + b"}"),
    "a name outside": lambda path: path.write_bytes(b"../../../etc/passwd"),
    "a folder": turn_into_folder,
    "a link to itself": link_to_itself,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_one_file_is_a_miss_or_a_store_error_and_is_mended(tmp_path: Path, damage: str) -> None:
    whole = Store(tmp_path / "whole")
    fill(whole)
    names = [path.relative_to(whole.folder) for path in sorted(whole.folder.rglob("*")) if path.is_file()]
    assert len(names) == 7  # source, binary, manifest and text as blobs; action, kernel, derived text
    expected = {read: READS[read](whole) for read in READS}
    for number, name in enumerate(names):
        store = Store(tmp_path / str(number))
        fill(store)
        DAMAGES[damage](store.folder / name)
        for read, call in READS.items():
            try:
                found = call(store)
            except StoreError:
                continue
            if read != "get":
                assert found in (None, (), {}, expected[read]), (name, read)
        if damage != "a link to itself":  # who made one of those has to remove it
            fill(store)
            assert {read: READS[read](store) for read in READS} == expected, name


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_a_store_error(store: Store) -> None:
    fill(store)
    for path in [path for path in store.folder.rglob("*") if path.is_file()]:
        path.chmod(0)
        for call in READS.values():
            with contextlib.suppress(StoreError):
                call(store)
        path.chmod(0o600)
    assert store.action_result(ACTION) == {"note": "first"}
