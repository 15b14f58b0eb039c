"""What the audit found refused properly, and must stay so: section 4 of its report, as far as it is HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Client
from serving import connected, exchanged, parsed, received, running

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.api_keys import KEYS_MARK, ApiKeys, Scope
from roller_svc.farm.backup import RESTORING
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.migrate import upgrade
from roller_svc.farm.objects import open_objects
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.authentication import Authenticator
from roller_svc.service.client_uses import UseRecorder
from roller_svc.service.worker import FarmWorker
from roller_svc.settings import Settings

NO_USES = UseRecorder(lambda _: None)
KEY = "the-key-of-this-test"
JSON = {"Content-Type": "application/json"}
COMPILE, ESTIMATES = "/v1/kernels:compile", "/v1/estimates"
VALID: dict[str, Any] = {
    "expression": "y[i] = x[i] * 2.0",
    "inputs": {"x": {"dtype": "float32", "shape": [8]}},
    "target": "cpu-x86-avx2",
}


def unused(_: BuildRequest) -> Artifact:
    digest = "sha256:" + "0" * 64
    return Artifact(digest, {"digest": digest, "language": "c", "files": {"source": "kernel.c"}}, {"source": b""})


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running(create_app(Settings(store=tmp_path_factory.mktemp("store")), unused)) as (_, port):
        yield port


@pytest.fixture(scope="module")
def locked_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    settings = Settings(store=tmp_path_factory.mktemp("store"), api_keys=KEY)
    with running(create_app(settings, unused)) as (_, port):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Client]:
    with Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        yield client


def request(head: str, *lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join([head, *lines, "", ""]).encode("latin-1") + body


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None])
def test_a_form_of_another_page_is_no_request(client: Client, media: str | None) -> None:
    """What browsers send without asking first."""
    headers = {} if media is None else {"Content-Type": media}
    for path in (COMPILE, ESTIMATES):
        assert client.post(path, content=json.dumps(VALID), headers=headers).status_code == 415
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for extra in ({}, {"Origin": "http://evil.example"}):
            preflight = client.options(path, headers=asked | extra)
            assert preflight.status_code == 405
            assert not [name for name in preflight.headers if name.startswith("access-control")]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "TRACE", "DELETE", "PUT"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/version",
        "//healthz",
        "/healthz/",
        "/healthz;x",
        "/%2fhealthz",
        "/./healthz",
        "/v1/../healthz",
        "/readyz/",
        "/HEALTHZ",
        "/openapi.json",
        "/nothing",
        COMPILE,
        ESTIMATES,
        "/v1/operations/x",
        "/v1/hardware",
    ],
)
def test_without_a_key_there_is_nothing_to_see(locked_port: int, method: str, path: str) -> None:
    sent = request(f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close")
    with connected(locked_port) as connection:
        connection.sendall(sent)
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"www-authenticate: bearer" in answer.lower()


def test_without_a_key_no_body_is_read(locked_port: int) -> None:
    lines = ("Host: localhost", "Content-Type: application/json", "Content-Length: 1000000")
    assert exchanged(locked_port, request(f"POST {COMPILE} HTTP/1.1", *lines))[0] == 401


@pytest.mark.parametrize(
    "shown",
    ["", KEY[:8], KEY[:16], KEY[:-1], KEY + "x", "x" + KEY[1:], KEY.upper(), f"{KEY},", f'"{KEY}"', f"{KEY} {KEY}"],
)
def test_what_is_not_the_key_is_refused(locked_port: int, shown: str) -> None:
    for line in (f"Authorization: Bearer {shown}", f"Authorization: {shown}", f"X-API-Key: {shown}"):
        sent = request("GET /v1/version HTTP/1.1", "Host: localhost", "Connection: close", line)
        assert exchanged(locked_port, sent)[0] == 401
    right = request("GET /v1/version HTTP/1.1", "Host: localhost", "Connection: close", f"Authorization: Bearer {KEY}")
    assert exchanged(locked_port, right)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "kernels.example", ""])
def test_a_public_address_wants_a_key(host: str, tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/operations.db")
    upgrade(database)
    keys, objects = ApiKeys(database), open_objects("memory:", {})
    with pytest.raises(ArgumentError, match="without an API key"):
        Authenticator(Settings(host=host), keys, objects, NO_USES).check_address()
    Authenticator(Settings(host=host, api_keys=KEY), keys, objects, NO_USES).check_address()
    _, key = keys.add("first", [Scope.READ])
    keys.revoke(key.id)
    Authenticator(Settings(host=host), keys, objects, NO_USES).check_address()  # it is closed to all, but not open
    database.close()


def test_a_key_may_be_required_on_loopback_too(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="without an API key") as refused:
        create_app(Settings(store=tmp_path, require_key=True))
    assert refused.value.code == "no-api-key"


def test_a_store_that_is_being_restored_is_not_served(tmp_path: Path) -> None:
    settings = Settings(store=tmp_path)
    store = Store(tmp_path)
    store.objects.write(RESTORING, b"a backup")
    for start in (create_app, lambda given: FarmWorker(given, ["build.cuda"])):
        with pytest.raises(StoreError, match="roller store restore") as refused:
            start(settings)
        assert refused.value.code == "restore-incomplete"


@pytest.mark.parametrize("is_running", [False, True])
def test_a_lost_database_opens_nothing(tmp_path: Path, is_running: bool) -> None:
    """The keys are in the database alone; the store remembers that there were some."""
    keys = tmp_path / "keys.db"

    def authenticator(path: Path) -> Authenticator:
        database = Database(f"sqlite:///{path}")
        upgrade(database)
        return Authenticator(Settings(), ApiKeys(database), store.objects, NO_USES)

    store = Store(tmp_path / "store")
    service = authenticator(keys)
    assert service.is_open
    database = Database(f"sqlite:///{keys}")
    ApiKeys(database).add("first", [Scope.READ])
    database.close()
    if is_running:
        service._cache.load()  # as its next request does
    else:
        service = authenticator(keys)
    assert not service.is_open
    with pytest.raises(ArgumentError, match="database has none") as refused:
        authenticator(tmp_path / "empty.db").check_address()
    assert refused.value.code == "keys-lost"
    assert refused.value.hint is not None
    assert "roller keys add" in refused.value.hint
    store.objects.remove([KEYS_MARK])
    authenticator(tmp_path / "empty.db").check_address()


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 2", "Content-Length: 3"),
        ("Content-Length: 2, 3",),
        ("Content-Length: +2",),
        ("Content-Length: -2",),
        ("Content-Length: 0x2",),
        ("Content-Length: 2 2",),
        ("Content-Length: \xb2",),
        ("Transfer-Encoding: gzip",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: identity",),
        ("Transfer-Encoding: chunked, chunked",),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding: \x0bchunked",),
        ("Transfer-Encoding: chunked", "Content-Length: 2"),
        ("Content-Length: 2", "Transfer-Encoding: chunked"),
        ("Host: localhost",),
        (" folded: first",),
        ("Bad Header: x",),
        ("No colon",),
        (": x",),
        ("X: a\0b",),
    ],
)
def test_framing_that_two_readers_may_read_differently_ends_the_connection(port: int, lines: tuple[str, ...]) -> None:
    """Nothing behind such a request is taken for another one."""
    first = () if lines[0].startswith(" ") else ("Host: localhost",)
    sent = request(f"POST {ESTIMATES} HTTP/1.1", *lines[:1], *first, *lines[1:], "Content-Type: application/json")
    hidden = request("GET /healthz HTTP/1.1", "Host: localhost")
    with connected(port) as connection:
        connection.sendall(sent + b"0\r\n\r\n" + hidden)
        answer = received(connection)
    status, body = parsed(answer)
    assert (status, body["code"]) == (400, "malformed-request")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize("lines", [(), ("Host : localhost",), ("Host: localhost", "Host: localhost")])
def test_a_request_names_one_host(port: int, lines: tuple[str, ...]) -> None:
    assert exchanged(port, request("GET /healthz HTTP/1.1", *lines, "Connection: close"))[0] == 400


@pytest.mark.parametrize("size", [(1 << 20) + 1, 2 << 20, 20 << 20])
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_large_body_is_not_kept(port: int, size: int, is_announced: bool) -> None:
    framing = f"Content-Length: {size}" if is_announced else "Transfer-Encoding: chunked"
    part = b" " * 65_536 if is_announced else b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with connected(port) as connection:
        with contextlib.suppress(OSError):  # the answer may come, and the connection close, before all is sent
            connection.sendall(request(f"POST {ESTIMATES} HTTP/1.1", "Host: localhost", "Content-Type: application/json", framing))
            for _ in range(0, size, 65_536):
                connection.sendall(part)
        status, body = parsed(received(connection))
    assert (status, body["code"]) == (413, "body-too-large")


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 500_000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b'{"items":' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"targets": Infinity}',
        b"",
        b"null",
        b"1",
        b'"text"',
        b"[]",
        b"{}",
        b'{"items": {}, "targets": {}}',
    ],
)
@pytest.mark.parametrize("path", [COMPILE, ESTIMATES])
def test_bodies_that_are_no_request(client: Client, path: str, content: bytes) -> None:
    answer = client.post(path, content=content, headers=JSON)
    # 413: more punctuation than values are allowed
    assert answer.status_code in (400, 413, 422)
    assert answer.json()["code"] in ("invalid-json", "invalid-body", "body-too-large")
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "changes",
    [
        {"expression": "\ud800"},
        {"inputs": {"\ud800": {"dtype": "float32", "shape": [8]}}},
        {"target": "\udfff"},
        {"outputs": ["\ud800"]},
        {"options": {"family": "\ud800"}},
        {"options": {"tiles": {"\ud800": 1}}},
        {"options": {"top_k": True}},
        {"options": {"top_k": "80"}},
        {"options": {"top_k": 1.0}},
        {"options": {"top_k": 0}},
        {"options": {"top_k": 101}},
        {"options": {"allow_tf32": 1}},
        {"options": {"tiles": {"lanes": -1}}},
        {"options": {"family": "x" * 201}},
        {"unknown": 1},
        {"options": {"unknown": 1}},
        {"outputs": ["y", "y"]},
        {"outputs": ["x"]},
        {"inputs": []},
        {"inputs": {"x": {"dtype": "float32", "shape": [True]}}},
        {"inputs": {"x": {"dtype": "float32", "shape": [10**400]}}},
    ],
)
def test_fields_that_do_not_fit(client: Client, changes: dict[str, Any]) -> None:
    answer = client.post(COMPILE, content=json.dumps(VALID | changes).encode(), headers=JSON)
    assert answer.status_code in (400, 404, 422), answer.text
    assert answer.json()["code"] not in ("internal", "http-error")


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "1e5", "soon", "", "0x10", "%00"])
def test_waits_that_are_no_time(client: Client, wait: str) -> None:
    name = client.post(COMPILE, json=VALID, headers={"Prefer": "wait=30"}).json()["name"]
    assert client.get(f"/v1/{name}?wait={wait}").status_code == 422


@pytest.mark.parametrize("prefer", ["wait=nan", "wait=-5", "wait=9999999", "wait=0x10", "wait", "wait=", "=", ","])
def test_preferences_that_make_no_sense_are_ignored(client: Client, prefer: str) -> None:
    answer = client.post(COMPILE, json=VALID, headers={"Prefer": prefer})
    assert answer.status_code in (200, 202)
    assert "preference-applied" not in answer.headers
    assert client.post(COMPILE, json=VALID, headers={"Prefer": "x" * 201}).status_code == 422


@pytest.mark.parametrize(
    "name",
    [
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "..",
        "%00",
        "hit-%00",
        "%0a",
        "x" * 5000,
        "hit-..%2f..%2fx",
        "hit-",
        "hit-sha256:zz",
        "sha256:" + "g" * 64,
        "sha256:" + "0" * 63,
        "SHA256:" + "0" * 64,
        "%ff",
        "%f0%9f%92%a9",
        "~",
        "*",
    ],
)
@pytest.mark.parametrize("place", ["/v1/operations/{}", "/v1/kernels/{}", "/v1/kernels/{}/source", "/v1/hardware/{}"])
def test_names_that_are_none(client: Client, place: str, name: str) -> None:
    answer = client.get(place.format(name))
    assert answer.status_code == 404
    assert len(answer.content) < 1500


@pytest.mark.parametrize("kind", ["..%2fsource", "%00", "x" * 3000, "..", "source%0a", "Source"])
def test_kinds_that_are_none(client: Client, kind: str) -> None:
    built = client.post(COMPILE, json=VALID, headers={"Prefer": "wait=30"}).json()
    assert client.get(f"/v1/kernels/{built['response']['digest']}/{kind}").status_code == 404


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"\r\n\r\n\r\n",
        b"\0" * 100,
        b"GET\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
        b"POST /v1/estimates HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 20_000 + b"\r\n{}\r\n0\r\n\r\n",
    ],
)
def test_odd_requests_are_answered_or_refused_and_the_next_one_is_served(client: Client, port: int, sent: bytes) -> None:
    with connected(port) as connection:
        connection.sendall(sent)
        connection.settimeout(10)
        answer = connection.recv(1 << 16)
    assert answer == b"" or 200 <= int(answer.split()[1]) < 500
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("path", ["/nothing", "/v1/operations/x", "/v1/version"])
def test_every_answer_says_what_it_is(client: Client, path: str) -> None:
    answer = client.get(path)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert len(answer.headers["x-request-id"]) == 16
    assert "server" not in answer.headers
