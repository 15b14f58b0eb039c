"""API keys over HTTP: every route has a scope, keys are limited and revoked, secrets stay out of everything."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from builders import BODY, Builder, digest_of
from fastapi import FastAPI
from fastapi.routing import APIRoute
from httpx import Client, Response
from serving import running
from sqlalchemy import text
from waiting import wait_until

from roller_svc import settings as settings_module
from roller_svc.cli import main
from roller_svc.farm.api_keys import ApiKeys, Scope
from roller_svc.farm.database.connect import Database
from roller_svc.service import key_cache
from roller_svc.service.access import OPEN_PATHS, RequiredScope, needs_key, routes_of
from roller_svc.service.app import create_app
from roller_svc.service.routes.page import FOLDER
from roller_svc.settings import Settings

ENVIRONMENT_KEY = "key-of-the-environment"
WAIT = {"Prefer": "wait=30"}


@pytest.fixture
def app(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    monkeypatch.setattr(key_cache, "MAX_AGE_S", 0.2)
    monkeypatch.setattr(key_cache, "MIN_AGE_S", 0.0)
    return create_app(Settings(store=tmp_path / "store", api_keys=ENVIRONMENT_KEY, workers=1), builder, digest_of)


@pytest.fixture
def port(app: FastAPI, builder: Builder) -> Iterator[int]:
    with running(app) as (_, port):
        yield port
        builder.gate.set()


@pytest.fixture
def keys(app: FastAPI, tmp_path: Path) -> Iterator[ApiKeys]:
    database = Database(f"sqlite:///{tmp_path}/store/operations.db")
    yield ApiKeys(database)
    database.close()


@contextmanager
def client_with(port: int, key: str | None) -> Iterator[Client]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, headers=headers) as client:
        yield client


def scope_of(route: APIRoute) -> Scope | None:
    scopes = [each.call.scope for each in route.dependant.dependencies if isinstance(each.call, RequiredScope)]
    assert len(scopes) <= 1
    return scopes[0] if scopes else None


# ---------------------------------------------------------------- scopes of routes


def test_every_route_has_a_scope(app: FastAPI) -> None:
    routes = list(routes_of(app))
    assert {route.path_format for route in routes if route.include_in_schema} == set(app.openapi()["paths"])
    without = {route.path_format for route in routes if scope_of(route) is None}
    assert without == OPEN_PATHS | {"/", "/k/{digest}", "/m", "/m/{digest}", "/farm", "/page/{name}"}
    assert not any(needs_key(path) for path in without)


def test_the_table_of_scopes_is_the_one_of_the_page(app: FastAPI) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    section = page.split("### Access\n")[1].split("\n### ")[0]
    table = {}
    for scope in Scope:
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{scope.value}` |")]
        table[scope] = row
    for route in routes_of(app):
        scope = scope_of(route)
        if scope is None:
            continue
        path = route.path_format.replace("operation_id", "id").replace("device_id", "id")
        (method,) = route.methods
        assert f"`{method} {path}`" in table[scope]


def example(path: str) -> str:
    values = {"operation_id": "x", "device_id": "local", "digest": "sha256:" + "0" * 64, "kind": "source"}
    return path.format(**values, name=next(FOLDER.glob("*.js")).name)


def request(client: Client, method: str, path: str) -> Response:
    """Return the response, without its body where it is a stream, which may have no end."""
    with client.stream(method, path, json={} if method == "POST" else None) as response:
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.read()
        return response


@pytest.mark.parametrize("held", [None, *Scope])
def test_a_route_rejects_keys_without_its_scope(app: FastAPI, port: int, keys: ApiKeys, held: Scope | None) -> None:
    key = None if held is None else keys.add("one", [held])[0]
    order = [None, *Scope]
    with client_with(port, key) as client:
        for route in routes_of(app):
            (method,) = route.methods
            response = request(client, method, example(route.path_format))
            needed = scope_of(route)
            if needed is None:
                assert response.status_code == 200
            elif held is None:
                assert (response.status_code, response.json()["code"]) == (401, "unauthorized")
            elif order.index(held) < order.index(needed):
                assert (response.status_code, response.json()["code"]) == (403, "insufficient-scope")
                assert "insufficient_scope" in response.headers["www-authenticate"]
            else:
                assert response.status_code not in (401, 403)


def test_measuring_by_an_option_needs_its_scope(port: int, keys: ApiKeys) -> None:
    key, _ = keys.add("one", [Scope.COMPILE])
    measured = BODY | {"options": {"select": "measure"}}
    graph = {"model": {"graph": {}}, "target": "local", "options": {"select": "measure"}}
    with client_with(port, key) as client:
        for path, body in (("/v1/kernels:compile", measured), ("/v1/graphs:compile", graph)):
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["code"]) == (403, "insufficient-scope")
        entries = client.post("/v1/kernels:batchCompile", json={"requests": [measured, BODY]}).json()["results"]
        assert [entry.get("error", {}).get("status") for entry in entries] == [403, None]
        assert client.post("/v1/operations/x:cancel", json={"for_all": True}).status_code == 403


def test_a_client_sees_its_own_operations(port: int, keys: ApiKeys) -> None:
    (alice_key, _), (bob_key, _), (admin_key, _) = (
        keys.add(name, [scope]) for name, scope in (("a", Scope.COMPILE), ("b", Scope.COMPILE), ("c", Scope.ADMIN))
    )
    names = {}
    for number, key in enumerate((alice_key, bob_key)):
        with client_with(port, key) as client:
            body = BODY | {"expression": f"{BODY['expression']} # {number}"}
            names[key] = client.post("/v1/kernels:compile", json=body, headers=WAIT).json()["name"]
    for key, seen in ((alice_key, [names[alice_key]]), (admin_key, [names[bob_key], names[alice_key]])):
        with client_with(port, key) as client:
            assert [each["name"] for each in client.get("/v1/operations").json()["operations"]] == seen


# ---------------------------------------------------------------- keys


def test_a_key_works_soon_after_it_is_made_and_stops_soon_after_it_is_revoked(port: int, keys: ApiKeys) -> None:
    key, made = keys.add("one", [Scope.READ])
    with client_with(port, key) as client:
        assert client.get("/v1/version").status_code == 200
        keys.revoke(made.id)
        wait_until(lambda: client.get("/v1/version").status_code != 200)
        assert client.get("/v1/version").json()["code"] == "unauthorized"
    with client_with(port, ENVIRONMENT_KEY) as client:
        assert client.get("/v1/version").status_code == 200


def test_a_key_in_either_header_and_only_whole(port: int, keys: ApiKeys) -> None:
    key, _ = keys.add("one", [Scope.READ])
    with client_with(port, None) as client:
        assert client.get("/v1/version", headers={"X-API-Key": key}).status_code == 200
        for wrong in (key[:-1], key + "x", key.upper(), key[:16], f"{key} {key}", "rk_", "\xff", "a.b.c"):
            for name, value in (("Authorization", f"Bearer {wrong}"), ("X-API-Key", wrong)):
                assert client.get("/v1/version", headers={name: value.encode("latin-1")}).status_code == 401


def test_the_quota_of_a_key_counts(port: int, keys: ApiKeys, builder: Builder) -> None:
    builder.gate.clear()
    key, _ = keys.add("one", [Scope.COMPILE], quota=1)
    with client_with(port, key) as client:
        assert client.post("/v1/kernels:compile", json=BODY).status_code == 202
        response = client.post("/v1/kernels:compile", json=BODY | {"expression": "other"})
        assert (response.status_code, response.json()["code"]) == (429, "quota-exceeded")


def test_an_operations_client_is_the_keys_id(port: int, keys: ApiKeys, tmp_path: Path) -> None:
    key, made = keys.add("one", [Scope.COMPILE])
    with client_with(port, key) as client:
        client.post("/v1/kernels:compile", json=BODY, headers=WAIT)
    database = Database(f"sqlite:///{tmp_path}/store/operations.db")
    with database.read() as connection:
        assert list(connection.scalars(text("SELECT client FROM operations"))) == [made.id]
    database.close()


def test_the_first_key_closes_an_open_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_cache, "MAX_AGE_S", 0.0)
    app = create_app(Settings(store=tmp_path), Builder(), digest_of)
    database = Database(f"sqlite:///{tmp_path}/operations.db")
    with running(app) as (_, port), client_with(port, None) as client:
        assert client.get("/v1/version").status_code == 200
        key, made = ApiKeys(database).add("first", [Scope.READ])
        assert client.get("/v1/version").status_code == 401
        assert client.get("/v1/version", headers={"X-API-Key": key}).status_code == 200
        ApiKeys(database).revoke(made.id)
        assert client.get("/v1/version").status_code == 401
    database.close()


# ---------------------------------------------------------------- secrets


def test_no_secret_is_in_logs_records_or_responses(
    app: FastAPI, port: int, keys: ApiKeys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key, _ = keys.add("one", [Scope.ADMIN])
    wrong = key[:-4] + ("AAAA" if not key.endswith("AAAA") else "BBBB")
    secrets = [key.split("_", 2)[2], wrong.split("_", 2)[2], ENVIRONMENT_KEY, "password-of-the-database"]
    said = ""
    for offered in (key, wrong, ENVIRONMENT_KEY, ENVIRONMENT_KEY + "x"):
        with client_with(port, offered) as client:
            for path in ("/v1/version", "/v1/operations", "/nothing", "/v1/operations/x"):
                said += client.get(path).text
            for body in (BODY, BODY | {"options": {"top_k": 97}}, BODY | {"expression": "bad"}, {}):
                said += client.post(
                    "/v1/kernels:compile", json=body, headers=WAIT | {"Idempotency-Key": "secret-idempotency-key"}
                ).text
    said += caplog.text + "".join(repr(record.__dict__) for record in caplog.records)
    said += repr(app.state.roller.settings) + repr(keys.all())
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert len(content) > 10_000
    for secret in [*secrets, "secret-idempotency-key"]:
        assert secret not in said
        assert secret.encode() not in content


# ---------------------------------------------------------------- command line


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLER_STORE", str(tmp_path))
    settings_module.use(settings_module.read_settings())
    return tmp_path


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["keys", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_keys_on_the_command_line(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    code, out, err = ran(capsys, "add", "alice", "--scope", "measure", "--quota", "5", "--days", "30")
    key = out.strip()
    assert (code, key[:3]) == (0, "rk_")
    assert key.split("_", 2)[2] not in err
    key_id = key.split("_")[1]
    code, out, _ = ran(capsys, "list", "--json")
    (facts,) = json.loads(out)["keys"]
    assert (facts["id"], facts["name"], facts["quota"], facts["state"]) == (key_id, "alice", 5, "valid")
    assert facts["scopes"] == ["read", "compile", "measure"]
    assert ran(capsys, "revoke", key_id)[0] == 0
    code, out, _ = ran(capsys, "list")
    assert "revoked" in out
    assert key.split("_", 2)[2] not in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("revoke", "0"), "unknown-key"),
        (("add", "alice", "--scope", "root"), "root"),
        (("add", "alice", "--quota", "0"), "--quota"),
        (("add", "alice", "--days", "-1"), "--days"),
        (("add", ""), "name"),
        ((), "ACTION"),
    ],
)
def test_errors_of_the_command_line(capsys: pytest.CaptureFixture[str], store: Path, words: tuple[str, ...], says: str) -> None:
    code, _, err = ran(capsys, *words)
    assert code == 2
    assert says in err


def test_a_request_without_rows_of_any_kind_is_cheap(port: int, app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the environment pays no query."""
    reads: list[Any] = []
    authenticator = app.state.roller.authenticator
    monkeypatch.setattr(authenticator._cache, "_read", lambda: reads.append(1) or [])
    monkeypatch.setattr(key_cache, "MAX_AGE_S", 3600.0)
    with client_with(port, ENVIRONMENT_KEY) as client:
        for _ in range(20):
            assert client.get("/v1/version").status_code == 200
    assert reads == []
