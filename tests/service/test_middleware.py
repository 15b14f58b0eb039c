"""The guard: which hosts, pages, keys and bodies reach a route. Findings P2, P4 and P17 of the service's audit."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Client
from hypothesis import given
from hypothesis import strategies as st
from serving import exchanged, running, served

from roller_svc.errors import ArgumentError, KernelTimeoutError, LaunchError, StoreError
from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.bodies import MAX_DEPTH, BodyError, check_json, max_value_count
from roller_svc.service.hosts import Authority, is_own_host, is_same_origin, parse_authority
from roller_svc.service.middleware import MAX_TARGET_BYTES
from roller_svc.service.problems import MAX_REPORTED_ERRORS, problem_from_record, status_of
from roller_svc.service.server import server_config
from roller_svc.settings import Settings

JSON = {"Content-Type": "application/json"}
VALID: dict[str, Any] = {
    "items": [{"expression": "y[i] = x[i] * 2.0", "inputs": {"x": {"dtype": "float32", "shape": [8]}}}],
    "targets": ["cpu-x86-avx2"],
}


def unused(_: BuildRequest) -> Artifact:
    raise AssertionError("nothing is built here")


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    settings = Settings(store=tmp_path_factory.mktemp("store"), allowed_hosts="kernels.example, Proxy.Example:8443", max_items=16)
    with running(create_app(settings, unused)) as (_, port):
        yield port


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[Client]:
    with Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        yield client


def asked(port: int, *lines: str, target: str = "/healthz", method: str = "GET", version: str = "1.1") -> tuple[int, Any]:
    head = [f"{method} {target} HTTP/{version}", *(line.replace("PORT", str(port)) for line in lines)]
    return exchanged(port, "\r\n".join([*head, "Connection: close", "", ""]).encode("latin-1"))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:PORT",
        "localhost:PORT",
        "LocalHost:PORT",
        "[::1]:PORT",
        "127.8.9.1:PORT",
        "127.0.0.1",
        "localhost",
        "[::ffff:127.0.0.1]:PORT",
        "kernels.example",
        "kernels.example:1",
        "proxy.example:8443",
    ],
)
def test_names_of_the_service_are_served(port: int, host: str) -> None:
    assert asked(port, f"Host: {host}")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:PORT",
        "127.0.0.1.evil.example:PORT",
        "localhost.evil.example",
        "localhost:1",
        "",
        "127.0.0.1:1",
        "127.1:PORT",
        "0x7f.0.0.1:PORT",
        "2130706433:PORT",
        "[::2]:PORT",
        "10.0.0.1:PORT",
        "proxy.example",
        "user@localhost:PORT",
        "localhost:PORT:PORT",
        "localhost:99999",
        "localhost, evil.example",
        "[::1%lo]:PORT",
        "\xe9vil:PORT",
        "localhost/x",
        "sub.kernels.example",
        "0.0.0.0:PORT",
    ],
)
@pytest.mark.parametrize("target", ["/healthz", "/healthz/", "/v1/kernels:compile", "/nothing"])
def test_other_hosts_are_misdirected(port: int, host: str, target: str) -> None:
    status, body = asked(port, f"Host: {host}", target=target)
    assert (status, body["code"]) == (421, "misdirected-request")
    assert "evil" not in json.dumps(body)


def test_a_request_has_one_host(port: int) -> None:
    assert asked(port)[0] == 400
    assert asked(port, version="1.0")[0] == 400
    assert asked(port, "Host: localhost:PORT", "Host: localhost:PORT")[0] == 400


def test_an_absolute_target_counts_in_place_of_host(port: int) -> None:
    own, other = "Host: localhost:PORT", "Host: evil.example"
    assert asked(port, own, target=f"http://127.0.0.1:{port}/healthz")[0] == 200
    assert asked(port, other, target=f"http://127.0.0.1:{port}/healthz")[0] == 200
    assert asked(port, own, target="http://evil.example/healthz")[0] == 421
    assert asked(port, own, target=f"http://evil.example@127.0.0.1:{port}/healthz")[0] == 421
    assert asked(port, own, target="ftp://127.0.0.1/healthz")[0] == 400
    assert asked(port, own, target=f"127.0.0.1:{port}", method="CONNECT")[0] in (400, 404, 405)


def test_no_redirect_repeats_a_host(client: Client) -> None:
    for path in ("/healthz/", "/v1/hardware/", "/v1/version/"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:PORT", 200),
        ("http://evil.example:PORT", 403),
        ("null", 403),
        ("http://127.0.0.1:1", 403),
        ("http://127.0.0.1", 403),
        ("http://localhost:PORT", 403),
        ("file://", 403),
        ("", 403),
        ("http://[", 403),
        ("http://127.0.0.1:PORT, http://evil.example", 403),
        ("http://evil@127.0.0.1:PORT", 403),
    ],
)
def test_pages_of_other_sites_post_nothing(client: Client, port: int, origin: str, status: int) -> None:
    sent = JSON | {"Origin": origin.replace("PORT", str(port))}
    answer = client.post("/v1/estimates", json=VALID, headers=sent)
    assert answer.status_code == status
    assert client.get("/healthz", headers=sent).status_code == 200
    if status == 403:
        assert answer.json()["code"] == "foreign-origin"
        assert client.delete("/v1/estimates", headers=sent).status_code == 403


def test_a_rebound_page_is_refused_with_its_own_name_in_both(port: int) -> None:
    lines = ("Host: evil.example:PORT", "Origin: http://evil.example:PORT", "Content-Type: application/json")
    assert asked(port, *lines, "Content-Length: 0", target="/v1/kernels:compile", method="POST")[0] == 421


def test_the_bound_address_is_ours_and_no_other() -> None:
    lan, mapped = ("192.0.2.7", 8000), ("::ffff:192.0.2.7", 8000)
    for bound in (lan, mapped):
        assert is_own_host(Authority("192.0.2.7", 8000), bound, ())
        assert is_own_host(Authority("192.0.2.7", None), bound, ())
        assert not is_own_host(Authority("192.0.2.7", 8001), bound, ())
        assert not is_own_host(Authority("192.0.2.8", 8000), bound, ())
    assert not is_own_host(Authority("localhost", None), None, ())
    assert is_own_host(Authority("kernels.example", 5), None, {Authority("kernels.example", None)})
    assert not is_own_host(Authority("kernels.example", 5), None, {Authority("kernels.example", 6)})


@given(st.text(max_size=40))
def test_no_text_is_both_a_strange_name_and_ours(text: str) -> None:
    given = parse_authority(text)
    if given is not None and is_own_host(given, ("127.0.0.1", 8000), ()):
        assert given.host == "localhost" or set(given.host) <= set("0123456789abcdef.:")
    if given is not None:
        assert not is_same_origin(text, given)


def test_a_wrong_allowed_host_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="ROLLER_ALLOWED_HOSTS: 'http://x' is not a host"):
        server_config(create_app(Settings(store=tmp_path), unused), Settings(allowed_hosts="http://x"))


@pytest.mark.parametrize(
    "content",
    [
        b'{"items": [], "items": []}',
        b'{"items": [{"expression": "a", "expression": "b"}], "targets": []}',
        json.dumps(VALID).encode("utf-16"),
        json.dumps(VALID).encode("utf-32"),
        json.dumps(VALID).encode("utf-16-le"),
        b"\xef\xbb\xbf" + json.dumps(VALID).encode(),
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a": "\xff"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"",
        b"{} {}",
        b"'a'",
    ],
)
@pytest.mark.parametrize("path", ["/v1/estimates", "/v1/kernels:compile"])
def test_what_two_readers_may_read_differently_is_no_json(client: Client, path: str, content: bytes) -> None:
    answer = client.post(path, content=content, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid-json")
    assert len(answer.content) < 1000


def test_depth_is_counted_in_lists_and_objects_alike() -> None:
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        check_json(opening * (MAX_DEPTH - 1) + b"1" + closing * (MAX_DEPTH - 1))
        with pytest.raises(BodyError, match="deeper"):
            check_json(opening * (MAX_DEPTH + 1) + b"1" + closing * (MAX_DEPTH + 1))


def count_values(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(count_values, value.values()))
    return 1 + sum(map(count_values, value)) if isinstance(value, list) else 1


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    )
)
def test_values_are_bounded_by_their_punctuation(value: object) -> None:
    assert count_values(value) <= max_value_count(json.dumps(value).encode())
    check_json(json.dumps(value).encode())


HUGE = {
    "empty items": '{"targets":["a"],"items":[' + ",".join(["{}"] * 349_000) + "]}",
    "numbers": '{"targets":["a"],"items":[' + ",".join(["1"] * 500_000) + "]}",
    "items below the values' limit": '{"targets":["a"],"items":[' + ",".join(["{}"] * 8_000) + "]}",
    "unknown fields": "{" + ",".join(f'"f{i}":1' for i in range(15_000)) + "}",
    "inputs that are no objects": json.dumps(
        {"targets": ["a"], "items": [{"expression": "x", "inputs": {f"f{i}": 1 for i in range(15_000)}}]}
    ),
    "shapes": json.dumps({"targets": ["a"], "items": [{"expression": "x", "inputs": {"x": {"shape": ["a"] * 9_000}}}]}),
    "outputs": json.dumps({"expression": "x", "inputs": {}, "target": "a", "outputs": [1] * 9_000}),
    "tiles": json.dumps({"expression": "x", "inputs": {}, "options": {"tiles": {f"f{i}": "" for i in range(9000)}}}),
    "a spec": json.dumps({"expression": "x", "inputs": {}, "hardware": {"levels": [{}] * 8_000}}),
}  # fmt: skip


@pytest.mark.parametrize("content", HUGE.values(), ids=list(HUGE))
@pytest.mark.parametrize("path", ["/v1/estimates", "/v1/kernels:compile"])
def test_a_body_of_very_many_faults_has_a_short_answer(client: Client, path: str, content: str) -> None:
    assert len(content) <= 1 << 20
    answer = client.post(path, content=content.encode(), headers=JSON)
    assert answer.status_code in (413, 422)
    assert len(answer.content) < 8_000
    assert len(answer.json()["errors"]) <= MAX_REPORTED_ERRORS + 1


def test_faults_that_are_not_listed_are_counted(client: Client) -> None:
    inputs = {f"f{i}": 1 for i in range(200)}
    answer = client.post("/v1/estimates", json={"targets": ["a"], "items": [{"expression": "x", "inputs": inputs}]}).json()
    assert len(answer["errors"]) == MAX_REPORTED_ERRORS + 1
    assert answer["errors"][-1]["message"] == f"… {200 - MAX_REPORTED_ERRORS} more"


def test_a_large_body_that_is_right_is_served(client: Client) -> None:
    padded = json.dumps(VALID).encode() + b" " * 100_000
    assert client.post("/v1/estimates", content=padded, headers=JSON).status_code == 200


@pytest.mark.parametrize("key", ["schlüssel", "ключ", "plain"])
def test_keys_match_as_clients_encode_them(tmp_path: Path, key: str) -> None:
    with served(create_app(Settings(store=tmp_path, api_keys=f"other,{key}"), unused)) as client:
        encodings = ["utf-8"] if key == "ключ" else ["utf-8", "latin-1"]
        for shown in (key.encode(encoding) for encoding in encodings):
            for value in (b"Bearer " + shown, b"bearer   " + shown):
                assert client.get("/v1/version", headers={b"Authorization": value}).status_code == 200
            assert client.get("/v1/version", headers={b"X-API-Key": shown}).status_code == 200
        for wrong in (
            b"Bearer",
            b"Basic " + key.encode(),
            b"Bearer " + key.encode()[:-1],
            b"Bearer other,",
        ):
            assert client.get("/v1/version", headers={b"Authorization": wrong}).status_code == 401


def test_a_long_path_is_cut_in_the_answer(client: Client) -> None:
    answer = client.get("/" + "a" * 5000)
    assert answer.status_code == 404
    assert len(answer.content) < 500
    for target in ("/" + "a" * MAX_TARGET_BYTES, "/v1/version?" + "a" * MAX_TARGET_BYTES):
        long = client.get(target)
        assert (long.status_code, long.json()["code"]) == (414, "target-too-long")
        assert len(long.content) < 500


@pytest.mark.parametrize("path", ["/%0aforged", "/%00", "/\xe9", "/%ff"])
def test_a_path_is_answered_as_it_was_sent(client: Client, path: str) -> None:
    detail = client.get(path).json()["detail"]
    assert detail.isascii()
    assert detail.isprintable()


def test_a_bug_is_logged_with_the_requests_id_and_nothing_of_its_body(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: BuildRequest) -> str:
        raise ZeroDivisionError("a bug")

    body = {
        "expression": "y[i] = secret[i]",
        "inputs": {"secret": {"dtype": "float32", "shape": [8]}},
        "target": "local",
    }
    app = create_app(Settings(store=tmp_path, api_keys="the-key"), unused, broken)
    with caplog.at_level(logging.ERROR, logger="roller_svc"), served(app) as client:
        answers = [client.post("/v1/kernels:compile", json=body, headers={"X-API-Key": "the-key"}) for _ in range(3)]
    answer = answers[0]
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    # The server closes after it. A client that is told sends the next request on another connection.
    assert [each.headers["connection"] for each in answers] == ["close"] * 3
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("roller_svc")]
    assert any(answer.headers["x-request-id"] in line for line in ours)
    assert not any("secret" in line or "the-key" in line for line in ours)


def test_statuses_say_whose_fault_it_is() -> None:
    assert status_of(KernelTimeoutError) == 422
    assert status_of(LaunchError, "out-of-memory") == 422
    assert status_of(LaunchError) == 500
    assert status_of(StoreError) == 503
    facts = {"code": "compile-timeout", "message": "too long", "class": "CompileError"}
    assert problem_from_record(facts)["status"] == 422
    assert problem_from_record(facts | {"code": "compile-failed"})["status"] == 500
    assert problem_from_record(facts | {"class": "BuildServiceError", "code": "worker-lost"})["status"] == 503
