"""Collections of the store: what goes, what stays, and who waits for whom, in every kind of store."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from clocks import ManualClock

from roller_svc.errors import ArgumentError, StoreError, UnknownKernelError
from roller_svc.farm import collection, store_lock
from roller_svc.farm.blobs import BLOBS
from roller_svc.farm.collection import collect, verify
from roller_svc.farm.objects import Objects
from roller_svc.farm.sightings import Sightings
from roller_svc.farm.store import MODELS, Artifact, Store
from roller_svc.farm.store_archive import export_results, import_results
from roller_svc.farm.store_keeper import StoreKeeper

SIZE = 1000  # of a file of an artifact


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def action(number: int) -> str:
    return f"sha256:{number + 1000:064x}"


def artifact(number: int, shared: bytes = b"", folder: str = "kernels") -> Artifact:
    files = {"source": bytes([number]) * SIZE} | ({"binary": shared} if shared else {})
    return Artifact(digest(number), {"number": number}, files, folder)


def publish(store: Store, *numbers: int, shared: bytes = b"") -> None:
    for number in numbers:
        store.publish(action(number), artifact(number, shared))


def present(store: Store, *numbers: int) -> list[int]:
    return [number for number in numbers if store.action_result(action(number)) is not None]


def blobs(store: Store) -> set[str]:
    return {info.name for info in store.objects.list(BLOBS)}


def set_age(store: Store, age_s: float, *parts: str) -> None:
    """Make the files whose names have one of the parts that old."""
    then_s = time.time() - age_s
    for path in store.folder.rglob("*"):
        if path.is_file() and any(part in str(path) for part in parts):
            os.utime(path, (then_s, then_s))


def test_without_a_quota_only_what_nothing_refers_to_is_removed(any_store: Store) -> None:
    publish(any_store, 1, 2)
    any_store.put_derived(digest(1), "ptx", "tool", b"listing")
    any_store.put_upload(b"model")
    whole = blobs(any_store)
    any_store.put(b"of a publication that was killed")
    any_store.objects.note("ac/" + "e" * 64, b"0" * 64)
    report = collect(any_store, grace_s=0)
    assert (report.removed_items, report.removed_blobs, report.removed_bytes) == (0, 1, 32)
    assert blobs(any_store) == whole
    assert report.size_bytes == sum(info.size_bytes for info in any_store.objects.list(BLOBS))
    assert any_store.objects.info("ac/" + "e" * 64) is None
    assert present(any_store, 1, 2) == [1, 2]
    assert any_store.derived(digest(1), "ptx", "tool") == b"listing"


def test_nothing_is_removed_within_the_grace_period(any_store: Store) -> None:
    publish(any_store, 1)
    any_store.put(b"of a publication that is going on")
    report = collect(any_store, 0)
    assert (report.removed_items, report.removed_blobs) == (0, 0)
    assert present(any_store, 1) == [1]


def test_an_item_is_removed_with_its_names_and_its_own_blobs(any_store: Store) -> None:
    publish(any_store, 1, 2, shared=b"shared")
    any_store.publish(action(3), Artifact(digest(1), {"number": 3}, {"source": b"another result of kernel 1"}))
    any_store.put_derived(digest(1), "ptx", "tool", b"listing")
    any_store.uses.write("kernels/" + digest(1).removeprefix("sha256:"))
    any_store.pin(digest(2))
    report = collect(any_store, 0, grace_s=0)
    assert sorted(report.removed_actions) == [action(1), action(3)]
    assert (report.removed_items, present(any_store, 1, 2, 3)) == (1, [2])
    assert any_store.file(digest(2), "binary") == b"shared"
    for folder in ("ac", "kernels", "derived", "used"):
        assert [info.name for info in any_store.objects.list(f"{folder}/") if digest(2)[-64:] not in info.name] == (
            [f"ac/{action(2)[-64:]}"] if folder == "ac" else []
        )
    assert len(blobs(any_store)) == 3
    publish(any_store, 1, shared=b"shared")
    assert present(any_store, 1, 2) == [1, 2]


def test_pins_keep_until_they_are_removed(any_store: Store) -> None:
    publish(any_store, 1)
    any_store.publish(action(2), artifact(2, folder=MODELS))
    upload = any_store.put_upload(b"model")
    for pinned in (digest(1), digest(2), upload):
        any_store.pin(pinned)
    assert any_store.pins() == sorted([digest(1), digest(2), f"sha256:{upload}"])
    collect(any_store, 0, grace_s=0)
    assert present(any_store, 1, 2) == [1, 2]
    assert any_store.get(upload) == b"model"
    for pinned in (digest(1), digest(2), upload):
        any_store.unpin(pinned)
    assert collect(any_store, 0, grace_s=0).removed_items == 3
    assert (present(any_store, 1, 2), blobs(any_store), any_store.pins()) == ([], set(), [])


@pytest.mark.parametrize("name", ["sha256:" + "f" * 64, "../../etc/passwd", ""])
def test_what_is_not_there_cannot_be_pinned(any_store: Store, name: str) -> None:
    with pytest.raises(UnknownKernelError):
        any_store.pin(name)
    any_store.unpin(name)


def test_the_least_recently_used_go_first_and_only_as_many_as_needed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publish(store, 1, 2, 3, 4)
    set_age(store, 9000, "/")
    size_bytes = collect(store).size_bytes
    set_age(store, 8000, f"kernels/{2:064x}")
    store.action_result(action(1))  # a use of now
    report = collect(store, size_bytes - 2 * SIZE)
    assert report.removed_items == 2
    assert present(store, 1, 2, 3, 4) == [1, 2]
    assert size_bytes - 3 * SIZE < report.size_bytes <= size_bytes - 2 * SIZE


def test_a_use_is_written_once_in_a_while(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publish(store, 1)
    assert list(store.objects.list("used/")) == []
    for _ in range(3):
        store.action_result(action(1))
        store.kernel(digest(1))
    assert list(store.objects.list("used/")) == []
    store.uses.flush()
    (first,) = store.objects.list("used/")
    assert first.name == f"used/kernels/{1:064x}"
    store.action_result(action(1))
    store.uses.flush()
    assert [info.version for info in store.objects.list("used/")] == [first.version]


def test_an_upload_that_an_operation_waits_for_stays(any_store: Store) -> None:
    waited_for, other = any_store.put_upload(b"one"), any_store.put_upload(b"two")
    collect(any_store, 0, grace_s=0, keep={f"uploads/{waited_for}"})
    assert any_store.get(waited_for) == b"one"
    assert any_store.get(other) is None


def test_an_upload_that_was_collected_is_taken_again(any_store: Store) -> None:
    upload = any_store.put_upload(b"one")
    collect(any_store, 0, grace_s=0)
    assert any_store.get(upload) is None
    assert any_store.put_upload(b"one") == upload
    assert any_store.get(upload) == b"one"


def test_a_collection_waits_for_publications_and_they_for_it(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = any_store.objects
    monkeypatch.setattr(store_lock, "WAIT_S", 0.2)
    collection = store_lock.collecting(objects)
    with store_lock.writing(objects), pytest.raises(StoreError, match="being written") as refused:
        collection.__enter__()
    assert refused.value.code == "store-busy"
    collection = store_lock.collecting(objects)
    with store_lock.collecting(objects), pytest.raises(StoreError, match="another collection"):
        collection.__enter__()
    monkeypatch.setattr(store_lock, "WAIT_S", 30.0)
    with store_lock.collecting(objects):
        writer = threading.Thread(target=publish, args=(any_store, 1))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert list(objects.list("ac/")) == []
    writer.join()
    assert present(any_store, 1) == [1]
    assert list(objects.list("writers/")) == list(objects.list("collecting/")) == []


def test_dead_writers_and_collectors_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.objects.note("writers/killed")
    store.objects.note("collecting/lock", b"killed")
    set_age(store, 2 * store_lock.WRITER_S, "writers", "collecting")
    publish(store, 1)
    with store_lock.collecting(store.objects):
        assert list(store.objects.list("writers/")) == []
    assert store.objects.info("collecting/lock") is None


@pytest.mark.parametrize("age_s", [-3600.0, 3600.0])
def test_dead_writers_and_collectors_of_another_clock_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    store = Store(tmp_path)
    store.objects.note("writers/killed")
    store.objects.note("collecting/lock", b"killed")
    set_age(store, age_s, "writers", "collecting")
    with store_lock.collecting(store.objects):
        assert list(store.objects.list("writers/")) == []
    store.objects.note("collecting/lock", b"killed")
    set_age(store, age_s, "collecting")
    clock = ManualClock()
    monkeypatch.setattr(store_lock, "Sightings", lambda: Sightings(clock))
    monkeypatch.setattr(time, "sleep", lambda _: setattr(clock, "now_s", clock.now_s + 1 + store_lock.COLLECTOR_S))
    publish(store, 1)
    assert present(store, 1) == [1]


def test_a_collector_that_was_overtaken_removes_nothing(any_store: Store) -> None:
    with store_lock.collecting(any_store.objects) as right:
        right.check()
        any_store.objects.note("collecting/lock", b"another one's")
        with pytest.raises(StoreError, match="overtaken"):
            right.check()
    assert any_store.objects.read("collecting/lock") == b"another one's"


def test_a_writer_that_took_too_long_writes_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr(store_lock, "WRITER_S", -1.0)
    with pytest.raises(StoreError) as refused:
        publish(store, 1)
    assert refused.value.code == "store-slow"
    assert list(store.objects.list("kernels/")) == []


def test_a_collection_that_is_interrupted_leaves_complete_results_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for stop_after in range(8):
        store = Store(tmp_path / str(stop_after))
        publish(store, 1, 2)
        removed: list[str] = []

        def failing(
            names: Iterable[str], stop: int = stop_after, seen: list[str] = removed, objects: Objects = store.objects
        ) -> None:
            for name in names:
                if not name.startswith(("collecting", "writers")):
                    if len(seen) == stop:
                        raise StoreError("the machine went down")
                    seen.append(name)
                Objects.remove(objects, [name])

        with monkeypatch.context() as patch:
            patch.setattr(store.objects, "remove", failing)
            try:
                collect(store, 0, grace_s=0)
            except StoreError:
                assert len(removed) == stop_after
        for number in (1, 2):
            if store.action_result(action(number)) is not None:
                assert store.file(digest(number), "source") == bytes([number]) * SIZE
        collect(store, 0, grace_s=0)
        assert blobs(store) == set()


def test_publications_go_on_between_removals_and_keep_what_they_refer_to(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        any_store.put(bytes([number]) * SIZE)  # of publications that were killed
    publish(any_store, 7)
    monkeypatch.setattr(collection, "BATCH", 1)
    monkeypatch.setattr(collection, "HOLD_S", -1.0)
    pauses: list[set[str]] = []

    def pause(_: float) -> None:
        assert any_store.objects.info(store_lock.LOCK) is None
        pauses.append(blobs(any_store))
        if len(pauses) == 2:
            for number in range(6):
                publish(any_store, number)

    monkeypatch.setattr(collection.time, "sleep", pause)
    before = blobs(any_store)
    report = collect(any_store, None, grace_s=0)
    assert [len(before) - len(left) for left in pauses] == [1, 2]
    assert present(any_store, *range(6), 7) == [*range(6), 7]
    assert report.removed_blobs == 2


def test_many_objects_are_removed_by_one_request() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.requests: list[object] = []

        def delete(self, names: object) -> None:
            self.requests.append(names)

    store = Recorder()
    Objects(store).remove(iter(["a", "b"]))
    assert store.requests == [["a", "b"]]


def test_verify_finds_damage_and_removes_it(any_store: Store) -> None:
    publish(any_store, 1, 2)
    any_store.put_derived(digest(2), "ptx", "tool", b"listing")
    assert not verify(any_store).blobs
    damaged = next(info.name for info in any_store.objects.list(BLOBS) if any_store.objects.read(info.name) == b"\1" * SIZE)
    any_store.objects.write(damaged, b"\1" * (SIZE - 1))
    for remove in (False, True):
        damage = verify(any_store, remove=remove)
        assert damage.blobs == [damaged]
        assert damage.names == [f"ac/{action(1)[-64:]}", f"kernels/{digest(1)[-64:]}"]
    damage = verify(any_store)
    assert (damage.blobs, damage.names) == ([], [])
    assert present(any_store, 1, 2) == [2]


def test_results_are_copied_from_store_to_store(any_store: Store, tmp_path: Path) -> None:
    publish(any_store, 1, 2, 3, shared=b"shared")
    any_store.publish(action(4), artifact(4, folder=MODELS))
    any_store.publish(action(5), Artifact(digest(1), {"number": 5}, {"source": b"another result of kernel 1"}))
    everything = export_results(any_store, tmp_path / "all.tar")
    assert everything.names == 9
    other = Store(tmp_path / "other")
    assert import_results(other, tmp_path / "all.tar") == everything
    assert present(other, 1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]
    assert blobs(other) == blobs(any_store)
    assert other.files(digest(3)) == any_store.files(digest(3))
    import_results(other, tmp_path / "all.tar")
    some = Store(tmp_path / "some")
    export_results(any_store, tmp_path / "some.tar", [digest(2), digest(4)])
    import_results(some, tmp_path / "some.tar")
    assert present(some, 1, 2, 3, 4, 5) == [2, 4]
    with pytest.raises(UnknownKernelError):
        export_results(any_store, tmp_path / "none.tar", [digest(77)])


@pytest.mark.parametrize("fault", ["text", "name", "blob", "no blobs", "link", "missing"])
def test_other_files_are_not_imported(tmp_path: Path, fault: str) -> None:
    source, target = Store(tmp_path / "source"), Store(tmp_path / "target")
    publish(source, 1)
    export_results(source, tmp_path / "good.tar")
    bad = tmp_path / "bad.tar"
    with tarfile.open(tmp_path / "good.tar") as good, tarfile.open(bad, "w") as archive:
        for member in good:
            content = good.extractfile(member).read()
            if fault == "name":
                member.name = f"../{member.name}"
            if fault == "blob" and member.name.startswith(BLOBS):
                content = content[:-1] + b"?"
            if fault == "link":
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            if fault != "no blobs" or not member.name.startswith(BLOBS):
                archive.addfile(member, io.BytesIO(content))
    if fault == "text":
        bad.write_text("no archive")
    if fault == "missing":
        bad.unlink()
    with pytest.raises(ArgumentError):
        import_results(target, bad)
    assert present(target, 1) == []
    assert list(target.objects.list("kernels/")) == []


def test_a_sparse_member_is_not_imported(tmp_path: Path) -> None:
    """A few bytes of an archive would become many of the store."""
    zeros = 1 << 24
    name = f"{BLOBS}/{hashlib.sha256(bytes(zeros)).hexdigest()[:2]}/{hashlib.sha256(bytes(zeros)).hexdigest()}"
    (tmp_path / name).parent.mkdir(parents=True)
    with (tmp_path / name).open("wb") as file:
        file.truncate(zeros)
    for form in ("gnu", "posix"):
        archive = tmp_path / f"{form}.tar"
        subprocess.run(["tar", "--sparse", f"--format={form}", "-cf", archive, "-C", tmp_path, name], check=True)
        assert archive.stat().st_size < 1 << 16
        store = Store(tmp_path / form)
        with pytest.raises(ArgumentError, match="unexpected member"):
            import_results(store, archive)
        assert blobs(store) == set()


def test_blobs_of_an_archive_are_written_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = Store(tmp_path / "source"), Store(tmp_path / "target")
    publish(source, 1, shared=b"shared")
    export_results(source, tmp_path / "all.tar")
    written: list[int] = []
    put = Store.put
    monkeypatch.setattr(Store, "put", lambda store, content: (written.append(len(blobs(store))), put(store, content))[1])
    import_results(target, tmp_path / "all.tar")
    assert written == [0, 1, 2]  # source, binary and manifest


def test_the_keeper_writes_uses_and_stays_within_the_quota(tmp_path: Path) -> None:
    store = Store(tmp_path)
    publish(store, 1, 2)
    set_age(store, 9000, "/")
    store.action_result(action(2))
    removed: list[str] = []
    keeper = StoreKeeper(store, 2 * SIZE, lambda: set(), removed.extend)
    keeper.collect()
    assert present(store, 1, 2) == [2]
    assert removed == [action(1)]
    store.kernel(digest(2))
    keeper.start()
    keeper.close()
    assert [info.name for info in store.objects.list("used/")] == [f"used/kernels/{2:064x}"]
