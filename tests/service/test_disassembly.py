"""PTX and SASS as blobs: made once, read from then on, whatever happens to what was kept."""

from __future__ import annotations

import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from httpx import Client
from serving import served
from waiting import PATIENCE_S

from roller_svc.errors import CompileError, UnknownKernelError
from roller_svc.farm.build import build_artifact
from roller_svc.farm.store import Artifact, Json, Store
from roller_svc.ir.kernel import Language
from roller_svc.service import disassembly
from roller_svc.service.app import create_app
from roller_svc.service.disassembly import MAX_RUNNING, ListingCache
from roller_svc.settings import Settings
from roller_svc.toolchain.binaries import sass
from tests.service.test_listings import BODY

COUNT = 16


class Maker:
    """Counts what it makes, and waits for `gate` before."""

    languages = (Language.CUDA,)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.version = "tool 1"
        self.made: list[str] = []
        self.at_once: list[int] = []
        self._lock = threading.Lock()
        self._working = 0

    def tool(self) -> str:
        return self.version

    def make(self, facts: Json, files: Mapping[str, bytes]) -> str:
        with self._lock:
            self._working += 1
            self.at_once.append(self._working)
            self.made.append(str(facts["note"]))
        assert self.gate.wait(PATIENCE_S)
        with self._lock:
            self._working -= 1
        if files["source"] == b"wrong":
            raise CompileError("no")
        return f"{self.version} {facts['note']}"


def digest_of(number: int) -> str:
    return f"sha256:{number:064x}"


def published(store: Store, number: int = 0, *, language: str = "cuda", source: bytes = b"right") -> str:
    digest = digest_of(number)
    facts: Json = {"digest": digest, "language": language, "note": str(number)}
    store.publish(digest_of(number + 1000), Artifact(digest, facts, {"source": source, "binary": b"\x7fELF"}))
    return digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def making(store: Store, maker: Maker) -> Iterator[ListingCache]:
    found = ListingCache(store, {"ptx": maker, "sass": maker})
    yield found
    maker.gate.set()
    found.close()


def test_a_text_is_made_once_and_kept(making: ListingCache, maker: Maker, store: Store) -> None:
    digest = published(store)
    assert making.cached(digest, "ptx") is None
    assert making.request(digest, "ptx").result() == b"tool 1 0"
    assert making.cached(digest, "ptx") == b"tool 1 0"
    assert making.request(digest, "ptx").result() == b"tool 1 0"  # asked for by one that saw it missing before
    assert ListingCache(Store(store.folder), {"ptx": maker}).cached(digest, "ptx") == b"tool 1 0"
    assert maker.made == ["0"]


def test_requests_for_one_text_share_it(making: ListingCache, maker: Maker, store: Store) -> None:
    digest = published(store)
    maker.gate.clear()
    futures = {making.request(digest, "ptx") for _ in range(50)}
    assert len(futures) == 1
    other = making.request(digest, "sass")
    maker.gate.set()
    assert {future.result() for future in (*futures, other)} == {b"tool 1 0"}
    assert maker.made == ["0", "0"]  # one a kind


def test_few_are_made_at_once_and_others_wait(making: ListingCache, maker: Maker, store: Store) -> None:
    digests = [published(store, number) for number in range(COUNT + 1)]
    maker.gate.clear()
    futures = [making.request(digest, "ptx") for digest in digests[:-1]]
    assert making.request(digests[0], "ptx") is futures[0]
    assert making.cached(digests[-1], "ptx") is None  # reading waits for nobody
    maker.gate.set()
    assert [future.result() for future in futures] == [f"tool 1 {n}".encode() for n in range(COUNT)]
    assert max(maker.at_once) <= MAX_RUNNING
    assert making.request(digests[-1], "ptx").result()


def test_a_failure_is_told_to_all_and_not_kept(making: ListingCache, maker: Maker, store: Store) -> None:
    digest = published(store, source=b"wrong")
    maker.gate.clear()
    first, second = making.request(digest, "ptx"), making.request(digest, "ptx")
    maker.gate.set()
    for future in (first, second):
        with pytest.raises(CompileError):
            future.result()
    with pytest.raises(CompileError):
        making.request(digest, "ptx").result()
    assert maker.made == ["0", "0"]


def test_another_tool_makes_the_text_again(making: ListingCache, maker: Maker, store: Store) -> None:
    digest = published(store)
    making.request(digest, "ptx").result()
    maker.version = "tool 2"
    assert making.cached(digest, "ptx") is None
    assert making.request(digest, "ptx").result() == b"tool 2 0"


def test_what_has_no_text_is_refused(making: ListingCache, store: Store) -> None:
    with pytest.raises(UnknownKernelError, match="is of the language c; ptx is of cuda"):
        making.cached(published(store, language="c"), "ptx")
    with pytest.raises(UnknownKernelError):
        making.cached(digest_of(7), "ptx")
    with pytest.raises(UnknownKernelError):
        making.request(digest_of(7), "ptx").result()


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the texts that tools make from now on."""
    runs: list[str] = []
    ptx, sass_text = disassembly.toolchain.ptx, disassembly.toolchain.sass_text
    monkeypatch.setattr(disassembly.toolchain, "ptx", lambda *given: runs.append("ptx") or ptx(*given))
    monkeypatch.setattr(disassembly.toolchain, "sass_text", lambda *given: runs.append("sass") or sass_text(*given))
    return runs


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with served(create_app(Settings(store=tmp_path / "store"), build_artifact)) as client:
        yield client


def links(client: Client) -> dict[str, str]:
    answer = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=60"}).json()
    found: dict[str, str] = answer["response"]["links"]
    return found


@pytest.mark.slow
def test_a_service_makes_each_text_once_and_mends_it(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = links(client)
    runs = count_runs(monkeypatch)
    for kind, word in (("ptx", ".target sm_80"), ("sass", "STG.E")):
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _, link=found[kind]: client.get(link), range(16)))
        assert {answer.status_code for answer in answers} == {200}
        (text,) = {answer.text for answer in answers}
        assert word in text
        assert runs == [kind]
        (name,) = (tmp_path / "store" / "derived").glob(f"*.{kind}")
        for damage in (b"", b"\xff", b"[]", name.read_bytes()[:-2]):
            name.write_bytes(damage)
            assert client.get(found[kind]).text == text
        for blob in (tmp_path / "store" / "cas").rglob("*"):
            if blob.is_file() and blob.read_bytes() == text.encode():
                blob.write_bytes(b"damaged")
        assert client.get(found[kind]).text == text
        assert client.get(found[kind]).text == text
        assert runs == [kind] * 6
        runs.clear()


@pytest.mark.slow
def test_texts_outlive_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(store=tmp_path / "store")
    with served(create_app(settings, build_artifact)) as first:
        found = links(first)
        before = first.get(found["sass"]).text
    runs = count_runs(monkeypatch)
    with served(create_app(settings, build_artifact)) as second:
        assert second.get(found["sass"]).text == before
        assert runs == []
        monkeypatch.setattr(sass, "_version_of", lambda _: "another nvdisasm")
        assert second.get(found["sass"]).text == before
        assert runs == ["sass"]


def test_a_bundle_has_the_launchers_that_a_client_asks_for(client: Client) -> None:
    link = links(client)["bundle"]
    answer = client.get(link, params={"launcher": "cupy,cpp"})
    assert "etag" not in answer.headers
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        files = ["kernel.cu", "kernel.cubin", "launch.hpp", "launch.py", "metadata.json", "report.json"]
        assert sorted(archive.namelist()) == files
        assert "cuLaunchKernel" in archive.read("launch.hpp").decode()
    for url, params in ((link, {"launcher": "rust"}), (link.replace("bundle", "source"), {"launcher": "cupy"})):
        refusal = client.get(url, params=params)
        assert (refusal.status_code, refusal.json()["code"]) == (422, "unknown-launcher")


@pytest.mark.parametrize("content", [b"{}", b"[", b"[" * 100_000, b"\xff"])
def test_launchers_of_a_damaged_kernel_are_refused(client: Client, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    link = links(client)["bundle"]
    monkeypatch.setattr(Store, "file", lambda *_: content)
    refusal = client.get(link, params={"launcher": "cpp"})
    assert (refusal.status_code, refusal.json()["code"]) == (404, "unknown-kernel")
