"""The page's files over HTTP: who gets them, and with which headers."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import Builder, digest_of
from httpx import Client
from serving import served

from roller_svc.service.app import create_app
from roller_svc.service.routes.page import FOLDER, INDEX
from roller_svc.settings import Settings

WEB = Path(__file__).resolve().parents[2] / "web"
FIRST_KB, ALL_KB = 40, 250  # gzipped: before the first paint, and all


@pytest.fixture
def client(tmp_path: Path, builder: Builder) -> Iterator[Client]:
    app = create_app(Settings(store=tmp_path / "store", api_keys="a-key", workers=1), builder, digest_of)
    with served(app) as client:
        yield client


def first_files() -> list[str]:
    """The files that the browser needs for the first paint, besides index.html."""
    return re.findall(r'"/page/([^"]+)"', (FOLDER / INDEX).read_text(encoding="utf-8"))


def test_the_page_needs_no_key_and_its_data_do(client: Client) -> None:
    for path in ("/", "/k/sha256:abc", "/m", "/m/sha256:abc", "/farm", f"/page/{first_files()[0]}"):
        assert client.get(path).status_code == 200
    for path in ("/v1/hardware", "/openapi.json", "/page", "/page/a/b", "/k", "/k/a/b", "/m/a/b", "/farm/a"):
        assert client.get(path).status_code == 401, path


def test_each_answer_has_its_own_nonce_and_a_strict_policy(client: Client) -> None:
    nonces = set()
    for path in ("/", "/k/sha256:abc", "/m", "/farm"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        nonce = re.search(r"'nonce-([\w-]+)'", policy)
        assert nonce is not None
        assert f'nonce="{nonce[1]}"' in answer.text
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["cache-control"] == "no-store"
        nonces.add(nonce[1])
    assert len(nonces) == 4


def test_files_are_immutable_and_others_do_not_exist(client: Client) -> None:
    for name in first_files():
        answer = client.get(f"/page/{name}")
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["content-encoding"] == "gzip"
        plain = client.get(f"/page/{name}", headers={"Accept-Encoding": "gzip;q=0"})
        assert "content-encoding" not in plain.headers
        assert (plain.content, plain.headers["etag"] == answer.headers["etag"]) == (answer.content, False)
        assert client.get(f"/page/{name}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304
    for name in ("index.html", "licenses.txt", "app.js", "..%2Fapp.py", "%2e%2e"):
        assert client.get(f"/page/{name}").status_code in (401, 404), name
    assert client.post("/", json={}).status_code == 405


def test_the_page_is_small() -> None:
    sizes = {path.name: len(gzip.compress(path.read_bytes())) / 1024 for path in FOLDER.iterdir() if path.suffix != ".txt"}
    assert sum(sizes[name] for name in (INDEX, *first_files())) <= FIRST_KB
    assert sum(sizes.values()) <= ALL_KB


@pytest.mark.needs("node")
def test_building_again_gives_the_same_files(tmp_path: Path) -> None:
    if not (WEB / "node_modules").is_dir():
        pytest.skip("the packages of web/ are not installed (npm ci --prefix web)")
    node = shutil.which("node")
    assert node is not None
    subprocess.run([node, "build.mjs", str(tmp_path)], cwd=WEB, check=True)
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert built == {path.name: path.read_bytes() for path in FOLDER.iterdir()}, "the page is older than web/: make page"


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (WEB / "package-lock.json").read_text(encoding="utf-8")
